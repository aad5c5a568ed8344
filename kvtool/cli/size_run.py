"""The run of `kvtool size`: load each model, collect its rows, and say what failed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtool import catalog
from kvtool.cli.each import each_model
from kvtool.cli.gpus import add_gpus
from kvtool.cli.size_words import ignored, query_of
from kvtool.config import load_config, read_bounded, read_json_value
from kvtool.errors import KvtoolError, usage_error
from kvtool.model import read_model
from kvtool.output import Output
from kvtool.query import Query
from kvtool.run import Row, Run
from kvtool.size_row import Subject
from kvtool.sizing import default_contexts, most_contexts, size_rows, specs_rows
from kvtool.speculation import with_draft, with_mtp
from kvtool.units import GIB, format_bytes, parse_count

__all__ = ["curve", "gate", "query_of", "run_size"]

CURVE_POINTS = 48
FEWEST_POINTS = 8
CURVE_TOP = 128 * 1024


def run_size(
    given: dict[str, Any], query: Query, out: Output
) -> tuple[list[Subject], Run, KvtoolError | None]:
    """Rows of every model, and the first thing that failed."""
    models = given["models"] or []
    if bool(models) == (given["layer_specs"] is not None):
        raise usage_error("size needs a MODEL, or --layer-specs FILE", "see kvtool size --help")
    subjects: list[Subject] = []

    def one(model: str, lost: list[KvtoolError]) -> tuple[list[Row], list[str]]:
        subject, said = _subject(model, given, [s.name for s in subjects], out)
        found, more = size_rows(subject, query, lost)
        subjects.append(subject)
        return found, [*(f"{subject.name}: {text}" for text in said), *more]

    rows, notes, failed = each_model(models, one)
    if given["layer_specs"] is not None:
        rows = _specs(given["layer_specs"], query)
    notes = ignored(given, query) + notes
    if given["gpu"] is not None:
        notes += add_gpus(rows, given["gpu"])
    run = Run(command="size", params=params_of(given), rows=tuple(rows), notes=tuple(notes))
    return subjects, run, failed or _does_not_fit(rows)


def params_of(given: dict[str, Any]) -> dict[str, Any]:
    """The options as they were typed."""
    return given | {"layer_specs": str(given["layer_specs"]) if given["layer_specs"] else None}


def _does_not_fit(rows: list[Row]) -> KvtoolError | None:
    """vLLM's refusal to start, which is an answer and a failure."""
    bad = next((row for row in rows if row.get("fits") is False), None)
    if bad is None:
        return None
    memory = bad["one_request_bytes"] is not None
    return KvtoolError(
        f"{bad['model']}: vLLM does not start: {bad['reason']}",
        "give it more --kv-memory, a shorter --max-model-len, another --kv-dtype or a higher --tp"
        if memory
        else "no memory helps: it refuses this mix of layers with these options (--dcp, --hybrid)",
        code="does_not_fit",
    )


def _subject(
    model: str, given: dict[str, Any], names: list[str], out: Output
) -> tuple[Subject, tuple[str, ...]]:
    loaded = load_config(model, revision=given["revision"])
    table = catalog.class_defaults()["types"]
    shape = read_model(loaded.config, table, assume=given["assume"])
    mtp = parse_count(given["mtp"], name="--mtp", low=0, high=64)
    shape = with_mtp(shape, mtp)
    notes = loaded.notes
    if mtp and not _speaks_of_mtp(loaded.config):
        notes += ("its config has no multi-token-prediction layers: counted because of --mtp",)
    if given["draft"] is not None:
        draft = read_model(load_config(given["draft"]).config, table, assume=given["assume"])
        shape = with_draft(shape, draft, given["draft"])
    out.detail(f"{loaded.name}: read from {loaded.where}")
    name = loaded.name if loaded.name not in names else f"{loaded.name} ({len(names) + 1})"
    return Subject(name=name, source=loaded.source, shape=shape), notes


def _speaks_of_mtp(config: Mapping[str, Any]) -> bool:
    """num_nextn_predict_layers, mtp_num_hidden_layers and the like, at any level."""
    return any(
        bool(value) if re.search("mtp|nextn", key) else _speaks_of_mtp(value)
        for key, value in config.items()
        if isinstance(value, Mapping) or re.search("mtp|nextn", key)
    )


def _specs(path: Path, query: Query) -> list[Row]:
    if query.engines != ("vllm",):
        raise usage_error("--layer-specs is read by the engine vllm", "add --engine vllm")
    from kvtool.engines.vllm import parse_specs

    specs = parse_specs(read_json_value(read_bounded(path), str(path)))
    return specs_rows(path.name, specs, query)


def curve(subjects: list[Subject], query: Query) -> tuple[Row, ...]:
    """Rows for a picture: what was asked, or from 1 token to the maximum if that is one context."""
    rows: list[Row] = []
    if any(most_contexts(subject.shape, query) < FEWEST_POINTS for subject in subjects):
        return ()
    for subject in subjects:
        points = replace(query, contexts=_points(query, subject), per_layer=False)
        rows += size_rows(subject, points, [])[0]
    return tuple(rows)


def _points(query: Query, subject: Subject) -> tuple[int, ...]:
    if len(query.contexts) > 1:
        return query.contexts
    top = query.contexts[0] if query.contexts else max(default_contexts(subject.shape))
    if not query.contexts and subject.shape.max_context is None:
        top = CURVE_TOP
    count = min(CURVE_POINTS, most_contexts(subject.shape, query) // 2)
    steps = {round(math.exp(math.log(top) * i / count)) for i in range(count + 1)}
    windows = {e.window for e in subject.shape.layers if e.window is not None}
    edges = sorted(window for window in windows if window <= top)[:count]
    return tuple(sorted(steps | set(edges)))


def gate(max_gib: float | None) -> Callable[[Run], KvtoolError | None]:
    """The check behind --assert-max-gib: the fullest GPU of any row against the limit."""
    if max_gib is None:
        return lambda run: None
    if not math.isfinite(max_gib) or max_gib <= 0:
        raise usage_error(
            f"--assert-max-gib: {max_gib} is not an amount", "give GiB above 0, such as 20 or 0.5"
        )

    def check(run: Run) -> KvtoolError | None:
        worst = max(run.rows, key=lambda row: int(row["per_gpu_bytes"] or 0))
        if (worst["per_gpu_bytes"] or 0) <= max_gib * GIB:
            return None
        return KvtoolError(
            f"{worst['model']} at {worst['context_tokens']:,} tokens × {worst['batch']:,} needs "
            f"{format_bytes(worst['per_gpu_bytes'])} on a GPU, above the limit of {max_gib:g} GiB",
            "shorten --context, lower --batch, raise --tp, or choose a smaller --kv-dtype",
            code="above_limit",
        )

    return check

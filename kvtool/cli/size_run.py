"""The run of `kvtool size`: load each model, collect its rows, and say what failed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtool import catalog
from kvtool.cli.size_words import ignored, query_of
from kvtool.config import load_config, read_bounded, read_json_value
from kvtool.engines.vllm import parse_specs
from kvtool.errors import KvtoolError, usage_error
from kvtool.model import read_model
from kvtool.output import Output
from kvtool.run import Row, Run
from kvtool.size_row import Subject
from kvtool.sizing import Query, default_contexts, size_rows, specs_rows
from kvtool.speculation import with_draft, with_mtp
from kvtool.units import GIB, format_bytes, parse_count

__all__ = ["curve", "gate", "query_of", "run_size"]

LEVELS = "rtx-4090,h100,h200,b200"
CURVE_POINTS = 48
CURVE_TOP = 128 * 1024


def run_size(
    given: dict[str, Any], query: Query, out: Output
) -> tuple[list[Subject], Run, KvtoolError | None]:
    """Rows of every model. One that fails does not lose the rows of the others: its error comes
    last; if none is left, it is raised."""
    models = given["models"] or []
    if bool(models) == (given["layer_specs"] is not None):
        raise usage_error("size needs a MODEL, or --layer-specs FILE", "see kvtool size --help")
    rows: list[Row] = []
    notes = ignored(given, query)
    failed: KvtoolError | None = None
    subjects: list[Subject] = []
    if given["layer_specs"] is not None:
        rows = _specs(given["layer_specs"], query)
    for model in models:
        try:
            subject, said = _subject(model, given, [s.name for s in subjects], out)
            lost: list[KvtoolError] = []
            found, more = size_rows(subject, query, lost)
            failed = failed or next((_about(model, error) for error in lost), None)
        except KvtoolError as error:
            if len(models) == 1:
                raise
            failed = failed or _about(model, error)
            continue
        subjects.append(subject)
        rows += found
        notes += [f"{subject.name}: {text}" for text in said] + more
    if failed is not None and not rows:
        raise failed
    failed = failed or _does_not_fit(rows)
    params = given | {"levels": levels_of(given["gpu"] or LEVELS), "gpu_asked": bool(given["gpu"])}
    params["layer_specs"] = str(given["layer_specs"]) if given["layer_specs"] else None
    run = Run(command="size", params=params, rows=tuple(rows), notes=tuple(notes))
    return subjects, run, failed


def _about(model: str, error: KvtoolError) -> KvtoolError:
    return KvtoolError(
        f"{model}: {error.message}", error.hint, code=error.code, exit_code=error.exit_code
    )


def _does_not_fit(rows: list[Row]) -> KvtoolError | None:
    """vLLM's refusal to start, which is an answer and a failure."""
    bad = next((row for row in rows if row.get("fits") is False), None)
    if bad is None:
        return None
    return KvtoolError(
        f"{bad['model']}: vLLM does not start: {bad['reason']}",
        "give it more --kv-memory, a shorter --max-model-len, another --kv-dtype or a higher --tp",
        code="does_not_fit",
    )


def _subject(
    model: str, given: dict[str, Any], names: list[str], out: Output
) -> tuple[Subject, tuple[str, ...]]:
    loaded = load_config(model, revision=given["revision"])
    table = catalog.class_defaults()["types"]
    shape = read_model(loaded.config, table, assume=given["assume"])
    shape = with_mtp(shape, parse_count(given["mtp"], name="--mtp", low=0, high=64))
    if given["draft"] is not None:
        draft = read_model(load_config(given["draft"]).config, table, assume=given["assume"])
        shape = with_draft(shape, draft, given["draft"])
    out.detail(f"{loaded.name}: read from {loaded.where}")
    name = loaded.name if loaded.name not in names else f"{loaded.name} ({len(names) + 1})"
    return Subject(name=name, source=loaded.source, shape=shape), loaded.notes


def _specs(path: Path, query: Query) -> list[Row]:
    if query.engines != ("vllm",):
        raise usage_error("--layer-specs is read by the engine vllm", "add --engine vllm")
    specs = parse_specs(read_json_value(read_bounded(path), str(path)))
    return specs_rows(path.name, specs, query)


def curve(subjects: list[Subject], query: Query) -> tuple[Row, ...]:
    """Rows for a picture: what was asked, or from 1 token to the maximum if that is one context."""
    rows: list[Row] = []
    for subject in subjects:
        rows += size_rows(subject, replace(query, contexts=_points(query, subject)))[0]
    return tuple(rows)


def _points(query: Query, subject: Subject) -> tuple[int, ...]:
    if len(query.contexts) > 1:
        return query.contexts
    top = query.contexts[0] if query.contexts else max(default_contexts(subject.shape))
    if not query.contexts and subject.shape.max_context is None:
        top = CURVE_TOP
    steps = {round(math.exp(math.log(top) * i / CURVE_POINTS)) for i in range(CURVE_POINTS + 1)}
    windows = {e.window for e in subject.shape.layers if e.window is not None}
    return tuple(sorted(steps | {window for window in windows if window <= top}))


def levels_of(gpus: str) -> dict[str, int]:
    """Usable memory of each GPU named, `h100:8` being eight of them; one without a figure is left
    out."""
    levels = {}
    for text in gpus.split(","):
        name, colon, count = text.strip().partition(":")
        gpu = catalog.gpu_preset(name)
        times = parse_count(count, name="--gpu", high=2**16) if colon else 1
        if gpu.usable_bytes:
            levels[gpu.id if times == 1 else f"{times} × {gpu.id}"] = times * gpu.usable_bytes
    return levels


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

"""From the words of `kvtool size` to its run: parse the lists, load each model, collect the rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvtool import catalog
from kvtool.config import load_config
from kvtool.dtypes import DTYPES, MODEL_DTYPES, dtype_named, parse_kv_dtype
from kvtool.engines import check_engine
from kvtool.errors import KvtoolError, usage_error
from kvtool.model import read_model
from kvtool.output import Output
from kvtool.run import Row, Run
from kvtool.sizing import Query, Subject, default_contexts, size_rows
from kvtool.units import GIB, format_bytes, parse_count, parse_counts

MAX_BATCH = 2**20
MAX_PARALLEL = 2**16
LEVELS = ("rtx-4090", "h100", "h200", "b200")
CURVE_POINTS = 48


def query_of(given: dict[str, Any]) -> Query:
    """The command's words as a Query; every list is parsed before any model is loaded."""
    check_engine(given["engine"])
    if given["assume"] not in (None, "full"):
        raise usage_error(f"--assume: '{given['assume'][:40]}' is not known", "write --assume full")
    kv_dtypes = tuple(part.strip() for part in given["kv_dtype"].split(","))
    for text in kv_dtypes:
        parse_kv_dtype(text, auto=DTYPES["bf16"])
    dtype = given["dtype"]
    blocks = given["block_size"]
    encoder = given["encoder_tokens"]
    return Query(
        engine=given["engine"],
        contexts=tuple(parse_counts(given["context"], name="--context") if given["context"] is not None else ()),
        batches=tuple(parse_counts(given["batch"], name="--batch", high=MAX_BATCH)),
        dtype=dtype_named(dtype, flag="--dtype", among=MODEL_DTYPES) if dtype is not None else None,
        kv_dtypes=kv_dtypes,
        tps=tuple(parse_counts(given["tp"], name="--tp", high=MAX_PARALLEL)),
        pps=tuple(parse_counts(given["pp"], name="--pp", high=MAX_PARALLEL)),
        block_sizes=tuple(parse_counts(blocks, name="--block-size", high=MAX_BATCH)) if blocks is not None else (None,),
        encoder_tokens=parse_count(encoder, name="--encoder-tokens", low=0) if encoder is not None else None,
        allow_long=given["allow_long"],
        per_layer=given["per_layer"],
    )  # fmt: skip


def run_size(
    given: dict[str, Any], query: Query, out: Output, *, picture: bool
) -> tuple[Run, KvtoolError | None]:
    """Rows of every model. One that fails does not lose the rows of the others: its error comes
    last; if none is left, it is raised."""
    levels = _levels(given["gpu"], wanted=picture)
    rows: list[Row] = []
    notes: list[str] = []
    failed: KvtoolError | None = None
    names: set[str] = set()
    for model in given["models"]:
        try:
            subject, said = _subject(model, given, names)
            asked = _along_the_curve(query, subject) if picture else query
            found, more = size_rows(subject, asked)
        except KvtoolError as error:
            if len(given["models"]) == 1:
                raise
            failed = failed or KvtoolError(
                f"{model}: {error.message}", error.hint, code=error.code, exit_code=error.exit_code
            )
            continue
        rows += found
        notes += [f"{subject.name}: {text}" for text in said] + more
    if failed is not None and not rows:
        raise failed
    params = given | {"levels": levels} if levels else given
    return Run(command="size", params=params, rows=tuple(rows), notes=tuple(notes)), failed


def _subject(model: str, given: dict[str, Any], names: set[str]) -> tuple[Subject, tuple[str, ...]]:
    loaded = load_config(model, revision=given["revision"])
    table = catalog.class_defaults()["types"]
    shape = read_model(loaded.config, table, assume=given["assume"])
    name = loaded.name if loaded.name not in names else f"{loaded.name} ({len(names) + 1})"
    names.add(name)
    return Subject(name=name, source=loaded.source, shape=shape), loaded.notes


def _along_the_curve(query: Query, subject: Subject) -> Query:
    """A picture without several contexts of its own is drawn from 1 token to the maximum."""
    from dataclasses import replace

    if len(query.contexts) > 1:
        return query
    top = query.contexts[0] if query.contexts else max(default_contexts(subject.shape))
    if not query.contexts and subject.shape.max_context is None:
        top = 128 * 1024
    steps = {round(math.exp(math.log(top) * i / CURVE_POINTS)) for i in range(CURVE_POINTS + 1)}
    steps |= {e.window for e in subject.shape.layers if e.window is not None and e.window <= top}
    return replace(query, contexts=tuple(sorted(steps)))


def _levels(gpus: str | None, *, wanted: bool) -> dict[str, int]:
    """Capacities to draw: the GPUs asked for, or a few well-known ones."""
    names = [part.strip() for part in gpus.split(",")] if gpus is not None else LEVELS
    if not wanted and gpus is None:
        return {}
    found = [catalog.gpu_preset(name) for name in names]
    return {gpu.id: gpu.usable_bytes for gpu in found if gpu.usable_bytes}


def gate(max_gib: float | None) -> Callable[[Run], KvtoolError | None]:
    """The check behind --assert-max-gib: the fullest GPU of any row against the limit."""
    if max_gib is None:
        return lambda run: None
    if not math.isfinite(max_gib) or max_gib <= 0:
        raise usage_error(
            f"--assert-max-gib: {max_gib} is not an amount", "give GiB above 0, such as 20 or 0.5"
        )

    def check(run: Run) -> KvtoolError | None:
        worst = max(run.rows, key=lambda row: int(row["per_gpu_bytes"]))
        if worst["per_gpu_bytes"] <= max_gib * GIB:
            return None
        return KvtoolError(
            f"{worst['model']} at {worst['context_tokens']:,} tokens × {worst['batch']:,} needs "
            f"{format_bytes(worst['per_gpu_bytes'])} on a GPU, above the limit of {max_gib:g} GiB",
            "shorten --context, lower --batch, raise --tp, or choose a smaller --kv-dtype",
            code="above_limit",
        )

    return check

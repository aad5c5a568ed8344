"""Rows of `kvtool size`: a model's cache at each context, batch, dtype and parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

from kvtool.cache import CacheLayout, check_parallel
from kvtool.dtypes import DTYPES, Dtype, parse_kv_dtype
from kvtool.engine_rows import ROWS
from kvtool.errors import KvtoolError, usage_error
from kvtool.model.shape import ModelShape
from kvtool.query import Query
from kvtool.run import Row
from kvtool.size_row import Case, Subject

if TYPE_CHECKING:
    from kvtool.engines.vllm import LayerSpec

DEFAULT_CONTEXT = 8192
MOST_ROWS = 20_000
MOST_LAYER_ROWS = 1_000_000
"""Rows × layers of one model: above it a run takes longer than anyone waits for."""
EMPTY = ModelShape(
    model_type="layer-specs",
    num_layers=1,
    num_modules=1,
    layers_by="--layer-specs",
    layers=(),
    query_heads=0,
    dtype=None,
    kv_dtype=None,
    max_context=None,
    max_context_stated=False,
    encoder_tokens=None,
)


CANNOT = ("not_in_engine", "no_cache_in_engine", "engine_not_understood")
"""Codes of what one engine cannot do: beside other engines that is a note, not a failure."""


def default_contexts(shape: ModelShape) -> tuple[int, ...]:
    """1 token, 8k if the model goes that far, and the model's maximum."""
    top = shape.max_context
    wanted = [1, DEFAULT_CONTEXT] if top is None else [1, min(DEFAULT_CONTEXT, top), top]
    return tuple(dict.fromkeys(wanted))


def model_dtype(shape: ModelShape, given: Dtype | None) -> tuple[Dtype, str]:
    """The model's dtype: --dtype, the config's, or bf16 with a note."""
    if given is not None:
        return given, ""
    if shape.dtype is not None:
        return DTYPES[shape.dtype], ""
    return DTYPES["bf16"], "the config states no dtype: bf16 is assumed (--dtype sets it)"


def size_rows(
    subject: Subject, query: Query, lost: list[KvtoolError] | None = None
) -> tuple[list[Row], list[str]]:
    """The rows of one model, and the notes that go with them.

    With `lost`, a context or a split that cannot be sized is put there and costs no other its rows.
    """
    shape = subject.shape
    dtype, note = model_dtype(shape, query.dtype)
    notes = [note, *shape.notes]
    contexts = query.contexts or default_contexts(shape)
    check_amount(shape, query, len(contexts))
    if query.vllm.max_model_len is not None and "vllm" in query.engines:
        longest = query.vllm.max_model_len
        notes.append(check_context(shape, longest, allow_long=query.allow_long))
    good, splits, bad = _possible(shape, query, contexts, notes)
    if bad and (lost is None or not good or not splits):
        raise bad[0]
    notes += [encoder_length(shape, query.encoder_tokens, context)[1] for context in good]
    rows = []
    for case in _cases(shape, query, dtype, good, splits):
        try:
            row = ROWS[case.engine].row(subject, query, case)
        except KvtoolError as error:
            if len(query.engines) > 1 and error.code in CANNOT:
                notes.append(f"no row for {case.engine}: {error.message}")
                continue
            if lost is None:
                raise
            bad.append(error)
            continue
        rows.append(row)
        notes += ROWS[case.engine].notes(row, query, case)
    if bad and not rows:
        raise bad[0]
    if lost is not None:
        lost += bad
    notes += _closing_notes(shape, query)
    return rows, [f"{subject.name}: {note}" for note in dict.fromkeys(notes) if note]


def _closing_notes(shape: ModelShape, query: Query) -> list[str]:
    """What holds for all rows of a model."""
    notes = []
    asked = {part.strip().lower() for text in query.kv_dtypes for part in text.split("/")}
    if shape.kv_dtype and "auto" in asked:
        notes.append(f"the checkpoint quantises its KV cache: auto is {shape.kv_dtype}")
    notes += _parallel_notes(shape, query)
    if shape.assumed:
        notes.append(
            "sized as plain full attention because of --assume full, not by its own layout"
        )
    return notes


def _possible(
    shape: ModelShape, query: Query, contexts: tuple[int, ...], notes: list[str]
) -> tuple[list[int], list[tuple[int, int]], list[KvtoolError]]:
    """The contexts and the (tp, pp) that the model allows, and why not the others."""
    bad: list[KvtoolError] = []
    good: list[int] = []
    splits: list[tuple[int, int]] = []
    for context in contexts:
        try:
            notes.append(check_context(shape, context, allow_long=query.allow_long))
            good.append(context)
        except KvtoolError as error:
            bad.append(error)
    for tp, pp in product(query.tps, query.pps):
        try:
            check_parallel(shape, tp, pp, pp_layers=query.pp_layers, dcp=query.dcp)
            splits.append((tp, pp))
        except KvtoolError as error:
            bad.append(error)
    return good, splits, bad


def specs_rows(name: str, specs: tuple[LayerSpec, ...], query: Query) -> list[Row]:
    """The pool of a mix of layer specs, a row for each length."""
    from kvtool.reserve_row import specs_row

    dtype = query.dtype or DTYPES["bf16"]
    rows = []
    for context, batch in product(query.contexts or (DEFAULT_CONTEXT,), query.batches):
        layout = CacheLayout(
            shape=EMPTY,
            dtype=dtype,
            kv=parse_kv_dtype("auto", auto=dtype),
            pp=query.pps[0],
            pp_layers=query.pp_layers,
            dcp=query.dcp,
        )
        case = Case(
            engine="vllm", context=context, encoder=0, batch=batch, layout=layout, dp=query.dp
        )
        rows.append(specs_row(name, specs, case, query.vllm))
    return rows


def _parallel_notes(shape: ModelShape, query: Query) -> list[str]:
    """Why more ranks may not mean less cache on each."""
    tps = query.tps if query.dcp == 1 else (1,)
    heads = [e.kv_heads for e in shape.layers if e.kv_heads and not e.replicated]
    notes = []
    if heads and max(tps) > min(heads):
        notes.append(f"tp above {min(heads)} KV heads copies them: a rank keeps at least one head")
    latent = any(e.kind == "latent" for e in shape.layers)
    if max(tps) > 1 and latent and query.engines != ("vllm",):
        notes.append("a latent cache has one head: every tensor-parallel rank keeps all of it")
    return notes


def _cases(
    shape: ModelShape,
    query: Query,
    dtype: Dtype,
    contexts: list[int],
    splits: list[tuple[int, int]],
) -> Iterator[Case]:
    auto = DTYPES[shape.kv_dtype] if shape.kv_dtype else dtype
    for context, batch, text, (tp, pp), block_size, engine in product(
        contexts,
        query.batches,
        query.kv_dtypes,
        splits,
        query.block_sizes,
        query.engines,
    ):
        kv = parse_kv_dtype(text, auto=dtype if ROWS[engine].model_dtype else auto)
        yield Case(
            engine=engine,
            context=context,
            encoder=encoder_length(shape, query.encoder_tokens, context)[0],
            batch=batch,
            layout=CacheLayout(
                shape=shape,
                dtype=dtype,
                kv=kv,
                tp=tp,
                pp=pp,
                pp_layers=query.pp_layers,
                dcp=query.dcp,
                block_size=block_size,
            ),
            cache=query.cache,
            prompt=query.prompt,
            dp=query.dp,
        )


def most_contexts(shape: ModelShape, query: Query) -> int:
    """How many contexts a run of the other lists may have."""
    return _most_rows(shape) // _rows_a_context(query)


def _most_rows(shape: ModelShape) -> int:
    return min(MOST_ROWS, MOST_LAYER_ROWS // max(len(shape.layers), 1))


def _rows_a_context(query: Query) -> int:
    lists = (query.batches, query.kv_dtypes, query.tps, query.pps, query.block_sizes, query.engines)
    return math.prod(map(len, lists))


def check_amount(shape: ModelShape, query: Query, contexts: int) -> None:
    """Refuse a product of lists that would run for minutes."""
    if contexts > most_contexts(shape, query):
        raise usage_error(
            f"{contexts * _rows_a_context(query):,} rows of {len(shape.layers):,} layers are too many for one run",
            f"ask for at most {_most_rows(shape):,} rows: shorter lists, or several runs",
        )


def check_context(shape: ModelShape, context: int, *, allow_long: bool) -> str:
    """Refuse a context above the maximum that the config states; a class default only warns."""
    top = shape.max_context
    if top is None or context <= top:
        return ""
    if shape.max_context_stated and not allow_long:
        raise KvtoolError(
            f"a context of {context:,} tokens is above the model's maximum of {top:,}",
            f"ask for at most {top:,}, or size it all the same with --allow-long",
            code="context_too_long",
        )
    return f"{context:,} tokens is above the model's maximum of {top:,}"


def encoder_length(shape: ModelShape, given: int | None, context: int) -> tuple[int, str]:
    """Encoder tokens: --encoder-tokens, what the config fixes, or as many as the context."""
    if shape.encoder_tokens is None:
        return 0, "--encoder-tokens is ignored: no cross-attention" if given else ""
    if given is not None:
        return given, ""
    if shape.encoder_tokens > 0:
        return shape.encoder_tokens, (
            f"{shape.encoder_tokens:,} encoder tokens, as the config fixes them (--encoder-tokens)"
        )
    return context, "as many encoder tokens as decoder tokens are assumed (--encoder-tokens)"

"""Rows of `kvtool size`: a model's cache at each context, batch, dtype and parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from kvtool.cache import CacheLayout, check_parallel, element_bytes
from kvtool.dtypes import DTYPES, Dtype, parse_kv_dtype
from kvtool.engines import ENGINES
from kvtool.engines.result import KindBytes, Sequence
from kvtool.errors import KvtoolError
from kvtool.model.shape import LayerCache, ModelShape, State
from kvtool.run import Row

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What is asked of each model. Lists are run as a product, in the order given."""

    engine: str = "ideal"
    contexts: tuple[int, ...] = ()
    """Empty: 1 token, 8k if the model goes that far, and its maximum."""
    batches: tuple[int, ...] = (1,)
    dtype: Dtype | None = None
    kv_dtypes: tuple[str, ...] = ("auto",)
    tps: tuple[int, ...] = (1,)
    pps: tuple[int, ...] = (1,)
    block_sizes: tuple[int | None, ...] = (None,)
    encoder_tokens: int | None = None
    allow_long: bool = False
    per_layer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model as the user named it."""

    name: str
    source: str
    shape: ModelShape


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


def size_rows(subject: Subject, query: Query) -> tuple[list[Row], list[str]]:
    """The rows of one model, and the notes that go with them."""
    shape = subject.shape
    dtype, note = model_dtype(shape, query.dtype)
    notes = [note, *shape.notes]
    contexts = query.contexts or default_contexts(shape)
    for context in contexts:
        notes.append(check_context(shape, context, allow_long=query.allow_long))
    rows = []
    for context, batch, layout in _cases(shape, query, dtype, contexts):
        encoder, note = encoder_length(shape, query.encoder_tokens, context)
        notes.append(note)
        sequence = ENGINES[query.engine](layout, context=context, encoder=encoder)
        rows.append(_row(subject, query, layout, sequence, context, batch, encoder))
    if shape.kv_dtype and "auto" in query.kv_dtypes:
        notes.append(f"the checkpoint quantises its KV cache: auto is {shape.kv_dtype}")
    notes += _parallel_notes(shape, query.tps)
    if shape.assumed:
        notes.append(
            "sized as plain full attention because of --assume full, not by its own layout"
        )
    return rows, [f"{subject.name}: {note}" for note in dict.fromkeys(notes) if note]


def _parallel_notes(shape: ModelShape, tps: tuple[int, ...]) -> list[str]:
    """Why more ranks may not mean less cache on each."""
    heads = [e.kv_heads for e in shape.layers if e.kv_heads and not e.replicated]
    notes = []
    if heads and max(tps) > min(heads):
        notes.append(f"tp above {min(heads)} KV heads copies them: a rank keeps at least one head")
    if max(tps) > 1 and any(e.kind == "latent" for e in shape.layers):
        notes.append("a latent cache has one head: every tensor-parallel rank keeps all of it")
    return notes


def _cases(
    shape: ModelShape, query: Query, dtype: Dtype, contexts: tuple[int, ...]
) -> Iterator[tuple[int, int, CacheLayout]]:
    auto = DTYPES[shape.kv_dtype] if shape.kv_dtype else dtype
    kvs = [parse_kv_dtype(text, auto=auto) for text in query.kv_dtypes]
    for tp, pp in product(query.tps, query.pps):
        check_parallel(shape, tp, pp)
    for context, batch, kv, tp, pp, block_size in product(
        contexts, query.batches, kvs, query.tps, query.pps, query.block_sizes
    ):
        yield (
            context,
            batch,
            CacheLayout(shape=shape, dtype=dtype, kv=kv, tp=tp, pp=pp, block_size=block_size),
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


def _row(
    subject: Subject,
    query: Query,
    layout: CacheLayout,
    sequence: Sequence,
    context: int,
    batch: int,
    encoder: int,
) -> Row:
    shape = subject.shape
    row: Row = {
        "model": subject.name,
        "model_type": shape.model_type,
        "source": subject.source,
        "engine": query.engine,
        "context_tokens": context,
        "encoder_tokens": encoder,
        "batch": batch,
        "dtype": layout.dtype.name,
        "kv_dtype": layout.kv.name,
        "tp": layout.tp,
        "pp": layout.pp,
        "block_size": layout.block_size,
        "max_context": shape.max_context,
        "bytes_per_token": sequence.next_token_bytes,
        "sequence_bytes": sequence.bytes,
        "state_bytes": sequence.state_bytes,
        "cross_bytes": sequence.cross_bytes,
        "scale_bytes": batch * sequence.scale_bytes,
        "total_bytes": batch * sequence.bytes,
        "per_gpu_bytes": batch * sequence.rank_bytes,
        "mha_bytes": batch * sequence.mha_bytes,
        "gqa_ratio": gqa_ratio(shape),
        "plain_bytes": batch * plain_bytes(layout, context),
        "layers": shape.num_layers,
        "kinds": [_kind(layout, group, batch) for group in _groups(sequence)],
    }
    if shape.assumed:
        row["assume"] = shape.assumed
    if query.per_layer:
        row["per_layer"] = [_layer(kind, batch) for kind in sequence.kinds]
    return row


def gqa_ratio(shape: ModelShape) -> float | None:
    """Query heads for each KV head, over the layers with attention; None without any."""
    pairs = [(e.query_heads, e.kv_heads) for e in shape.layers if e.query_heads]
    return sum(q for q, _ in pairs) / sum(kv for _, kv in pairs) if pairs else None


def plain_bytes(layout: CacheLayout, context: int) -> int:
    """2 · layers · KV heads · head size · tokens · bytes, taken literally, as a reader would."""
    heads = [e for e in layout.shape.layers if e.query_heads and e.kind != "cross"]
    if not heads:
        return 0
    first = next((e for e in heads if e.kind == "full"), heads[0])
    count = first.query_heads if first.replicated else first.kv_heads
    widths = layout.kv.k.vector_bytes(first.mha_k_dim) + layout.kv.v.vector_bytes(first.mha_v_dim)
    return layout.shape.num_layers * count * widths * context


def _groups(sequence: Sequence) -> list[list[KindBytes]]:
    """Entries that differ only in their layer, in order of first appearance."""
    groups: dict[Any, list[KindBytes]] = {}
    for kind in sequence.kinds:
        e = kind.entry
        key = (
            e.kind,
            e.kv_heads,
            e.k_head_dim,
            e.v_head_dim,
            e.window,
            e.stride,
            e.states,
            e.trace,
        )
        groups.setdefault(key, []).append(kind)
    return list(groups.values())


def _kind(layout: CacheLayout, group: list[KindBytes], batch: int) -> dict[str, Any]:
    entry = group[0].entry
    return {
        "kind": entry.kind,
        "layers": len(group),
        "kv_heads": entry.kv_heads,
        "k_head_dim": entry.k_head_dim,
        "v_head_dim": entry.v_head_dim,
        "window": entry.window,
        "stride": entry.stride,
        "tokens": group[0].tokens,
        "bytes": batch * sum(kind.bytes for kind in group),
        "state_bytes": batch * sum(kind.state_bytes for kind in group),
        "formula": formula(layout, group, batch),
        "decided_by": {"layers": layout.shape.layers_by, **dict(entry.trace)},
    }


def _layer(kind: KindBytes, batch: int) -> dict[str, Any]:
    entry = kind.entry
    return {
        "layer": entry.layer,
        "kind": entry.kind,
        "kv_heads": entry.kv_heads,
        "k_head_dim": entry.k_head_dim,
        "v_head_dim": entry.v_head_dim,
        "window": entry.window,
        "tokens": kind.tokens,
        "bytes": batch * kind.bytes,
    }


def formula(layout: CacheLayout, group: list[KindBytes], batch: int) -> str:
    """The group's bytes written out: factors that multiply to `bytes`."""
    entry, tokens, layers = group[0].entry, group[0].tokens, len(group)
    terms = []
    if entry.kind != "linear":
        terms.append(_token_terms(layout, entry) + f" × {tokens:,} tokens")
    terms += [_state_term(layout, state) for state in entry.states]
    inner = terms[0] if len(terms) == 1 else "(" + " + ".join(terms) + ")"
    sequences = f" × {batch:,} sequences" if batch > 1 else ""
    return f"{layers} layers × {inner}{sequences}"


def _token_terms(layout: CacheLayout, entry: LayerCache) -> str:
    k, v = layout.kv.k, layout.kv.v
    same = k == v and not k.scale_bytes
    heads = "" if entry.replicated else f"{entry.kv_heads} KV heads × "
    if same and entry.k_head_dim == entry.v_head_dim:
        return f"2 × {heads}{entry.k_head_dim} × {k.bits // 8} bytes"
    if same and entry.v_head_dim:
        return f"{heads}({entry.k_head_dim} + {entry.v_head_dim}) × {k.bits // 8} bytes"
    if same:
        return f"{heads}{entry.k_head_dim} × {k.bits // 8} bytes"
    parts = [f"{k.vector_bytes(entry.k_head_dim)} bytes of K"]
    if entry.v_head_dim:
        parts.append(f"{v.vector_bytes(entry.v_head_dim)} bytes of V")
    return f"{heads}({' + '.join(parts)})"


def _state_term(layout: CacheLayout, state: State) -> str:
    width = element_bytes(layout, state)
    if state.name == "conv":
        return f"{state.elements:,} channels × {state.columns} columns × {width} bytes"
    return f"{state.elements:,} state elements × {width} bytes"

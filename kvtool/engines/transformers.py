"""The engine `transformers`: bytes of the cache objects that transformers 5.24 fills.

Rules of transformers' cache_utils.py, each held to its own caches (tests/test_transformers.py):

- dynamic: a window layer keeps min(tokens, window − 1), for the token that comes next completes the
  window; a chunk is kept like a window; everything else keeps every token.
- static: a full layer is allocated for the static length, a window layer for min(length, window).
- a convolution keeps all its taps' columns, not one less; a recurrent state stays in fp32.
- what single classes do otherwise is in the tables below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from kvtool.cache import CacheLayout, fixed_bytes, mha_token_bytes, state_bytes, token_bytes
from kvtool.engines.result import KindBytes, Part, Sequence
from kvtool.errors import KvtoolError
from kvtool.model.shape import LayerCache, State

UNCUT = {"gpt_neo"}
"""Classes whose local layers keep every token: the window is only in the mask."""

MORE_TOKENS = {"xlm": 1, "nllb-moe": 1, "moonshine": 1}
"""generate() puts a token of its own into the cache: XLM's mask, the decoder's start."""

FP32_CONVOLUTIONS = {"inkling_text", "inkling2_text", "inkling2_loop_text"}
FP32_INDEXERS = {"dots3_note_text"}
"""Modules that a class keeps in fp32 whatever the model's dtype."""

NARROW_STATES = {"minimax", "xlstm"}
"""Classes that copy their recurrent state into buffers of the model's dtype."""

MODULE_STATES = {"recurrent_gemma"}
"""Classes that keep their states on the modules, outside the cache object."""

TWICE_OUTSIDE_POOLS = {"deepseek_v4"}
"""Classes whose K and V are one tensor in the layers with a pool and two in the others."""

NEVER_STATIC = {"recurrent_gemma", "xlnet", "reformer", "rwkv"}
"""Classes that keep their own dynamic cache when a static one is asked for."""

INDEXER_WIDTHS = {"glm5_next_text": lambda width: 2 * width + 1}
"""What an indexer's key is stored with: GLM-5-Next's gate scores and a mark of valid channels."""

NO_CACHE = {"openai-gpt": "its class takes no cache: every step runs the whole text again"}


def size(
    layout: CacheLayout,
    *,
    context: int,
    encoder: int,
    prompt: int | None,
    cache: str,
) -> Sequence:
    """One sequence (one row of input_ids), whole model."""
    check(layout)
    held = as_held(layout)
    prompt = context if prompt is None else prompt
    found = list(_parts(held, context, encoder, prompt, cache))
    by_entry: Counter[int] = Counter()
    for index, part in found:
        by_entry[index] += part.bytes
    longer = sum(part.bytes for _, part in _parts(held, context + 1, encoder, prompt, cache))
    kinds = []
    for index, entry in enumerate(held.shape.layers):
        own = by_entry[index]
        entry = replace(entry, states=tuple(_now(state, entry, context) for state in entry.states))
        state = sum(state_bytes(held, state) for state in entry.states)
        per_token = token_bytes(held, entry)
        rows = held.shape.rows_per_sequence
        tokens = (own * rows - state) // per_token if per_token else 0
        if fixed_bytes(entry, tokens):
            tokens = held_tokens(entry, context, encoder, cache)
        kinds.append(KindBytes(entry=entry, tokens=tokens, bytes=own, state_bytes=state))
    return Sequence(
        kinds=tuple(kinds),
        next_token_bytes=longer - by_entry.total(),
        state_bytes=sum(kind.state_bytes for kind in kinds),
        cross_bytes=sum(k.bytes for k in kinds if k.entry.kind == "cross"),
        rank_bytes=by_entry.total(),
        mha_bytes=sum(k.tokens * mha_token_bytes(held, k.entry) + k.state_bytes for k in kinds),
        scale_bytes=0,
        parts=tuple(part for _, part in found),
    )


def parts(
    layout: CacheLayout,
    *,
    context: int,
    encoder: int,
    prompt: int | None = None,
    cache: str = "dynamic",
) -> tuple[Part, ...]:
    """What each layer of the cache object holds for one row of input_ids, by kind."""
    check(layout)
    held = as_held(layout)
    prompt = context if prompt is None else prompt
    return tuple(part for _, part in _parts(held, context, encoder, prompt, cache))


def check(layout: CacheLayout) -> None:
    """Refuse what transformers' own cache cannot be asked for."""
    types = {layout.shape.model_type, *(entry.owner for entry in layout.shape.layers)}
    for kind in types & NO_CACHE.keys():
        raise KvtoolError(
            f"{kind}: {NO_CACHE[kind]}", "use --engine ideal", code="no_cache_in_engine"
        )
    if layout.kv.k != layout.dtype or layout.kv.v != layout.dtype:
        raise KvtoolError(
            f"transformers caches K and V in the model's dtype, not in {layout.kv.name}",
            "leave out --kv-dtype, or set --dtype",
            code="not_in_engine",
        )
    if max(layout.tp, layout.pp, layout.dcp) > 1 or layout.block_size is not None:
        raise KvtoolError(
            "--engine transformers sizes one process without blocks",
            "leave out --tp, --pp and --block-size, or use --engine ideal",
            code="not_in_engine",
        )


def as_held(layout: CacheLayout) -> CacheLayout:
    """The layout with what each class of transformers does its own way written into its entries."""
    shape = layout.shape
    pooled = {entry.layer for entry in shape.layers if entry.stride > 1}
    layers = []
    for entry in shape.layers:
        kind = shape.type_of(entry)
        held = _own_way(kind, entry)
        if kind in TWICE_OUTSIDE_POOLS and entry.layer not in pooled:
            held = replace(held, v_head_dim=held.k_head_dim)
        layers.append(held)
    return replace(layout, shape=replace(shape, layers=tuple(layers)))


def _own_way(kind: str, entry: LayerCache) -> LayerCache:
    kept = () if kind in MODULE_STATES else entry.states
    states = tuple(_held_state(kind, state) for state in kept)
    widen = INDEXER_WIDTHS.get(kind)
    if entry.kind == "indexer" and widen is not None:
        entry = replace(entry, k_head_dim=widen(entry.k_head_dim))
    return replace(
        entry,
        states=states,
        window=None if kind in UNCUT else entry.window,
        kv_heads=entry.query_heads if entry.expanded else entry.kv_heads,
        extra=entry.extra + (MORE_TOKENS.get(kind, 0) if entry.kind != "cross" else 0),
    )


def _held_state(kind: str, state: State) -> State:
    wide = state.name == "ssm" and state.dtype != "model"
    wide = wide and kind not in NARROW_STATES
    wide = wide or (state.name == "conv" and kind in FP32_CONVOLUTIONS)
    return replace(state, columns=state.held, dtype="float32" if wide else "model")


def _now(state: State, entry: LayerCache, context: int) -> State:
    """A pool's pending tokens as they stand, where the state is their most."""
    if state.name != "buffer":
        return state
    return replace(state, parts=((_pending(entry, context), 1),))


def _pending(entry: LayerCache, context: int) -> int:
    """Elements: values and gates of tokens that make no entry yet, and CSA's overlap."""
    series = 2 if entry.overlap else 1
    kept = 2 * entry.stride if entry.overlap and context >= entry.stride else 0
    return (2 * (context % entry.stride) * series + kept) * entry.k_head_dim


def _parts(
    layout: CacheLayout, context: int, encoder: int, prompt: int, cache: str
) -> Iterator[tuple[int, Part]]:
    """(index of the entry, part) of every tensor, summed over tensors of one kind in a layer."""
    for index, entry in enumerate(layout.shape.layers):
        for kind, count in _bytes_of(layout, entry, context, encoder, prompt, cache):
            if count:
                rows = layout.shape.rows_per_sequence
                yield index, Part(layer=entry.layer, kind=kind, bytes=count // rows)


def _bytes_of(
    layout: CacheLayout, entry: LayerCache, context: int, encoder: int, prompt: int, cache: str
) -> Iterator[tuple[str, int]]:
    k = entry.kv_heads * layout.kv.k.vector_bytes(entry.k_head_dim)
    v = entry.kv_heads * layout.kv.v.vector_bytes(entry.v_head_dim)
    model_type = layout.shape.type_of(entry)
    static = cache == "static" and model_type not in NEVER_STATIC
    tokens = held_tokens(entry, context, encoder, "static" if static else "dynamic")
    for state in entry.states:
        if state.name != "buffer":
            yield state.name, state_bytes(layout, state)
    if entry.kind == "linear":
        return
    if entry.stride > 1:
        yield "other", _pool(layout, entry, context)
    elif entry.kind == "hidden":
        yield "other", tokens * token_bytes(layout, entry) + fixed_bytes(entry, tokens)
    elif entry.kind == "indexer":
        wide = model_type in FP32_INDEXERS
        yield "indexer", tokens * (4 * entry.k_head_dim if wide else k)
    elif entry.reference:
        yield from _reference(entry, context, prompt, cache, k, v)
    else:
        side = "cross" if entry.kind == "cross" else "self"
        yield f"{side}_k", tokens * k
        yield f"{side}_v", tokens * v


def held_tokens(entry: LayerCache, context: int, encoder: int, cache: str) -> int:
    """Tokens of a layer in the cache object."""
    if entry.kind == "cross":
        return encoder
    tokens = context + entry.extra
    if entry.window is None:
        return tokens
    window = entry.span or entry.window
    if entry.kind == "hidden" or cache == "static":
        return min(tokens, window)
    return min(tokens, window - 1) if window > 1 else tokens  # [-0:] keeps everything


def _pool(layout: CacheLayout, entry: LayerCache, context: int) -> int:
    """DeepSeek-V4: entries so far, values and gates of pending tokens, and CSA's overlap.

    Gates are counted in the model's dtype; where its fp32 modules are kept (from_pretrained does),
    CSA's overlapping gates are fp32, a few KiB more a layer.
    """
    vector = layout.kv.k.vector_bytes(entry.k_head_dim)
    pending = _pending(entry, context) * layout.dtype.bits // 8
    return context // entry.stride * vector + pending


def _reference(
    entry: LayerCache, context: int, prompt: int, cache: str, k: int, v: int
) -> Iterator[tuple[str, int]]:
    """Unlimited-OCR: the prompt apart from the window of what was generated.

    Its static cache keeps one buffer, as long as the prompt and the window but no longer than the
    static length, and two views of it; all three are attributes.
    """
    if cache == "static":
        window = min(entry.span, context)
        whole = min(context, prompt + window)
        yield "self_k", window * k
        yield "self_v", window * v
        yield "other", (2 * whole - window) * (k + v)
        return
    generated = min(max(context - prompt, 0), entry.span - 1)
    yield "self_k", generated * k
    yield "self_v", generated * v
    yield "other", min(prompt, context) * (k + v)


FIELDS = ("self_k", "self_v", "cross_k", "cross_v", "conv", "ssm", "indexer", "other")


def fields(sequence: Sequence, batch: int) -> dict[str, int]:
    """The row's bytes by kind of tensor; they add to total_bytes."""
    return {
        f"{name}_bytes": batch * sum(p.bytes for p in sequence.parts if p.kind == name)
        for name in FIELDS
    }

"""The engine `ideal`: what the mathematics needs.

A full layer holds every token, a window layer min(window, tokens), a latent one vector a token, a
convolution its kernel − 1 columns in the model's dtype, a recurrent state fp32 unless the config
says otherwise. With a block size, tokens are rounded up to whole blocks.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from kvtool.cache import (
    CacheLayout,
    fixed_bytes,
    mha_token_bytes,
    stages,
    state_bytes,
    token_bytes,
    token_scale_bytes,
)
from kvtool.engines.result import KindBytes, Sequence
from kvtool.model.shape import LayerCache


def held(entry: LayerCache, context: int, encoder: int, block_size: int | None) -> int:
    """Cached entries of one layer at a context of that many tokens."""
    if entry.kind == "linear":
        return 0
    tokens = encoder if entry.kind == "cross" else context + entry.extra
    if entry.window is not None:
        tokens = min(tokens, entry.window)
    if block_size is not None:
        tokens = -(-tokens // block_size) * block_size
    return tokens // entry.stride


def size(
    layout: CacheLayout,
    *,
    context: int,
    encoder: int,
    prompt: int | None = None,
    cache: str = "dynamic",
) -> Sequence:
    """One sequence of `context` tokens, with `encoder` tokens behind its cross-attention.

    How the context is split into prompt and output (`prompt`) changes nothing here, nor does the
    kind of `cache` object.
    """
    entries = layout.shape.layers
    tokens = [held(entry, context, encoder, layout.block_size) for entry in entries]
    states = [sum(state_bytes(layout, state) for state in entry.states) for entry in entries]
    grown = [
        n * token_bytes(layout, entry) + fixed_bytes(entry, n)
        for entry, n in zip(entries, tokens, strict=True)
    ]
    pairs = list(zip(entries, tokens, strict=True))
    return Sequence(
        kinds=tuple(
            KindBytes(entry=entry, tokens=n, bytes=g + s, state_bytes=s)
            for entry, n, g, s in zip(entries, tokens, grown, states, strict=True)
        ),
        next_token_bytes=_next_token(layout, context),
        state_bytes=sum(states),
        cross_bytes=sum(g for e, g in zip(entries, grown, strict=True) if e.kind == "cross"),
        rank_bytes=rank_bytes(layout, context, encoder),
        mha_bytes=sum(n * mha_token_bytes(layout, e) for e, n in pairs) + sum(states),
        scale_bytes=sum(n * token_scale_bytes(layout, e) for e, n in pairs),
    )


def _next_token(layout: CacheLayout, context: int) -> int:
    """What one more token adds; a compressed pool adds an entry every `stride` tokens.

    In blocks it is a whole block or nothing, and only where the block is full.
    """
    adds: list[Fraction | int] = []
    for entry in layout.shape.layers:
        if entry.kind in ("linear", "cross"):
            continue
        here, there = (held(entry, n, 0, layout.block_size) for n in (context, context + 1))
        more = Fraction(1, entry.stride) if layout.block_size is None else there - here
        full = entry.window is not None and context + entry.extra >= entry.window
        adds.append(0 if full and layout.block_size is None else more * token_bytes(layout, entry))
        adds.append(fixed_bytes(entry, there) - fixed_bytes(entry, here))
    return round(sum(adds))


def rank_bytes(layout: CacheLayout, context: int, encoder: int) -> int:
    """Bytes on the fullest GPU: the worst pipeline stage, one tensor-parallel rank of it.

    With decode context parallelism, ranks share the tokens of full layers and latents.
    """

    def own(entry: LayerCache, token: int, state: int) -> int:
        shared = layout.dcp if entry.kind in ("full", "latent", "indexer") else 1
        n = -(-held(entry, context, encoder, layout.block_size) // shared)
        return n * token + fixed_bytes(entry, n) + state

    return max(
        sum(count * own(entry, token, state) for entry, count, token, state in alike)
        for alike in _stages_alike(layout)
    )


_Alike = tuple[LayerCache, int, int, int]
"""A layer, how many are like it, and on one rank the bytes of a token and of the states."""


@lru_cache(maxsize=1024)
def _stages_alike(layout: CacheLayout) -> tuple[tuple[_Alike, ...], ...]:
    """The layers of each pipeline stage, alike ones counted: there are few kinds, and many layers."""
    shape = layout.shape
    cut = stages(shape.num_modules, layout.pp, layout.pp_layers)
    stage_of = {module: i for i, stage in enumerate(cut) for module in stage}
    counts: list[dict[LayerCache, int]] = [{} for _ in cut]
    for entry in shape.layers:
        if entry.module in stage_of:
            plain = replace(entry, layer=0, module=0, trace=())
            of = counts[stage_of[entry.module]]
            of[plain] = of.get(plain, 0) + 1
    return tuple(tuple(_alike(layout, *one) for one in of.items()) for of in counts)


def _alike(layout: CacheLayout, entry: LayerCache, count: int) -> _Alike:
    states = sum(state_bytes(layout, state, tp=layout.tp) for state in entry.states)
    return entry, count, token_bytes(layout, entry, tp=layout.tp), states

"""The engine `ideal`: what the mathematics needs.

A full layer holds every token, a window layer min(window, tokens), a latent one vector a token, a
convolution its kernel − 1 columns in the model's dtype, a recurrent state fp32 unless the config
says otherwise. With a block size, tokens are rounded up to whole blocks.
"""

from __future__ import annotations

from fractions import Fraction

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
        rank_bytes=_worst_rank(layout, tokens),
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


def _worst_rank(layout: CacheLayout, tokens: list[int]) -> int:
    """Bytes on the fullest GPU: the worst pipeline stage, one tensor-parallel rank of it.

    With decode context parallelism, ranks share the tokens of full layers and latents.
    """
    layers: dict[int, int] = {}
    for entry, n in zip(layout.shape.layers, tokens, strict=True):
        shared = layout.dcp if entry.kind in ("full", "latent", "indexer") else 1
        n = -(-n // shared)
        own = n * token_bytes(layout, entry, tp=layout.tp) + fixed_bytes(entry, n)
        own += sum(state_bytes(layout, state, tp=layout.tp) for state in entry.states)
        layers[entry.module] = layers.get(entry.module, 0) + own
    return max(
        sum(layers.get(layer, 0) for layer in stage)
        for stage in stages(layout.shape.num_modules, layout.pp, layout.pp_layers)
    )

"""ModelShape + dtypes + parallelism + block size → CacheLayout: bytes of each thing a layer caches.

A layout says what one cached token of one layer costs, whole model and on one rank. How many tokens
are held is for an engine to say (kvtool/engines).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from kvtool.dtypes import Dtype, KvDtype, dtype_named
from kvtool.errors import KvtoolError
from kvtool.model.shape import LayerCache, ModelShape, State


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """A model's cache in given dtypes, cut over tp ranks and pp stages. block_size in tokens."""

    shape: ModelShape
    dtype: Dtype
    kv: KvDtype
    tp: int = 1
    pp: int = 1
    pp_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty: vLLM's even split over pp."""
    dcp: int = 1
    """Decode context parallelism: ranks among tp that share a sequence's tokens."""
    block_size: int | None = None


def token_bytes(layout: CacheLayout, entry: LayerCache, *, tp: int = 1) -> int:
    """Bytes of one cached token of one layer on one of `tp` ranks (K and V, scales included)."""
    heads = shard(entry.kv_heads, tp) if not entry.replicated else entry.kv_heads
    return heads * (
        layout.kv.k.vector_bytes(entry.k_head_dim) + layout.kv.v.vector_bytes(entry.v_head_dim)
    )


def fixed_bytes(entry: LayerCache, tokens: int) -> int:
    """What a layer keeps besides K and V, in no KV dtype."""
    return entry.fixed_bytes * tokens if tokens > entry.fixed_above else 0


def token_scale_bytes(layout: CacheLayout, entry: LayerCache) -> int:
    """Of a token's bytes, scales and zero points."""
    return entry.kv_heads * (
        layout.kv.k.scale_share(entry.k_head_dim) + layout.kv.v.scale_share(entry.v_head_dim)
    )


def mha_token_bytes(layout: CacheLayout, entry: LayerCache) -> int:
    """The same if every query head had its own K and V; an indexer would have no reason to be."""
    if not entry.query_heads:
        return 0 if entry.kind == "indexer" else token_bytes(layout, entry)
    return entry.query_heads * (
        layout.kv.k.vector_bytes(entry.mha_k_dim) + layout.kv.v.vector_bytes(entry.mha_v_dim)
    )


def state_bytes(layout: CacheLayout, state: State, *, tp: int = 1) -> int:
    """Bytes of a constant state on one of `tp` ranks: the columns that are needed."""
    return rank_elements(state, tp) * element_bytes(layout, state)


def rank_elements(state: State, tp: int) -> int:
    """Elements of a constant state, all its columns, on one of `tp` ranks."""
    return state.columns * sum(count // pieces * shard(pieces, tp) for count, pieces in state.parts)


def element_bytes(layout: CacheLayout, state: State) -> int:
    """Bytes of one element of a state."""
    if state.dtype == "model":
        return layout.dtype.bits // 8
    return dtype_named(state.dtype, flag="the config's state dtype").bits // 8


def shard(pieces: int, tp: int) -> int:
    """Pieces (KV heads, groups, channels) on the fullest of `tp` ranks; at least one on each.

    vLLM, config/model.py: kv_heads per rank = max(1, total // tp). A split that leaves a remainder
    is refused by `check_parallel`.
    """
    return max(1, pieces // tp)


def check_parallel(
    shape: ModelShape, tp: int, pp: int, *, pp_layers: tuple[int, ...] = (), dcp: int = 1
) -> None:
    """Refuse a tp that does not divide the heads, or more stages than layers."""
    for entry in shape.layers:
        pieces = [("query heads", entry.query_heads)] if entry.query_heads else []
        if not entry.replicated and entry.kv_heads:
            pieces.append(("KV heads", entry.kv_heads))
        pieces += [("state heads", part[1]) for state in entry.states for part in state.parts]
        for what, count in pieces:
            uneven = count % tp if count >= tp or what == "query heads" else tp % count
            if uneven and count > 1:
                raise KvtoolError(
                    f"--tp {tp} does not divide {count} {what} of {shape.model_type}",
                    "choose a tp that divides the heads, such as "
                    + ", ".join(str(n) for n in (1, 2, 4, 8, 16) if not count % n),
                    code="tp_does_not_divide",
                )
    _check_dcp(shape, tp, dcp)
    if pp_layers and sum(pp_layers) != shape.num_modules:
        raise KvtoolError(
            f"--pp-layers are {sum(pp_layers)} layers, and {shape.model_type} has "
            f"{shape.num_modules}",
            "give each stage its layers, so that they add up",
            code="pp_layers_do_not_add_up",
        )
    if pp > shape.num_modules:
        raise KvtoolError(
            f"--pp {pp} is more than the {shape.num_modules} layers of {shape.model_type}",
            f"choose a pp of at most {shape.num_modules}",
            code="pp_too_large",
        )


def _check_dcp(shape: ModelShape, tp: int, dcp: int) -> None:
    """Ranks can share a sequence's tokens only where they hold the same head.

    vLLM, config/model.py, verify_with_parallel_config: without a latent, dcp ≤ tp // KV heads.
    """
    if tp % dcp:
        raise KvtoolError(
            f"--dcp {dcp} does not divide --tp {tp}",
            "its ranks are tensor-parallel ranks: raise --tp, or choose a dcp that divides it",
            code="dcp_does_not_divide",
        )
    split = [e.kv_heads for e in shape.layers if e.kind == "full" and not e.replicated]
    if dcp > 1 and split and dcp * max(split) > tp:
        raise KvtoolError(
            f"--dcp {dcp} with --tp {tp}: {max(split)} KV heads leave no {dcp} ranks with one head",
            f"raise --tp to {dcp * max(split)}, or leave out --dcp",
            code="dcp_does_not_divide",
        )


def stages(num_layers: int, pp: int, given: tuple[int, ...] = ()) -> list[range]:
    """Layers of each pipeline stage, as `given` or split evenly.

    The remainder goes to the stages before the last, from the back, since the first and last also
    hold embeddings: vLLM, distributed/utils.py, get_pp_indices.
    """
    sizes = list(given) or [num_layers // pp] * pp
    for i in range(2, 2 if given else num_layers % pp + 2):
        sizes[-i] += 1
    ends = accumulate(sizes)
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

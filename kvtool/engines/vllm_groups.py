"""Which layers share a group in vLLM, and at what page size.

The rules are those of vLLM 0.32 (V1), v1/core/kv_cache_utils.py, for layouts with layers outermost.
All groups draw blocks from one pool, so their blocks must be of one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvtool.engines.vllm_specs import LayerSpec, VllmSettings, blocks_per_request


class Refused(Exception):
    """vLLM raises at start-up; the message is its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share one block table. `uniform` ones have pages of their own sizes."""

    layers: tuple[LayerSpec, ...]
    uniform: bool = False
    different: tuple[LayerSpec, ...] = field(init=False, compare=False, repr=False)
    """Of the layers, those that differ: few, and asked for with every length."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "different", tuple(dict.fromkeys(self.layers)))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all its layers."""
        return sum(spec.page_bytes for spec in self.layers)

    def blocks(self, settings: VllmSettings, length: int) -> int:
        """Blocks that one request of `length` tokens holds."""
        return max(blocks_per_request(spec, settings, length) for spec in self.different)


def grouped(specs: Sequence[LayerSpec], settings: VllmSettings) -> list[Group]:
    """get_kv_cache_groups: one group if all layers need the same blocks, else groups of a size."""
    layers = list(specs)
    if not layers:
        raise Refused("This model keeps no cache.")
    if not settings.hybrid and not _one_kind(layers):
        layers = _promoted(layers)
    if settings.dcp > 1 and any(spec.kind == "sliding" for spec in layers):
        raise Refused("DCP not support sliding window.")
    if _mergeable(layers):
        return [Group(layers=tuple(layers))]
    if _same_slots(layers):
        return [Group(layers=tuple(layers), uniform=True)]
    unified = _unified(layers)
    if unified is None:
        return [Group(layers=tuple(_full_allocation(layers)), uniform=True)]
    return _dealt(unified)


def _one_kind(layers: Sequence[LayerSpec]) -> bool:
    return _mergeable(layers) or _same_slots(layers)


def _mergeable(layers: Sequence[LayerSpec]) -> bool:
    """True if the layers can share one spec (KVCacheSpec.merge).

    Full layers that were promoted may differ in having a window, but not in its size.
    """
    first, kinds = layers[0], {spec.kind for spec in layers}
    if kinds != {"full"}:
        return all(spec == first for spec in layers)
    for name in ("window", "chunk"):
        if len({getattr(spec, name) for spec in layers} - {None}) > 1:
            raise Refused(
                "All attention layers in the same KV cache group must have the same window size."
            )
    plain = {replace(spec, window=None, chunk=None) for spec in layers}
    local = [any(getattr(spec, name) for spec in layers) for name in ("window", "chunk")]
    return len(plain) == 1 and not all(local)


def _same_slots(layers: Sequence[LayerSpec]) -> bool:
    """True if every layer needs the same number of blocks (UniformTypeKVCacheSpecs)."""
    if len({spec.block_size for spec in layers}) > 1:
        return False
    if all(spec.keeps_all for spec in layers):
        return True
    first = layers[0]
    same = {(s.kind, s.window, s.chunk, s.state_blocks) for s in layers}
    pages = {spec.page_bytes for spec in layers}
    return len(same) == 1 and (first.kind != "linear" or len(pages) == 1)


def _promoted(layers: list[LayerSpec]) -> list[LayerSpec]:
    """Windows and chunks kept as full attention (_promote_local_kv_cache_specs)."""
    full = [spec for spec in layers if spec.keeps_all]
    if full:
        sizes = {spec.block_size for spec in full}
        layers = [_as_full(spec, sizes) for spec in layers]
    if not _one_kind(layers):
        raise Refused("Failed to promote local KV cache specs to one unified type.")
    return layers


def _as_full(spec: LayerSpec, sizes: set[int]) -> LayerSpec:
    if spec.kind not in ("sliding", "chunked"):
        return spec
    return replace(spec, kind="full", block_size=min(sizes) if len(sizes) == 1 else spec.block_size)


def _unified(layers: list[LayerSpec]) -> list[LayerSpec] | None:
    """Every page as large as the largest (unify_kv_cache_spec_page_size).

    A page that divides the largest takes more tokens; a state, or attention that does not divide it,
    is padded. A latent can do neither: None.
    """
    page = max(spec.page_bytes for spec in layers)
    out = []
    for spec in layers:
        own = spec.page_bytes
        if own == page:
            out.append(spec)
        elif spec.kind == "linear":
            out.append(replace(spec, padded=page))
        elif page % own == 0:
            ratio = page // own
            padded = spec.padded and spec.padded * ratio
            out.append(replace(spec, block_size=spec.block_size * ratio, padded=padded))
        elif spec.kind == "latent":
            return None
        else:
            out.append(replace(spec, padded=page))
    return out


def _full_allocation(layers: list[LayerSpec]) -> list[LayerSpec]:
    """Latents beside windows: the windows are kept whole (_try_get_full_allocation_fallback)."""
    kinds = {spec.kind for spec in layers}
    if "sliding" in kinds and "chunked" not in kinds:
        promoted = _promoted(layers)
        if _same_slots(promoted):
            return promoted
    raise Refused(
        "page size is not divisible by the maximum page size and cannot be padded. "
        "Padding is only supported for non-MLA attention layers."
    )


def _dealt(layers: list[LayerSpec]) -> list[Group]:
    """Groups of one size, layers dealt round (_get_kv_cache_groups_uniform_page_size).

    The size is the least bucket's, or the largest's if that is not half as large again: padding a
    few layers is cheaper than splitting.
    """
    alike: dict[LayerSpec, list[LayerSpec]] = {}
    for spec in layers:
        alike.setdefault(spec, []).append(spec)
    buckets: list[list[LayerSpec]] = []
    for same in alike.values():
        for bucket in buckets:
            if _joins(bucket, same[0]):
                bucket += same
                break
        else:
            buckets.append(same)
    counts = [len(bucket) for bucket in buckets]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for bucket in buckets:
        num_groups = -(-len(bucket) // size)
        groups += [Group(layers=tuple(bucket[i::num_groups])) for i in range(num_groups)]
    return groups


def _joins(bucket: list[LayerSpec], spec: LayerSpec) -> bool:
    if spec.kind != "full" or bucket[0].kind != "full":
        return False
    try:
        return _mergeable([*dict.fromkeys(bucket), spec])
    except Refused:
        return False

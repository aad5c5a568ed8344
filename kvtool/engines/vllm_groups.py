"""vLLM's arithmetic from layer specs to a pool of blocks: groups, padding, blocks, concurrency.

The rules are those of vLLM 0.32 (V1), v1/core/kv_cache_utils.py, for layouts with layers outermost.
All groups draw blocks from one pool, so a block is as large as the largest group needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from kvtool.cache import stages
from kvtool.engines.vllm_specs import (
    BLOCK_SIZE,
    LayerSpec,
    SpecKind,
    VllmSettings,
    blocks_per_request,
)

GIB = 1024**3


class Refused(Exception):
    """vLLM raises at start-up; the message is its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share one block table. `uniform` ones have pages of their own sizes."""

    layers: tuple[LayerSpec, ...]
    uniform: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all its layers."""
        return sum(spec.page_bytes for spec in self.layers)

    def blocks(self, settings: VllmSettings, length: int) -> int:
        """Blocks that one request of `length` tokens holds."""
        return max(blocks_per_request(spec, settings, length) for spec in set(self.layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmGroup:
    """A group as it is reported. Pages are of one layer, or of all where their sizes differ."""

    kind: SpecKind
    layers: int
    block_size: int
    page_bytes: int
    blocks_per_request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPool:
    """What vLLM reserves on each GPU. Counts are None without memory, or where it does not fit."""

    block_size: int
    bytes_per_block: int | None
    blocks_per_request: int | None
    one_request_bytes: int | None
    num_blocks: int | None
    kv_cache_size_tokens: int | None
    max_concurrency: float | None
    groups: tuple[VllmGroup, ...]
    fits: bool
    reason: str
    """Why it does not start, in vLLM's words; '' if it does."""


def pool_of(
    specs: Sequence[LayerSpec], settings: VllmSettings, *, num_layers: int | None = None
) -> VllmPool:
    """The pool of these layers. `num_layers` counts the decoder's for pipeline stages."""
    block_size = next((s.block_size for s in specs if s.kind != "linear"), None)
    block_size = block_size or settings.block_size or BLOCK_SIZE
    try:
        groups = grouped(specs, settings)
    except Refused as refused:
        return VllmPool(
            block_size=block_size,
            bytes_per_block=None,
            blocks_per_request=None,
            one_request_bytes=None,
            num_blocks=None,
            kv_cache_size_tokens=None,
            max_concurrency=None,
            groups=(),
            fits=False,
            reason=str(refused),
        )
    return _pool(
        groups, settings, block_size, _block_bytes_of_stages(groups, specs, settings, num_layers)
    )


def _pool(
    groups: list[Group], settings: VllmSettings, block_size: int, workers: list[int]
) -> VllmPool:
    """num_blocks is that of the fullest stage; each stage is checked (get_kv_cache_configs)."""
    bytes_per_block = max(workers)
    per_request = _per_request(groups, settings, settings.max_model_len)
    reason, num_blocks, concurrency = "", None, None
    if settings.kv_memory is not None:
        problems = (_shortage(block, groups, settings, settings.kv_memory) for block in workers)
        reason = next((problem for problem in problems if problem), "")
        if not reason:
            num_blocks = settings.kv_memory // bytes_per_block
            concurrency = num_blocks / per_request
    return VllmPool(
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        blocks_per_request=per_request,
        one_request_bytes=bytes_per_block * per_request,
        num_blocks=num_blocks,
        kv_cache_size_tokens=(
            None if concurrency is None else int(concurrency * settings.max_model_len)
        ),
        max_concurrency=concurrency,
        groups=tuple(_reported(group, settings) for group in groups),
        fits=not reason,
        reason=reason,
    )


def _reported(group: Group, settings: VllmSettings) -> VllmGroup:
    kinds = {spec.kind for spec in group.layers}
    return VllmGroup(
        kind=kinds.pop() if len(kinds) == 1 else "full",
        layers=len(group.layers),
        block_size=group.layers[0].block_size,
        page_bytes=group.block_bytes if group.uniform else group.layers[0].page_bytes,
        blocks_per_request=group.blocks(settings, settings.max_model_len),
    )


def _per_request(groups: Iterable[Group], settings: VllmSettings, length: int) -> int:
    return sum(group.blocks(settings, length) for group in groups)


# --- does it fit ----------------------------------------------------------------------------------


def _shortage(block: int, groups: list[Group], settings: VllmSettings, memory: int) -> str:
    """Why one request of max_model_len does not fit, or ''.

    _check_enough_kv_cache_memory, after get_kv_cache_configs has set one block aside: the null
    block, which num_blocks still counts.
    """
    usable = memory - block

    def needed(length: int) -> int:
        return block * _per_request(groups, settings, length)

    if usable <= 0:
        return "No available memory for the cache blocks."
    length = settings.max_model_len
    if needed(length) <= usable:
        return ""
    longest = _longest(lambda tokens: needed(tokens) <= usable, length)
    estimate = (
        f"Based on the available memory, the estimated maximum model length is {longest}. "
        if longest
        else ""
    )
    return (
        f"To serve at least one request with the model's max seq len ({length}), "
        f"({_gib(needed(length))} GiB KV cache is needed, which is larger than the available KV "
        f"cache memory ({_gib(usable)} GiB). {estimate}Try increasing `gpu_memory_utilization` "
        "or decreasing `max_model_len`."
    )


def _longest(fits: Callable[[int], bool], limit: int) -> int:
    """The longest request that fits, by bisection; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _gib(count: int) -> str:
    return str(round(count / GIB, 2))


# --- groups ---------------------------------------------------------------------------------------


def grouped(specs: Sequence[LayerSpec], settings: VllmSettings) -> list[Group]:
    """get_kv_cache_groups: one group if all layers need the same blocks, else groups of a size."""
    layers = list(specs)
    if not layers:
        raise Refused("This model keeps no cache.")
    if settings.dcp > 1 and any(spec.kind == "sliding" for spec in layers):
        raise Refused("DCP not support sliding window.")
    if not settings.hybrid and not _one_kind(layers):
        layers = _promoted(layers)
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
            out.append(replace(spec, block_size=spec.block_size * (page // own)))
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


# --- pipeline stages ------------------------------------------------------------------------------


def _block_bytes_of_stages(
    groups: list[Group], layers: Sequence[LayerSpec], settings: VllmSettings, num_layers: int | None
) -> list[int]:
    """Bytes of a block on each stage's ranks (_project_kv_cache_groups_to_worker)."""
    count = num_layers or max(spec.layer for spec in layers) + 1
    ends = list(accumulate(settings.pp_layers))
    ranges = (
        [range(end - n, end) for n, end in zip(settings.pp_layers, ends, strict=True)]
        if ends
        else stages(count, settings.pp)
    )
    sizes = [
        max(sum(s.page_bytes for s in group.layers if s.layer in stage) for group in groups)
        for stage in ranges
    ]
    return [size for size in sizes if size]

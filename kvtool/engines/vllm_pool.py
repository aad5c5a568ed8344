"""vLLM's pool of blocks: how large a block is, how many there are, how many requests they serve.

The rules are those of vLLM 0.32 (V1), v1/core/kv_cache_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import lcm

from kvtool.cache import stages
from kvtool.engines.vllm_groups import Group, Refused, grouped
from kvtool.engines.vllm_specs import BLOCK_SIZE, LayerSpec, SpecKind, VllmSettings
from kvtool.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmGroup:
    """A group as it is reported. Pages are of one layer, or of all where their sizes differ."""

    kind: SpecKind
    layers: int
    block_size: int
    page_bytes: int
    blocks_per_request: int
    window: int | None = None
    """Of a sliding window or a chunk; None: every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPool:
    """What vLLM reserves on each GPU. Counts are None without memory, or where it does not fit."""

    block_size: int
    bytes_per_block: int | None
    blocks_per_request: int | None
    one_request_bytes: int | None
    all_stages_bytes: int | None
    """Of one request, one rank of every pipeline stage."""
    bytes_per_token: int | None
    """What a longer request reserves more, over a step of whole blocks; the same ranks."""
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
    return pool_in(laid_out(specs, settings, num_layers), settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """Groups and blocks, which depend on no length of a request and on no memory."""

    block_size: int
    groups: tuple[Group, ...] = ()
    workers: tuple[int, ...] = ()
    """Bytes of a block on each stage's ranks."""
    refused: str = ""


def laid_out(
    specs: Sequence[LayerSpec], settings: VllmSettings, num_layers: int | None = None
) -> LaidOut:
    """The groups of these layers, or why vLLM refuses them."""
    block_size = next((s.block_size for s in specs if s.kind != "linear"), None)
    block_size = block_size or settings.block_size or BLOCK_SIZE
    try:
        groups = grouped(specs, settings)
    except Refused as refused:
        return LaidOut(block_size=block_size, refused=str(refused))
    workers = _block_bytes_of_stages(groups, specs, settings, num_layers)
    return LaidOut(block_size=block_size, groups=tuple(groups), workers=tuple(workers))


def pool_in(laid: LaidOut, settings: VllmSettings) -> VllmPool:
    """The pool of these groups for a length and a memory."""
    if laid.refused:
        return VllmPool(
            block_size=laid.block_size,
            bytes_per_block=None,
            blocks_per_request=None,
            one_request_bytes=None,
            all_stages_bytes=None,
            bytes_per_token=None,
            num_blocks=None,
            kv_cache_size_tokens=None,
            max_concurrency=None,
            groups=(),
            fits=False,
            reason=laid.refused,
        )
    return _pool(laid.groups, settings, laid.block_size, laid.workers)


def _pool(
    groups: Sequence[Group], settings: VllmSettings, block_size: int, workers: Sequence[int]
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
        all_stages_bytes=sum(workers) * per_request,
        bytes_per_token=_marginal(groups, settings, sum(workers)),
        num_blocks=num_blocks,
        kv_cache_size_tokens=(
            None if concurrency is None else int(concurrency * settings.max_model_len)
        ),
        max_concurrency=concurrency,
        groups=tuple(_reported(group, settings) for group in groups),
        fits=not reason,
        reason=reason,
    )


def _marginal(groups: Sequence[Group], settings: VllmSettings, block: int) -> int:
    """Bytes a token, averaged over the least step that ends at a block's edge in every group."""
    sizes = [spec.block_size for g in groups for spec in g.layers if spec.kind != "linear"]
    if not sizes:
        return 0
    step = lcm(*sizes) * settings.dcp
    here, there = (
        _per_request(groups, settings, settings.max_model_len + more) for more in (0, step)
    )
    return round((there - here) * block / step)


def _reported(group: Group, settings: VllmSettings) -> VllmGroup:
    kinds = {spec.kind for spec in group.layers}
    kind = kinds.pop() if len(kinds) == 1 else "full"
    return VllmGroup(
        kind=kind,
        layers=len(group.layers),
        block_size=group.layers[0].block_size,
        page_bytes=group.block_bytes if group.uniform else group.layers[0].page_bytes,
        blocks_per_request=group.blocks(settings, settings.max_model_len),
        window=max((spec.window or spec.chunk or 0 for spec in group.layers), default=0) or None
        if kind in ("sliding", "chunked")
        else None,
    )


def _per_request(groups: Iterable[Group], settings: VllmSettings, length: int) -> int:
    return sum(group.blocks(settings, length) for group in groups)


# --- does it fit ----------------------------------------------------------------------------------


def _shortage(block: int, groups: Sequence[Group], settings: VllmSettings, memory: int) -> str:
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


# --- pipeline stages ------------------------------------------------------------------------------


def _block_bytes_of_stages(
    groups: list[Group], layers: Sequence[LayerSpec], settings: VllmSettings, num_layers: int | None
) -> list[int]:
    """Bytes of a block on each stage's ranks (_project_kv_cache_groups_to_worker)."""
    count = num_layers or max(spec.layer for spec in layers) + 1
    sizes = [
        max(sum(s.page_bytes for s in group.layers if s.layer in stage) for group in groups)
        for stage in stages(count, settings.pp, settings.pp_layers)
    ]
    return [size for size in sizes if size]

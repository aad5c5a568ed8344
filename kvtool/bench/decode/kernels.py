"""What a device decodes with: storing K and V into slots, and attention over blocks or reservations.

Caches come as [blocks, kv_heads, block_size, head_dim], whichever way they lie in memory: on a CPU
the tokens of a block's head together, on a GPU the heads of a token, as vLLM and FlashInfer lay them
out. Nothing is read back from a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.bench.attention.case import BLOCK_SIZES
from kvtool.bench.device import numpy_of

Tensor = torch.Tensor

Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(keys, values [tokens, kv_heads, head_dim], k_cache, v_cache, slots int64 [tokens])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What queries see: `lengths` int32 [batch], the newest token included."""

    lengths: Tensor
    max_context: int
    scale: float
    window: int
    """0: all."""


Paged = Callable[[Tensor, Tensor, Tensor, Tensor, Seen], Tensor]
"""(queries [batch, query_heads, head_dim], k_cache, v_cache, block_table, seen) → like queries."""

Contiguous = Paged
"""The same, where a block is a sequence's reservation and its table one entry, the lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The functions of one device."""

    name: str
    tokens_first: bool
    """How memory lies: the heads of a token together, or else the tokens of a block's head."""
    store: Store
    paged: Paged
    contiguous: Contiguous
    in_order: bool
    """Whether `contiguous` takes the lanes 0, 1, … alone; `store` then skips slots below 0."""


def kernels_for(device: str, threads: int = 1) -> Kernels:
    """Triton's on a GPU, numba's on a CPU."""
    return gpu_kernels() if device.startswith("cuda") else cpu_kernels(threads)


def cpu_kernels(threads: int) -> Kernels:
    """kvtool/bench/cpu/attention.py, on the memory of torch's tensors. Its contiguous kernel is the
    paged one with a block a sequence, so that it takes lanes in any order."""
    from kvtool.bench.cpu import attention as cpu_attention

    def paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, seen: Seen) -> Tensor:
        queries, out, lse = _results(q)
        cpu_attention.paged_decode(
            queries, numpy_of(k), numpy_of(v), table.numpy(), seen.lengths.numpy(), out, lse,
            scale=seen.scale, window=seen.window, threads=threads,
        )  # fmt: skip
        return torch.from_numpy(out).to(q.dtype)

    return Kernels(
        name="numba",
        tokens_first=False,
        store=store,
        paged=paged,
        contiguous=paged,
        in_order=False,
    )


def gpu_kernels() -> Kernels:
    """kernels/decode.py and kernels/store.py, whose caches are [blocks, block_size, kv_heads, …]."""
    from kvtool.kernels.decode import contiguous_decode, paged_decode
    from kvtool.kernels.store import store as scatter

    def put(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        k, v = k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
        if k.shape[1] not in BLOCK_SIZES:  # a reservation: its slots are those of blocks of one
            k, v = (one.view(-1, 1, *one.shape[2:]) for one in (k, v))
        scatter(keys, values, k, v, slots)

    def paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, seen: Seen) -> Tensor:
        k, v = k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
        out, _ = paged_decode(q, k, v, table, seen.lengths, **_options(seen))
        return torch.as_tensor(out)

    def contiguous(q: Tensor, k: Tensor, v: Tensor, table: Tensor, seen: Seen) -> Tensor:
        k, v = (one[: len(q)].permute(0, 2, 1, 3) for one in (k, v))
        out, _ = contiguous_decode(q, k, v, seen.lengths, **_options(seen))
        return torch.as_tensor(out)

    return Kernels(
        name="triton",
        tokens_first=True,
        store=put,
        paged=paged,
        contiguous=contiguous,
        in_order=True,
    )


def store(keys: Tensor, values: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Scatter new K and V into their slots, in plain torch."""
    size = k_cache.shape[2]
    block, offset = slots // size, slots % size
    k_cache[block, :, offset] = keys
    v_cache[block, :, offset] = values


def _options(seen: Seen) -> dict[str, Any]:
    return {"scale": seen.scale, "window": seen.window, "max_context": seen.max_context}


def _results(q: Tensor) -> tuple[Any, Any, Any]:
    """Queries as fp32, and room for an output and a log-sum-exp."""
    import numpy as np

    queries = q.contiguous().float().numpy()
    return queries, np.empty_like(queries), np.empty(queries.shape[:2], dtype=np.float32)

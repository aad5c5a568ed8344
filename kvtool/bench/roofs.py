"""What this device can do at best: bytes read, bytes copied and multiplications a second, measured.

The roofs are measured in the process that measures the case, at the case's own size: a small case is
held against a small copy, and a busy machine lowers both.
"""

from __future__ import annotations

import statistics
from typing import Any

from kvtool.bench.device import Device, load_torch, torch_dtype
from kvtool.bench.timer import Call, measure, samplers

ROUNDS = 9
CPU_MATMUL, GPU_MATMUL = 768, 8192
"""Rows of the square matrices whose product is the arithmetic roof."""


def read_call(pools: list[Any], device: Device, threads: int | None) -> Call:
    """A call that reads every byte of a pool's tensor once and keeps next to nothing."""
    torch = load_torch()
    if device.is_gpu:
        from kvtool.kernels import read

        launches = [read.prepare(one.view(-1)) for one in pools]
        return lambda pool: launches[pool].run()
    from kvtool.bench.cpu.read import read_sum

    arrays = [one.view(-1).view(torch.float32).numpy() for one in pools]
    return lambda pool: read_sum(arrays[pool], threads or 1)


def copy_call(pools: list[Any], targets: list[Any]) -> Call:
    """A call that copies a pool's tensor to that pool's target: every byte read and written once."""

    def copy(pool: int) -> None:
        targets[pool].copy_(pools[pool])

    return copy


def read_roof(device: Device, num_bytes: int, threads: int | None = None) -> float:
    """Bytes a second that are read of a buffer of that size, on its own."""
    torch = load_torch()
    size = max(num_bytes // 64 * 16, 1024)
    pools = max(1, min(8, -(-3 * device.cache_bytes // (4 * size))))
    buffers = [torch.ones(size, dtype=torch.float32, device=device.kind) for _ in range(pools)]
    return 4 * size / _seconds(read_call(buffers, device, threads), pools, device)


def matmul_roof(device: Device, dtype: str, *, threads: int | None = None) -> float:
    """Floating-point operations a second of a product of random square matrices.

    Random, since a GPU's clock is higher on zeros and ones than on any model.
    """
    torch = load_torch()
    if threads is not None:
        torch.set_num_threads(threads)
    rows = GPU_MATMUL if device.is_gpu else CPU_MATMUL
    random = torch.Generator(device=device.kind).manual_seed(0)
    left, right = (
        torch.randn((rows, rows), generator=random, device=device.kind).to(torch_dtype(dtype))
        for _ in range(2)
    )
    out = torch.empty_like(left)

    def multiply(pool: int) -> None:
        torch.matmul(left, right, out=out)

    return float(2 * rows**3 / _seconds(multiply, 1, device))


def _seconds(call: Call, pools: int, device: Device) -> float:
    """The median of a few samples."""
    ready = samplers({"roof": call}, pools=pools, device=device)
    found = measure(ready, rounds=ROUNDS, budget_s=3.0, seed=0)
    return statistics.median(found["roof"].wall_s)

"""What this device can do at best: bytes read, bytes copied and multiplications a second, measured.

The roofs are measured in the process that measures the case, at the case's own size: a small case is
held against a small copy, and a busy machine lowers both.
"""

from __future__ import annotations

import statistics
from typing import Any

from kvtool.bench.attention.data import flat, torch_dtype
from kvtool.bench.device import Device, load_torch
from kvtool.bench.timer import Call, measure

ROUNDS = 9
CPU_MATMUL, GPU_MATMUL = 768, 8192
"""Rows of the square matrices whose product is the arithmetic roof."""


def read_call(pools: list[tuple[Any, ...]], device: Device, threads: int | None) -> Call:
    """A call that reads every byte of a pool's tensors once and keeps next to nothing."""
    torch = load_torch()
    if device.is_gpu:
        from kvtool.kernels import read

        lines = [[flat(one) for one in pool] for pool in pools]

        def on_gpu(pool: int) -> None:
            for line in lines[pool]:
                read.read_sum(line)

        return on_gpu
    from kvtool.bench.cpu.attention import read_sum

    arrays = [[flat(one).view(torch.float32).numpy() for one in pool] for pool in pools]

    def on_cpu(pool: int) -> None:
        for array in arrays[pool]:
            read_sum(array, threads or 1)

    return on_cpu


def copy_call(pools: list[tuple[Any, ...]], targets: tuple[Any, ...]) -> Call:
    """A call that copies a pool's tensors: every byte read once and written once."""
    lines = [[flat(one) for one in pool] for pool in pools]
    ends = [flat(one) for one in targets]

    def copy(pool: int) -> None:
        for source, target in zip(lines[pool], ends, strict=True):
            target.copy_(source)

    return copy


def read_roof(device: Device, num_bytes: int, threads: int | None = None) -> float:
    """Bytes a second that are read of a buffer of that size, on its own."""
    torch = load_torch()
    size = max(num_bytes // 4, 1024)
    pools = max(1, min(8, -(-3 * device.cache_bytes // (4 * size))))
    buffers = [(torch.ones(size, dtype=torch.float32, device=device.kind),) for _ in range(pools)]
    return 4 * size / _seconds(read_call(buffers, device, threads), pools, device)


def matmul_roof(device: Device, dtype: str, *, threads: int | None = None) -> float:
    """Floating-point operations a second of a square matrix product."""
    torch = load_torch()
    if threads is not None:
        torch.set_num_threads(threads)
    rows = GPU_MATMUL if device.is_gpu else CPU_MATMUL
    shape = (rows, rows)
    left, right = (torch.ones(shape, device=device.kind).to(torch_dtype(dtype)) for _ in range(2))
    out = torch.empty_like(left)

    def multiply(pool: int) -> None:
        torch.matmul(left, right, out=out)

    return float(2 * rows**3 / _seconds(multiply, 1, device))


def _seconds(call: Call, pools: int, device: Device) -> float:
    """The median of a few samples."""
    found, _ = measure(
        {"roof": call}, pools=pools, device=device, rounds=ROUNDS, budget_s=3.0, seed=0
    )
    return statistics.median(found["roof"].wall_s)

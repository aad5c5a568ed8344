"""The CPU's own providers: the fused kernels of bench/cpu, with queries and output in fp32."""

from __future__ import annotations

from typing import Any

from kvtool.bench.attention.data import Data
from kvtool.bench.attention.prepared import Missing, Prepared
from kvtool.bench.device import load_torch, numpy_of


def paged(data: Data) -> Prepared:
    """The fused paged kernel."""
    from kvtool.bench.cpu import attention as cpu_attention

    q, outs, lses = _results(data)
    table, lengths = data.table.numpy(), data.lengths.numpy()
    pools = [
        tuple(numpy_of(one.permute(0, 2, 1, 3)) for one in pair)
        for pair in zip(data.k_cache, data.v_cache, strict=True)
    ]
    threads = data.case.threads or 1

    def run(pool: int) -> None:
        k_cache, v_cache = pools[pool]
        cpu_attention.paged_decode(
            q, k_cache, v_cache, table, lengths, outs[pool], lses[pool],
            scale=data.scale, threads=threads,
        )  # fmt: skip

    return _prepared(run, outs, lses, data.case.table_bytes)


def contiguous(data: Data) -> Prepared:
    """The same kernel on the contiguous cache."""
    from kvtool.bench.cpu import attention as cpu_attention

    q, outs, lses = _results(data)
    lengths = data.lengths.numpy()
    pools = [
        tuple(numpy_of(one.permute(0, 2, 1, 3)) for one in pair)
        for pair in zip(data.k, data.v, strict=True)
    ]
    threads = data.case.threads or 1

    def run(pool: int) -> None:
        k, v = pools[pool]
        cpu_attention.contiguous_decode(
            q, k, v, lengths, outs[pool], lses[pool], scale=data.scale, threads=threads
        )

    return _prepared(run, outs, lses, 0)


def for_gpus_only(data: Data) -> Prepared:
    """Libraries whose kernels run on GPUs."""
    raise Missing("its kernels run on GPUs only")


def _results(data: Data) -> tuple[Any, list[Any], list[Any]]:
    """The queries as fp32, and an output and a log-sum-exp for each pool."""
    import numpy as np

    shape = tuple(data.q.shape)
    outs = [np.zeros(shape, dtype=np.float32) for _ in range(data.pools)]
    lses = [np.zeros(shape[:2], dtype=np.float32) for _ in range(data.pools)]
    return data.q.float().numpy(), outs, lses


def _prepared(run: Any, outs: list[Any], lses: list[Any], extra_bytes: int) -> Prepared:
    torch = load_torch()
    return Prepared(
        run=run,
        output=lambda pool: torch.from_numpy(outs[pool]),
        lse=lambda pool: torch.from_numpy(lses[pool]),
        extra_bytes=extra_bytes,
    )

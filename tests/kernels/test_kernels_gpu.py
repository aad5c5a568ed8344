"""The kernels on a real GPU: the same poison, real arithmetic, and a captured graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need triton, which is there on Linux only")

from kvtool.kernels import compiled, decode, store  # noqa: E402
from kvtool.kernels.launch import is_interpreted  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or is_interpreted(decode._decode), reason="no GPU is here"
    ),
]

LENGTHS = (1500, 0, 1, 777, 64)
# Rounding of P and of the result in the cache's dtype, on values of about 1.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def stored(dtype: Any, block_size: int, layout: str, head_dim: int = 128) -> tuple:
    """q, caches written by `store` into poison, their table and lengths; 4 query heads a KV head."""
    torch.manual_seed(0)
    device, kv_heads = "cuda", 2
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    blocks = -(-max(LENGTHS) // block_size) + 1
    count = len(LENGTHS) * blocks
    table = torch.randperm(count, device=device).view(len(LENGTHS), blocks).int()
    sizes = (count, block_size, kv_heads, head_dim)
    if layout == "HND":
        sizes = (count, kv_heads, block_size, head_dim)
    caches = [torch.full(sizes, torch.nan, dtype=dtype, device=device) for _ in "kv"]
    if layout == "HND":
        caches = [cache.permute(0, 2, 1, 3) for cache in caches]
    for seq, length in enumerate(LENGTHS):
        tokens = torch.arange(length, device=device)
        slots = table[seq, tokens // block_size].long() * block_size + tokens % block_size
        new = torch.randn(2, length, kv_heads, head_dim, device=device).to(dtype)
        store.store(new[0], new[1], *caches, slots)
        table[seq, -(-length // block_size) :] = 2**30
    q = torch.randn(len(LENGTHS), 4 * kv_heads, head_dim, device=device).to(dtype)
    return q, *caches, table, lengths


def close(got: tuple, wanted: tuple, dtype: Any) -> None:
    """out and lse within the tolerance of the dtype."""
    for result, exact in zip(got, wanted, strict=True):
        torch.testing.assert_close(result.double(), exact, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("walk", ["chunked", "naive"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("block_size", "layout"), [(1, "NHD"), (16, "HND"), (256, "NHD")])
def test_a_gpu_computes_what_the_formula_says(
    dtype: Any, block_size: int, layout: str, walk: str
) -> None:
    inputs = stored(dtype, block_size, layout)
    plan = decode.prepare_paged(*inputs).plan
    for window in (0, 100):
        for splits in (1, 4):
            chosen = replace(plan, walk=walk, num_splits=splits)
            got = decode.paged_decode(*inputs, window=window, plan=chosen)
            close(got, decode.paged_reference(*inputs, window=window), dtype)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 192, 256])
def test_a_gpu_computes_every_head_size(head_dim: int) -> None:
    inputs = stored(torch.bfloat16, 16, "NHD", head_dim)
    close(decode.paged_decode(*inputs), decode.paged_reference(*inputs), torch.bfloat16)


def test_a_captured_graph_follows_lengths_and_tables() -> None:
    q, k, v, table, lengths = stored(torch.float16, 16, "NHD")
    made = decode.prepare_paged(q, k, v, table, lengths)
    made.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run()
    lengths.copy_(torch.tensor((3, 1, 0, 700, 64), dtype=torch.int32))
    table[1, 0] = table[0, 0]
    graph.replay()
    close((made.out, made.lse), decode.paged_reference(q, k, v, table, lengths), torch.float16)


def test_a_gpu_says_what_a_launch_takes() -> None:
    taken = compiled.resources(decode.prepare_paged(*stored(torch.bfloat16, 16, "NHD")).launches[0])
    assert taken.registers > 0
    assert taken.shared_bytes > 0
    assert taken.spills >= 0

"""The CPU's attention against its plain twin in float64, and the roofs that it is measured by."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite.binding import get_host_cpu_features

from kvtool.bench.cpu import attention as cpu_attention
from kvtool.bench.cpu import read as cpu_read
from kvtool.errors import KvtoolError

TOLERANCE = 2e-6
"""Of fp32 sums and of an exponential that is exact to 1e-8; the caches hold the same bits for both."""
LEAST_CHUNK = cpu_attention._LEAST_CHUNK


def bits_of(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers as a cache of this dtype holds them."""
    if dtype == "bf16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype({"fp32": np.float32, "fp16": np.float16}[dtype])


def numbers_of(cache: np.ndarray) -> np.ndarray:
    """What a cache holds, as numbers."""
    if cache.dtype == np.uint16:
        return (cache.astype(np.uint32) << 16).view(np.float32)
    return cache


class Case:
    """Random queries, and caches that are NaN wherever no token is."""

    def __init__(
        self, lengths: list[int], *, group: int = 4, kv_heads: int = 2, head_dim: int = 64,
        block_size: int = 16, layout: str = "HND", dtype: str = "fp32", seed: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.lengths = np.array(lengths, np.int32)
        held = -(-self.lengths // block_size)
        num_blocks = int(held.sum()) + 2
        blocks = iter(rng.permutation(num_blocks))
        # Behind a sequence's end: no block, and blocks far away.
        self.table = np.full((len(lengths), int(held.max(initial=0)) + 2), -1, np.int32)
        self.table[:, -1] = 1 << 30
        shape = num_blocks, kv_heads, block_size, head_dim
        k, v = (np.full(shape, np.nan, np.float32) for _ in "kv")
        for sequence, length in enumerate(lengths):
            for i in range(held[sequence]):
                block = self.table[sequence, i] = next(blocks)
                filled = min(block_size, length - i * block_size)
                size = kv_heads, filled, head_dim
                k[block, :, :filled] = rng.standard_normal(size)
                v[block, :, :filled] = rng.standard_normal(size)
        self.k, self.v = (laid_out(bits_of(one, dtype), layout) for one in (k, v))
        self.q = rng.standard_normal((len(lengths), kv_heads * group, head_dim)).astype(np.float32)

    def check(self, window: int = 0, threads: int = 1, scale: float = 0.125) -> None:
        out, lse = np.full_like(self.q, np.nan), np.full(self.q.shape[:2], np.nan, np.float32)
        cpu_attention.paged_decode(
            self.q, self.k, self.v, self.table, self.lengths, out, lse,
            scale=scale, window=window, threads=threads,
        )  # fmt: skip
        k, v = numbers_of(self.k), numbers_of(self.v)
        truth = cpu_attention.paged_twin(
            self.q, k, v, self.table, self.lengths, scale=scale, window=window
        )
        np.testing.assert_allclose(out, truth[0], atol=TOLERANCE, rtol=TOLERANCE)
        np.testing.assert_allclose(lse, truth[1], atol=TOLERANCE, rtol=TOLERANCE)


def laid_out(cache: np.ndarray, layout: str) -> np.ndarray:
    """A view [num_blocks, kv_heads, block_size, head_dim] of memory in this order."""
    if layout == "HND":
        return np.ascontiguousarray(cache)
    return np.ascontiguousarray(cache.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256, 24])
def test_block_sizes(block_size: int, layout: str, dtype: str) -> None:
    case = Case([137, 0, 1, 300], block_size=block_size, layout=layout, dtype=dtype)
    case.check()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 192, 256])
def test_head_sizes(head_dim: int, dtype: str) -> None:
    Case([33, 70], head_dim=head_dim, dtype=dtype).check(scale=head_dim**-0.5)


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 32])
def test_query_heads_of_a_kv_head(group: int, kv_heads: int) -> None:
    Case([50, 5], group=group, kv_heads=kv_heads).check()


@pytest.mark.parametrize("window", [1, 4, 31, 32, 33, 100, 1000])
def test_a_window_sees_the_last_tokens(window: int) -> None:
    case = Case([137, 0, 20, 100])
    case.check(window=window)
    first = max(0, 137 - window) // 16
    case.table[0, :first] = -7  # what has left the window was freed
    case.check(window=window)


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("lengths", [[4 * LEAST_CHUNK + 7], [0, 700, 3, 1200], [5] * 9])
def test_threads_share_sequences_and_contexts(lengths: list[int], threads: int) -> None:
    case = Case(lengths, group=2, block_size=8)
    case.check(threads=threads)
    case.check(threads=threads, window=LEAST_CHUNK + 5)


@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    group=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([16, 32, 48, 80]),
    block_size=st.integers(1, 40),
    layout=st.sampled_from(["HND", "NHD"]),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    window=st.integers(0, 100),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_any_case(lengths: list[int], window: int, threads: int, seed: int, **sizes: Any) -> None:
    Case(lengths, seed=seed, **sizes).check(window=window, threads=threads)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    case = Case([200])
    case.q *= 100
    case.q[0, 0] = 0  # all tokens alike
    out, lse = np.empty_like(case.q), np.empty(case.q.shape[:2], np.float32)
    cpu_attention.paged_decode(
        case.q, case.k, case.v, case.table, case.lengths, out, lse, scale=1.0
    )
    truth = cpu_attention.paged_twin(case.q, case.k, case.v, case.table, case.lengths, scale=1.0)
    np.testing.assert_allclose(lse, truth[1], rtol=1e-6)
    np.testing.assert_allclose(out, truth[0], atol=1e-3)  # scores of 3,000: fp32 keeps 4 digits


def test_fp16_keeps_its_smallest_numbers_and_bf16_its_largest() -> None:
    for dtype, number in (("fp16", 6e-8), ("fp16", 65504.0), ("bf16", 3e37), ("bf16", 1e-38)):
        case = Case([5], dtype=dtype)
        case.v = np.full_like(case.v, bits_of(np.array([number], np.float32), dtype)[0])
        out, lse = np.empty_like(case.q), np.empty(case.q.shape[:2], np.float32)
        cpu_attention.paged_decode(
            case.q, case.k, case.v, case.table, case.lengths, out, lse, scale=0.1
        )
        np.testing.assert_allclose(out, numbers_of(case.v).flat[0].astype(np.float64), rtol=1e-6)


def test_a_contiguous_cache_is_read_up_to_each_length() -> None:
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((3, 2, 90, 64)).astype(np.float32) for _ in "kv")
    q, lengths = rng.standard_normal((3, 6, 64)).astype(np.float32), np.array([90, 0, 37], np.int32)
    k[2, :, 37:] = v[2, :, 37:] = np.nan
    out, lse = np.empty_like(q), np.empty((3, 6), np.float32)
    cpu_attention.contiguous_decode(q, k, v, lengths, out, lse, scale=0.125)
    truth = cpu_attention.paged_twin(q, k, v, np.arange(3)[:, None], lengths, scale=0.125)
    np.testing.assert_allclose(out, truth[0], atol=TOLERANCE)
    np.testing.assert_allclose(lse, truth[1], atol=TOLERANCE)


def test_offsets_beyond_32_bits(tmp_path: Any) -> None:
    """A pool of 2**32 numbers, of which a few are written: the file has holes."""
    head_dim, blocks = 64, 1 << 22
    shape = blocks, 1, 16, head_dim
    try:
        k = np.memmap(tmp_path / "k", np.float32, "w+", shape=shape)
    except OSError:
        pytest.skip("no file of 16 GiB, even with holes")
    last = blocks - 1
    k[[5, last]] = np.random.default_rng(0).standard_normal((2, 1, 16, head_dim))
    q = np.ones((1, 4, head_dim), np.float32)
    table, lengths = np.array([[last, 5]], np.int32), np.array([30], np.int32)
    out, lse = np.empty_like(q), np.empty((1, 4), np.float32)
    cpu_attention.paged_decode(q, k, k, table, lengths, out, lse, scale=0.1)
    truth = cpu_attention.paged_twin(q, k, k, table, lengths, scale=0.1)
    np.testing.assert_allclose(out, truth[0], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"table": np.array([[0, 99]], np.int32)}, "names a block"),
        ({"table": np.array([[0, -1]], np.int32)}, "names a block"),
        ({"table": np.array([[0]], np.int32)}, "longer than its row"),
        ({"q": np.zeros((1, 3, 64), np.float32)}, "do not fit"),
        ({"q": np.zeros((1, 4, 32), np.float32)}, "do not fit"),
        ({"k": np.zeros((9, 2, 16, 64))}, "cannot be read"),
        ({"k": np.zeros((9, 2, 16, 128), np.float32)[..., ::2]}, "cannot be read"),
        ({"k": np.zeros((9, 2, 16, 64), np.float32)[::-1]}, "cannot be read"),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_refused(change: dict[str, np.ndarray], says: str, threads: int) -> None:
    cache = np.zeros((9, 2, 16, 64), np.float32)
    q = change.get("q", np.zeros((1, 4, 64), np.float32))
    table = change.get("table", np.array([[0, 1]], np.int32))
    with pytest.raises(KvtoolError, match=says):
        cpu_attention.paged_decode(
            q, change.get("k", cache), cache, table, np.array([20], np.int32), np.empty_like(q),
            np.empty(q.shape[:2], np.float32), scale=1.0, threads=threads,
        )  # fmt: skip


ONE = np.zeros((1, 4, 64), np.float32)
WRONG: list[dict[str, Any]] = [
    {"lengths": np.full(1000, 20, np.int32), "table": np.zeros((1000, 2), np.int32)},
    {"table": np.zeros((0, 2), np.int32)},
    {"q": np.zeros((2, 4, 64), np.float32)},
    {"q": np.zeros((1, 4, 64), np.int32)},
    {"q": np.zeros((4, 64), np.float32)},
    {"table": np.array([[0.9, 0.9]])},
    {"table": np.array([[2**32, 1]])},
    {"table": np.zeros(2, np.int32)},
    {"table": np.zeros((1, 2, 1), np.int32)},
    {"lengths": np.array([-1])},
    {"lengths": np.array([3.0])},
    {"lengths": [3]},
    {"cache": np.zeros((9, 0, 16, 64), np.float32)},
    {"cache": np.zeros((2, 16, 64), np.float32)},
    {"out": ONE.astype(np.int32)},
    {"out": np.zeros((2, 4, 64), np.float32)},
    {"out": None},
    {"lse": np.zeros((4,), np.float32)},
    {"window": -1},
    {"window": 1.5},
    {"threads": 0},
]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_nothing_is_read_or_written_where_it_should_not_be(change: dict[str, Any]) -> None:
    cache = change.get("cache", np.zeros((9, 2, 16, 64), np.float32))
    with pytest.raises(KvtoolError):
        cpu_attention.paged_decode(
            change.get("q", ONE), cache, cache, change.get("table", np.array([[0, 1]], np.int32)),
            change.get("lengths", np.array([20], np.int32)), change.get("out", ONE.copy()),
            change.get("lse", np.zeros((1, 4), np.float32)), scale=1.0,
            window=change.get("window", 0), threads=change.get("threads", 1),
        )  # fmt: skip


def test_strides_between_elements_are_refused() -> None:
    raw = np.zeros(9 * 2 * 16 * 64 * 4 + 64, np.uint8)
    odd = np.lib.stride_tricks.as_strided(
        raw.view(np.float32), (4, 2, 16, 64), (8193, 4096, 256, 4)
    )
    with pytest.raises(KvtoolError, match="cannot be read"):
        cpu_attention.paged_decode(
            ONE, odd, odd, np.array([[0, 1]], np.int32), np.array([20], np.int32), ONE.copy(),
            np.zeros((1, 4), np.float32), scale=1.0,
        )  # fmt: skip


def test_a_head_size_that_is_no_multiple_of_16_is_refused() -> None:
    cache, q = np.zeros((9, 2, 16, 72), np.float32), np.zeros((1, 4, 72), np.float32)
    with pytest.raises(KvtoolError, match="multiple of 16"):
        cpu_attention.paged_decode(
            q, cache, cache, np.zeros((1, 1), np.int32), np.array([3], np.int32), q.copy(),
            np.empty((1, 4), np.float32), scale=1.0,
        )  # fmt: skip


@pytest.mark.skipif(not get_host_cpu_features().get("avx2"), reason="no AVX2 here")
def test_narrow_vectors_give_the_same(tmp_path: Any) -> None:
    """A machine without AVX-512: vectors of 8."""
    environ = {
        **os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c",
    }  # fmt: skip
    chosen = "test_head_sizes or test_query_heads"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen],
        env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 64, 1003, 99_999])
def test_read_sum_is_the_sum_of_the_words(size: int, threads: int) -> None:
    raw = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    words = raw[: size // 8 * 8].view(np.int64)
    with np.errstate(over="ignore"):
        expected = int(words.sum() + np.int64(raw[words.size * 8 :].sum()))
    assert cpu_read.read_sum(raw, threads) == expected

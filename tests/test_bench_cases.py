"""Cases of decode attention: lengths, bytes, block tables, data, and the check against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bench_cases import CPU, case
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.bench.attention import data as cases
from kvtool.bench.attention.case import BLOCK_SIZES, PATTERNS, check
from kvtool.bench.attention.correct import expected, verdict
from kvtool.bench.attention.prepared import Prepared
from kvtool.bench.attention.tables import block_tables
from kvtool.errors import KvtoolError

torch = pytest.importorskip("torch")


@given(batch=st.integers(1, 40), context=st.integers(1, 500), skew=st.integers(1, 40))
def test_a_skewed_batch_reads_the_same_bytes(batch: int, context: int, skew: int) -> None:
    skew = min(skew, batch)
    found = case(batch=batch, context_tokens=context, skew=skew)
    assert sum(found.lengths) == batch * context
    assert found.max_context == (skew * context if batch > 1 else context)
    assert min(found.lengths) >= 0
    assert found.kv_bytes == case(batch=batch, context_tokens=context).kv_bytes


def test_bytes_and_operations_of_a_case_by_hand() -> None:
    one = case(batch=2, context_tokens=37, kv_dtype="bf16")
    assert one.kv_bytes == 2 * 37 * 2 * (
        2 * 64 * 2
    )  # sequences, tokens, K and V, heads × size × 2 B
    assert one.useful_bytes == one.kv_bytes + 2 * (2 * 4 * 64 * 2)  # queries and output
    assert one.table_bytes == 2 * 3 * 4  # 37 tokens are 3 blocks of 16
    assert one.flops == 2 * 37 * 4 * 64 * 4
    assert one.partial_bytes(1) == 0
    assert one.partial_bytes(3) == 2 * (3 * 2 * 4) * (64 * 4 + 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": 24}, "--block-size 24"),
        ({"block_size": 0}, "--block-size 0"),
        ({"head_dim": 72}, "--head-dim 72"),
        ({"query_heads": 5}, "no multiple"),
        ({"skew": 3}, "--skew 3"),
    ],
)
def test_what_no_kernel_computes_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(KvtoolError, match=said) as caught:
        check(case(**changes))
    assert caught.value.exit_code == 2


@settings(max_examples=40)
@given(
    pattern=st.sampled_from(PATTERNS), batch=st.integers(1, 6), context=st.integers(1, 120),
    size=st.sampled_from(BLOCK_SIZES), skew=st.integers(1, 6), seed=st.integers(0, 9),
)  # fmt: skip
def test_every_block_stands_in_one_place_of_one_table(
    pattern: str, batch: int, context: int, size: int, skew: int, seed: int
) -> None:
    one = case(
        batch=batch, context_tokens=context, block_size=size, skew=min(skew, batch), pattern=pattern
    )
    table, num_blocks = block_tables(one, seed)
    used = [table[row, :count] for row, count in enumerate(one.blocks)]
    every = np.concatenate(used)
    assert len(set(every)) == len(every) == sum(one.blocks)
    assert every.min() >= 0
    assert every.max() < num_blocks
    assert table.dtype == np.int32
    again, _ = block_tables(one, seed)
    assert (table == again).all()


def test_patterns_differ_as_they_say() -> None:
    one = case(batch=4, context_tokens=512)
    runs = {}
    for pattern in PATTERNS:
        table, num_blocks = block_tables(replace(one, pattern=pattern), 0)
        runs[pattern] = float((np.diff(table, axis=1) == 1).mean())
        assert (num_blocks > sum(one.blocks)) == (pattern == "fragmented")
    assert runs["sequential"] == 1.0
    assert runs["shuffled"] < 0.1
    assert runs["fragmented"] < 0.5  # the sequences grew in turn


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_blocks_hold_what_the_contiguous_copy_holds(layout: str, dtype: str) -> None:
    one = case(batch=3, skew=2, layout=layout, kv_dtype=dtype, pattern="shuffled")
    data = cases.make(one, CPU, seed=1)
    assert data.pools > 1  # small: several copies, so that none stays in the cache
    for pool in range(data.pools):
        for row, tokens in enumerate(one.lengths):
            at = torch.arange(tokens)
            blocks = data.table[row, at // one.block_size].long()
            for flat, paged in ((data.k, data.k_cache), (data.v, data.v_cache)):
                assert torch.equal(flat[pool][row, :tokens], paged[pool][blocks, at % 16])
        assert torch.equal(data.v[pool], data.v[0] * cases.factor(pool))
    heads_last = data.k_cache[0].stride()[2] < data.k_cache[0].stride()[1]
    assert heads_last == (layout == "nhd")


def test_padding_is_what_no_token_is_in() -> None:
    one = case(batch=3, skew=2, pattern="fragmented")
    data = cases.make(one, CPU, seed=0)
    before = [one.clone() for one in (data.k[0], data.v_cache[0])]
    data.fill_padding(float("nan"))
    tokens = sum(one.lengths) * one.kv_heads * one.head_dim
    for now, then in zip((data.k[0], data.v_cache[0]), before, strict=True):
        kept = ~torch.isnan(now)
        assert int(kept.sum()) == tokens
        assert torch.equal(now[kept], then[kept])


def _torch_provider(data: cases.Data, spoil: Any = None) -> Prepared:
    """Softmax(QK^T)V in fp32, and what a test does to it."""

    def output(pool: int) -> Any:
        one = data.case
        out = torch.zeros(data.q.shape)
        for row, tokens in enumerate(one.lengths):
            q = data.q[row].float().view(one.kv_heads, -1, one.head_dim)
            k, v = (x[pool][row, :tokens].permute(1, 0, 2).float() for x in (data.k, data.v))
            if spoil is not None:
                k, v = spoil(k, v)
            out[row] = (torch.softmax(q @ k.mT * data.scale, -1) @ v).reshape(4, one.head_dim)
        return out

    return Prepared(run=lambda pool: None, output=output)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_right_provider_is_right(dtype: str) -> None:
    data = cases.make(case(kv_dtype=dtype), CPU, seed=0)
    found = verdict(data, _torch_provider(data), expected(data))
    assert found.correct
    assert found.max_abs_error is not None
    assert found.error_share is not None
    assert found.error_share < 1


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda k, v: (k[:, :-1], v[:, :-1]),
        lambda k, v: (k[:, 1:], v[:, 1:]),
        lambda k, v: (k, v.roll(1, 1)),
        lambda k, v: (k * 1.1, v),
        lambda k, v: (k.flip(0), v.flip(0)),
        lambda k, v: (k, v * float("nan")),
    ],
    ids=["last token", "first token", "shifted", "scale", "heads", "nan"],
)
def test_a_wrong_provider_is_wrong(dtype: str, spoil: Any) -> None:
    """Also in a long context, where one token in a thousand would otherwise hide in the noise."""
    data = cases.make(case(kv_dtype=dtype, context_tokens=1000), CPU, seed=0)
    assert not verdict(data, _torch_provider(data, spoil), expected(data)).correct


def test_a_provider_that_always_reads_the_first_copy_is_wrong() -> None:
    data = cases.make(case(), CPU, seed=0)
    right = _torch_provider(data)
    stuck = replace(right, output=lambda pool: right.output(0))
    assert not verdict(data, stuck, expected(data)).correct


def test_what_does_not_fit_is_refused_before_it_is_made() -> None:
    small = replace(CPU, free_bytes=2**20)
    with pytest.raises(KvtoolError, match=r"are needed and 1\.00 MiB") as caught:
        cases.make(case(context_tokens=10_000), small, seed=0)
    assert caught.value.code == "out_of_memory"

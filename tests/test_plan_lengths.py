"""Requests of real lengths at a time: by hand, by the engine's rows, and against a run of the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import case_of
from prefix_cases import hashed, traces
from ran import Ran

from kvtool import prompts, sharing
from kvtool.capacity import Holder, capacity
from kvtool.errors import KvtoolError
from kvtool.plan_lengths import (
    STRAIGHT,
    concurrency_of,
    length_fields,
    lengths_of,
    made_requests,
    request_costs,
)
from kvtool.plan_shared import shared_concurrency_of, shared_fields
from kvtool.requests import Requests
from kvtool.trace_blocks import HashedRequests
from kvtool.units import GIB

LLAMA_BLOCK = 16 * 131_072
"""Llama-3-8B in bf16: 2 × 32 layers × 8 KV heads × 128 × 2 bytes a token."""


def requests(*pairs: tuple[int, int]) -> Requests:
    prompt, output = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    return Requests(arrival_ns=np.zeros_like(prompt), prompt_tokens=prompt, output_tokens=output)


@pytest.fixture(scope="module")
def llama() -> Holder:
    return case_of("llama-3-8b")[2].holder


def longest(holder: Holder, tokens: int) -> Holder:
    return replace(holder, options=replace(holder.options, max_model_len=tokens))


# -- lengths


def test_a_running_request_is_met_in_proportion_to_its_output() -> None:
    found = lengths_of(requests((100, 10), (100, 90)))
    assert (found.num_requests, found.longest, found.mean) == (2, 190, 150)
    # 105 tokens on average for 10 steps, 145 for 90.
    assert found.mean_running == pytest.approx((10 * 105 + 90 * 145) / 100)
    assert list(found.at_end) == [110, 190]
    assert list(found.steps) == [10, 90]


def test_percentiles_are_of_prompt_and_output_rounded_up() -> None:
    found = lengths_of(requests(*((one, 1) for one in range(100))))  # 1 to 100 tokens
    assert (found.p50, found.p95, found.p99) == (51, 96, 100)  # 50.5, 95.05, 99.01


def test_chunks_are_one_distribution() -> None:
    whole = requests((5, 1), (9, 7), (100, 3))
    assert lengths_of(whole) == lengths_of(whole.first(1), whole.take(np.array([1, 2])))


def test_no_requests_are_an_error() -> None:
    with pytest.raises(KvtoolError, match="no requests"):
        lengths_of()


def test_a_preset_workload_has_its_means() -> None:
    found = made_requests("chat", num_requests=50_000)
    assert found.prompt_tokens.mean() == pytest.approx(161.31, rel=0.02)
    assert found.output_tokens.mean() == pytest.approx(337.99, rel=0.02)


# -- at a time


def test_a_mix_by_hand(llama: Holder) -> None:
    lengths = lengths_of(requests((16, 16), (40, 32)))
    found = concurrency_of(llama, GIB, lengths)
    # 512 blocks. 16 tokens, then 17 to 31: 1 + 15 × 2 in 16 steps. 40 to 48, 49 to 64, 65 to 71: 9 × 3 + 16
    # × 4 + 7 × 5 in 32. At the end 32 and 72 tokens: 2 blocks and 5.
    blocks = (1 + 30 + 27 + 64 + 35) / 48
    assert found.mean_blocks == pytest.approx(blocks)
    assert found.running == pytest.approx(512 / blocks)
    assert found.at_end == pytest.approx(512 * 48 / (16 * 2 + 32 * 5))
    assert found.mean_bytes == pytest.approx(blocks * LLAMA_BLOCK)


def test_equal_requests_are_those_of_one_context(llama: Holder) -> None:
    found = concurrency_of(llama, 10 * GIB, lengths_of(requests(*[(100, 28)] * 5)), replicas=3)
    one = 3 * capacity(llama, 128, 10 * GIB).max_concurrency
    assert found.at_p50 == found.at_p99 == found.at_end == pytest.approx(one)
    assert found.running > found.at_end


@pytest.mark.parametrize("engine", ["vllm", "ideal"])
def test_nothing_is_held_below_zero(engine: str) -> None:
    holder = case_of("llama-3-8b", engine=engine)[2].holder
    found = length_fields(concurrency_of(holder, -GIB, lengths_of(requests((9, 9)))))
    assert {found[name] for name in found if name.startswith("max_concurrency")} == {0}


def test_ideal_counts_bytes() -> None:
    holder = case_of("llama-3-8b", engine="ideal")[2].holder
    found = concurrency_of(holder, GIB, lengths_of(requests((100, 20), (300, 20))))
    assert found.mean_blocks is None
    assert found.mean_bytes == (109.5 + 309.5) / 2 * 131_072  # 100 to 119 tokens, 300 to 319
    assert found.running == pytest.approx(GIB / found.mean_bytes)


@pytest.mark.parametrize(
    ("name", "gpu", "engine", "words", "exact"),
    [
        ("llama-3-8b", "h100", "vllm", {}, True),
        ("deepseek-v3", "h200:16", "vllm", {"tps": (16,), "dcp": 8}, True),
        ("llama-3-8b", "h100", "ideal", {}, True),
        ("gpt-oss-120b", "h100", "vllm", {}, False),
        ("gemma-3-27b", "h100", "vllm", {}, False),
        ("gemma-3-27b", "h100", "ideal", {}, False),
    ],
)
def test_costs_between_bends_are_those_of_the_rows(
    name: str, gpu: str, engine: str, words: dict[str, Any], exact: bool
) -> None:
    holder = case_of(name, gpu, engine, **words)[2].holder
    tokens = np.unique(np.r_[1:40, 120:140, 1015:1035, np.arange(37, 20_000, 313)])
    rows = [holder.row(int(one)) for one in tokens]
    real = np.array([row.get("blocks_per_request") or row["per_gpu_bytes"] for row in rows])
    off = np.abs(request_costs(holder, tokens) - real)
    assert (off <= (0 if exact else np.maximum(1, 3 * STRAIGHT * real))).all()


def test_max_model_len_does_not_make_requests_longer(llama: Holder) -> None:
    lengths = lengths_of(requests((100, 28)))
    found = concurrency_of(longest(llama, 4096), GIB, lengths)
    assert found.limit == 4096
    assert found.at_end == concurrency_of(llama, GIB, lengths).at_end


def test_requests_beyond_the_maximum_are_said(llama: Holder) -> None:
    lengths = lengths_of(requests((100, 10), (8000, 500), (8192, 1)))
    found = concurrency_of(llama, GIB, lengths)
    assert (found.limit, found.num_cut, found.num_refused) == (8192, 1, 1)
    assert list(found.lengths.at_end) == [110, 8192]
    assert "1 of 3 request is longer than the model's maximum, 8,192 tokens: cut" in found.notes[0]
    assert "1 of 3 request is refused" in found.notes[1]
    longer = concurrency_of(longest(llama, 10_000), GIB, lengths)
    assert (longer.num_cut, longer.num_refused, longer.lengths) == (0, 0, lengths)
    assert "above the model's maximum" in longer.notes[0]
    with pytest.raises(KvtoolError, match="no prompt"):
        concurrency_of(longest(llama, 100), GIB, lengths)


def test_a_maximum_that_the_config_does_not_state_cuts_nothing(llama: Holder) -> None:
    shape = replace(llama.layout.shape, max_context_stated=False)
    holder = replace(llama, layout=replace(llama.layout, shape=shape))
    found = concurrency_of(holder, 10 * GIB, lengths_of(requests((8000, 500))))
    assert (found.limit, found.num_cut, found.lengths.longest) == (None, 0, 8500)
    assert "1 of 1 request is longer" in found.notes[0]


def test_the_estimate_is_what_the_scheduler_makes_of_it(
    llama: Holder, kvtool: Callable[..., Ran]
) -> None:
    """4,096 blocks kept full by continuous batching, with preemptions."""
    done = kvtool(
        "fragment", "--workload", "chat", "--num-blocks", "4096", "--allocator", "paged",
        "--block-size", "16", "--max-num-seqs", "4096", "--json", "-q",
    )  # fmt: skip
    found = concurrency_of(llama, 4096 * LLAMA_BLOCK, lengths_of(made_requests("chat")))
    assert found.running == pytest.approx(done.json["rows"][0]["mean_batch"], rel=0.02)
    assert found.at_end < 0.7 * found.running


# -- shared prefixes


def plain_most(
    asked: HashedRequests, size: int, room: int, *, shares: bool
) -> Callable[[int], float]:
    """The median of blocks of n in a row, token by token: blocks are all tokens up to their ends."""
    held = []
    for place in range(len(asked)):
        tokens, output = int(asked.prompt_tokens[place]), int(asked.output_tokens[place])
        names = asked.hash_ids[asked.starts[place] : asked.starts[place + 1]].tolist()
        spelled = [(names[: at // asked.block_size + 1], at) for at in range(tokens)]
        full = {
            (tuple(before), end) if shares else (place, end)
            for before, end in spelled[size - 1 :: size]
            if end < tokens - 1
        }
        own = -(-(tokens + (output + 1) // 2) // size) - len(full)
        held.append(full | {(("own", place), one) for one in range(own)})

    def median(n: int) -> float:
        windows = [held[at : at + n] for at in range(len(held) - n + 1)]
        return float(np.median([len(set[Any]().union(*window)) for window in windows]))

    return median


@pytest.mark.parametrize("shares", [True, False])
@settings(max_examples=60, deadline=None)
@given(asked=traces(most=25), room=st.integers(0, 120), cut=st.integers(0, 24))
def test_distinct_blocks_of_requests_in_a_row(
    llama: Holder, shares: bool, asked: HashedRequests, room: int, cut: int
) -> None:
    parts = [asked.part(0, min(cut, len(asked))), asked.part(min(cut, len(asked)), len(asked))]
    found = shared_concurrency_of(llama, (room + 1) * LLAMA_BLOCK, parts)
    assert (found.block_size, found.num_blocks) == (16, room)
    median = plain_most(asked, 16, room, shares=shares)
    most = found.requests if shares else found.unshared
    assert most == 0 or median(most) <= room
    assert most == len(asked) or median(most + 1) > room


def chat(count: int, prefix: int, own: int) -> HashedRequests:
    """Prompts of `prefix` blocks of 16 tokens that all share and `own` that nobody does; 32 tokens follow."""
    prompts: Sequence[tuple[Sequence[int], int]] = [
        ([*range(prefix), *range(1000 + own * one, 1000 + own * one + own)], 16 * (prefix + own))
        for one in range(count)
    ]
    return hashed(prompts, 16, [32] * count)


def test_shared_blocks_by_hand(llama: Holder) -> None:
    # 10 shared blocks, then 4 of a request's own and one for half its output: 10 + 5 n and 15 n.
    found = shared_concurrency_of(llama, 101 * LLAMA_BLOCK, [chat(50, 10, 4)], replicas=2)
    assert (found.requests, found.unshared) == (2 * 18, 2 * 6)
    assert not found.whole
    assert shared_fields(found)["max_concurrency_shared"] == 36


def test_the_block_of_the_last_token_is_a_request_s_own(llama: Holder) -> None:
    # All 160 tokens are the same, and the last block is computed anew for its logits: 9 + 2 n.
    assert shared_concurrency_of(llama, 30 * LLAMA_BLOCK, [chat(50, 10, 0)]).requests == 10


def test_a_trace_that_fits_as_a_whole(llama: Holder) -> None:
    found = shared_concurrency_of(llama, 10**4 * LLAMA_BLOCK, [chat(7, 10, 4)])
    assert (found.requests, found.unshared, found.whole) == (7, 7, True)
    assert shared_concurrency_of(llama, -GIB, [chat(7, 10, 4)]).requests == 0


def test_prompts_that_are_too_long_are_no_part_of_it(llama: Holder) -> None:
    long = hashed([(range(600), 9600)] * 3, 16)
    found = shared_concurrency_of(llama, 101 * LLAMA_BLOCK, [chat(50, 10, 4), long])
    assert (found.num_requests, found.num_refused, found.requests) == (50, 3, 18)
    with pytest.raises(KvtoolError, match="no requests"):
        shared_concurrency_of(llama, GIB, [long])


def test_blocks_of_ideal_have_16_tokens_and_none_is_set_aside() -> None:
    holder = case_of("llama-3-8b", engine="ideal")[2].holder
    found = shared_concurrency_of(holder, 100 * LLAMA_BLOCK, [chat(50, 10, 4)])
    assert (found.block_size, found.num_blocks, found.requests) == (16, 100, 18)


def test_a_made_workload_shares_its_system_prompts(llama: Holder) -> None:
    made = prompts.made(sharing.sharing_of("system-prompts", num_requests=1000))
    found = shared_concurrency_of(llama, 8 * GIB, made)
    # 2,048 + 128 tokens and half of 256: 144 blocks each; the prefixes are 128 of them.
    assert found.unshared == pytest.approx(4095 / 144, rel=0.1)
    assert found.requests > 1.8 * found.unshared


@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-120b"])
def test_layers_with_windows_are_refused(name: str) -> None:
    holder = case_of(name)[2].holder
    with pytest.raises(KvtoolError, match="do not keep every token alike"):
        shared_concurrency_of(holder, GIB, [chat(5, 10, 4)])

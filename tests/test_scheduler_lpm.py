"""SGLang's order of the queue, longest prefix match: fast as plain, and its rules by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from blocks_cases import BlocksCase, Endless, drawn_contents, plain_numbers, run_blocks_plain
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sim_cases import drawn_settings, requests
from test_scheduler_radix import CALM, compare, drawn_trees, play

from kvtool.sim.blocks import state
from kvtool.sim.blocks.numbers import MOST_SORTED

INDEXES = ("hash", "radix")
ONE_AT_A_STEP = {"max_num_seqs": 1, "num_blocks": 400}
"""Who is admitted when says the order."""


@st.composite
def drawn_queues(draw: st.DrawFn) -> BlocksCase:
    """Many wait, and share prefixes long enough to be put last."""
    longest = draw(st.sampled_from((40, 60, 150)))
    count = draw(st.integers(10, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prompts = rng.integers(20, longest, count, endpoint=True)
    outputs = rng.integers(1, 12, count, endpoint=True)
    arrivals = rng.integers(0, draw(st.sampled_from((0, 100))), count, endpoint=True)
    limits = replace(
        draw(drawn_settings(longest)), preemption="recompute", cpu_blocks=0, prefix_caching=True,
        policy="lpm", index=draw(st.sampled_from(INDEXES)), max_model_len=300,
    )  # fmt: skip
    return BlocksCase(
        requests=requests(prompts, outputs, arrivals), settings=limits,
        contents=draw(drawn_contents(prompts.tolist(), limits.block_size)),
    )  # fmt: skip


@settings(max_examples=120, **CALM)
@given(case=drawn_queues())
def test_any_run_is_that_of_the_plain_scheduler(case: BlocksCase) -> None:
    compare(case)


@pytest.mark.slow
@settings(max_examples=2000, **CALM)
@given(case=drawn_queues())
def test_any_run_is_that_of_the_plain_scheduler_many_times(case: BlocksCase) -> None:
    compare(case)


@settings(max_examples=60, **CALM)
@given(case=drawn_trees(policies=("lpm",)))
def test_any_run_of_vllm_s_memory_too(case: BlocksCase) -> None:
    compare(replace(case, settings=replace(case.settings, index="hash")))


@settings(max_examples=30, **CALM)
@given(case=drawn_queues(), work=st.integers(1, 40))
def test_pauses_and_little_room_change_nothing(case: BlocksCase, work: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "FIRST_ROOM", 1)
        patch.setattr("kvtool.sim.blocks.engine.WORK_AT_ONCE", work)
        compare(case)


@settings(max_examples=30, **CALM)
@given(case=drawn_trees(policies=("lpm",)))
def test_where_at_most_one_waits_it_is_first_come_first_served(case: BlocksCase) -> None:
    # Far apart, and none is aborted in a step in which the next could come.
    far = np.arange(len(case.requests)) * 10**7
    asked = replace(case.requests, arrival_ns=far, parent=None, think_ns=None)
    found = []
    for policy in ("lpm", "fcfs"):
        limits = replace(case.settings, policy=policy, index="hash")
        try:
            plain = run_blocks_plain(
                BlocksCase(requests=asked, settings=limits, contents=case.contents)
            )
        except Endless:
            assume(False)
        assume(all(step.waiting + step.running <= 1 for step in plain.steps))
        found.append(plain_numbers(plain))
    assert found[0] == found[1]


# --- rules by hand


@pytest.mark.parametrize("index", INDEXES)
def test_who_has_most_cached_goes_first(index: str) -> None:
    pairs = [(40, 1), (60, 1), (60, 1), (60, 1)]
    segments = [[1, 0, 40], [2, 0, 60], [1, 0, 36, 3, 0, 24], [1, 0, 40, 4, 0, 20]]
    _, run = play(
        pairs, segments, arrivals=[0, 1, 1, 1], policy="lpm", index=index, **ONE_AT_A_STEP
    )
    assert run.outcome("admit_step").tolist() == [0, 3, 2, 1]
    assert run.outcome("cached_tokens_first").tolist() == [0, 0, 36, 40]


@pytest.mark.parametrize("index", INDEXES)
def test_of_those_that_begin_alike_one_goes_first(index: str) -> None:
    # Nothing is cached. The second begins like the first with 32 tokens, the fourth with 31 only.
    pairs = [(40, 1), (40, 1), (40, 1), (40, 1)]
    segments = [[1, 0, 40], [1, 0, 32, 2, 0, 8], [3, 0, 40], [1, 0, 31, 4, 0, 9]]
    _, run = play(pairs, segments, policy="lpm", index=index, max_num_seqs=3, num_blocks=400)
    assert run.outcome("admit_step").tolist() == [0, 1, 0, 0]
    assert run.outcome("cached_tokens_first").tolist()[1] == 32


@pytest.mark.parametrize("index", INDEXES)
def test_where_too_many_wait_nobody_is_matched(index: str) -> None:
    count = MOST_SORTED + 4
    pairs = [(40, 1)] * count
    segments = [[1, 0, 40], *([k, 0, 40] for k in range(2, count)), [1, 0, 40]]
    arrivals = [0, *[1] * (count - 1)]
    _, run = play(
        pairs, segments, arrivals=arrivals, policy="lpm", index=index,
        **{**ONE_AT_A_STEP, "num_blocks": 4000},
    )  # fmt: skip
    # The last one has all of its prompt cached, and waits until 128 do: then it is first.
    steps = run.outcome("admit_step").tolist()
    assert steps[:4] == [0, 1, 2, 3]
    assert steps[-1] == 4
    assert steps[4] == 5


@pytest.mark.parametrize("index", INDEXES)
def test_a_victim_is_sorted_with_the_others(index: str) -> None:
    pairs, segments = [(8, 12), (8, 12), (8, 1)], [[1, 0, 8], [2, 0, 8], [1, 0, 8]]
    plain, _ = play(pairs, segments, num_blocks=7, policy="lpm", index=index, arrivals=[0, 0, 3])
    assert len(plain.preemptions) > 0


def test_lpm_needs_contents_of_at_least_one_block() -> None:
    play([(1, 1), (2, 1)], [[1, 0, 1], [1, 0, 2]], policy="lpm")

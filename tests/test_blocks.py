"""The scheduler that tells blocks apart: vLLM's integers, fast as plain, and what must hold of every run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blocks_cases import (
    BlocksCase,
    Endless,
    TellingScheduler,
    check_requests,
    drawn_blocks,
    fast_gaps,
    fast_numbers,
    plain_numbers,
    run_blocks,
    run_blocks_plain,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sim_cases import (
    BLOCK_ROW_IDS,
    ROW_IDS,
    contents_of,
    differences,
    digest,
    requests,
    requests_of,
    rows,
    script,
    settings_of,
)

from kvtool.contents import Contents, joined, of_blocks, of_segments
from kvtool.errors import KvtoolError
from kvtool.sim import replay
from kvtool.sim.blocks import state
from kvtool.sim.blocks.engine import BlocksEngine
from kvtool.sim.blocks.numbers import END, FRESH, NO_NAME
from kvtool.sim.blocks.scheduler import CachedScheduler
from kvtool.sim.settings import ABORTED, CUT, DONE, UNFINISHED, Settings, StepTime
from kvtool.trace_blocks import HashedRequests

QUICK = {"a11", "d3", "f4", "f6", "f7", "e1", "e11", "e7", "h6", "i3", "j4", "j7"}
SLOW_PLAIN = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in (*ROW_IDS, *BLOCK_ROW_IDS)
]
CALM: Any = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
FEW, MANY = settings(max_examples=150, **CALM), settings(max_examples=2000, **CALM)
UNIT = StepTime(base_ns=1, token_ns=0, context_ns=0)


def case_of(row: dict[str, Any]) -> BlocksCase:
    """A measured row as a case."""
    return BlocksCase(
        requests=requests_of(row), settings=settings_of(row), contents=contents_of(row)
    )


def is_as_measured(row: dict[str, Any], found: dict[str, Any]) -> None:
    """Every integer of a row, and the order in which its blocks were freed."""
    steps = {name.removeprefix("step "): found[name] for name in found if name[:5] == "step "}
    assert differences(row, found, steps) == []
    assert set(row["truth"]["per_request"]) <= set(found)
    totals, names = row["truth"]["totals"], script().TOTALS
    told = {"evicted": totals["evictions"]}
    told |= {name.removesuffix("_tokens"): totals[names[name]] for name in names}
    assert {name: found[name] for name in told} == told
    assert digest(found["free list"]) == row["truth"]["final_free_list_sha256"]


@pytest.mark.parametrize("name", SLOW_PLAIN)
def test_the_plain_one_is_vllm_on_every_row(name: str) -> None:
    row = rows()[name]
    run = run_blocks_plain(case_of(row), most_steps=10**6)
    is_as_measured(row, plain_numbers(run))
    told = [f"{step}:{index}" for step, index in sorted(run.preemptions)]
    assert digest(told) == row["truth"]["preemptions_sha256"]
    assert run.is_stopped == row["truth"]["stopped_by_stall"]


@pytest.mark.parametrize("name", [*ROW_IDS, *BLOCK_ROW_IDS])
def test_the_fast_one_is_vllm_on_every_row(name: str) -> None:
    row = rows()[name]
    run = run_blocks(case_of(row))
    is_as_measured(row, fast_numbers(run))
    assert bool(run.state.run.stopped) == row["truth"]["stopped_by_stall"]
    check_pool(run)


# --- any run


def compare(case: BlocksCase) -> tuple[TellingScheduler, BlocksEngine]:
    """Both on the same, integer for integer."""
    try:
        plain = run_blocks_plain(case)
    except Endless:
        assume(False)
    fast = run_blocks(case)
    expected, found = plain_numbers(plain), fast_numbers(fast)
    for name, values in expected.items():
        assert found[name] == values, name
    assert fast_gaps(fast) == +plain.gaps
    check_pool(fast)
    check_tokens(case, plain, fast)
    check_requests(case, fast)
    return plain, fast


def check_pool(run: BlocksEngine) -> None:
    """Each block is free or in as many tables as it counts; what can be found is found by its name."""
    now, blocks, cells = run.state.run, run.state.blocks, run.state.cells
    free = list(run.free_list())
    assert len(set(free)) == len(free) == now.free_blocks
    assert set(free) <= set(range(1, run.settings.num_blocks + 1))
    held: Counter[int] = Counter()
    for request in run.state.requests:
        at, count = request.last_cell, 0
        while at >= 0:
            held[int(cells[at].block)] += 1
            at, count = cells[at].before, count + 1
        assert count == request.blocks
        assert bool(count) == bool(request.is_running)
    taken = range(FRESH + 1, FRESH + 1 + int(now.numbered))
    assert {at: int(blocks[at].refs) for at in taken if blocks[at].refs} == dict(held)
    assert len(held) + len(free) == run.settings.num_blocks
    named = Counter(int(blocks[at].name) for at in taken if blocks[at].name != NO_NAME)
    found = {int(slot.name): int(slot.block) for slot in run.state.slots if slot.name != NO_NAME}
    assert set(found) == set(named)
    for name, at in found.items():
        assert blocks[at].older < 0
        copies = [at]
        while blocks[at].newer >= 0:
            at = int(blocks[at].newer)
            copies.append(at)
        assert {int(blocks[one].name) for one in copies} == {name}
        assert (len(copies), copies[-1]) == (named[name], blocks[copies[0]].newest)
    assert blocks[END].name == state.NONE


def check_tokens(case: BlocksCase, plain: CachedScheduler, run: BlocksEngine) -> None:
    """Each token is computed, found or lost, and none is made twice."""
    now, steps, limits = run.state.run, run.all_steps(), case.settings
    scheduled = int(steps["scheduled_tokens"].sum())
    ended = [one for one in plain.requests if one.status in (DONE, CUT)]
    hits = int(now.hit + now.rehit)
    # The last token is made and never fed; who ran ahead of its end fed it.
    kept = sum(one.prompt_tokens + one.generated - 1 for one in ended)
    lost = int(now.recomputed) + sum(one.computed for one in plain.requests if one not in ended)
    if not limits.async_scheduling:
        assert scheduled + hits == kept + lost
    assert scheduled + hits >= kept
    made = sum(fast_gaps(run).values()) + int((run.outcome("first_token_step") >= 0).sum())
    assert made == sum(one.generated for one in plain.requests)
    for name, most in (
        ("used_blocks", limits.num_blocks), ("running", limits.max_running),
        ("scheduled_tokens", limits.token_budget), ("batch", limits.token_budget),
    ):  # fmt: skip
        assert (steps[name] >= 0).all()
        assert (steps[name] <= most).all()
    assert (np.diff(steps["end_ns"]) >= 0).all()
    assert now.hit <= now.queried
    assert now.rehit <= now.requery


@FEW
@given(case=drawn_blocks())
def test_any_run_is_that_of_the_plain_scheduler(case: BlocksCase) -> None:
    compare(case)


@pytest.mark.slow
@MANY
@given(case=drawn_blocks())
def test_any_run_is_that_of_the_plain_scheduler_many_times(case: BlocksCase) -> None:
    compare(case)


@settings(max_examples=60, **CALM)
@given(case=drawn_blocks(), work=st.integers(1, 40))
def test_pauses_and_little_room_change_nothing(case: BlocksCase, work: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        try:
            expected = plain_numbers(run_blocks_plain(case))
        except Endless:
            assume(False)
        patch.setattr(state, "FIRST_ROOM", 1)
        patch.setattr(state, "STEPS_KEPT", 1)
        patch.setattr("kvtool.sim.blocks.engine.WORK_AT_ONCE", work)
        run = run_blocks(case)
    found = fast_numbers(run)
    assert found == expected
    check_pool(run)


@settings(max_examples=60, **CALM)
@given(case=drawn_blocks())
def test_where_nothing_is_cached_the_counts_are_those_of_the_other_engine(case: BlocksCase) -> None:
    limits = replace(case.settings, prefix_caching=False, policy="fcfs", async_scheduling=False)
    asked = replace(case.requests, priority=None)
    assume(not (asked.arrival_ns < 0).any())
    fast = replay._run_blocks(asked, limits, lambda ended: None, None)
    counted = replay.replay(asked, limits)
    for name in (*replay.OUTCOMES, *replay.CACHED):
        assert fast.outcomes[name].tolist() == counted.outcomes[name].tolist(), name
    for name in (*replay.STEPS, "used_blocks", "evictions"):
        assert fast.steps[name].tolist() == counted.steps[name].tolist(), name
    assert (fast.preemptions, fast.recomputed_tokens) == (
        counted.preemptions, counted.recomputed_tokens,
    )  # fmt: skip


# --- rules by hand


def play(
    pairs: list[tuple[int, int]], segments: list[list[int]] | None = None, **limits: Any
) -> tuple[TellingScheduler, BlocksEngine]:
    """Requests, (prompt, output) each, on a few blocks of four; a step takes 1 ns."""
    arrivals, columns = limits.pop("arrivals", None), limits.pop("columns", {})
    limits = {"num_blocks": 8, "block_size": 4, "max_model_len": 100, "step_time": UNIT, **limits}
    asked = requests([a for a, _ in pairs], [b for _, b in pairs], arrivals)
    contents = None
    if segments is not None:
        outs = np.arange(50, 50 + len(pairs))
        flat = np.array([number for one in segments for number in one], np.int64)
        contents = of_segments(np.array([len(one) // 3 for one in segments]), flat, outs)
    made = {name: np.array(column, np.int64) for name, column in columns.items()}
    case = BlocksCase(
        requests=replace(asked, **made),
        settings=Settings(prefix_caching=segments is not None, **limits),
        contents=contents,
    )
    return compare(case)


def test_r12_a_block_is_found_in_the_call_that_schedules_it() -> None:
    _, run = play([(9, 1), (9, 1)], [[1, 0, 9], [1, 0, 8, 2, 0, 1]])
    assert run.outcome("admit_step").tolist() == [0, 0]
    assert run.outcome("cached_tokens_first").tolist() == [0, 8]
    assert run.all_steps()["scheduled_tokens"].tolist() == [10]


def test_r10_the_last_token_is_always_computed() -> None:
    _, run = play([(8, 1), (8, 1)], [[1, 0, 8], [1, 0, 8]])
    assert run.outcome("cached_tokens_first").tolist() == [0, 4]
    # Both computed the second block: there are two copies, and the older one is found.
    assert (run.state.run.queried, run.state.run.hit) == (16, 4)


def test_tokens_are_the_same_however_they_are_cut() -> None:
    _, run = play([(9, 1), (9, 1)], [[1, 0, 9], [1, 0, 2, 1, 2, 0, 1, 2, 5, 1, 7, 2]])
    assert run.outcome("cached_tokens_first").tolist() == [0, 8]


def test_a_token_late_in_the_prompt_does_not_make_up_for_an_early_one() -> None:
    _, run = play([(12, 1), (12, 1)], [[1, 0, 12], [2, 0, 1, 1, 1, 11]])
    assert run.outcome("cached_tokens_first").tolist() == [0, 0]


def test_generated_tokens_are_cached_but_the_last_one() -> None:
    # Stream 50 is what the first generates: 3 of its 4 tokens fill the second block, not the fourth's.
    _, run = play(
        [(5, 4), (9, 1), (5, 5), (11, 1)],
        [[1, 0, 5], [1, 0, 5, 50, 0, 4], [2, 0, 5], [2, 0, 5, 52, 0, 6]],
        arrivals=[0, 10, 20, 30],
    )
    assert run.outcome("cached_tokens_first").tolist() == [0, 8, 0, 8]


def test_r15_what_nobody_can_find_is_taken_first() -> None:
    _, run = play([(6, 1), (4, 1)], [[1, 0, 6], [2, 0, 4]], num_blocks=3, arrivals=[0, 5])
    # The first leaves block 2 blank in front; the second takes it, and nothing is evicted.
    assert run.state.run.evicted == 0
    assert list(run.free_list()) == [3, 1, 2]


def test_an_evicted_block_is_not_found() -> None:
    three = [[1, 0, 8], [2, 0, 12], [1, 0, 8]]
    _, run = play([(8, 1), (12, 1), (8, 1)], three, num_blocks=3, arrivals=[0, 5, 10])
    assert run.outcome("cached_tokens_first").tolist() == [0, 0, 0]
    assert run.state.run.evicted == 4  # two of the first by the second, then two of the second


def test_who_was_preempted_finds_its_blocks_again() -> None:
    plain, run = play([(8, 8), (8, 8)], [[1, 0, 8], [2, 0, 8]], num_blocks=5)
    assert len(plain.preemptions) > 0
    assert run.state.run.rehit > 0
    assert run.outcome("cached_tokens_after_preemption").tolist()[1] == run.state.run.rehit


def test_r19_the_lowest_priority_goes_first_and_the_highest_is_preempted() -> None:
    columns = {"priority": [1, 0, 2]}
    _, run = play([(4, 2)] * 3, max_num_seqs=1, policy="priority", columns=columns)
    assert run.outcome("admit_step").tolist() == [2, 0, 4]
    plain, _ = play(
        [(7, 8)] * 2, num_blocks=4, policy="priority", columns={"priority": [1, 0]},
    )  # fmt: skip
    assert [index for _, index in plain.preemptions] == [0]


def test_r19_a_victim_of_this_step_gives_its_tokens_back() -> None:
    # The first is scheduled, then the second asks for a block and takes the first's.
    plain, run = play(
        [(7, 8), (7, 8)], num_blocks=5, arrivals=[0, 0], policy="priority",
        columns={"priority": [1, 0]},
    )  # fmt: skip
    assert plain.preemptions[0][1] == 0
    step = plain.preemptions[0][0]
    assert run.all_steps()["batch"][step] == 1


def test_asynchronous_steps_waste_one_of_who_ends_unforeseen() -> None:
    law = StepTime(base_ns=10, token_ns=0, context_ns=0)
    waste = {}
    for way in ("max-tokens", "eos"):
        _, run = play([(4, 3)], async_scheduling=True, finish_by=way, step_time=law)
        assert run.outcome("generated").tolist() == [3]
        waste[way] = int(run.all_steps()["scheduled_tokens"].sum())
    assert waste == {"max-tokens": 6, "eos": 7}


def test_a_head_that_never_fits_does_not_stall_asynchronous_steps_for_ever() -> None:
    pairs = [(4, 2), (40, 1), (4, 2)]
    _, run = play(pairs, async_scheduling=True)
    assert run.outcome("status").tolist() == [DONE, ABORTED, DONE]
    _, run = play(pairs, async_scheduling=True, on_stall="stop")
    assert run.outcome("status").tolist() == [DONE, UNFINISHED, UNFINISHED]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_unchecked_what_never_fits_is_aborted(asynchronous: bool) -> None:
    _, run = play(
        [(40, 1), (1, 1)], max_batched_tokens=8, reserve_full_prompt=False,
        async_scheduling=asynchronous,
    )  # fmt: skip
    assert run.outcome("status").tolist() == [ABORTED, DONE]


def test_a_turn_finds_what_its_parent_left() -> None:
    columns = {"arrival_ns": [0, -1, -1], "parent": [-1, 0, 1], "think_ns": [0, 3, 0]}
    segments = [[1, 0, 5], [1, 0, 5, 50, 0, 3], [1, 0, 5, 50, 0, 3, 51, 0, 1]]
    _, run = play([(5, 4), (8, 2), (9, 1)], segments, columns=columns)
    assert run.outcome("arrival_ns").tolist() == [0, 7, 9]
    assert run.outcome("cached_tokens_first").tolist() == [0, 4, 8]


# --- what requests consist of


def hashed(size: int, ids: list[list[int]], prompts: list[int], **more: Any) -> HashedRequests:
    """Requests with named blocks."""
    return HashedRequests(
        arrival_ns=np.zeros(len(prompts), np.int64),
        prompt_tokens=np.array(prompts),
        output_tokens=np.array(more.pop("outputs", [1] * len(prompts))),
        hash_ids=np.array([one for some in ids for one in some], np.int64),
        starts=np.concatenate([[0], np.cumsum([len(some) for some in ids])]),
        block_size=size,
        **more,
    )


def pieces(contents: Contents, index: int) -> list[tuple[int, int, int]]:
    """The pieces of a request."""
    own = slice(int(contents.starts[index]), int(contents.starts[index + 1]))
    columns = (contents.value, contents.offset, contents.length)
    return list(zip(*(column[own].tolist() for column in columns), strict=True))


def test_blocks_of_a_trace_are_pieces_and_outputs_are_nobody_elses() -> None:
    found = of_blocks(hashed(16, [[7, 9], [7], []], [20, 16, 0]))
    assert pieces(found, 0) == [(7, 0, 16), (9, 0, 4)]
    assert pieces(found, 1) == [(7, 0, 16)]
    assert pieces(found, 2) == []
    outs = set(zip(found.out_value.tolist(), found.out_offset.tolist(), strict=True))
    assert len(outs) == 3
    later = of_blocks(hashed(16, [[7]], [5]), first=3)
    assert later.out_value.tolist() == [3]
    both = joined([found, later])
    assert [pieces(both, k) for k in range(4)] == [
        [(7, 0, 16), (9, 0, 4)], [(7, 0, 16)], [], [(7, 0, 5)],
    ]  # fmt: skip
    assert [pieces(both.take(np.array([3, 0])), k) for k in range(2)] == [
        [(7, 0, 5)], [(7, 0, 16), (9, 0, 4)],
    ]  # fmt: skip


def test_tokens_that_count_up_are_one_piece() -> None:
    found = of_blocks(hashed(1, [[5, 6, 7, 1, 2], [3, 4], []], [5, 2, 0]))
    assert pieces(found, 0) == [(0, 5, 3), (0, 1, 2)]
    assert pieces(found, 1) == [(0, 3, 2)]
    assert pieces(found, 2) == []
    assert 0 not in found.out_value
    spelled = of_blocks(hashed(16, [[7, 9]], [16], outputs=[3], spells_outputs=True))
    assert pieces(spelled, 0) == [(7, 0, 16), (9, 0, 3)]


def test_a_spelled_output_is_found_by_the_next_turn() -> None:
    turns = hashed(
        1, [[*range(8), 100, 101, 102, 103], [*range(8), 100, 101, 102, 103, 7, 8]], [8, 13],
        outputs=[4, 1], spells_outputs=True,
    )  # fmt: skip
    asked = requests([8, 13], [4, 1], [0, 100])
    limits = Settings(num_blocks=9, block_size=4, prefix_caching=True)
    _, run = compare(BlocksCase(requests=asked, settings=limits, contents=of_blocks(turns)))
    assert run.outcome("cached_tokens_first").tolist() == [0, 8]  # the 12th token was never fed


# --- refusals


def test_without_contents_nothing_is_cached_in_secret() -> None:
    with pytest.raises(ValueError, match="consist of"):
        replay.replay(requests([1], [1]), Settings(num_blocks=1, prefix_caching=True))


def test_more_blocks_than_can_be_kept_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MOST_TAKEN", 5000)
    limits = Settings(num_blocks=2**31, block_size=1, async_scheduling=True, max_model_len=2**20)
    assert run_blocks(BlocksCase(requests=requests([4000], [3]), settings=limits))
    with pytest.raises(KvtoolError, match="5,000 blocks would be in use"):
        run_blocks(BlocksCase(requests=requests([8000], [3]), settings=limits))


def test_a_pool_of_any_size_costs_what_is_taken_of_it() -> None:
    limits = Settings(num_blocks=2**31, async_scheduling=True)
    run = run_blocks(BlocksCase(requests=requests([100] * 50, [20] * 50), settings=limits))
    assert len(run.state.blocks) < 10_000
    assert run.outcome("status").tolist() == [DONE] * 50


def test_a_clock_beyond_64_bits_is_refused() -> None:
    asked = requests([1, 1], [1, 1], [0, -1])
    asked = replace(asked, parent=np.array([-1, 0]), think_ns=np.array([0, 2**60]))
    run_blocks(BlocksCase(requests=asked, settings=Settings(num_blocks=9)))
    late = replace(asked, arrival_ns=np.array([2**63 - 2**60, -1]))
    with pytest.raises(KvtoolError, match=r"2\^63 ns"):
        run_blocks(BlocksCase(requests=late, settings=Settings(num_blocks=9)))


def test_too_many_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.sim.blocks.engine.MOST_RECORDED", 50)
    monkeypatch.setattr("kvtool.sim.blocks.engine.WORK_AT_ONCE", 10)
    limits = Settings(num_blocks=99, async_scheduling=True)
    with pytest.raises(KvtoolError, match="more than 50 steps"):
        run_blocks(BlocksCase(requests=requests([4], [200]), settings=limits))


def test_progress_counts_all_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.sim.blocks.engine.WORK_AT_ONCE", 100)
    told: list[int] = []
    asked = requests([4] * 30, [9 + k for k in range(30)])
    BlocksEngine(requests=asked, settings=Settings(num_blocks=40), progress=told.append).run()
    assert len(told) > 3
    assert sum(told) == 30

"""The plain scheduler: what vLLM's own scheduler decided, row by row, and each rule by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sim_cases import (
    BLOCK_ROW_IDS,
    ROW_IDS,
    Case,
    Plain,
    differences,
    digest,
    requests,
    requests_of,
    rows,
    run_plain,
    settings_of,
)

from kvtool.sim.memory import Paged
from kvtool.sim.settings import (
    ABORTED,
    CUT,
    DONE,
    NO_MEMORY,
    NOBODY_WAITS,
    REJECTED,
    UNFINISHED,
    Settings,
    StepTime,
)  # fmt: skip

QUICK = {"a3", "b1", "b8", "c4", "d3", "d8", "f2", "f4", "f6", "f7", "g4", "h1", "h4"}
"""Rows of every family that take a tenth of a second or so each."""


def test_the_rows_are_there() -> None:
    assert sorted(rows()) == sorted((*ROW_IDS, *BLOCK_ROW_IDS))
    assert {row[0] for row in QUICK} == {rows()[name]["family"] for name in ROW_IDS}
    assert sum(row["truth"]["totals"]["preemptions"] for row in rows().values()) > 3000


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ROW_IDS],
)
def test_a_row_is_what_vllm_decided(name: str) -> None:
    row = rows()[name]
    plain = run_plain(Case(requests=requests_of(row), settings=settings_of(row)))
    assert differences(row, plain.outcomes(), plain.steps()) == []
    truth, result = row["truth"], plain.result
    told = [f"{step}:{index}" for step, index in sorted(result.preemptions)]
    assert told[:50] == [f"{step}:{index}" for step, index in truth["preemptions_first50"]]
    assert digest(told) == truth["preemptions_sha256"]
    assert result.stopped == truth["stopped_by_stall"]
    assert isinstance(plain.store, Paged)
    # vLLM's block 0 is the null block: its ids are one more than ours.
    assert (
        digest(block + 1 for block in plain.store.pool.free_blocks)
        == (truth["final_free_list_sha256"])
    )


def play(
    pairs: Sequence[tuple[int, int]], arrivals: Sequence[int] | None = None, **limits
) -> Plain:
    """A run of requests, (prompt, output) each, on four blocks of four slots; a step takes 1 ns."""
    limits = {"num_blocks": 4, "block_size": 4, "max_model_len": 100, **limits}
    limits.setdefault("step_time", StepTime(base_ns=1, token_ns=0, context_ns=0))
    prompts, outputs = zip(*pairs, strict=True)
    return run_plain(
        Case(requests=requests(prompts, outputs, arrivals), settings=Settings(**limits))
    )


def column(run: Plain, name: str) -> list[int]:
    """One field of all outcomes."""
    return [getattr(one, name) for one in run.result.outcomes]


def scheduled(run: Plain) -> list[int]:
    """The tokens of each step."""
    return [step.scheduled_tokens for step in run.result.steps]


TWO = [(7, 8), (7, 8)]
"""Each fills its second block in step 1, and asks for a third one in step 2: there are four."""


def test_r5_the_last_admitted_is_preempted_and_computed_anew() -> None:
    run = play(TWO)
    assert run.result.preemptions == [(2, 1)]
    # 7 + 7 prompt tokens; in step 8 the victim's 7 prompt and 2 generated ones in one go.
    assert scheduled(run) == [14, 2, 1, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1, 1]
    assert run.result.recomputed_tokens == 8
    assert column(run, "admit_step") == column(run, "first_token_step") == [0, 0]
    assert column(run, "finish_step") == [7, 13]
    assert column(run, "num_preemptions") == [0, 1]
    assert [step.held_slots for step in run.result.steps[:4]] == [16, 16, 12, 12]


def test_the_free_list_is_a_stack() -> None:
    run = play(TWO)
    # The first has 0 1, then the victim's 3 and 2; freed, 2 lies on top; the other takes 2 3 1, 0.
    assert isinstance(run.store, Paged)
    assert run.store.pool.free_blocks == [0, 1, 3, 2]


def test_r5_a_victim_goes_to_the_front_and_r7_nobody_overtakes_it() -> None:
    run = play([*TWO, (1, 1)], arrivals=[0, 0, 3])
    # From step 3 on one block is free, and the third request needs one; the victim needs three.
    assert column(run, "admit_step") == [0, 0, 8]
    assert [step.waiting for step in run.result.steps[2:9]] == [1, 2, 2, 2, 2, 2, 0]


def test_r6_a_step_that_preempted_admits_nobody() -> None:
    run = play(TWO, max_batched_tokens=5, reserve_full_prompt=False)
    assert run.result.preemptions[0] == (3, 1)
    third, fourth = run.result.steps[3:5]
    # One block and four tokens of the budget are left in both steps: enough for the victim's chunk.
    assert (third.scheduled_tokens, third.running, third.waiting) == (1, 1, 1)
    assert (third.held_slots, fourth.held_slots) == (12, 16)
    assert (fourth.scheduled_tokens, fourth.running, fourth.waiting) == (5, 2, 0)


@pytest.mark.parametrize(("checked", "admitted"), [(True, 4), (False, 0)])
def test_r8_the_whole_prompt_must_fit_though_a_chunk_is_computed(
    checked: bool, admitted: int
) -> None:
    # The first holds two blocks from step 0 to 3; a chunk of 2 tokens would fit, 10 would not.
    run = play([(6, 4), (10, 1)], max_batched_tokens=8, reserve_full_prompt=checked)
    assert column(run, "admit_step") == [0, admitted]


def test_r8_counts_the_generated_tokens_of_who_resumes() -> None:
    # Prompts of 8: in step 1 both want a third block, and a block is left beside the first's three.
    run = play([(8, 6), (8, 6)], num_blocks=5)
    assert run.result.preemptions == [(1, 1)]
    # Its 8 prompt tokens fit into the two blocks left, its 9 tokens do not.
    assert [step.held_slots for step in run.result.steps[1:6]] == [12, 12, 12, 12, 16]
    assert column(run, "finish_step")[0] == 5
    assert scheduled(run)[6] == 9


@pytest.mark.parametrize(
    ("watermark", "admitted"),
    [(0.0, 0), (0.099, 0), (0.1, 2), (0.19, 2)],
)
def test_r9_the_watermark_counts_the_null_block_and_is_rounded_down(
    watermark: float, admitted: int
) -> None:
    # 4 + 5 of 9 blocks, 10 with vLLM's null block: int(0.1 × 10) = 1, though 0.1 × 9 < 1.
    run = play([(16, 2), (20, 2)], num_blocks=9, watermark=watermark)
    assert column(run, "admit_step") == [0, admitted]


def test_r9_no_watermark_where_nothing_runs() -> None:
    run = play([(16, 1), (16, 1)], watermark=0.9)
    assert column(run, "admit_step") == [0, 1]
    assert column(run, "status") == [DONE, DONE]


def test_r17_the_front_end_rejects_and_the_limit_cuts() -> None:
    run = play([(0, 3), (20, 1), (19, 5), (21, 1), (10, 30)], max_model_len=20, num_blocks=10)
    assert column(run, "status") == [REJECTED, REJECTED, CUT, REJECTED, CUT]
    assert column(run, "generated") == [0, 0, 1, 0, 10]
    assert column(run, "finish_step") == [-1, -1, 0, -1, 9]


def test_r18_a_head_that_never_fits_blocks_all_behind_it_until_nothing_runs() -> None:
    pairs = [(4, 2), (12, 1), (1, 1)]
    run = play(pairs, num_blocks=2)
    assert scheduled(run) == [4, 1, 0, 1]
    assert column(run, "status") == [DONE, ABORTED, DONE]
    assert column(run, "admit_step") == [0, -1, 3]
    assert column(run, "finish_step") == [1, 2, 3]
    assert run.result.steps[-1].end_ns == 4  # the empty step took its time
    run = play(pairs, num_blocks=2, on_stall="stop")
    assert run.result.stopped
    assert scheduled(run) == [4, 1, 0]
    assert column(run, "status") == [DONE, UNFINISHED, UNFINISHED]


def test_r18_who_outgrows_the_pool_preempts_itself_and_is_aborted() -> None:
    run = play([(5, 10)], num_blocks=2)
    assert scheduled(run) == [5, 1, 1, 1, 0, 0]
    assert run.result.preemptions == [(4, 0)]
    assert run.result.recomputed_tokens == 8
    assert (column(run, "status"), column(run, "finish_step")) == ([ABORTED], [5])
    assert column(run, "generated") == [4]


def test_unchecked_what_never_fits_is_aborted_when_it_has_preempted_itself() -> None:
    run = play([(12, 1), (1, 1)], num_blocks=2, max_batched_tokens=4, reserve_full_prompt=False)
    assert scheduled(run) == [4, 4, 0, 1]
    assert run.result.preemptions == [(2, 0)]
    assert column(run, "status") == [ABORTED, DONE]
    assert column(run, "finish_step") == [2, 3]


def test_unchecked_what_fits_alone_may_preempt_itself_and_is_not_aborted() -> None:
    run = play([(6, 6), (12, 4)], max_batched_tokens=6, reserve_full_prompt=False)
    assert run.result.outcomes[1].num_preemptions > 0
    assert column(run, "status") == [DONE, DONE]


@pytest.mark.parametrize("cpu_blocks", [2, 100])
def test_a_swapped_victim_is_not_computed_anew(cpu_blocks: int) -> None:
    run = play(TWO, preemption="swap", cpu_blocks=cpu_blocks)
    assert run.result.preemptions == [(2, 1)]
    assert scheduled(run) == [14, 2, *[1] * 12]
    assert (run.result.recomputed_tokens, run.result.swapped_blocks) == (0, 4)  # out and in
    assert column(run, "finish_step") == [7, 13]


def test_a_victim_that_the_cpu_has_no_room_for_is_computed_anew() -> None:
    run = play(TWO, preemption="swap", cpu_blocks=1)
    assert (run.result.recomputed_tokens, run.result.swapped_blocks) == (8, 0)
    assert scheduled(run) == scheduled(play(TWO))


def test_a_full_cpu_takes_no_second_victim() -> None:
    run = play([(7, 8)] * 3, num_blocks=6, preemption="swap", cpu_blocks=4)
    assert run.result.preemptions == [(2, 2), (6, 1)]
    # Two blocks of the third, then three of the second: 12 tokens that are computed anew in step 8.
    assert (run.result.recomputed_tokens, run.result.swapped_blocks) == (12, 4)
    assert scheduled(run)[8:11] == [13, 1, 1]
    assert column(run, "finish_step") == [7, 9, 15]
    assert run.scheduler.cpu_blocks == 0


def test_who_is_aborted_leaves_the_cpu() -> None:
    limits = {"preemption": "swap", "cpu_blocks": 4}
    run = play([(7, 30), *TWO], arrivals=[0, 40, 40], **limits)
    # The first fills the pool, then the CPU, and never fits again; later there is room for a victim.
    assert column(run, "status") == [ABORTED, DONE, DONE]
    assert [index for _, index in run.result.preemptions] == [0, 2]
    assert (run.result.recomputed_tokens, run.result.swapped_blocks) == (0, 4 + 2 + 2)
    assert run.scheduler.cpu_blocks == 0


def test_r3_a_threshold_cuts_a_prompt_only_in_company() -> None:
    assert scheduled(play([(10, 1)], long_prefill_threshold=4)) == [10]
    two = play([(10, 1), (6, 1)], num_blocks=9, long_prefill_threshold=4)
    # When the second is done after two steps, the first is alone and computes the rest.
    assert scheduled(two) == [8, 6, 2]
    three = [(10, 1)] * 3
    limits = {"num_blocks": 9, "long_prefill_threshold": 2, "max_batched_tokens": 15}
    assert scheduled(play(three, **limits)) == [6] * 5
    # Adaptive: a third of the budget of 15.
    assert scheduled(play(three, **limits, long_prefill_adaptive=True)) == [15, 15]


def test_r7_without_chunks_a_prompt_waits_for_a_budget_that_takes_it_whole() -> None:
    pairs = [(5, 2), (5, 2)]
    limits = {"max_batched_tokens": 8}
    assert scheduled(play(pairs, **limits)) == [8, 3, 1]
    assert scheduled(play(pairs, **limits, chunked_prefill=False)) == [5, 6, 1]


def test_r1_the_smaller_budget_and_the_smaller_crowd_count() -> None:
    pairs = [(4, 2)] * 3
    assert scheduled(play(pairs, max_batched_tokens=8, max_scheduled_tokens=3)) == [
        3,
        3,
        3,
        3,
        2,
        1,
    ]
    run = play(pairs, max_num_seqs=3, max_num_active_seqs=1)
    assert [step.running for step in run.result.steps] == [1] * 6
    assert column(run, "admit_step") == [0, 2, 4]


def test_the_clock_adds_what_a_step_costs_and_jumps_over_nothing_to_do() -> None:
    law = StepTime(base_ns=100, token_ns=10, context_ns=1)
    run = play([(3, 2), (5, 1)], arrivals=[7, 1000], step_time=law)
    # 7 + 100 + 3 × 10 + 3, then + 100 + 10 + 4; the second arrives at 1000: + 100 + 50 + 5.
    assert [step.end_ns for step in run.result.steps] == [140, 254, 1155]
    assert column(run, "first_token_ns") == [140, 1155]
    assert column(run, "finish_ns") == [254, 1155]


def test_who_arrives_during_a_step_waits_for_the_next_one() -> None:
    law = StepTime(base_ns=10, token_ns=0, context_ns=0)
    run = play([(1, 3), (1, 1), (1, 1)], arrivals=[0, 10, 11], step_time=law)
    assert column(run, "admit_step") == [0, 1, 2]


def test_a_turn_arrives_when_its_parent_has_been_answered_and_thought_about() -> None:
    law = StepTime(base_ns=10, token_ns=0, context_ns=0)
    both = requests([1, 1], [2, 1], [0, -1])
    parent, think = requests([-1, 0], [0, 5]).prompt_tokens, requests([0, 5], [0, 0]).prompt_tokens
    turns = type(both)(**both.columns(), parent=parent, think_ns=think)
    limits = Settings(num_blocks=4, step_time=law)
    run = run_plain(Case(requests=turns, settings=limits))
    assert column(run, "finish_ns") == [20, 35]


def test_the_slots_of_a_step_are_told_apart() -> None:
    # A prompt of 5 and 2 to come, at most 6 cached: two of four blocks, 2 of their 8 slots for ever empty.
    (first, second) = play([(5, 2)]).result.steps
    assert (first.held_slots, first.token_slots, first.reserved_slots, first.internal_slots) == (
        8, 5, 1, 2,
    )  # fmt: skip
    assert (second.token_slots, second.reserved_slots, second.internal_slots) == (6, 0, 2)
    assert first.held_up == NOBODY_WAITS
    # Two of 8 do not fit beside each other into 3 blocks: the free one is free and useless.
    assert [step.held_up == NO_MEMORY for step in play([(8, 1), (8, 1)], num_blocks=3).result.steps] == [
        True, False,
    ]  # fmt: skip

"""Prefill and decode apart: requests that come computed, where they are sent, and how times are joined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_cases import (
    OUTCOMES,
    Case,
    drawn_requests,
    drawn_settings,
    engine,
    engine_outcomes,
    engine_steps,
    prefilled_cases,
    requests,
    run_plain,
    without_series,
)
from test_engine import FEW, MANY, check_sums

from kvtool.requests import Requests
from kvtool.sim.disaggregated import Pools, replay_pools
from kvtool.sim.instances import serve
from kvtool.sim.memory import Paged
from kvtool.sim.scheduler import Scheduler
from kvtool.sim.settings import ABORTED, CUT, DONE, REJECTED, UNFINISHED, Settings, StepTime


def compare_prefilled(case: Case) -> None:
    """Both schedulers on requests that come with a cache."""
    plain, run = run_plain(case), engine(case, recorded=True).run()
    assert engine_steps(run) == plain.steps()
    assert engine_outcomes(case, run) == plain.outcomes()
    assert without_series(run.totals()) == without_series(plain.totals())
    check_sums(case, run)


@FEW
@given(case=prefilled_cases())
def test_requests_that_come_computed_are_those_of_the_plain_scheduler(case: Case) -> None:
    compare_prefilled(case)


@pytest.mark.slow
@MANY
@given(case=prefilled_cases())
def test_requests_that_come_computed_many_times(case: Case) -> None:
    compare_prefilled(case)


def test_who_comes_computed_is_given_one_token_and_blocks_for_its_prompt() -> None:
    asked = replace(requests([8, 8], [3, 3]), prefilled=np.array([1, 0]))
    settings = Settings(num_blocks=9, block_size=4, max_model_len=20)
    steps = run_plain(Case(requests=asked, settings=settings)).result.steps
    assert [step.scheduled_tokens for step in steps] == [1 + 8, 2, 1]
    assert [step.held_slots for step in steps] == [12 + 8, 24, 12]


class PlainInstance:
    """The plain scheduler, told of its requests one by one; what is outstanding by looking at each."""

    def __init__(self, settings: Settings, asked: Requests, *, whole: bool) -> None:
        unseen = replace(asked, arrival_ns=np.full(len(asked), -1, np.int64))
        self.scheduler = Scheduler(unseen, settings, Paged(settings))
        self.here: list[Any] = []
        self.whole = whole

    def advance(self, until_ns: int) -> None:
        self.scheduler.run(until_ns=until_ns)

    def outstanding(self, now_ns: int) -> int:
        tokens = 0
        for request in self.here:
            outcome = self.scheduler.result.outcomes[request.index]
            if not 0 <= outcome.finish_ns <= now_ns:
                tokens += request.prompt_tokens + request.output_tokens * self.whole
        return tokens

    def send(self, asked: Requests, place: int) -> None:
        request = self.scheduler.requests[place]
        self.here.append(request)
        self.scheduler.arrivals.append((int(asked.arrival_ns[place]), place, request))
        self.scheduler.arrivals.sort(key=lambda entry: entry[:2])


def plain_stage(
    settings: Settings, count: int, asked: Requests, who: list[int], *, whole: bool
) -> tuple[list[int], list[Any]]:
    """One kind of instances by the plain scheduler: which got which, and the outcomes."""
    who = sorted(who, key=lambda place: (asked.arrival_ns[place], place))
    instances = [PlainInstance(settings, asked, whole=whole) for _ in range(count)]
    column = np.full(len(asked), -1, np.int64)
    serve(instances, asked, np.array(who, np.int64), column)
    chosen = column.tolist()
    told = [
        instances[max(0, number)].scheduler.result.outcomes[place]
        for place, number in enumerate(chosen)
    ]
    return chosen, told


def plain_pools(asked: Requests, pools: Pools) -> list[dict[str, int]]:
    """The rules once more, a request at a time."""
    longest = pools.prefill.max_model_len
    prompts, outputs = asked.prompt_tokens.tolist(), asked.output_tokens.tolist()
    ok = [k for k in range(len(asked)) if 0 < prompts[k] < longest]
    one = replace(asked, output_tokens=np.ones(len(asked), np.int64))
    chosen, first = plain_stage(pools.prefill, pools.num_prefill, one, ok, whole=False)
    limits = [min(outputs[k], longest - prompts[k]) for k in range(len(asked))]
    more = [k for k in ok if first[k].status == DONE and limits[k] > 1]
    arrival, free = [-1] * len(asked), [0] * pools.num_prefill
    for k in sorted(more, key=lambda k: (first[k].finish_ns, asked.arrival_ns[k], k)):
        bits = 8 * prompts[k] * pools.bytes_per_token
        begin = max(free[chosen[k]], first[k].finish_ns)
        arrival[k] = free[chosen[k]] = begin + -(-bits * 10**9 // pools.bits_per_s)
    two = replace(
        asked, arrival_ns=np.array(arrival), prefilled=np.array([int(k in more) for k in range(len(asked))])
    )  # fmt: skip
    _, second = plain_stage(pools.decode, pools.num_decode, two, more, whole=True)
    joined = []
    for k in range(len(asked)):
        a, b = first[k], second[k] if k in more else first[k]
        status = b.status
        if status == DONE and limits[k] < outputs[k]:
            status = CUT
        joined.append({
            "admit_step": a.admit_step, "first_token_step": a.first_token_step,
            "first_token_ns": a.first_token_ns, "finish_step": b.finish_step,
            "finish_ns": b.finish_ns, "generated": b.generated,
            "num_preemptions": a.num_preemptions + (b.num_preemptions if k in more else 0),
            "status": status if k in ok else REJECTED,
        })  # fmt: skip
    return joined


@st.composite
def drawn_pools(draw: st.DrawFn) -> tuple[Requests, Pools]:
    longest = draw(st.sampled_from((20, 60, 4)))
    asked = draw(drawn_requests(30, longest))
    never = {"preemption": "recompute", "cpu_blocks": 0, "on_stall": "abort-head"}
    prefill, decode = (replace(draw(drawn_settings(longest)), **never) for _ in range(2))
    return asked, Pools(
        prefill=prefill,
        decode=replace(decode, max_model_len=prefill.max_model_len),
        num_prefill=draw(st.integers(1, 3)),
        num_decode=draw(st.integers(1, 3)),
        bits_per_s=draw(st.sampled_from((10**9, 10**12, 333_333_333))),
        bytes_per_token=draw(st.sampled_from((1, 7))),
    )


def compare_pools(asked: Requests, pools: Pools) -> None:
    found, expected = replay_pools(asked, pools), plain_pools(asked, pools)
    for name in OUTCOMES:
        assert found.outcomes[name].tolist() == [one[name] for one in expected], name
    finished = np.isin(found.outcomes["status"], (DONE, CUT))
    if (
        found.gaps is not None and finished.all()
    ):  # every token after the first has one gap before it
        assert found.gaps[1].sum() == found.outcomes["generated"].sum() - len(asked)
        spans = found.outcomes["finish_ns"] - found.outcomes["first_token_ns"]
        assert (found.gaps[0] * found.gaps[1]).sum() == spans.sum()


@FEW
@given(drawn=drawn_pools())
def test_pools_are_those_of_the_plain_scheduler(drawn: tuple[Requests, Pools]) -> None:
    compare_pools(*drawn)


@pytest.mark.slow
@MANY
@given(drawn=drawn_pools())
def test_pools_are_those_of_the_plain_scheduler_many_times(drawn: tuple[Requests, Pools]) -> None:
    compare_pools(*drawn)


LAW = StepTime(base_ns=100, token_ns=10, context_ns=0)
WIDE = Settings(num_blocks=100, block_size=4, max_model_len=64, step_time=LAW)
ONE_EACH = Pools(
    prefill=WIDE, decode=replace(WIDE, step_time=StepTime(base_ns=50, token_ns=0, context_ns=0)),
    num_prefill=1, num_decode=1, bits_per_s=8 * 10**9, bytes_per_token=3,
)  # fmt: skip


def test_times_are_joined_over_the_link() -> None:
    found = replay_pools(requests([20, 10, 4], [3, 1, 2]), ONE_EACH)
    # One prefill of 34 tokens: 100 + 340. Then 60 bytes at a byte a ns, then 12; the second has ended.
    assert found.outcomes["first_token_ns"].tolist() == [440, 440, 440]
    assert found.send_ns.tolist() == [440, -1, 500]
    assert found.sent_ns.tolist() == [500, -1, 512]
    assert found.transfer_bytes == 72
    # Decode steps of 50 from 500 on; the third comes in the first of them and is let into the second.
    assert found.outcomes["finish_ns"].tolist() == [600, 440, 600]
    assert found.outcomes["generated"].tolist() == [3, 1, 2]
    assert found.gaps is not None
    gaps = np.repeat(*found.gaps).tolist()
    assert sorted(gaps) == [50, 550 - 440, 600 - 440]
    assert found.decode.steps[0]["begin_ns"].tolist() == [500, 550]


def test_the_least_loaded_instance_is_taken_and_the_first_of_equals() -> None:
    asked = requests([30, 10, 12, 5, 3], [1] * 5, [0, 0, 0, 250, 5000])
    found = replay_pools(asked, replace(ONE_EACH, num_prefill=2))
    # 30 | 10, then 22 at the second; the first ends at 400, the second at 320; then both are idle.
    assert found.prefill.chosen.tolist() == [0, 1, 1, 1, 0]


def test_a_decode_pool_that_holds_less_aborts_what_it_cannot_hold() -> None:
    small = replace(ONE_EACH, decode=replace(ONE_EACH.decode, num_blocks=4))
    found = replay_pools(requests([20, 4], [3, 3]), small)
    assert found.outcomes["status"].tolist() == [ABORTED, DONE]
    assert found.outcomes["first_token_ns"].tolist() == [340, 340]


def test_who_is_preempted_in_decode_is_computed_anew_there() -> None:
    tight = replace(ONE_EACH, decode=replace(ONE_EACH.decode, num_blocks=6))
    found = replay_pools(requests([8, 8], [9, 9]), tight)
    assert found.decode.preemptions > 0 == found.prefill.preemptions
    assert found.recomputed_tokens >= 8
    assert found.outcomes["status"].tolist() == [DONE, DONE]
    assert max(step["scheduled_tokens"].max() for step in found.decode.steps) > 8


def test_an_interrupt_keeps_what_has_ended() -> None:
    ended = 0

    def stop(count: int) -> None:
        nonlocal ended
        ended += count
        if ended > 2:
            raise KeyboardInterrupt

    found = replay_pools(requests([8, 8, 8], [1, 4, 4]), ONE_EACH, stop)
    assert found.interrupted
    assert found.outcomes["status"].tolist() == [DONE, UNFINISHED, UNFINISHED]
    assert found.outcomes["first_token_ns"].tolist() == [340, 340, 340]
    assert found.outcomes["generated"].tolist() == [1, 0, 0]

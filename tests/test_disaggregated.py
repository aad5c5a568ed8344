"""Prefill and decode apart: requests that come computed, where they are sent, and how times are joined."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
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

from kvtool.errors import KvtoolError
from kvtool.requests import Requests
from kvtool.sim.disaggregated import Split, replay_disaggregated
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

    def __init__(self, settings: Settings, asked: Requests) -> None:
        unseen = replace(asked, arrival_ns=np.full(len(asked), -1, np.int64))
        self.scheduler = Scheduler(unseen, settings, Paged(settings))
        self.here: list[Any] = []

    def outstanding(self, now_ns: int) -> list[Any]:
        """Who was sent here and has not ended by now."""
        self.scheduler.run(until_ns=now_ns)
        ended = [self.scheduler.result.outcomes[request.index].finish_ns for request in self.here]
        return [
            request
            for request, finish_ns in zip(self.here, ended, strict=True)
            if not 0 <= finish_ns <= now_ns
        ]

    def send(self, arrival_ns: int, place: int) -> None:
        request = self.scheduler.requests[place]
        self.here.append(request)
        self.scheduler.arrivals.append((arrival_ns, place, request))
        self.scheduler.arrivals.sort(key=lambda entry: entry[:2])


def plain_stage(
    settings: Settings, count: int, asked: Requests, who: list[int], load: Callable[[Any], int]
) -> tuple[list[int], list[Any]]:
    """One kind of instances by the plain scheduler: which got which, and the outcomes. Each request goes
    where the sum of the outstanding requests' loads is least, to the first of equals."""
    instances = [PlainInstance(settings, asked) for _ in range(count)]
    chosen = [-1] * len(asked)
    for place in sorted(who, key=lambda place: (asked.arrival_ns[place], place)):
        now = int(asked.arrival_ns[place])
        loads = [sum(map(load, one.outstanding(now))) for one in instances]
        chosen[place] = loads.index(min(loads))
        instances[chosen[place]].send(now, place)
    for one in instances:
        one.scheduler.run()
    told = [
        instances[max(0, number)].scheduler.result.outcomes[place]
        for place, number in enumerate(chosen)
    ]
    return chosen, told


def plain_split(asked: Requests, split: Split) -> list[dict[str, int]]:
    """The rules once more, a request at a time."""
    longest = split.prefill.max_model_len
    prompts, outputs = asked.prompt_tokens.tolist(), asked.output_tokens.tolist()
    ok = [k for k in range(len(asked)) if 0 < prompts[k] < longest]
    one = replace(asked, output_tokens=np.ones(len(asked), np.int64))
    chosen, first = plain_stage(
        split.prefill, split.num_prefill, one, ok, lambda request: int(request.prompt_tokens)
    )
    limits = [min(outputs[k], longest - prompts[k]) for k in range(len(asked))]
    more = [k for k in ok if first[k].status == DONE and limits[k] > 1]
    arrival, free = [-1] * len(asked), [0] * split.num_prefill
    for k in sorted(more, key=lambda k: (first[k].finish_ns, asked.arrival_ns[k], k)):
        bits = 8 * prompts[k] * split.bytes_per_token
        begin = max(free[chosen[k]], first[k].finish_ns)
        arrival[k] = free[chosen[k]] = begin + -(-bits * 10**9 // split.bits_per_s)
    two = replace(
        asked, arrival_ns=np.array(arrival), prefilled=np.array([int(k in more) for k in range(len(asked))])
    )  # fmt: skip
    placed, second = plain_stage(split.decode, split.num_decode, two, more, lambda request: 1)
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
            "prefill": chosen[k], "decode": placed[k],
        })  # fmt: skip
    return joined


@st.composite
def drawn_split(draw: st.DrawFn) -> tuple[Requests, Split]:
    longest = draw(st.sampled_from((20, 60, 4)))
    asked = draw(drawn_requests(30, longest))
    never = {"preemption": "recompute", "cpu_blocks": 0, "on_stall": "abort-head"}
    prefill, decode = (replace(draw(drawn_settings(longest)), **never) for _ in range(2))
    return asked, Split(
        prefill=prefill,
        decode=replace(decode, max_model_len=prefill.max_model_len),
        num_prefill=draw(st.integers(1, 3)),
        num_decode=draw(st.integers(1, 3)),
        bits_per_s=draw(st.sampled_from((10**9, 10**12, 333_333_333))),
        bytes_per_token=draw(st.sampled_from((1, 7))),
    )


def compare_split(asked: Requests, split: Split) -> None:
    found, expected = replay_disaggregated(asked, split), plain_split(asked, split)
    for name in OUTCOMES:
        assert found.outcomes[name].tolist() == [one[name] for one in expected], name
    for name, stage in (("prefill", found.prefill), ("decode", found.decode)):
        assert stage.chosen.tolist() == [one[name] for one in expected], name
    finished = np.isin(found.outcomes["status"], (DONE, CUT))
    if (
        found.gaps is not None and finished.all()
    ):  # every token after the first has one gap before it
        assert found.gaps[1].sum() == found.outcomes["generated"].sum() - len(asked)
        spans = found.outcomes["finish_ns"] - found.outcomes["first_token_ns"]
        assert (found.gaps[0] * found.gaps[1]).sum() == spans.sum()


@FEW
@given(drawn=drawn_split())
def test_both_kinds_are_those_of_the_plain_scheduler(drawn: tuple[Requests, Split]) -> None:
    compare_split(*drawn)


@pytest.mark.slow
@MANY
@given(drawn=drawn_split())
def test_both_kinds_are_those_of_the_plain_scheduler_many_times(
    drawn: tuple[Requests, Split],
) -> None:
    compare_split(*drawn)


LAW = StepTime(base_ns=100, token_ns=10, context_ns=0)
WIDE = Settings(num_blocks=100, block_size=4, max_model_len=64, step_time=LAW)
ONE_EACH = Split(
    prefill=WIDE, decode=replace(WIDE, step_time=StepTime(base_ns=50, token_ns=0, context_ns=0)),
    num_prefill=1, num_decode=1, bits_per_s=8 * 10**9, bytes_per_token=3,
)  # fmt: skip


def test_times_are_joined_over_the_link() -> None:
    found = replay_disaggregated(requests([20, 10, 4], [3, 1, 2]), ONE_EACH)
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
    found = replay_disaggregated(asked, replace(ONE_EACH, num_prefill=2))
    # 30 | 10, then 22 at the second; the first ends at 400, the second at 320; then both are idle.
    assert found.prefill.chosen.tolist() == [0, 1, 1, 1, 0]


def test_a_decode_pool_that_holds_less_aborts_what_it_cannot_hold() -> None:
    small = replace(ONE_EACH, decode=replace(ONE_EACH.decode, num_blocks=4))
    found = replay_disaggregated(requests([20, 4], [3, 3]), small)
    assert found.outcomes["status"].tolist() == [ABORTED, DONE]
    assert found.outcomes["first_token_ns"].tolist() == [340, 340]


def test_who_is_preempted_in_decode_is_computed_anew_there() -> None:
    tight = replace(ONE_EACH, decode=replace(ONE_EACH.decode, num_blocks=6))
    found = replay_disaggregated(requests([8, 8], [9, 9]), tight)
    assert found.decode.preemptions > 0 == found.prefill.preemptions
    assert found.recomputed_tokens >= 8
    assert found.outcomes["status"].tolist() == [DONE, DONE]
    assert max(step["scheduled_tokens"].max() for step in found.decode.steps) > 8


def test_who_decodes_longest_is_not_known_to_the_router() -> None:
    two = replace(ONE_EACH, num_decode=2)
    found = replay_disaggregated(requests([4, 4, 4], [40, 2, 2], [0, 1000, 1500]), two)
    # The first is there for 39 steps of 50; the second has left when the third comes: one there, none here.
    assert found.decode.chosen.tolist() == [0, 1, 1]
    found = replay_disaggregated(requests([4, 4, 4, 4], [40, 40, 2, 2]), two)
    assert found.decode.chosen.tolist() == [0, 1, 0, 1]
    found = replay_disaggregated(requests([4, 30, 4], [40, 2, 2]), two)
    assert found.decode.chosen.tolist() == [0, 1, 0]  # requests count, whatever they want or bring


def test_queues_grow_and_are_shortened() -> None:
    count = 2000
    rng = np.random.default_rng(3)
    prompts, outputs = rng.integers(1, 30, count).tolist(), rng.integers(1, 5, count).tolist()
    arrivals = np.sort(rng.integers(0, 30_000, count)).tolist()
    compare_split(
        requests(prompts, outputs, arrivals), replace(ONE_EACH, num_prefill=3, num_decode=2)
    )
    compare_split(requests(prompts, outputs), replace(ONE_EACH, num_prefill=2))


def test_more_steps_than_are_kept_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.sim.engine.MOST_RECORDED", 100_000)
    long = replace(WIDE, max_model_len=1 << 20, num_blocks=1 << 20)
    split = replace(ONE_EACH, prefill=long, decode=long)
    with pytest.raises(KvtoolError, match="more than 100,000 steps"):
        replay_disaggregated(requests([8], [400_000]), split)


def test_a_clock_that_is_full_is_said() -> None:
    slow = replace(WIDE, step_time=StepTime(base_ns=5 * 10**18, token_ns=0, context_ns=0))
    with pytest.raises(KvtoolError, match="292 years"):
        replay_disaggregated(requests([8], [9]), replace(ONE_EACH, decode=slow))


def test_many_instances_take_memory_for_what_they_do() -> None:
    tracemalloc.start()
    asked = requests([8] * 10_000, [1] * 10_000)
    replay_disaggregated(asked, replace(ONE_EACH, num_prefill=64, num_decode=64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (
        peak < 400 << 20
    )  # an outcome and a place in a queue for each at each of them: 131 MiB more


def test_ends_are_told_as_they_come_both_halves() -> None:
    told: list[float] = []
    asked = requests([8, 0, 8, 8], [1, 4, 4, 1])
    replay_disaggregated(asked, ONE_EACH, told.append)
    assert sum(told) == 4
    many = requests([8] * 20_000, [2] * 20_000, range(0, 20_000_000, 1000))
    told.clear()
    replay_disaggregated(many, replace(ONE_EACH, num_prefill=2), told.append)
    assert sum(told) == 20_000
    assert max(told) < 3_000


def after(times: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Progress that interrupts when it is told so many times, after each request that is sent."""
    monkeypatch.setattr("kvtool.sim.instances.SENT_AT_ONCE", 1)
    told = 0

    def stop(count: float) -> None:
        nonlocal told
        told += 1
        if told == times:
            raise KeyboardInterrupt

    return stop


def test_an_interrupt_keeps_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests([8, 8, 8], [1, 4, 4])
    for times in (
        4,
        5,
    ):  # three are sent to prefill, then who ends there, then one is sent to decode
        found = replay_disaggregated(asked, ONE_EACH, after(times, monkeypatch))
        assert found.interrupted
        assert found.outcomes["status"].tolist() == [DONE, UNFINISHED, UNFINISHED]
        assert found.outcomes["first_token_ns"].tolist() == [340, 340, 340]
        assert found.outcomes["generated"].tolist() == [1, 0, 0]


def test_an_interrupt_of_the_prefills_finishes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(ONE_EACH, prefill=replace(WIDE, num_blocks=8))
    asked = requests([30, 30, 1, 60, 9, 9], [30, 30, 1, 4, 2, 2], [0, 0, 0, 0, 5000, 6000])
    found = replay_disaggregated(asked, small, after(5, monkeypatch))
    assert found.interrupted
    ends = [UNFINISHED, UNFINISHED, DONE, ABORTED, UNFINISHED, UNFINISHED]
    assert found.outcomes["status"].tolist() == ends
    assert found.outcomes["generated"].tolist() == [0, 0, 1, 0, 0, 0]
    assert (found.outcomes["first_token_ns"] > 0).tolist() == [True] * 3 + [False] * 3
    assert found.outcomes["finish_ns"][:2].tolist() == [-1, -1]
    assert found.transfer_bytes == 0

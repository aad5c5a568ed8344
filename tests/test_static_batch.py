"""Static batches against a twin that looks at each slot of each row in each step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_cases import Case, adds_up, cut_up, requests, without_series

from kvtool.requests import Requests
from kvtool.sim.settings import Settings, StepTime
from kvtool.sim.static_batch import MOST_POINTS, StaticBatches
from kvtool.sim.totals import Sums, Totals

UNIT = StepTime(base_ns=1, token_ns=0, context_ns=0)
FEW, MANY = settings(max_examples=150, deadline=None), settings(max_examples=3000, deadline=None)


Row = tuple[int, int, int]
"""Prompt, output and arrival of a request."""


@dataclass(kw_only=True)
class Twin:
    """A run of static batches, a step and a slot at a time."""

    case: Case
    clock_ns: int = 0
    ended: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)
    window: Counter[str] = field(default_factory=Counter)
    points: list[Sums] = field(default_factory=list)

    def run(self) -> Totals:
        """All batches of the requests that can be served."""
        order = self.case.requests.in_order()
        columns = (order.prompt_tokens, order.output_tokens, order.arrival_ns)
        queue = deque(zip(*(column.tolist() for column in columns), strict=True))
        while self.has_head(queue):
            self.clock_ns = max(self.clock_ns, queue[0][2])
            batch: list[Row] = []
            while self.has_head(queue) and self.fits([*batch, self.limited(queue[0])]):
                self.counts["cut"] += self.limited(queue[0]) != queue[0]
                batch.append(self.limited(queue.popleft()))
            self.serve(batch, queue[0] if self.has_head(queue) else None)
        return Totals(
            requests=len(self.case.requests),
            completed=self.counts["completed"],
            cut=self.counts["cut"],
            prompt_too_long=self.counts["too long"],
            larger_than_pool=self.counts["too large"],
            peak_running=self.counts["peak"],
            steps=self.whole["steps"],
            end_ns=self.clock_ns if self.whole["steps"] else 0,
            scheduled_tokens=self.counts["scheduled"],
            whole=Sums(**self.whole),
            window=Sums(**self.window),
            series=tuple(self.points),
        )

    def limited(self, request: Row) -> Row:
        """The request with the output that max_model_len leaves it."""
        prompt, output, arrival = request
        tokens = [*["prompt"] * prompt, *["output"] * output][: self.case.settings.max_model_len]
        return prompt, tokens.count("output"), arrival

    def has_head(self, queue: deque[Row]) -> bool:
        """Whether somebody is to be served; who never can be leaves when it comes to the head."""
        limits = self.case.settings
        while queue:
            prompt, output, _ = self.limited(queue[0])
            if prompt < 1 or prompt >= limits.max_model_len:
                self.counts["too long"] += 1
            elif prompt + output - 1 > limits.num_slots:  # the last token is never cached
                self.counts["too large"] += 1
            else:
                return True
            queue.popleft()
        return False

    def fits(self, batch: list[Row]) -> bool:
        """Whether these make one batch: they are there, not too many, and their rectangle fits."""
        limits = self.case.settings
        prompts, outputs, arrivals = zip(*batch, strict=True)
        row = max(prompts) + max(outputs) - 1
        return (
            max(arrivals) <= self.clock_ns
            and len(batch) <= limits.max_running
            and len(batch) * row <= limits.num_slots
        )

    def serve(self, batch: list[Row], following: Row | None) -> None:
        """Every step of a batch; whether it is measured is that of the batch."""
        limits, law = self.case.settings, self.case.settings.step_time
        longest = max(prompt for prompt, _, _ in batch)
        steps = max(output for _, output, _ in batch)
        measured = following is not None and self.counts["completed"] + self.counts[
            "too large"
        ] >= (len(self.case.requests) // 10)
        before, begun_ns = Counter(self.whole), self.clock_ns
        for step in range(steps):
            slots: Counter[str] = Counter({"steps": 1})
            for prompt, output, _ in batch:
                slots["running"] += step < output
                for place in range(longest + steps - 1):
                    slots[kind_of(place, prompt, output, step)] += 1
            held = len(batch) * (longest + steps - 1)
            there = following is not None and following[2] <= begun_ns
            seats = len(batch) == limits.max_running
            slots["external" if there and not seats else "idle"] += limits.num_slots - held
            self.whole += slots
            if measured:
                self.window += slots
            computed = len(batch) * (longest if step == 0 else 1)
            context = len(batch) * (longest + step)
            self.counts["scheduled"] += computed
            pairs = len(batch) * (longest * (longest + 1) // 2) if step == 0 else context
            self.clock_ns += law.ns(computed, context, pairs, requests=len(batch))
        self.points.append(Sums(**{name: self.whole[name] - before[name] for name in self.whole}))
        self.counts["completed"] += len(batch)
        self.counts["peak"] = max(self.counts["peak"], len(batch))


def kind_of(place: int, prompt: int, output: int, step: int) -> str:
    """What a slot of a request's row is in a step of its batch: its tokens lie at the beginning."""
    if step >= output or place >= prompt + output - 1:
        return "padding"
    return "token" if place < prompt + step else "reserved"


def static(case: Case, source: list[Requests] | None = None, **more) -> StaticBatches:
    """The static batches of a case."""
    chunks = [case.requests.in_order()] if source is None else source
    count = len(case.requests)
    return StaticBatches(source=chunks, num_requests=count, settings=case.settings, **more).run()


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """Short requests, some of which can never be served, at once or over time."""
    pick = st.sampled_from
    count, longest = draw(st.integers(0, 30)), draw(pick((12, 5, 2)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    within = draw(pick((0, 50, 400)))
    return Case(
        requests=requests(
            rng.integers(draw(pick((1, 0))), longest, count, endpoint=True),
            rng.integers(1, longest, count, endpoint=True),
            rng.integers(0, within, count, endpoint=True),
        ),
        settings=Settings(
            num_blocks=draw(st.integers(3, 80)),
            block_size=draw(pick((1, 2, 3))),
            max_model_len=draw(pick((30, 15, 10))),
            max_num_seqs=draw(pick((256, 5, 2, 1))),
            max_num_active_seqs=draw(pick((None, None, 3))),
            step_time=StepTime(
                base_ns=draw(pick((3, 0))),
                token_ns=draw(pick((2, 0))),
                context_ns=draw(pick((1, 0, 0.3))),
                attention_ns=draw(pick((0, 0, 0.07, 2))),
                request_ns=draw(pick((0, 0, 0.6, 11))),
                read_ns=draw(pick((0, 0, 7, 40))),
            ),
        ),
    )


def compare(case: Case) -> None:
    """The closed form is the sum over slots and steps."""
    totals = static(case).totals()
    assert totals == Twin(case=case).run()
    for sums in (totals.whole, totals.window, *totals.series):
        assert adds_up(sums, case.settings.num_slots)
    assert totals.completed + totals.rejected == totals.requests
    assert (totals.preemptions, totals.recomputed_tokens, totals.copied_tokens) == (0, 0, 0)


@FEW
@given(case=drawn_cases())
def test_any_run_is_that_of_the_twin(case: Case) -> None:
    compare(case)


@pytest.mark.slow
@MANY
@given(case=drawn_cases())
def test_any_run_is_that_of_the_twin_many_times(case: Case) -> None:
    compare(case)


@settings(FEW, max_examples=50)
@given(case=drawn_cases(), sizes=st.lists(st.integers(0, 4), max_size=20))
def test_any_cut_into_chunks_gives_the_same_run(case: Case, sizes: list[int]) -> None:
    parts = static(case, cut_up(case.requests.in_order(), sizes))
    assert parts.totals() == static(case).totals()


def test_a_batch_by_hand() -> None:
    # Rows of 4 + 3 - 1 = 6 slots: two make 12, a third one would make 18 of 16.
    law = StepTime(base_ns=100, token_ns=10, context_ns=1)
    case = Case(
        requests=requests([4, 2, 1], [1, 3, 1]),
        settings=Settings(num_blocks=16, block_size=1, max_model_len=20, step_time=law),
    )
    totals = static(case).totals()
    first, second = totals.series
    # Tokens: 4, then 2 + 3 + 4 of the second row; 2 + 1 are still to come to it; the rest pads.
    assert first == Sums(steps=3, token=13, reserved=3, padding=20, external=12, running=4)
    assert second == Sums(steps=1, token=1, idle=15, running=1)
    # Two rows of a padded prompt of 4, then a token each; their contexts are 4, 5 and 6.
    assert totals.scheduled_tokens == 2 * (4 + 1 + 1) + 1
    assert totals.end_ns == 4 * 100 + 10 * 13 + 2 * (4 + 5 + 6) + 1
    assert (totals.completed, totals.peak_running, totals.steps) == (3, 2, 4)


def test_who_comes_while_a_batch_runs_waits_for_its_end() -> None:
    limits = Settings(num_blocks=100, step_time=UNIT)
    case = Case(requests=requests([4, 4, 4], [5, 5, 5], [0, 1, 30]), settings=limits)
    totals = static(case).totals()
    assert [one.running for one in totals.series] == [5, 5, 5]
    assert totals.end_ns == 35


def test_the_window_has_whole_batches_after_the_warm_up_and_before_the_last() -> None:
    limits = Settings(num_blocks=100, max_num_seqs=2, step_time=UNIT)
    case = Case(requests=requests([1] * 30, [2, *[1] * 29]), settings=limits)
    totals = static(case).totals()
    # 15 batches of two: two of them are three requests or more, the last one has nobody behind it.
    assert totals.steps == 16
    assert totals.window.steps == totals.measured.steps == 12
    short = static(Case(requests=requests([1], [2]), settings=limits)).totals()
    assert (short.window, short.measured) == (Sums(), short.whole)


def test_who_can_never_be_served_is_told_and_holds_nobody_up() -> None:
    limits = Settings(num_blocks=2, block_size=4, max_model_len=12)
    case = Case(requests=requests([0, 12, 8, 8, 1, 5], [1, 1, 1, 2, 50, 9]), settings=limits)
    totals = static(case).totals()
    # 8 + 2 - 1 = 9 slots of 8; the one of 1 is cut to 11 tokens, which hold 11; 5 is cut to 7: 11.
    assert (totals.prompt_too_long, totals.larger_than_pool) == (2, 3)
    assert (totals.completed, totals.cut, totals.rejected) == (1, 0, 5)
    cut = static(
        Case(requests=requests([5], [9]), settings=Settings(num_blocks=1, max_model_len=9))
    )
    assert (cut.totals().completed, cut.totals().cut, cut.totals().steps) == (1, 1, 4)


def test_points_of_the_series_become_one_when_they_are_many() -> None:
    limits = Settings(num_blocks=4, max_num_seqs=1, step_time=UNIT)
    for count, points in (
        (2 * MOST_POINTS - 1, 2 * MOST_POINTS - 1),
        (2 * MOST_POINTS, MOST_POINTS),
    ):
        totals = static(Case(requests=requests([3] * count, [2] * count), settings=limits)).totals()
        assert len(totals.series) == points
        assert sum(totals.series, Sums()) == totals.whole


@pytest.mark.parametrize("where", ["source", "progress"])
def test_an_interrupt_leaves_whole_batches(where: str) -> None:
    limits = Settings(num_blocks=10, max_num_seqs=4, step_time=UNIT)
    case = Case(requests=requests([3] * 40, [2, 9] * 20), settings=limits)
    told: list[int] = []

    def source() -> Iterator[Requests]:
        yield case.requests.take(np.arange(30))
        if where == "source":
            raise KeyboardInterrupt
        yield case.requests.take(np.arange(30, 40))

    def progress(ended: int) -> None:
        told.append(ended)
        if where == "progress" and len(told) == 5:
            raise KeyboardInterrupt

    totals = static(case, source(), progress=progress).totals()
    whole = static(case).totals()
    assert totals.interrupted
    assert not whole.interrupted
    assert totals.completed == sum(told) == 4 * len(told)
    assert len(told) == (7 if where == "source" else 5)
    assert totals.series == whole.series[: len(told)]
    assert sum(totals.series, Sums()) == totals.whole
    assert adds_up(totals.whole, limits.num_slots)


def test_no_requests_are_no_steps() -> None:
    totals = static(Case(requests=requests([], []), settings=Settings(num_blocks=1))).totals()
    assert without_series(totals) == without_series(Totals(requests=0, completed=0))


def test_nothing_is_external_while_nobody_waits() -> None:
    limits = Settings(num_blocks=100, step_time=UNIT)
    case = Case(requests=requests([4, 4], [5, 5], [0, 1_000_000]), settings=limits)
    assert static(case).totals().whole.external == 0

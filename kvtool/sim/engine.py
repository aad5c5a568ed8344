"""A run of the fast engine: requests in by the chunk, steps and outcomes out, and a place to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvtool.errors import KvtoolError
from kvtool.jit import must_compile
from kvtool.requests import Requests
from kvtool.sim import kernel
from kvtool.sim.memory import PAGED
from kvtool.sim.settings import ABORT_HEAD, REJECTED, UNFINISHED, Settings
from kvtool.sim.state import NONE, POINTS, QUEUE, SUMS, Records, State, new_state, records
from kvtool.sim.totals import Sums, Totals, warm_up_of

STEPS_AT_ONCE = 1 << 17
"""Steps between two looks at the keyboard and at the progress bar."""
MOST_RECORDED = 1 << 25
"""Steps that are kept: 96 bytes each."""
Progress = Callable[[int], None]
"""Told how many requests have ended since it was last told."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """A run of `source`, chunks of requests in the order of arrival, `num_requests` of them in all.

    With `recorded`, `outcomes` has a record for each request and `steps` one for each step; memory
    is otherwise bounded by a chunk and by the requests that run. Who waits is known of the chunks
    that were read: with `recorded` or a threshold for long prefills, `source` has one chunk.
    """

    source: Iterable[Requests]
    num_requests: int
    settings: Settings
    allocator: str = PAGED
    placement: str = ""
    recorded: bool = False
    progress: Progress = lambda ended: None
    steps: list[Records] = field(default_factory=list)
    gaps: list[Records] = field(default_factory=list)
    num_rejected: int = 0
    rejected: list[tuple[int, int]] = field(default_factory=list)
    interrupted: bool = False
    window: Sums = field(default_factory=Sums)
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.state = new_state(
            self.allocator,
            self.placement,
            self.settings,
            warm_up=warm_up_of(self.num_requests),
            num_recorded=self.num_requests if self.recorded else 0,
        )
        self.state.outcomes["status"] = UNFINISHED

    def run(self) -> Engine:
        """Until all requests have ended, or the user interrupts: then as far as it has come."""
        try:
            self._run()
        except KeyboardInterrupt:
            self.interrupted = True
            self.make_room()
        self._tell_unfinished()
        return self

    def _run(self) -> None:
        chunks = self._queues()
        queue, following = next(chunks, _queue(0)), next(chunks, None)
        if following is not None and (self.recorded or self.settings.long_prefill_threshold):
            raise ValueError("who waits must be known: give the requests in one chunk")
        run, ended = self.state.run, 0
        while True:
            code = kernel.advance(self.state, queue, following is None, STEPS_AT_ONCE)
            self.make_room()
            self.progress(int(run.done + run.aborted) - ended)
            ended = int(run.done + run.aborted)
            if run.stopped == kernel.CLOCK_IS_FULL:
                raise clock_is_full()
            if code == kernel.ALL_DONE:
                return
            if self.recorded:
                check_steps(int(run.step))
            if code == kernel.MORE_REQUESTS and following is not None:
                queue = np.concatenate([queue[run.head :], following]).view(np.recarray)
                run.arrived -= run.head
                run.head = 0
                following = next(chunks, None)

    def close(self, *, interrupted: bool = False) -> None:
        """No more comes: what is written down is whole."""
        self.interrupted = interrupted
        self.make_room()
        self._tell_unfinished()

    def _queues(self) -> Iterator[Records]:
        """The requests that the front end lets through, a chunk at a time."""
        first = 0
        for requests in self.source:
            prompt = requests.prompt_tokens
            accepted = (prompt > 0) & (prompt < self.settings.max_model_len)
            places = np.flatnonzero(accepted)
            self.num_rejected += len(prompt) - len(places)
            if self.recorded or self.settings.on_stall != ABORT_HEAD:
                turned_away = np.flatnonzero(~accepted)
                arrivals = requests.arrival_ns[turned_away].tolist()
                self.rejected += zip((first + turned_away).tolist(), arrivals, strict=True)
            queue = _queue(len(places))
            queue.arrival_ns = requests.arrival_ns[places]
            queue.prompt, queue.output = prompt[places], requests.output_tokens[places]
            queue.index = first + places
            if requests.prefilled is not None:
                queue.prefilled = requests.prefilled[places]
            first += len(prompt)
            yield queue

    def make_room(self) -> None:
        """Take what is written down; a series that is full gets steps of twice the width."""
        run, series = self.state.run, self.state.sums[:POINTS]
        window, last = self.state.sums[POINTS], self.state.sums[POINTS + 1]
        for name in SUMS.names or ():
            series[name][max(0, run.step - 1) // run.width] += last[name]
            window[name] += last[name] * run.measured
        self.window += _sums(window)  # in whole numbers without end: a large pool outgrows 64 bits
        self.state.sums[POINTS:] = np.zeros(2, SUMS)
        if run.step >= POINTS * run.width:
            halved = records(SUMS, POINTS, 0)
            for name in SUMS.names or ():
                halved[name][: POINTS // 2] = series[name][::2] + series[name][1::2]
            series[:] = halved
            run.width *= 2
        if self.recorded:
            self.steps.append(self.state.steps[: run.steps_kept].copy())
            self.gaps.append(self.state.steps["gap"][: run.gaps_kept].copy())
        run.steps_kept = run.gaps_kept = 0

    def _tell_unfinished(self) -> None:
        """What is known of the requests that have not ended: those that run, and the preempted."""
        run, lines = self.state.run, self.state.lines
        stopped_early = run.stopped or self.interrupted
        for index, arrival_ns in self.rejected:
            if stopped_early and arrival_ns > run.seen_ns:
                self.num_rejected -= 1  # it never came to the front end
            elif self.recorded:
                self.state.outcomes["status"][index] = REJECTED
        live = list(lines["preempted"][: run.preempted])
        at = run.first
        while at != NONE:
            live.append(at)
            at = lines[at]["next"]
        for line in lines[live] if self.recorded else ():
            outcome = self.state.outcomes[line["index"]]
            for name in ("admit_step", "first_token_step", "first_token_ns", "num_preemptions"):
                outcome[name] = line[name]

    def all_steps(self) -> Records:
        """A record for each step."""
        return np.concatenate([self.state.steps[:0], *self.steps]).view(np.recarray)

    def totals(self) -> Totals:
        """What the run came to."""
        run = self.state.run
        series = self.state.sums[:POINTS]
        series = series[series["steps"] > 0]
        return Totals(
            requests=self.num_requests,
            completed=int(run.done),
            cut=int(run.cut),
            prompt_too_long=self.num_rejected,
            larger_than_pool=int(run.aborted),
            preemptions=int(run.preemptions),
            recomputed_tokens=int(run.recomputed),
            swapped_blocks=int(run.swapped),
            copied_tokens=int(run.copied),
            peak_running=int(run.peak),
            steps=int(run.step),
            end_ns=int(run.clock) if run.step else 0,
            scheduled_tokens=int(run.scheduled),
            whole=Sums(**{name: sum(series[name].tolist()) for name in SUMS.names or ()}),
            window=self.window,
            series=tuple(map(_sums, series)),
            interrupted=self.interrupted,
        )


def check_steps(count: int) -> None:
    """Refuse to keep more steps than there is room for."""
    if count > MOST_RECORDED:
        raise KvtoolError(
            f"the run takes more than {MOST_RECORDED:,} steps, and each is kept",
            "give it fewer or shorter requests; kvtool fragment runs them without keeping",
            code="too_large",
        )


def clock_is_full() -> KvtoolError:
    """The error of a run that is longer than 64 bits of nanoseconds."""
    return KvtoolError(
        "the clock went beyond 2^63 ns (292 years)",
        "make the steps shorter (--step-time), or the arrivals earlier",
    )


def compiles() -> bool:
    """Whether the first run on this machine is still to come."""
    return must_compile(kernel.advance)


def _queue(count: int) -> Records:
    return records(QUEUE, count, 0)


def _sums(record: Records) -> Sums:
    return Sums(**dict(zip(SUMS.names or (), record.item(), strict=True)))

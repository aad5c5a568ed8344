"""Instances of one kind, each a scheduler with a block pool and a clock of its own, and who is sent where.

What they are lies side by side, so that one compiled loop goes through all of them: an instance is looked
at only if somebody is there and its last step has ended, since nothing else changes what is outstanding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtool.jit import compiled, must_compile, part
from kvtool.sim import kernel
from kvtool.sim.engine import Engine, check_steps, clock_is_full
from kvtool.sim.memory import PAGED
from kvtool.sim.settings import ABORT_HEAD, UNFINISHED, Settings
from kvtool.sim.state import NONE, OUTCOME, QUEUE, RUN, STEP, STEPS_KEPT, State, new_state, records

if TYPE_CHECKING:
    from kvtool.requests import Column, Requests
    from kvtool.sim.state import Records, Run

PROMPT_TOKENS, NUM_REQUESTS = range(2)
"""What of the outstanding is counted."""
FOREVER = int(np.iinfo(np.int64).max)
SENT_AT_ONCE = 1 << 12
"""Requests between two looks at the keyboard and at the progress bar."""
STEPS_AT_ONCE = 1 << 13
FEWEST_KEPT = 1 << 12
SHORTEST_QUEUE = 64
WENT_ON, PAUSED, FULL, QUEUE_FULL = range(4)
"""Whether something was in the way: nothing, a pause, an instance's records, its part of the queue."""


class Group(NamedTuple):
    """Everything that the instances know, a place an instance; `outcomes` are of all requests."""

    runs: Records
    lines: Records
    sums: Records
    outcomes: Records
    steps: Records
    queue: Records
    """A part for each instance, of which it has used what stands between `begin` and `end`."""
    begin: Column
    end: Column
    room: Column
    """Where its part ends."""
    sent_tokens: Column
    sent: Column


class Instances:
    """So many instances with these settings, for requests of which there are `num_requests` in all."""

    def __init__(self, settings: Settings, count: int, num_requests: int, *, counted: int) -> None:
        assert settings.on_stall == ABORT_HEAD, "a run that stops would be sent more"
        self.settings, self.counted, self.ended = settings, counted, 0
        self.chosen: Column = np.full(num_requests, -1, np.int64)
        self.group = _group(settings, count, num_requests)
        self.engines = [_engine(self.group, k, settings) for k in range(count)]

    def serve(
        self,
        requests: Requests,
        places: Column,
        progress: Callable[[int], None] = lambda ended: None,
    ) -> None:
        """Send these requests, in the order of arrival, each to the instance with the least outstanding
        at that time (the first of equals), and run all to the end."""
        asked = records(QUEUE, len(places), 0)
        asked.arrival_ns, asked.index = requests.arrival_ns[places], places
        asked.prompt, asked.output = requests.prompt_tokens[places], requests.output_tokens[places]
        if requests.prefilled is not None:
            asked.prefilled = requests.prefilled[places]
        first, code = 0, FULL
        while first < len(asked) or code != WENT_ON:
            some = asked[: first + SENT_AT_ONCE]
            last = len(some) == len(asked)
            first, code, at = send(self.group, some, first, last, self.counted, self.chosen)
            self._go_on(code, at, progress)

    def close(self, *, interrupted: bool) -> None:
        """No more comes: what is written down is whole."""
        for one in self.engines:
            one.close(interrupted=interrupted)

    def _go_on(self, code: int, at: int, progress: Callable[[int], None]) -> None:
        """Make room where an instance ran short of it, and tell who has ended."""
        runs = self.group.runs
        if runs["stopped"][at] == kernel.CLOCK_IS_FULL:
            raise clock_is_full()
        if code == QUEUE_FULL:
            self._make_queue(at)
        elif code == FULL:
            self.engines[at].make_room()
            check_steps(int(runs["step"].sum()))
        ended = int(runs["ended_requests"].sum())
        progress(ended - self.ended)
        self.ended = ended

    def _make_queue(self, full: int) -> None:
        """Forget who was admitted; if that leaves one half full, all get parts twice as long as they use."""
        runs, begin, end, room = self.group.runs, *self.group[6:9]
        live = [self.group.queue[begin[full] + runs["head"][full] : end[full]].copy()]
        which = [full]
        if 2 * len(live[0]) > room[full] - begin[full]:
            which = list(range(len(runs)))
            heads = begin + runs["head"]
            live = [self.group.queue[heads[k] : end[k]].copy() for k in which]
            rooms = [max(SHORTEST_QUEUE, 2 * len(part)) for part in live]
            room[:] = np.cumsum(rooms)
            begin[:] = room - rooms
            self.group = self.group._replace(queue=records(QUEUE, int(room[-1]), 0))
        for k, kept in zip(which, live, strict=True):
            end[k] = begin[k] + len(kept)
            self.group.queue[begin[k] : end[k]] = kept
            runs["arrived"][k] -= runs["head"][k]
            runs["head"][k] = 0


def compiles() -> bool:
    """Whether the first such run on this machine is still to come."""
    return must_compile(send)


def _group(settings: Settings, count: int, num_requests: int) -> Group:
    one = new_state(PAGED, "", settings, warm_up=0, num_recorded=1)
    runs = np.zeros(count, RUN).view(np.recarray)
    for name in RUN.names or ():
        if name != "phases":  # zeros that are not written take no memory
            runs[name] = one.run[name]
    most = int(one.run.most)
    kept = 2 * most + max(FEWEST_KEPT, STEPS_KEPT // count)
    outcomes = records(OUTCOME, num_requests, NONE, zero=("num_preemptions", "generated"))
    outcomes["status"] = UNFINISHED
    begin = np.arange(count) * SHORTEST_QUEUE
    return Group(
        runs=runs,
        lines=np.tile(one.lines, (count, 1)).view(np.recarray),
        sums=np.tile(one.sums, (count, 1)).view(np.recarray),
        outcomes=outcomes,
        steps=np.zeros((count, kept), STEP).view(np.recarray),
        queue=records(QUEUE, count * SHORTEST_QUEUE, 0),
        begin=begin,
        end=begin.copy(),
        room=begin + SHORTEST_QUEUE,
        sent_tokens=np.zeros(count, np.int64),
        sent=np.zeros(count, np.int64),
    )


def _engine(group: Group, k: int, settings: Settings) -> Engine:
    """The instance as a run of its own, which keeps its steps."""
    one = Engine(source=(), num_requests=0, settings=settings)
    one.recorded = True
    one.state = State(group.runs[k], group.lines[k], group.sums[k], group.outcomes, group.steps[k])
    return one


@compiled
def send(
    group: Group, asked: Records, first: int, last: bool, counted: int, chosen: Column
) -> tuple[int, int, int]:
    """Send the requests from the first on and, if no more come, run all to the end, until something is in
    the way: how many are sent, what it is, and where."""
    for at in range(first, len(asked)):
        now, best, least = asked[at].arrival_ns, 0, FOREVER
        for k in range(len(group.runs)):
            run = group.runs[k]
            if run.clock < now and run.ended_requests < group.sent[k]:
                code = go_to(group, k, now)
                if code != WENT_ON:
                    return at, code, k
            load = outstanding(group, run, k, now, counted)
            if load < least:
                best, least = k, load
        if group.end[best] == group.room[best]:
            return at, QUEUE_FULL, best
        group.queue[group.end[best]] = asked[at]
        group.end[best] += 1
        group.sent[best] += 1
        group.sent_tokens[best] += asked[at].prompt
        chosen[asked[at].index] = best
    for k in range(len(group.runs)):
        if last and group.runs[k].ended_requests < group.sent[k]:
            code = go_to(group, k, FOREVER)
            if code != WENT_ON:
                return len(asked), code, k
    return len(asked), WENT_ON, 0


@part
def go_to(group: Group, k: int, until_ns: int) -> int:
    """Make every step of an instance that begins before this time: a later arrival changes none of them.
    What is in the way."""
    run = group.runs[k]
    run.until_ns = until_ns
    state = State(run, group.lines[k], group.sums[k], group.outcomes, group.steps[k])
    queue = group.queue[group.begin[k] : group.end[k]]
    code = kernel.advance(state, queue, True, STEPS_AT_ONCE)
    if run.stopped or code == kernel.FULL:
        return FULL
    return PAUSED if code == kernel.PAUSED else WENT_ON


@part
def outstanding(group: Group, run: Run, k: int, now_ns: int, counted: int) -> int:
    """What was sent less what has ended by now; the last step may end later than that."""
    ended = run.clock <= now_ns
    if counted == NUM_REQUESTS:
        return group.sent[k] - (run.ended_requests if ended else run.ended_requests_before)
    return group.sent_tokens[k] - (run.ended_prompt if ended else run.ended_prompt_before)

"""Who arrives, who waits and in which order, compiled: rules R5, R17 and R19."""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.blocks.numbers import NONE
from kvtool.sim.blocks.state import State
from kvtool.sim.settings import REJECTED

LATEST_NS = 9 * 10**18
HEAD_NEVER_FITS, CLOCK_IS_FULL = 1, 2
"""Why a run stops before all is done: `run.stopped`."""


@part
def num_waiting(run: Any) -> int:
    """Who has arrived and neither runs nor has ended."""
    return run.preempted + run.arrived - run.head + run.heaped


@part
def next_arrival(s: State) -> int:
    """Who comes next, by time and then by index; NONE: nobody that is known of."""
    run, queues = s.run, s.queues
    known = queues[run.next_sorted] if run.next_sorted < run.sorted else NONE
    if run.pending == 0:
        return known
    later = queues[2 * run.count]
    if known < 0 or goes_before(s.requests, later, known, False):
        return later
    return known


@part
def arrive(s: State) -> None:
    """R17: the front end takes what has come and rejects what can never be served."""
    run, requests, queues = s.run, s.requests, s.queues
    at = next_arrival(s)
    while at >= 0 and requests[at].arrival_ns <= run.clock:
        if run.next_sorted < run.sorted and queues[run.next_sorted] == at:
            run.next_sorted += 1
        else:
            pop_first(requests, queues, 2 * run.count, run.pending, False)
            run.pending -= 1
        prompt = requests[at].prompt
        if prompt <= 0 or prompt >= run.max_model_len:
            end(s, at, REJECTED, NONE)
        elif run.by_priority:
            wait_by_priority(s, at)
        else:
            queues[run.count + run.arrived] = at
            run.arrived += 1
        at = next_arrival(s)


@part
def end(s: State, at: int, status: int, step: int) -> None:
    """The request is over, and what waits for its end may come."""
    run, requests, queues = s.run, s.requests, s.queues
    request = requests[at]
    request.status = status
    run.ended += 1
    if status != REJECTED:
        request.finish_step, request.finish_ns = step, run.clock
    child = request.first_child
    while child >= 0:
        if run.clock > LATEST_NS - requests[child].think_ns:
            run.stopped = CLOCK_IS_FULL
            return
        requests[child].arrival_ns = run.clock + requests[child].think_ns
        push(requests, queues, 2 * run.count, run.pending, child, False)
        run.pending += 1
        child = requests[child].next_child


@part
def head_of_queue(s: State) -> int:
    """Who is to be admitted next; there is somebody."""
    run = s.run
    if run.by_priority:
        return s.queues[run.count]
    if run.preempted > 0:
        return s.lists[run.preempted - 1].preempted
    return s.queues[run.count + run.head]


@part
def leave_queue(s: State) -> None:
    """The head of the queue goes."""
    run = s.run
    if run.by_priority:
        pop_first(s.requests, s.queues, run.count, run.heaped, True)
        run.heaped -= 1
    elif run.preempted > 0:
        run.preempted -= 1
    else:
        run.head += 1


@part
def wait_by_priority(s: State, at: int) -> None:
    """R19: by priority, then by arrival; who was preempted takes its place again."""
    run = s.run
    push(s.requests, s.queues, run.count, run.heaped, at, True)
    run.heaped += 1


@part
def wait_in_front(s: State, at: int) -> None:
    """R5: who was preempted waits before all others; by match, behind them, as SGLang appends it."""
    if s.run.by_priority:
        wait_by_priority(s, at)
        return
    if s.run.by_match:
        wait_behind(s, at)
        return
    s.lists[s.run.preempted].preempted = at
    s.run.preempted += 1


@part
def wait_behind(s: State, at: int) -> None:
    """The last of the queue, in which everybody has one place: those before it move up to the head."""
    run, queues = s.run, s.queues
    run.head -= 1
    for k in range(run.count + run.head, run.count + run.arrived - 1):
        queues[k] = queues[k + 1]
    queues[run.count + run.arrived - 1] = at


@part
def leave_front(s: State, at: int) -> None:
    """Who was preempted and gets its last token all the same leaves those that wait in front."""
    run, lists = s.run, s.lists
    place = 0
    while lists[place].preempted != at:
        place += 1
    run.preempted -= 1
    for k in range(place, run.preempted):
        lists[k].preempted = lists[k + 1].preempted


# --- heaps: the first of `size` requests stands at `base` of the queues


@part
def goes_before(requests: Any, one: int, other: int, by_priority: bool) -> bool:
    """The order of arrival, or of priority first; by index in the end."""
    a, b = requests[one], requests[other]
    if by_priority and a.priority != b.priority:
        return a.priority < b.priority
    if a.arrival_ns != b.arrival_ns:
        return a.arrival_ns < b.arrival_ns
    return one < other


@part
def push(requests: Any, queues: Any, base: int, size: int, at: int, by_priority: bool) -> None:
    """One more in a heap."""
    place = size
    while place > 0:
        above = (place - 1) // 2
        if not goes_before(requests, at, queues[base + above], by_priority):
            break
        queues[base + place] = queues[base + above]
        place = above
    queues[base + place] = at


@part
def pop_first(requests: Any, queues: Any, base: int, size: int, by_priority: bool) -> None:
    """The first of a heap goes."""
    last = queues[base + size - 1]
    place, below = 0, 1
    while below < size - 1:
        if below + 1 < size - 1 and goes_before(
            requests, queues[base + below + 1], queues[base + below], by_priority
        ):
            below += 1
        if not goes_before(requests, queues[base + below], last, by_priority):
            break
        queues[base + place] = queues[base + below]
        place, below = below, 2 * below + 1
    queues[base + place] = last

"""Who runs, in the order of admission, compiled; who is scheduled in a step; who is preempted."""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.blocks.numbers import NONE
from kvtool.sim.blocks.state import State
from kvtool.sim.blocks.waiting import wait_in_front
from kvtool.sim.clock import beyond


@part
def append_running(run: Any, requests: Any, at: int) -> None:
    """Admitted: the last of the list."""
    request = requests[at]
    request.previous, request.next = run.last, NONE
    if run.last >= 0:
        requests[run.last].next = at
    else:
        run.first = at
    run.last = at
    run.running += 1
    request.is_running = 1


@part
def remove_running(run: Any, requests: Any, at: int) -> None:
    """Finished or preempted. It still knows who came after it."""
    request = requests[at]
    if request.previous >= 0:
        requests[request.previous].next = request.next
    else:
        run.first = request.next
    if request.next >= 0:
        requests[request.next].previous = request.previous
    else:
        run.last = request.previous
    run.running -= 1
    request.is_running = 0


@part
def append_scheduled(s: State, at: int, n: int) -> None:
    """So many tokens of a request in this step; if they are its last, it gets one from it."""
    run, request = s.run, s.requests[at]
    request.computed += n
    run.budget -= n
    run.now_tokens += n
    run.now_context += request.computed
    run.now_beyond += beyond(n, request.computed)
    run.now_batch += 1
    samples = request.computed == request.prompt + request.generated + request.placeholders
    if samples and run.most_in_flight > 1:
        request.placeholders += 1
    first = ((run.oldest + run.in_flight) & 1) * (len(s.lists) // 2)
    s.lists[first + run.places].batch = 2 * at + samples
    request.in_step, request.chunk, request.place = run.step, n, first + run.places
    run.places += 1


@part
def worst(run: Any, requests: Any) -> int:
    """R19: whom priorities choose: the last by (priority, arrival), of equals the first that runs."""
    found = at = run.first
    while at >= 0:
        a, b = requests[at], requests[found]
        if a.priority > b.priority or (a.priority == b.priority and a.arrival_ns > b.arrival_ns):
            found = at
        at = requests[at].next
    return found


@part
def preempt(s: State, memory: Any, at: int) -> None:
    """R5: its blocks are free at once; generated tokens are kept."""
    run, request = s.run, s.requests[at]
    if request.in_step == run.step:  # R19: its tokens are given back
        run.budget += request.chunk
        run.now_tokens -= request.chunk
        run.now_context -= request.computed
        run.now_beyond -= beyond(request.chunk, request.computed)
        run.now_batch -= 1
        s.lists[request.place].batch = NONE
        request.computed -= request.chunk
        request.in_step = NONE
    run.preemptions += 1
    run.recomputed += request.computed
    request.lost = request.computed
    request.num_preemptions += 1
    request.computed = 0
    remove_running(run, s.requests, at)
    memory.release(s, at)
    wait_in_front(s, at)

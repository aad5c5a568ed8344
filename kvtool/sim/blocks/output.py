"""The output of a step in the fast engine of blocks, compiled: tokens, and who has all of them (R14)."""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.blocks.running import remove_running
from kvtool.sim.blocks.state import State
from kvtool.sim.blocks.waiting import end, leave_front
from kvtool.sim.settings import CUT, DONE, UNFINISHED


@part
def process(s: State, memory: Any) -> None:
    """Who has computed all its tokens gets one more; who has enough of them leaves."""
    run, requests, lists = s.run, s.requests, s.lists
    slot = run.oldest
    first, step = slot * (len(lists) // 2), run.batch_step[slot]
    run.clock = max(run.clock, run.batch_end[slot])
    run.oldest = 1 - slot
    run.in_flight -= 1
    followed, gap = 0, 0
    for place in range(first, first + run.batch_places[slot]):
        entry = lists[place].batch
        if entry < 0:
            continue
        at = entry >> 1
        status = UNFINISHED
        if entry & 1:
            request = requests[at]
            if request.status != UNFINISHED:
                continue
            if request.first_token_step < 0:
                request.first_token_step, request.first_token_ns = step, run.clock
            elif request.last_step == step - 1:
                followed, gap = followed + 1, run.clock - request.last_ns
            else:
                note_gap(s, run.clock - request.last_ns, 1)
            request.last_step, request.last_ns = step, run.clock
            status = count_token(s, memory, at)
        memory.compute(s, at, status != UNFINISHED)
        if status != UNFINISHED:
            finish(s, memory, at, status, step)
    if followed > 0:
        note_gap(s, gap, followed)


@part
def note_gap(s: State, gap: int, weight: int) -> None:
    """So many requests had their last token so long ago."""
    told = s.steps[s.run.gaps_kept]
    told.gap, told.weight = gap, weight
    s.run.gaps_kept += 1


@part
def count_token(s: State, memory: Any, at: int) -> int:
    """One more token of a request, which may end with it."""
    run, request = s.run, s.requests[at]
    request.generated += 1
    in_advance = run.most_in_flight > 1
    if in_advance:
        request.placeholders -= 1
    if in_advance and run.caching and request.is_running:
        memory.schedule(s, at, request.computed - request.placeholders)
    if request.generated >= request.output:
        return DONE
    if request.prompt + request.generated >= run.max_model_len:
        return CUT
    return UNFINISHED


@part
def finish(s: State, memory: Any, at: int, status: int, step: int) -> None:
    """A request has its last token."""
    if s.requests[at].is_running:
        remove_running(s.run, s.requests, at)
        memory.release(s, at)
    else:
        leave_front(s, at)  # preempted with its last token under way
    end(s, at, status, step)

"""Admission in the fast engine of blocks, compiled: what is cached of the head, and room for it."""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.blocks.running import append_running, append_scheduled
from kvtool.sim.blocks.state import State
from kvtool.sim.blocks.tables import blocks_for
from kvtool.sim.blocks.waiting import head_of_queue, leave_queue, num_waiting
from kvtool.sim.settings import NO_MEMORY, NO_SEAT, NO_TOKENS, NOBODY_WAITS


@part
def threshold(run: Any, tokens: int) -> int:
    """R3: a long prefill is cut unless its request is the only one."""
    if run.threshold <= 0 or run.crowd <= 1:
        return tokens
    if run.adaptive:
        return min(tokens, max(run.threshold, run.max_batched_tokens // run.crowd))
    return min(tokens, run.threshold)


@part
def admit(s: State, memory: Any) -> bool:
    """R7 to R11: from the head of the queue until something fails; False: there is no room for more."""
    run = s.run
    while True:
        run.held_up = NOBODY_WAITS
        if num_waiting(run) == 0:
            return True
        run.held_up = NO_SEAT
        if run.running >= run.max_running:
            return True
        run.held_up = NO_TOKENS
        if run.budget <= 0:
            return True
        memory.sort(s, memory.look_up, memory.name)
        at = head_of_queue(s)
        request = s.requests[at]
        tokens = request.prompt + request.generated
        hits = 0
        if run.caching:
            hits = memory.look_up(s, memory.name, at, (tokens - 1) // run.block_size)
        if hits < 0:
            return False
        cached = hits * run.block_size
        n = threshold(run, tokens - cached)
        if not run.chunked_prefill and n > run.budget:
            return True
        n = min(n, run.budget)
        run.held_up = NO_MEMORY
        if not has_room(s, memory, tokens, hits, cached + n):
            return True
        blocks = blocks_for(run, min(cached + n, run.max_model_len))
        if not memory.has_records(s, blocks):
            return False
        leave_queue(s)
        memory.hold(s, at, hits)
        request.computed = cached
        memory.take(s, at, blocks - hits)
        if run.caching:
            memory.schedule(s, at, min(cached + n, run.max_model_len, tokens))
        memory.forget(s, at)
        note_hits(run, request, cached)
        append_running(run, s.requests, at)
        append_scheduled(s, at, n)


@part
def has_room(s: State, memory: Any, known: int, hits: int, tokens: int) -> bool:
    """R8 and R9: for the whole prompt so far if that is asked for, and for these tokens."""
    run = s.run
    if run.full_check:
        tokens = max(tokens, known)
    needed = blocks_for(run, min(tokens, run.max_model_len))
    if run.running > 0:
        needed += run.watermark_blocks
    return memory.has_room(s, hits, needed)


@part
def note_hits(run: Any, request: Any, cached: int) -> None:
    """Hits at the first admission, and those of a request that was preempted, apart."""
    queried = request.prompt + request.generated if run.caching else 0
    if request.admit_step < 0:
        request.admit_step, request.cached_tokens_first = run.step, cached
        run.queried += queried
        run.hit += cached
    else:
        request.cached_tokens_after_preemption += cached
        run.requery += queried
        run.rehit += cached
        run.regained += min(cached, request.lost)

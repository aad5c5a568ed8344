"""Admission in the fast engine of blocks, compiled: what is cached of the head, and room for it."""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.blocks.index import find
from kvtool.sim.blocks.names import SEED, name_of
from kvtool.sim.blocks.numbers import NONE
from kvtool.sim.blocks.running import append_running, append_scheduled
from kvtool.sim.blocks.state import State
from kvtool.sim.blocks.tables import blocks_for, has_records, register, share, take
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
def admit(s: State) -> bool:
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
        at = head_of_queue(s)
        request = s.requests[at]
        hits = look_up(s, at) if run.caching else 0
        if hits < 0:
            return False
        cached = hits * run.block_size
        n = threshold(run, request.prompt + request.generated - cached)
        if not run.chunked_prefill and n > run.budget:
            return True
        n = min(n, run.budget)
        run.held_up = NO_MEMORY
        if not has_room(s, request, hits, cached + n):
            return True
        blocks = blocks_for(run, min(cached + n, run.max_model_len))
        if not has_records(run, s.blocks, s.cells, blocks):
            return False
        leave_queue(s)
        share(s, request, hits)
        request.computed = cached
        take(s, request, blocks - hits)
        if run.caching:
            tokens = min(cached + n, run.max_model_len)
            register(s, at, min(tokens, request.prompt + request.generated))
        note_hits(run, request, cached)
        append_running(run, s.requests, at)
        append_scheduled(s, at, n)


@part
def look_up(s: State, at: int) -> int:
    """R10: of the full blocks before the last token those that are cached; NONE: no room for names."""
    run, request, names = s.run, s.requests[at], s.names
    most = (request.prompt + request.generated - 1) // run.block_size
    if run.named_for != at:
        run.named_for, run.named = at, 0
    hits = 0
    while hits < most:
        if hits == run.named:
            if hits == len(names):
                run.want_names = hits + 1
                return NONE
            chain, piece = SEED, request.first_piece
            if hits > 0:
                chain, piece = names[hits - 1].name, names[hits - 1].piece
            names[hits].name, names[hits].piece = name_of(
                run, request, s.pieces, hits, piece, chain
            )
            run.named += 1
        block = find(s.slots, names[hits].name)
        if block < 0:
            break
        names[hits].block = block
        hits += 1
    run.work += hits
    return hits


@part
def has_room(s: State, request: Any, hits: int, tokens: int) -> bool:
    """R8 and R9: for the whole prompt so far if that is asked for, and for these tokens."""
    run = s.run
    if run.full_check:
        tokens = max(tokens, request.prompt + request.generated)
    needed = blocks_for(run, min(tokens, run.max_model_len)) - hits
    if run.running > 0:
        needed += run.watermark_blocks
    if needed > run.free_blocks:
        return False
    for k in range(hits):
        needed += s.blocks[s.names[k].block].refs == 0
    return needed <= run.free_blocks


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

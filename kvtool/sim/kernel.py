"""The fast engine: the rules of kvtool.sim.scheduler without looking at each request in each step.

A request that decodes is touched when something happens to it: its next event (a growth, its last
block, its end) stands in the calendar, and how many of them need a block in a step is counted by the
phase (since - computed) modulo block_size. A step costs the same for 10 requests as for 1,000.
"""

from __future__ import annotations

from kvtool.jit import compiled, part
from kvtool.sim.admission import admit, blocks_for, hold_blocks, set_pad, threshold
from kvtool.sim.clock import LATEST_NS, beyond, step_ns
from kvtool.sim.ending import abort_head, finish_due, output_of_prefills
from kvtool.sim.lists import (
    computed_now,
    forget,
    joins_decoding,
    leaves_decoding,
    remind,
    remove_running,
)  # fmt: skip
from kvtool.sim.record import note_step, tell
from kvtool.sim.regions import grow_in_place, place, release
from kvtool.sim.settings import NO_MEMORY
from kvtool.sim.state import CALENDAR, GROW, NONE, PAGED, POINTS, Lines, Records, Run, State

ALL_DONE, MORE_REQUESTS, FULL, PAUSED, AT_HORIZON = range(5)
CLOCK_IS_FULL = 2
"""In `run.stopped`, beside 1: the head of the queue never fits."""


@compiled
def advance(s: State, queue: Records, last: bool, most_steps: int) -> int:
    """Run until all is done, requests run short, a buffer is full or so many steps are made.

    The queue is in the order of arrival and has no request that the front end rejects; `last`: no
    more will come. `run.head` is its first request that was never admitted.
    """
    run, lines = s.run, s.lines
    for _ in range(most_steps):
        if not last and len(queue) - run.head <= run.max_running:
            return MORE_REQUESTS
        kept = len(s.steps)  # a step may close as many gaps as may run
        if kept and (run.steps_kept >= kept or run.gaps_kept + run.most > kept):
            return FULL
        if run.step >= POINTS * run.width:
            return FULL
        if run.running + run.preempted == 0 and run.head >= len(queue):
            return ALL_DONE
        if begins_at(run, queue) >= run.until_ns:
            return AT_HORIZON
        arrive(run, queue)
        measured = run.done + run.aborted >= run.warm_up
        preemptions = run.preemptions
        plan_chunks(run, lines)
        if run.allocator == PAGED:
            take_blocks(run, lines)
        elif run.allocator == GROW:
            grow_regions(run, lines)
        compute(run, lines)
        preempted = run.preemptions > preemptions
        held_up = NO_MEMORY  # R6: a step that preempted admits nobody
        if not preempted:
            held_up = admit(run, lines, queue)
        tick(run)
        waiting = run.preempted + run.arrived - run.head
        measured = measured and (waiting > 0 or run.head < len(queue) or not last)
        note_step(run, s.sums, s.steps, measured, held_up, waiting)
        finish_due(run, lines)
        output_of_prefills(run, lines)
        if run.running + run.now_tokens == 0 and (not preempted or never_fits(run, lines)):
            abort_head(run, lines, queue)
        tell(run, lines, s.outcomes, s.steps)
        run.step += 1
        run.phase = run.phase + 1 if run.phase + 1 < run.block_size else 0
        if run.stopped:
            return ALL_DONE
    return PAUSED


@part
def begins_at(run: Run, queue: Records) -> int:
    """When the next step begins: now, or when somebody comes."""
    if run.running + run.preempted > 0:
        return run.clock
    return max(run.clock, queue[run.head].arrival_ns)


@part
def arrive(run: Run, queue: Records) -> None:
    """Who has come by now waits; if nobody is here, the clock goes to the next arrival."""
    run.clock = begins_at(run, queue)
    while run.arrived < len(queue) and queue[run.arrived].arrival_ns <= run.clock:
        run.arrived += 1
    run.seen_ns, run.swapped_before = run.clock, run.swapped
    run.ended_prompt_before, run.ended_requests_before = run.ended_prompt, run.ended_requests
    run.crowd = run.running + run.preempted + run.arrived - run.head


@part
def compute(run: Run, lines: Lines) -> None:
    """Count the tokens of this step: one for each that decodes, the chunks of the prefills."""
    run.now_unseen = run.now_beyond = 0
    if run.skipped:
        delay_skipped(run, lines)
    if run.allocator == PAGED:
        note_last_blocks(run, lines)
    run.now_decoded = run.now_tokens = run.now_batch = run.decoding - run.skipped
    for k in range(run.prefilling):
        at = lines[k].prefilling
        line = lines[at]
        line.computed += line.chunk
        run.now_tokens += line.chunk
        if line.chunk:
            run.now_batch += 1
            run.now_beyond += beyond(line.chunk, line.computed)
        else:
            run.now_unseen += line.computed
        if run.allocator == PAGED:
            set_pad(run, lines, at, line.computed)


@part
def tick(run: Run) -> None:
    """The clock at the end of the step; it stops where 64 bits end."""
    run.tokens += run.now_tokens
    run.scheduled += run.now_tokens
    run.now_context = run.tokens - run.now_unseen
    passed, moved = step_ns(run), run.swapped - run.swapped_before
    if passed < 0 or float(run.clock) + passed + float(run.swap_ns) * moved > LATEST_NS:
        run.stopped = CLOCK_IS_FULL
        return
    run.clock += passed + run.swap_ns * moved


@part
def plan_chunks(run: Run, lines: Lines) -> None:
    """R2 and R3: the tokens of each prefill in this step, and who decodes but gets no token."""
    run.skipped = 0
    wanted = run.decoding
    for k in range(run.prefilling):
        line = lines[lines[k].prefilling]
        line.chunk = threshold(run, line.prompt + line.generated - line.computed)
        wanted += line.chunk
    if wanted <= run.token_budget:
        return
    budget, at = run.token_budget, run.first
    while at >= 0:  # rare: the order of admission decides who is served
        line = lines[at]
        if line.since < 0:
            line.chunk = min(line.chunk, budget)
            budget -= line.chunk
        elif budget > 0:
            budget -= 1
        else:
            line.skipped = run.step
            run.skipped += 1
        at = line.next


@part
def blocks_needed(run: Run, lines: Lines, at: int) -> int:
    """Blocks that a running request asks for in this step."""
    line = lines[at]
    if line.since < 0:
        return blocks_for(run, line.computed + line.chunk) - blocks_for(run, line.computed)
    asks = (
        line.skipped != run.step and (line.since - line.computed - run.step) % run.block_size == 0
    )
    return 1 if asks else 0


@part
def take_blocks(run: Run, lines: Lines) -> None:
    """R4 and R5: preempt from the end until what is left fits, then take the blocks of all.

    vLLM goes through the requests in order and preempts the last one when a block is missing. Who is
    left in the end is the same: the longest beginning of the list whose needs can be met.
    """
    needed = run.phases[run.phase]
    if run.skipped:
        needed, at = 0, run.first
        while at >= 0:
            needed += blocks_needed(run, lines, at) if lines[at].since >= 0 else 0
            at = lines[at].next
    for k in range(run.prefilling):
        needed += blocks_needed(run, lines, lines[k].prefilling)
    while needed > run.free_blocks:
        needed -= blocks_needed(run, lines, run.last)
        preempt(run, lines, run.last)
    hold_blocks(run, needed)


@part
def grow_regions(run: Run, lines: Lines) -> None:
    """The regions that are full, in the order of admission; who finds no hole preempts from the end."""
    at = first_full(run, lines)
    while at >= 0:
        line = lines[at]
        wanted = min(2 * line.room, run.max_model_len)
        while line.since >= 0 and not grow_in_place(run, lines, at, wanted):
            if place(run, lines, at, wanted):
                run.copied += computed_now(run, lines, at)
                break
            preempt(run, lines, run.last)
        if line.since >= 0:
            forget(run, lines, at)
            remind(run, lines, at)
        at = first_full(run, lines)


@part
def first_full(run: Run, lines: Lines) -> int:
    """Who was admitted first of those that need a slot in this step and have none left."""
    first, at = NONE, run.calendar[run.step & (CALENDAR - 1)]
    while at >= 0:
        line = lines[at]
        if line.due == run.step and line.skipped != run.step:
            full = computed_now(run, lines, at) == line.room
            if full and (first < 0 or line.stamp < lines[first].stamp):
                first = at
        at = line.later
    return first


@part
def preempt(run: Run, lines: Lines, at: int) -> None:
    """R5: its memory is free at once; it waits in front, to be computed anew or swapped in again."""
    line = lines[at]
    tokens, blocks = computed_now(run, lines, at), 0
    if line.since >= 0:
        line.last_ns = run.clock
        leaves_decoding(run, lines, at)
    else:
        run.prefilling -= 1  # the last that was admitted stands last here too
    if run.allocator == PAGED:
        blocks = blocks_for(run, tokens)
        hold_blocks(run, -blocks)
        line.needed = blocks_for(run, min(line.prompt + line.generated, run.max_model_len))
        run.internal -= line.pad
        line.pad = 0
    else:
        release(run, lines, at)
    run.tokens -= tokens
    remove_running(run, lines, at)
    line.computed = 0
    if run.swaps and run.allocator == PAGED and blocks <= run.cpu_blocks - run.cpu_used:
        line.computed, line.on_cpu = tokens, blocks
        run.cpu_used += blocks
        run.swapped += blocks
    else:
        run.recomputed += tokens
    lines[run.preempted].preempted = at
    run.preempted += 1
    run.preemptions += 1
    line.num_preemptions += 1


@part
def never_fits(run: Run, lines: Lines) -> bool:
    """Unchecked and larger than the pool: vLLM would compute and preempt the head for ever."""
    head = lines[lines[run.preempted - 1].preempted]
    return (
        run.allocator == PAGED
        and not run.full_check
        and head.prompt + head.generated > run.num_slots
    )


@part
def delay_skipped(run: Run, lines: Lines) -> None:
    """Who got no token does one step later what it was to do."""
    run.skipped, at = 0, run.first
    while at >= 0:
        line = lines[at]
        if line.since >= 0 and line.skipped == run.step:
            run.skipped += 1
            run.skips += 1
            run.now_unseen += computed_now(run, lines, at)
            leaves_decoding(run, lines, at)
            joins_decoding(run, lines, at, run.step + 1)
        at = line.next


@part
def note_last_blocks(run: Run, lines: Lines) -> None:
    """Who took its last block in this step holds slots from now on that it will never use."""
    at = run.calendar[run.step & (CALENDAR - 1)]
    while at >= 0:
        line = lines[at]
        later = line.later
        if line.due == run.step and line.pad == 0 and line.final % run.block_size:
            forget(run, lines, at)
            set_pad(run, lines, at, line.final)
            remind(run, lines, at)
        at = later

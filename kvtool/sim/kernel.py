"""The fast engine: the rules of kvtool.sim.scheduler without looking at each request in each step.

A request that decodes is touched when something happens to it: its next event (a growth, its last
block, its end) stands in the calendar, and how many of them need a block in a step is counted by the
phase (since - computed) modulo block_size. A step costs the same for 10 requests as for 1,000.
"""

from __future__ import annotations

from typing import Any

from kvtool.sim.jit import compiled, part
from kvtool.sim.lists import (
    append_running, computed_now, forget, joins_decoding, leaves_decoding, remind,
    remove_running,
)  # fmt: skip
from kvtool.sim.memory import ALLOCATORS, SMALLEST_REGION
from kvtool.sim.record import note_step, note_token, tell
from kvtool.sim.regions import extend, move, order_of, place, release
from kvtool.sim.settings import ABORTED, CUT, DONE
from kvtool.sim.state import CALENDAR, NONE, STEPS_KEPT, Lines, Records, Run, State

PAGED, MAX, POW2, ORACLE, GROW = (
    ALLOCATORS.index(name) for name in ("paged", "max", "pow2", "oracle", "grow")
)
ALL_DONE, MORE_REQUESTS, FULL, PAUSED = range(4)


@compiled
def advance(s: State, queue: Records, last: bool, most_steps: int) -> int:
    """Run until all is done, requests run short, a buffer is full or so many steps are made.

    The requests are in the order of arrival and none is one that the front end rejects; `last`: no
    more will come. `run.head` is the first that was never admitted.
    """
    run = s.run
    for _ in range(most_steps):
        if not last and len(queue) - run.head <= run.max_running:
            return MORE_REQUESTS
        if run.running + run.preempted == 0:
            if run.head >= len(queue):
                return ALL_DONE
            run.clock = max(run.clock, queue[run.head].arrival_ns)
        while run.arrived < len(queue) and queue[run.arrived].arrival_ns <= run.clock:
            run.arrived += 1
        if len(s.steps) and max(run.steps_kept, run.gaps_kept + run.running) >= STEPS_KEPT:
            return FULL
        step(run, s.lines, s.sums, s.outcomes, s.steps, queue, last)
        if run.stopped:
            return ALL_DONE
    return PAUSED


@part
def step(
    run: Run,
    lines: Lines,
    sums: Records,
    outcomes: Records,
    steps: Records,
    queue: Records,
    last: bool,
) -> None:
    """One call of the scheduler, its clock, and its output."""
    measured = run.done + run.aborted >= run.warm_up
    before = run.preemptions
    crowd = run.running + run.preempted + run.arrived - run.head
    skipped = plan_chunks(run, lines, crowd)
    if run.allocator == PAGED:
        take_blocks(run, lines, skipped)
    elif run.allocator == GROW:
        grow_regions(run, lines)
    preempted = run.preemptions > before
    unseen = delay_skipped(run, lines) if skipped else 0  # tokens of who was skipped
    if skipped:
        skipped = run.skipped
    if run.allocator == PAGED:
        note_last_blocks(run, lines)
    decoded = run.decoding - skipped
    scheduled, batch = decoded, decoded
    for place_in_list in range(run.prefilling):
        line = lines[lines[place_in_list].prefilling]
        line.computed += line.chunk
        scheduled += line.chunk
        batch += line.chunk > 0
        if line.chunk == 0:
            unseen += line.computed
        if run.allocator == PAGED:
            set_pad(run, lines, lines[place_in_list].prefilling, line.computed)
    blocked = True
    if not preempted:
        first_new = run.prefilling
        blocked = admit(run, lines, queue, run.token_budget - scheduled, crowd)
        for place_in_list in range(first_new, run.prefilling):
            scheduled += lines[lines[place_in_list].prefilling].chunk
        batch += run.prefilling - first_new
    run.tokens += scheduled
    context = run.tokens - unseen
    run.scheduled += scheduled
    run.clock += run.base_ns + run.token_ns * scheduled + run.context_ns * context
    waiting = run.preempted + run.arrived - run.head
    measured = measured and (waiting > 0 or run.head < len(queue) or not last)
    note_step(run, sums, steps, measured, blocked, scheduled, batch, waiting, context, decoded)
    finish_due(run, lines)
    output_of_prefills(run, lines)
    if scheduled == 0 and not preempted:
        stall(run, lines, queue)
    tell(run, lines, outcomes, steps)
    run.step += 1


@part
def plan_chunks(run: Run, lines: Lines, crowd: int) -> int:
    """R2 and R3: the tokens of each prefill in this step. How many that decode get no token."""
    wanted = run.decoding
    for place_in_list in range(run.prefilling):
        line = lines[lines[place_in_list].prefilling]
        line.chunk = threshold(run, lines, line.prompt + line.generated - line.computed, crowd)
        wanted += line.chunk
    if wanted <= run.token_budget:
        return 0
    skipped, budget, at = 0, run.token_budget, run.first
    while at >= 0:  # rare: the order of admission decides who is served
        line = lines[at]
        if line.since < 0:
            line.chunk = min(line.chunk, budget)
            budget -= line.chunk
        elif budget > 0:
            budget -= 1
        else:
            line.skipped = run.step
            skipped += 1
        at = line.next
    return skipped


@part
def threshold(run: Run, lines: Lines, tokens: int, crowd: int) -> int:
    """R3: a long prefill is cut unless its request is the only one."""
    if run.threshold <= 0 or crowd <= 1:
        return tokens
    if run.adaptive:
        return min(tokens, max(run.threshold, run.max_batched_tokens // crowd))
    return min(tokens, run.threshold)


@part
def blocks_for(run: Run, lines: Lines, tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return (tokens + run.block_size - 1) // run.block_size


@part
def blocks_needed(run: Run, lines: Lines, at: int) -> int:
    """Blocks that a running request asks for in this step."""
    line = lines[at]
    if line.since < 0:
        return blocks_for(run, lines, line.computed + line.chunk) - blocks_for(run, lines, line.computed)
    asks = line.skipped != run.step and (line.since - line.computed - run.step) % run.block_size == 0
    return 1 if asks else 0


@part
def take_blocks(run: Run, lines: Lines, skipped: int) -> None:
    """R4 and R5: preempt from the end until what is left fits, then take the blocks of all.

    vLLM goes through the requests in order and preempts the last one when a block is missing. Who is
    left in the end is the same: the longest beginning of the list whose needs can be met.
    """
    needed = run.phases[run.step % run.block_size]
    if skipped:
        needed, at = 0, run.first
        while at >= 0:
            needed += blocks_needed(run, lines, at) if lines[at].since >= 0 else 0
            at = lines[at].next
    for place_in_list in range(run.prefilling):
        needed += blocks_needed(run, lines, lines[place_in_list].prefilling)
    while needed > run.num_blocks - run.held // run.block_size:
        needed -= blocks_needed(run, lines, run.last)
        preempt(run, lines, run.last)
    run.held += needed * run.block_size


@part
def grow_regions(run: Run, lines: Lines) -> None:
    """The regions that are full, in the order of admission; who finds no hole preempts from the end."""
    count, at = 0, run.calendar[run.step & (CALENDAR - 1)]
    while at >= 0:
        line = lines[at]
        if line.due == run.step and computed_now(run, lines, at) == line.room and line.skipped != run.step:
            place_in_list = count
            while place_in_list and lines[lines[place_in_list - 1].growing].stamp > line.stamp:
                lines[place_in_list].growing = lines[place_in_list - 1].growing
                place_in_list -= 1
            lines[place_in_list].growing = at
            count += 1
        at = line.later
    for place_in_list in range(count):
        at = lines[place_in_list].growing
        line = lines[at]
        if line.since < 0:  # preempted by one before it
            continue
        wanted = min(2 * line.room, run.max_model_len)
        while line.since >= 0 and not extend(run, lines, at, wanted):
            if move(run, lines, at, wanted):
                run.copied += computed_now(run, lines, at)
                break
            preempt(run, lines, run.last)
        if line.since >= 0:
            forget(run, lines, at)
            remind(run, lines, at)


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
        blocks = blocks_for(run, lines, tokens)
        run.held -= blocks * run.block_size
        run.internal -= line.pad
        line.pad = 0
    else:
        release(run, lines, at)
    run.tokens -= tokens
    remove_running(run, lines, at)
    line.computed = 0
    if run.swaps and blocks <= run.cpu_blocks - run.cpu_used:
        line.computed, line.on_cpu = tokens, blocks
        run.cpu_used += blocks
        run.swapped += blocks
    else:
        run.recomputed += tokens
    lines[run.preempted].preempted = at
    run.preempted += 1
    run.preemptions += 1
    line.num_preemptions += 1
    total = line.prompt + line.generated
    if run.running == 0 and not run.full_check and run.allocator == PAGED and total > run.num_slots:
        abort_preempted(run, lines)  # vLLM would compute and preempt it for ever


@part
def delay_skipped(run: Run, lines: Lines) -> int:
    """Who got no token does one step later what it was to do. The tokens that they hold."""
    run.skipped, tokens, at = 0, 0, run.first
    while at >= 0:
        line = lines[at]
        if line.since >= 0 and line.skipped == run.step:
            run.skipped += 1
            run.skips += 1
            tokens += computed_now(run, lines, at)
            leaves_decoding(run, lines, at)
            joins_decoding(run, lines, at, run.step + 1)
        at = line.next
    return tokens


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


@part
def set_pad(run: Run, lines: Lines, at: int, tokens: int) -> None:
    """The slots of so many tokens' blocks that are beyond the last token of the request."""
    line = lines[at]
    pad = max(0, blocks_for(run, lines, tokens) * run.block_size - line.final)
    run.internal += pad - line.pad
    line.pad = pad


@part
def admit(run: Run, lines: Lines, queue: Records, budget: int, crowd: int) -> bool:
    """R7 to R9: from the head of the queue until something fails. Whether memory failed."""
    while budget > 0 and run.running < run.max_running:
        resumed = run.preempted > 0
        if resumed:
            at = lines[run.preempted - 1].preempted
        elif run.head < run.arrived:
            at = new_line(run, lines, queue[run.head])
        else:
            return False
        line = lines[at]
        tokens = threshold(run, lines, line.prompt + line.generated - line.computed, crowd)
        if not run.chunked_prefill and tokens > budget:
            return False
        tokens = min(tokens, budget)
        if not take_memory(run, lines, at, line.computed + tokens):
            return True
        if resumed:
            run.preempted -= 1
        else:
            run.head += 1
            run.free_lines -= 1
        run.cpu_used -= line.on_cpu
        run.swapped += line.on_cpu
        line.on_cpu = 0
        run.tokens += line.computed  # what was swapped in
        line.computed += tokens
        line.chunk = tokens
        budget -= tokens
        append_running(run, lines, at)
        lines[run.prefilling].prefilling = at
        run.prefilling += 1
        if run.allocator == PAGED:
            set_pad(run, lines, at, line.computed)
        if line.admit_step < 0:
            line.admit_step = run.step
    return False


@part
def new_line(run: Run, lines: Lines, request: Any) -> int:
    """The line that the head of the queue gets if it is admitted."""
    at = lines[run.free_lines - 1].free
    line = lines[at]
    line.index, line.prompt, line.output = request.index, request.prompt, request.output
    line.limit = min(line.output, run.max_model_len - line.prompt)
    line.final = line.prompt + line.limit - 1
    line.since = line.skipped = line.last_ns = line.room = line.address = NONE
    line.admit_step = line.first_token_step = line.first_token_ns = NONE
    line.computed = line.generated = line.chunk = line.pad = line.on_cpu = 0
    line.num_preemptions = 0
    return at


@part
def take_memory(run: Run, lines: Lines, at: int, tokens: int) -> bool:
    """Room for the first tokens of a request, if the allocator lets it in."""
    line = lines[at]
    total = line.prompt + line.generated
    if run.allocator != PAGED:
        return place(run, lines, reservation(run, lines, at, total), at) >= 0
    free = run.num_blocks - run.held // run.block_size
    needed = blocks_for(run, lines, min(total if run.full_check else tokens, run.max_model_len))
    if needed + (run.watermark_blocks if run.running else 0) > free:
        return False
    run.held += blocks_for(run, lines, tokens) * run.block_size
    return True


@part
def reservation(run: Run, lines: Lines, at: int, total: int) -> int:
    """Slots that a contiguous allocator asks for: kvtool.sim.memory.reservation."""
    line = lines[at]
    if run.allocator == MAX:
        return run.max_model_len
    if run.allocator == POW2:
        return min(line.prompt + (1 << order_of(line.output)), run.max_model_len)
    if run.allocator == ORACLE:
        return line.final
    return min(max(SMALLEST_REGION, 1 << order_of(total + 1)), run.max_model_len)


@part
def finish_due(run: Run, lines: Lines) -> None:
    """R14 for those that decode: who has its last token in this step leaves."""
    at = run.calendar[run.step & (CALENDAR - 1)]
    while at >= 0:
        line = lines[at]
        later = line.later
        if line.due == run.step:
            leaves_decoding(run, lines, at)
            line.computed, line.generated = line.final, line.limit
            finish(run, lines, at)
        at = later


@part
def output_of_prefills(run: Run, lines: Lines) -> None:
    """R14 for those that had prompt left: who has computed it all gets a token, and decodes on."""
    kept = 0
    for place_in_list in range(run.prefilling):
        at = lines[place_in_list].prefilling
        line = lines[at]
        if line.computed < line.prompt + line.generated:
            lines[kept].prefilling = at
            kept += 1
            continue
        line.generated += 1
        note_token(run, lines, at)
        if line.generated >= line.limit:
            finish(run, lines, at)
        else:
            joins_decoding(run, lines, at, run.step + 1)
    run.prefilling = kept


@part
def finish(run: Run, lines: Lines, at: int) -> None:
    """The request has all its tokens; its line is free."""
    line = lines[at]
    cut = line.limit < line.output
    run.done += 1
    run.cut += cut
    run.tokens -= line.computed
    if run.allocator == PAGED:
        run.held -= blocks_for(run, lines, line.computed) * run.block_size
        run.internal -= line.pad
    else:
        release(run, lines, at)
    remove_running(run, lines, at)
    end(run, lines, at, CUT if cut else DONE)


@part
def end(run: Run, lines: Lines, at: int, status: int) -> None:
    """What became of a request is told at the end of the step; then its line is free."""
    lines[at].status = status
    lines[run.ended].ended = at
    run.ended += 1


@part
def stall(run: Run, lines: Lines, queue: Records) -> None:
    """R18: nothing will change, because the head never fits: it is aborted, or the run ends."""
    if run.preempted > 0:
        abort_preempted(run, lines)
    elif run.aborts:
        at = new_line(run, lines, queue[run.head])
        run.head += 1
        run.free_lines -= 1
        run.aborted += 1
        end(run, lines, at, ABORTED)
    else:
        run.stopped = 1


@part
def abort_preempted(run: Run, lines: Lines) -> None:
    """The same for a head that has run before."""
    if not run.aborts:
        run.stopped = 1
        return
    run.preempted -= 1
    at = lines[run.preempted].preempted
    run.cpu_used -= lines[at].on_cpu
    run.aborted += 1
    end(run, lines, at, ABORTED)

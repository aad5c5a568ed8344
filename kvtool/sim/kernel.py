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
from kvtool.sim.record import note_step, note_token
from kvtool.sim.regions import extend, move, order_of, place, release
from kvtool.sim.settings import ABORTED, CUT, DONE
from kvtool.sim.state import CALENDAR, NONE, STEPS_KEPT, Records, State

PAGED, MAX, POW2, ORACLE, GROW = (
    ALLOCATORS.index(name) for name in ("paged", "max", "pow2", "oracle", "grow")
)
ALL_DONE, MORE_REQUESTS, FULL, PAUSED = range(4)


@compiled
def advance(s: State, queue: Records, last: bool, steps: int) -> int:
    """Run until all is done, requests run short, a buffer is full or so many steps are made.

    The requests are in the order of arrival and none is one that the front end rejects; `last`: no
    more will come. `run.head` is the first that was never admitted.
    """
    run = s.run
    for _ in range(steps):
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
        step(s, queue, last)
        if run.stopped:
            return ALL_DONE
    return PAUSED


@part
def step(s: State, queue: Records, last: bool) -> None:
    """One call of the scheduler, its clock, and its output."""
    run = s.run
    measured = run.done + run.aborted >= run.warm_up
    before = run.preemptions
    crowd = run.running + run.preempted + run.arrived - run.head
    skipped = plan_chunks(s, crowd)
    if run.allocator == PAGED:
        take_blocks(s, skipped)
    elif run.allocator == GROW:
        grow_regions(s)
    preempted = run.preemptions > before
    unseen = delay_skipped(s) if skipped else 0  # tokens of who was skipped
    if skipped:
        skipped = run.skipped
    if run.allocator == PAGED:
        note_last_blocks(s)
    decoded = run.decoding - skipped
    scheduled, batch = decoded, decoded
    for place_in_list in range(run.prefilling):
        line = s.lines[s.lines[place_in_list].prefilling]
        line.computed += line.chunk
        scheduled += line.chunk
        batch += line.chunk > 0
        if line.chunk == 0:
            unseen += line.computed
        if run.allocator == PAGED:
            set_pad(s, s.lines[place_in_list].prefilling, line.computed)
    blocked = True
    if not preempted:
        first_new = run.prefilling
        blocked = admit(s, queue, run.token_budget - scheduled, crowd)
        for place_in_list in range(first_new, run.prefilling):
            scheduled += s.lines[s.lines[place_in_list].prefilling].chunk
        batch += run.prefilling - first_new
    run.tokens += scheduled
    context = run.tokens - unseen
    run.scheduled += scheduled
    run.clock += run.base_ns + run.token_ns * scheduled + run.context_ns * context
    waiting = run.preempted + run.arrived - run.head
    measured = measured and (waiting > 0 or run.head < len(queue) or not last)
    note_step(s, measured, blocked, scheduled, batch, waiting, context, decoded)
    finish_due(s)
    output_of_prefills(s)
    if scheduled == 0 and not preempted:
        stall(s, queue)
    run.step += 1


@part
def plan_chunks(s: State, crowd: int) -> int:
    """R2 and R3: the tokens of each prefill in this step. How many that decode get no token."""
    run = s.run
    wanted = run.decoding
    for place_in_list in range(run.prefilling):
        line = s.lines[s.lines[place_in_list].prefilling]
        line.chunk = threshold(s, line.prompt + line.generated - line.computed, crowd)
        wanted += line.chunk
    if wanted <= run.token_budget:
        return 0
    skipped, budget, at = 0, run.token_budget, run.first
    while at >= 0:  # rare: the order of admission decides who is served
        line = s.lines[at]
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
def threshold(s: State, tokens: int, crowd: int) -> int:
    """R3: a long prefill is cut unless its request is the only one."""
    run = s.run
    if run.threshold <= 0 or crowd <= 1:
        return tokens
    if run.adaptive:
        return min(tokens, max(run.threshold, run.max_batched_tokens // crowd))
    return min(tokens, run.threshold)


@part
def blocks_for(s: State, tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return (tokens + s.run.block_size - 1) // s.run.block_size


@part
def blocks_needed(s: State, at: int) -> int:
    """Blocks that a running request asks for in this step."""
    run, line = s.run, s.lines[at]
    if line.since < 0:
        return blocks_for(s, line.computed + line.chunk) - blocks_for(s, line.computed)
    asks = line.skipped != run.step and (line.since - line.computed - run.step) % run.block_size == 0
    return 1 if asks else 0


@part
def take_blocks(s: State, skipped: int) -> None:
    """R4 and R5: preempt from the end until what is left fits, then take the blocks of all.

    vLLM goes through the requests in order and preempts the last one when a block is missing. Who is
    left in the end is the same: the longest beginning of the list whose needs can be met.
    """
    run = s.run
    needed = s.marks[CALENDAR + run.step % run.block_size]
    if skipped:
        needed, at = 0, run.first
        while at >= 0:
            needed += blocks_needed(s, at) if s.lines[at].since >= 0 else 0
            at = s.lines[at].next
    for place_in_list in range(run.prefilling):
        needed += blocks_needed(s, s.lines[place_in_list].prefilling)
    while needed > run.num_blocks - run.held // run.block_size:
        needed -= blocks_needed(s, run.last)
        preempt(s, run.last)
    run.held += needed * run.block_size


@part
def grow_regions(s: State) -> None:
    """The regions that are full, in the order of admission; who finds no hole preempts from the end."""
    run = s.run
    count, at = 0, s.marks[run.step & (CALENDAR - 1)]
    while at >= 0:
        line = s.lines[at]
        if line.due == run.step and computed_now(s, at) == line.room and line.skipped != run.step:
            place_in_list = count
            while place_in_list and s.lines[s.lines[place_in_list - 1].growing].stamp > line.stamp:
                s.lines[place_in_list].growing = s.lines[place_in_list - 1].growing
                place_in_list -= 1
            s.lines[place_in_list].growing = at
            count += 1
        at = line.later
    for place_in_list in range(count):
        at = s.lines[place_in_list].growing
        line = s.lines[at]
        if line.since < 0:  # preempted by one before it
            continue
        wanted = min(2 * line.room, run.max_model_len)
        while line.since >= 0 and not extend(s, at, wanted):
            if move(s, at, wanted):
                run.copied += computed_now(s, at)
                break
            preempt(s, run.last)
        if line.since >= 0:
            forget(s, at)
            remind(s, at)


@part
def preempt(s: State, at: int) -> None:
    """R5: its memory is free at once; it waits in front, to be computed anew or swapped in again."""
    run, line = s.run, s.lines[at]
    tokens, blocks = computed_now(s, at), 0
    if line.since >= 0:
        line.last_ns = run.clock
        leaves_decoding(s, at)
    else:
        run.prefilling -= 1  # the last that was admitted stands last here too
    if run.allocator == PAGED:
        blocks = blocks_for(s, tokens)
        run.held -= blocks * run.block_size
        run.internal -= line.pad
        line.pad = 0
    else:
        release(s, at)
    run.tokens -= tokens
    remove_running(s, at)
    line.computed = 0
    if run.swaps and blocks <= run.cpu_blocks - run.cpu_used:
        line.computed, line.on_cpu = tokens, blocks
        run.cpu_used += blocks
        run.swapped += blocks
    else:
        run.recomputed += tokens
    s.lines[run.preempted].preempted = at
    run.preempted += 1
    run.preemptions += 1
    if len(s.outcomes):
        s.outcomes[line.index].num_preemptions += 1
    total = line.prompt + line.generated
    if run.running == 0 and not run.full_check and run.allocator == PAGED and total > run.num_slots:
        abort_preempted(s)  # vLLM would compute and preempt it for ever


@part
def delay_skipped(s: State) -> int:
    """Who got no token does one step later what it was to do. The tokens that they hold."""
    run = s.run
    run.skipped, tokens, at = 0, 0, run.first
    while at >= 0:
        line = s.lines[at]
        if line.since >= 0 and line.skipped == run.step:
            run.skipped += 1
            run.skips += 1
            tokens += computed_now(s, at)
            leaves_decoding(s, at)
            joins_decoding(s, at, run.step + 1)
        at = line.next
    return tokens


@part
def note_last_blocks(s: State) -> None:
    """Who took its last block in this step holds slots from now on that it will never use."""
    run = s.run
    at = s.marks[run.step & (CALENDAR - 1)]
    while at >= 0:
        line = s.lines[at]
        later = line.later
        if line.due == run.step and line.pad == 0 and line.final % run.block_size:
            forget(s, at)
            set_pad(s, at, line.final)
            remind(s, at)
        at = later


@part
def set_pad(s: State, at: int, tokens: int) -> None:
    """The slots of so many tokens' blocks that are beyond the last token of the request."""
    run, line = s.run, s.lines[at]
    pad = max(0, blocks_for(s, tokens) * run.block_size - line.final)
    run.internal += pad - line.pad
    line.pad = pad


@part
def admit(s: State, queue: Records, budget: int, crowd: int) -> bool:
    """R7 to R9: from the head of the queue until something fails. Whether memory failed."""
    run = s.run
    while budget > 0 and run.running < run.max_running:
        resumed = run.preempted > 0
        if resumed:
            at = s.lines[run.preempted - 1].preempted
        elif run.head < run.arrived:
            at = new_line(s, queue[run.head])
        else:
            return False
        line = s.lines[at]
        tokens = threshold(s, line.prompt + line.generated - line.computed, crowd)
        if not run.chunked_prefill and tokens > budget:
            return False
        tokens = min(tokens, budget)
        if not take_memory(s, at, line.computed + tokens):
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
        append_running(s, at)
        s.lines[run.prefilling].prefilling = at
        run.prefilling += 1
        if run.allocator == PAGED:
            set_pad(s, at, line.computed)
        if len(s.outcomes) and s.outcomes[line.index].admit_step < 0:
            s.outcomes[line.index].admit_step = run.step
    return False


@part
def new_line(s: State, request: Any) -> int:
    """The line that the head of the queue gets if it is admitted."""
    run = s.run
    at = s.lines[run.free_lines - 1].free
    line = s.lines[at]
    line.index, line.prompt, line.output = request.index, request.prompt, request.output
    line.limit = min(line.output, run.max_model_len - line.prompt)
    line.final = line.prompt + line.limit - 1
    line.since = line.skipped = line.last_ns = line.room = line.address = NONE
    line.computed = line.generated = line.chunk = line.pad = line.on_cpu = 0
    return at


@part
def take_memory(s: State, at: int, tokens: int) -> bool:
    """Room for the first tokens of a request, if the allocator lets it in."""
    run, line = s.run, s.lines[at]
    total = line.prompt + line.generated
    if run.allocator != PAGED:
        return place(s, reservation(s, at, total), at) >= 0
    free = run.num_blocks - run.held // run.block_size
    needed = blocks_for(s, min(total if run.full_check else tokens, run.max_model_len))
    if needed + (run.watermark_blocks if run.running else 0) > free:
        return False
    run.held += blocks_for(s, tokens) * run.block_size
    return True


@part
def reservation(s: State, at: int, total: int) -> int:
    """Slots that a contiguous allocator asks for: kvtool.sim.memory.reservation."""
    run, line = s.run, s.lines[at]
    if run.allocator == MAX:
        return run.max_model_len
    if run.allocator == POW2:
        return min(line.prompt + (1 << order_of(line.output)), run.max_model_len)
    if run.allocator == ORACLE:
        return line.final
    return min(max(SMALLEST_REGION, 1 << order_of(total + 1)), run.max_model_len)


@part
def finish_due(s: State) -> None:
    """R14 for those that decode: who has its last token in this step leaves."""
    run = s.run
    at = s.marks[run.step & (CALENDAR - 1)]
    while at >= 0:
        line = s.lines[at]
        later = line.later
        if line.due == run.step:
            leaves_decoding(s, at)
            line.computed, line.generated = line.final, line.limit
            finish(s, at)
        at = later


@part
def output_of_prefills(s: State) -> None:
    """R14 for those that had prompt left: who has computed it all gets a token, and decodes on."""
    run = s.run
    kept = 0
    for place_in_list in range(run.prefilling):
        at = s.lines[place_in_list].prefilling
        line = s.lines[at]
        if line.computed < line.prompt + line.generated:
            s.lines[kept].prefilling = at
            kept += 1
            continue
        line.generated += 1
        note_token(s, at)
        if line.generated >= line.limit:
            finish(s, at)
        else:
            joins_decoding(s, at, run.step + 1)
    run.prefilling = kept


@part
def finish(s: State, at: int) -> None:
    """The request has all its tokens; its line is free."""
    run, line = s.run, s.lines[at]
    cut = line.limit < line.output
    run.done += 1
    run.cut += cut
    run.tokens -= line.computed
    if run.allocator == PAGED:
        run.held -= blocks_for(s, line.computed) * run.block_size
        run.internal -= line.pad
    else:
        release(s, at)
    remove_running(s, at)
    end(s, at, CUT if cut else DONE)


@part
def end(s: State, at: int, status: int) -> None:
    """Tell what became of a request."""
    run, line = s.run, s.lines[at]
    s.lines[run.free_lines].free = at
    run.free_lines += 1
    if len(s.outcomes):
        told = s.outcomes[line.index]
        told.finish_step, told.finish_ns = run.step, run.clock
        told.generated, told.status = line.generated, status


@part
def stall(s: State, queue: Records) -> None:
    """R18: nothing will change, because the head never fits: it is aborted, or the run ends."""
    run = s.run
    if run.preempted > 0:
        abort_preempted(s)
    elif run.aborts:
        at = new_line(s, queue[run.head])
        run.head += 1
        run.free_lines -= 1
        run.aborted += 1
        end(s, at, ABORTED)
    else:
        run.stopped = 1


@part
def abort_preempted(s: State) -> None:
    """The same for a head that has run before."""
    run = s.run
    if not run.aborts:
        run.stopped = 1
        return
    run.preempted -= 1
    at = s.lines[run.preempted].preempted
    run.cpu_used -= s.lines[at].on_cpu
    run.aborted += 1
    end(s, at, ABORTED)

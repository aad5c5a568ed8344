"""The fast engine where blocks are told apart: kvtool.sim.blocks.scheduler in records, compiled.

A step looks at each running request once. What the records have no room for makes the run pause before
anything is lost: the driver makes room and goes on.
"""

from __future__ import annotations

from typing import Any

from kvtool.jit import compiled, part
from kvtool.sim.blocks.admission import admit, threshold
from kvtool.sim.blocks.memory import HASHED, HASHED_SORTED, RADIX
from kvtool.sim.blocks.output import process
from kvtool.sim.blocks.running import append_scheduled, preempt, worst
from kvtool.sim.blocks.state import State
from kvtool.sim.blocks.tables import blocks_for
from kvtool.sim.blocks.waiting import (
    CLOCK_IS_FULL,
    HEAD_NEVER_FITS,
    arrive,
    end,
    head_of_queue,
    leave_queue,
    next_arrival,
    num_waiting,
)  # fmt: skip
from kvtool.sim.clock import LATEST_NS, step_ns
from kvtool.sim.settings import ABORTED, NO_MEMORY

ALL_DONE, FULL, MORE_ROOM, PAUSED = range(4)


@compiled
def advance(s: State, most_work: int) -> int:
    """With vLLM's memory, first come first served or by priority."""
    return go_on(s, HASHED, most_work)


@compiled
def advance_sorted(s: State, most_work: int) -> int:
    """With vLLM's memory, and the queue in SGLang's order."""
    return go_on(s, HASHED_SORTED, most_work)


@compiled
def advance_radix(s: State, most_work: int) -> int:
    """With SGLang's memory, in each order."""
    return go_on(s, RADIX, most_work)


@part
def go_on(s: State, memory: Any, most_work: int) -> int:
    """Run until all is done, a buffer is full, room runs short or so much work is done."""
    run = s.run
    run.work = 0
    kept, most = len(s.steps), len(s.lists) // 2
    while run.work < most_work:
        if run.steps_kept >= kept or run.gaps_kept + most >= kept:
            return FULL
        arrive(s)
        if run.stopped:
            return ALL_DONE
        if run.in_flight < run.most_in_flight and (num_waiting(run) > 0 or run.running > 0):
            if not schedule(s, memory):
                return MORE_ROOM
            if run.stopped:
                return ALL_DONE
            if run.in_flight < run.most_in_flight:
                continue
        if run.in_flight > 0:
            process(s, memory)
            if run.stopped:
                return ALL_DONE
            continue
        at = next_arrival(s)
        if at < 0:
            return ALL_DONE
        run.clock = s.requests[at].arrival_ns
    return PAUSED


@part
def schedule(s: State, memory: Any) -> bool:
    """A step; False: it waits for room, and goes on from there when called again."""
    run = s.run
    if not run.midway:
        most = most_taken(s, memory, run.token_budget)
        if not memory.has_records(s, most):
            most = min(most, most_taken(s, memory, wanted(s)))
            if not memory.has_records(s, most):
                return False
        run.budget = run.token_budget
        run.crowd = run.running + num_waiting(run)
        run.now_tokens = run.now_context = run.now_beyond = run.now_batch = run.places = 0
        run.preempted_before, run.evicted_before = run.preemptions, run.evicted
        run.held_up = NO_MEMORY  # R6: a step that preempted admits nobody
        schedule_running(s, memory)
        run.midway = 1
    if run.preemptions == run.preempted_before and not admit(s, memory):
        return False
    run.midway = 0
    close_step(s, memory)
    return True


@part
def most_taken(s: State, memory: Any, tokens: int) -> int:
    """The most blocks that running requests take in a step of so many tokens.

    Those of the tokens and, if a victim gives its own back, fewer than that which are still free then.
    """
    run = s.run
    return min(memory.available(s), 2 * (tokens // run.block_size + run.running + 1))


@part
def wanted(s: State) -> int:
    """Tokens that running requests could compute at once: the budget may be far above them."""
    tokens, at = 0, s.run.first
    while at >= 0:
        request = s.requests[at]
        tokens += request.prompt + request.generated + request.placeholders - request.computed
        at = request.next
    return tokens


@part
def schedule_running(s: State, memory: Any) -> None:
    """R2 to R5: in the order of admission; who finds no block preempts."""
    run, requests = s.run, s.requests
    at = run.first
    while at >= 0 and run.budget > 0:
        request = requests[at]
        n = chunk(run, request)
        if n > 0:
            tokens = min(request.computed + n, run.max_model_len)
            if tokens > request.blocks * run.block_size:
                needed = blocks_for(run, tokens) - request.blocks
                while needed > memory.available(s):
                    victim = worst(run, requests) if run.by_priority else run.last
                    preempt(s, memory, victim)
                    if victim == at:
                        return
                memory.take(s, at, needed)
            if run.caching:
                memory.schedule(s, at, min(tokens, request.prompt + request.generated))
            append_scheduled(s, at, n)
        at = request.next


@part
def chunk(run: Any, request: Any) -> int:
    """Tokens of a running request in this step; 0: all it can do is under way."""
    held = request.placeholders
    if held > 0:
        most = run.max_model_len - request.prompt if run.to_eos else request.output
        if request.computed + 2 - held >= request.prompt + most:
            return 0
    n = threshold(run, request.prompt + request.generated + held - request.computed)
    return min(n, run.budget, run.max_model_len - request.computed - 1)


@part
def close_step(s: State, memory: Any) -> None:
    """The step takes its time and is under way; or nothing will change, and the head is to blame."""
    run = s.run
    preempted = run.preemptions > run.preempted_before
    begun = max(run.last_end, run.clock)
    passed = step_ns(run)
    if passed < 0 or float(begun) + passed > LATEST_NS:
        run.stopped = CLOCK_IS_FULL
        return
    s.steps[run.steps_kept].begin_ns = begun
    if run.now_batch > 0 or run.most_in_flight == 1:
        begun += passed
    run.last_end = begun
    note_step(s, memory)
    others = 0
    for k in range(run.in_flight):
        others += run.batch_size[(run.oldest + k) & 1]
    if run.now_batch == 0 and ((others == 0 and not preempted) or (preempted and never_fits(s))):
        run.clock = max(run.clock, begun)
        if run.aborts:
            at = head_of_queue(s)
            leave_queue(s)
            memory.forget(s, at)
            end(s, at, ABORTED, run.step)
        else:
            run.stopped = HEAD_NEVER_FITS
    else:
        slot = (run.oldest + run.in_flight) & 1
        run.batch_step[slot], run.batch_end[slot] = run.step, begun
        run.batch_places[slot], run.batch_size[slot] = run.places, run.now_batch
        run.in_flight += 1
    run.step += 1


@part
def never_fits(s: State) -> bool:
    """Unchecked and larger than the pool: vLLM would compute and preempt the head for ever."""
    run = s.run
    if run.full_check or run.running > 0:
        return False
    head = s.requests[head_of_queue(s)]
    return head.prompt + head.generated > run.num_blocks * run.block_size


@part
def note_step(s: State, memory: Any) -> None:
    """A step, seen after scheduling and before its output is processed."""
    run = s.run
    told = s.steps[run.steps_kept]
    told.scheduled_tokens, told.batch = run.now_tokens, run.now_batch
    told.running, told.waiting = run.running, num_waiting(run)
    told.used_blocks = run.num_blocks - memory.available(s)
    told.context_tokens, told.end_ns = run.now_context, run.last_end
    told.evictions = run.evicted - run.evicted_before
    told.held_up, told.preemptions = run.held_up, run.preemptions
    run.steps_kept += 1
    run.work += run.places + 1

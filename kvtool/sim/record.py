"""What the fast engine writes down: sums over steps, steps, requests and gaps."""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.settings import NO_MEMORY, NO_SEAT, NO_TOKENS
from kvtool.sim.state import POINTS, Lines, Records, Run


@part
def note_step(
    run: Run, sums: Records, steps: Records, measured: bool, held_up: int, waiting: int
) -> None:
    """A step, seen after scheduling and before its output is processed."""
    run.peak = max(run.peak, run.running)
    if measured != run.measured or run.step == run.point_ends:
        pour_sums(run, sums)
        run.measured = measured
        run.point_ends = (run.step // run.width + 1) * run.width
    add_to_sums(run, sums[POINTS + 1], held_up)
    if len(steps):
        told = steps[run.steps_kept]
        told.scheduled_tokens, told.batch = run.now_tokens, run.now_batch
        told.running, told.waiting, told.held = run.running, waiting, run.held
        told.context_tokens, told.decoded = run.now_context, run.now_decoded
        told.begin_ns, told.end_ns, told.held_up = run.seen_ns, run.clock, held_up
        told.preemptions = run.preemptions
        run.steps_kept += 1


@part
def add_to_sums(run: Run, into: Any, held_up: int) -> None:
    """Slots of the pool by what they are in this step."""
    free = run.num_slots - run.held
    into.steps += 1
    into.token += run.tokens
    into.reserved += run.held - run.internal - run.tokens
    into.internal += run.internal
    into.running += run.running
    into.no_seat += held_up == NO_SEAT
    into.no_tokens += held_up == NO_TOKENS
    into.no_memory += held_up == NO_MEMORY
    if held_up == NO_MEMORY:
        into.external += free
    else:
        into.idle += free


@part
def pour_sums(run: Run, sums: Records) -> None:
    """Add the last steps, which were alike, to the series and to the window if they are of it."""
    last = sums[POINTS + 1]
    for target in range(2):
        into = sums[POINTS] if target else sums[max(run.step - 1, 0) // run.width]
        if target and not run.measured:
            break
        into.steps += last.steps
        into.token += last.token
        into.reserved += last.reserved
        into.internal += last.internal
        into.external += last.external
        into.idle += last.idle
        into.running += last.running
        into.no_seat += last.no_seat
        into.no_tokens += last.no_tokens
        into.no_memory += last.no_memory
    last.steps = last.token = last.reserved = last.internal = last.external = last.idle = 0
    last.running = last.no_seat = last.no_tokens = last.no_memory = 0


@part
def note_token(run: Run, lines: Lines, at: int) -> None:
    """The first token after a prefill: the request's first, or the first since it was preempted."""
    line = lines[at]
    if line.last_ns >= 0:
        lines[run.gaps].gap = run.clock - line.last_ns
        run.gaps += 1
    if line.first_token_step < 0:
        line.first_token_step, line.first_token_ns = run.step, run.clock


@part
def tell(run: Run, lines: Lines, outcomes: Records, steps: Records) -> None:
    """Hand over who ended in this step, and the gaps between tokens that it closed."""
    for place in range(run.ended):
        at = lines[place].ended
        if len(outcomes):
            line = lines[at]
            told = outcomes[line.index]
            told.admit_step, told.num_preemptions = line.admit_step, line.num_preemptions
            told.first_token_step, told.first_token_ns = line.first_token_step, line.first_token_ns
            told.finish_step, told.finish_ns = run.step, run.clock
            told.generated, told.status = line.generated, line.status
        run.ended_prompt += lines[at].prompt
        run.ended_requests += 1
        lines[run.free_lines].free = at
        run.free_lines += 1
    if len(steps):
        for place in range(run.gaps):
            steps[run.gaps_kept + place].gap = lines[place].gap
        run.gaps_kept += run.gaps
    run.ended = run.gaps = 0

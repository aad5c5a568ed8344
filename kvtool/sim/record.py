"""What the fast engine writes down: sums over steps, a series over time, steps, requests and gaps."""

from __future__ import annotations

from typing import Any

from kvtool.sim.jit import part
from kvtool.sim.state import POINTS, Lines, Records, Run


@part
def note_step(
    run: Run, sums: Records, steps: Records, measured: bool, blocked: bool, waiting: int
) -> None:
    """A step, seen after scheduling and before its output is processed."""
    run.peak = max(run.peak, run.running)
    add_to_sums(run, sums[0], blocked)
    if measured:
        add_to_sums(run, sums[1], blocked)
    point = run.step // run.width
    if point == POINTS:
        halve_series(run, sums)
        point = run.step // run.width
    add_to_sums(run, sums[2 + point], blocked)
    if len(steps):
        told = steps[run.steps_kept]
        told.scheduled_tokens, told.batch = run.now_tokens, run.now_batch
        told.running, told.waiting, told.held = run.running, waiting, run.held
        told.context_tokens, told.decoded = run.now_context, run.now_decoded
        told.end_ns = run.clock
        run.steps_kept += 1


@part
def add_to_sums(run: Run, into: Any, blocked: bool) -> None:
    """Slots of the pool by what they are in this step."""
    free = run.num_slots - run.held
    into.steps += 1
    into.tokens += run.tokens
    into.reserved += run.held - run.internal - run.tokens
    into.internal += run.internal
    into.running += run.running
    into.held += run.held
    if blocked:
        into.external += free
    else:
        into.idle += free


@part
def halve_series(run: Run, sums: Records) -> None:
    """Each two points become one of twice the steps."""
    for point in range(POINTS // 2):
        one, two, into = sums[2 + 2 * point], sums[2 + 2 * point + 1], sums[2 + point]
        into.steps = one.steps + two.steps
        into.tokens = one.tokens + two.tokens
        into.reserved = one.reserved + two.reserved
        into.internal = one.internal + two.internal
        into.external = one.external + two.external
        into.idle = one.idle + two.idle
        into.running = one.running + two.running
        into.held = one.held + two.held
    for point in range(POINTS // 2, POINTS):
        into = sums[2 + point]
        into.steps = into.tokens = into.reserved = into.internal = into.external = 0
        into.idle = into.running = into.held = 0
    run.width *= 2


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
        lines[run.free_lines].free = at
        run.free_lines += 1
    if len(steps):
        for place in range(run.gaps):
            steps[run.gaps_kept + place].gap = lines[place].gap
        run.gaps_kept += run.gaps
    run.ended = run.gaps = 0

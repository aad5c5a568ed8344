"""What the fast engine writes down: sums over steps, a series over time, steps, requests and gaps."""

from __future__ import annotations

from typing import Any

from kvtool.sim.jit import part
from kvtool.sim.state import POINTS, State


@part
def note_step(
    s: State,
    measured: bool,
    blocked: bool,
    scheduled: int,
    batch: int,
    waiting: int,
    context: int,
    decoded: int,
) -> None:
    """A step, seen after scheduling and before its output is processed."""
    run = s.run
    run.peak = max(run.peak, run.running)
    add_to_sums(s, s.sums[0], blocked)
    if measured:
        add_to_sums(s, s.sums[1], blocked)
    point = run.step // run.width
    if point == POINTS:
        halve_series(s)
        point = run.step // run.width
    add_to_sums(s, s.sums[2 + point], blocked)
    if len(s.steps):
        told = s.steps[run.steps_kept]
        told.scheduled_tokens, told.batch, told.running = scheduled, batch, run.running
        told.waiting, told.held, told.context_tokens = waiting, run.held, context
        told.end_ns, told.decoded = run.clock, decoded
        run.steps_kept += 1


@part
def add_to_sums(s: State, sums: Any, blocked: bool) -> None:
    """Slots of the pool by what they are in this step."""
    run = s.run
    free = run.num_slots - run.held
    sums.steps += 1
    sums.tokens += run.tokens
    sums.reserved += run.held - run.internal - run.tokens
    sums.internal += run.internal
    sums.running += run.running
    sums.held += run.held
    if blocked:
        sums.external += free
    else:
        sums.idle += free


@part
def halve_series(s: State) -> None:
    """Each two points become one of twice the steps."""
    for point in range(POINTS // 2):
        one, two, sums = s.sums[2 + 2 * point], s.sums[2 + 2 * point + 1], s.sums[2 + point]
        sums.steps = one.steps + two.steps
        sums.tokens = one.tokens + two.tokens
        sums.reserved = one.reserved + two.reserved
        sums.internal = one.internal + two.internal
        sums.external = one.external + two.external
        sums.idle = one.idle + two.idle
        sums.running = one.running + two.running
        sums.held = one.held + two.held
    for point in range(POINTS // 2, POINTS):
        sums = s.sums[2 + point]
        sums.steps = sums.tokens = sums.reserved = sums.internal = sums.external = 0
        sums.idle = sums.running = sums.held = 0
    s.run.width *= 2


@part
def note_token(s: State, at: int) -> None:
    """The first token after a prefill: the request's first, or the first since it was preempted."""
    run, line = s.run, s.lines[at]
    if len(s.outcomes) == 0:
        return
    if line.last_ns >= 0:
        s.steps[run.gaps_kept].gap = run.clock - line.last_ns
        run.gaps_kept += 1
    told = s.outcomes[line.index]
    if told.first_token_step < 0:
        told.first_token_step, told.first_token_ns = run.step, run.clock

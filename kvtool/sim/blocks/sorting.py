"""SGLang's order of the queue, longest prefix match, compiled: kvtool.sim.blocks.order says the rules.

Of who begins alike only the first ALIKE_TOKENS tokens matter, so that a tree of the queue is a list of names.
"""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.blocks.names import SEED, name_of
from kvtool.sim.blocks.numbers import ALIKE_TOKENS, FEW_TOKENS, MOST_SORTED, NO_NAME, NONE
from kvtool.sim.blocks.state import State


@part
def sort_waiting(s: State, look_up: Any, name: Any) -> None:
    """Once a step, and not again when the step was paused: to match twice stamps in another order."""
    run = s.run
    if not run.by_match or run.sorted_in == run.step:
        return
    run.sorted_in = run.step
    waiting = run.arrived - run.head
    if waiting <= MOST_SORTED:
        find_all(s, look_up, name, run.count + run.head, waiting)
        sort(s, run.count + run.head, waiting)


@part
def find_all(s: State, look_up: Any, name: Any, first: int, waiting: int) -> None:
    """What is cached of each; of who found little and begins like one before it, that it goes last."""
    run = s.run
    leads = 0
    for k in range(first, first + waiting):
        at = s.queues[k]
        request, mark = s.requests[at], s.marks[at]
        tokens = request.prompt + request.generated
        cached = look_up(s, name, at, tokens // run.block_size) * run.block_size
        mark.found = min(cached, tokens - 1)
        if cached <= FEW_TOKENS and tokens >= ALIKE_TOKENS:
            if mark.lead == NO_NAME:
                mark.lead, _ = name_of(
                    ALIKE_TOKENS, request, s.pieces, 0, request.first_piece, SEED
                )
            before = 0
            while before < leads and run.leads[before] != mark.lead:
                before += 1
            if before < leads:
                mark.found = NONE
            else:
                run.leads[leads] = mark.lead
                leads += 1
        run.work += 1


@part
def sort(s: State, first: int, waiting: int) -> None:
    """Most found first, by insertion: it was sorted a step ago."""
    queues, marks = s.queues, s.marks
    for k in range(first + 1, first + waiting):
        at = queues[k]
        place = k
        while place > first and marks[queues[place - 1]].found < marks[at].found:
            queues[place] = queues[place - 1]
            place -= 1
        queues[place] = at

"""The stack distances of a trace, a run of blocks at a time.

Who had a block last decides how deep it lies. A prompt's blocks go back on the stack in one piece, first
block on top, and later requests take pieces of it from its beginning: what is left of it stays together.
So a stack of requests with a count each stands for the stack of blocks; a prompt meets each older request
in one run of blocks, whose distances are consecutive numbers, and one look at the sums is enough for all.
"""

from __future__ import annotations

from typing import Any

from kvtool.jit import compiled, part
from kvtool.sim.prefix.pool import record

TOTALS = record("requests queried blocks distinct tail largest on_stack")
"""`blocks`: full ones, of prompts and outputs; `distinct`: without those seen before; `tail`: whether the
last request left a block without a hash; `largest`: blocks of the largest request."""


@compiled
def add_distances(
    totals: Any, seen_by: Any, live: Any, tree: Any, steps: Any,
    ids: Any, starts: Any, tokens: Any, outputs: Any, size: int,
) -> bool:  # fmt: skip
    """Add each hit at the least capacity that has it; False if a block is cached twice."""
    never_twice = True
    for request in range(len(tokens)):
        length, held = tokens[request], tokens[request] + outputs[request]
        first, last = starts[request], starts[request + 1]
        limit = first + max(0, length - 1) // size
        index = totals.requests
        at = first
        while at < last and seen_by[ids[at]] > 0:
            by = seen_by[ids[at]] - 1
            # On top of this run lie all requests after that one, and the older runs of this prompt.
            distance = totals.on_stack - sum_to(tree, by)
            begin = at
            while at < last and seen_by[ids[at]] == by + 1:
                at += 1
            hits = min(at, limit) - begin
            if hits > 0:
                steps[distance + totals.tail + 1] += 1
                steps[distance + totals.tail + 1 + hits] -= 1
            if at > limit:
                never_twice = False
        taken = at - first
        at = first
        while at < first + taken:  # off the stack, once all distances are known
            by = seen_by[ids[at]] - 1
            begin = at
            while at < first + taken and seen_by[ids[at]] == by + 1:
                seen_by[ids[at]] = index + 1
                at += 1
            add(tree, live, by, begin - at)
        for one in range(at, last):
            seen_by[ids[one]] = index + 1
        add(tree, live, index, held // size)
        totals.on_stack += held // size - taken
        totals.distinct += held // size - taken
        totals.blocks += held // size
        totals.tail = held % size > 0
        totals.largest = max(totals.largest, (held + size - 1) // size)
        totals.queried += length
        totals.requests += 1
    return never_twice


@part
def sum_to(tree: Any, index: int) -> int:
    """Blocks of the requests up to this one."""
    total, at = 0, index + 1
    while at > 0:
        total += tree[at]
        at &= at - 1
    return total


@part
def add(tree: Any, live: Any, index: int, blocks: int) -> None:
    """A request has more or fewer blocks."""
    live[index] += blocks
    at = index + 1
    while at < len(tree):
        tree[at] += blocks
        at += at & -at


@compiled
def fill_tree(live: Any, tree: Any) -> None:
    """The sums of counts, in an empty tree."""
    for at in range(1, len(tree)):
        tree[at] += live[at - 1]
        above = at + (at & -at)
        if above < len(tree):
            tree[above] += tree[at]

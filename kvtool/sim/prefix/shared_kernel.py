"""What of each prompt an earlier request had: one pass over the keys, as if nothing were ever evicted."""

from __future__ import annotations

from typing import Any

from kvtool.jit import compiled
from kvtool.sim.prefix.pool import record

KNOWN = record("reused", "extent requests first last run")
"""Of a block of the trace: `extent` tokens of it are known, `requests` prompts reach into it, the `first`
and the `last` of which have these numbers, and `reused` of their tokens were there before them."""


@compiled
def add_shared(
    known: Any, keys: Any, starts: Any, tokens: Any, held: Any, size: int, base: int, shared: Any
) -> None:
    """Add prompts of `tokens`, of which `held` are known afterwards; `shared`: what was known before."""
    for request in range(len(tokens)):
        length, total, first = tokens[request], held[request], starts[request]
        at, found = 0, 0
        while at * size < length:
            block = known[keys[first + at]]
            here = min(size, length - at * size)
            common = min(block.extent, here)
            block.reused += common
            found += common
            if common < here:
                break
            at += 1
        shared[request] = found
        at = 0
        while at * size < total:
            block = known[keys[first + at]]
            block.extent = max(block.extent, min(size, total - at * size))
            if at * size < length:
                if block.requests == 0:
                    block.first = base + request
                block.requests += 1
                block.last = base + request
            at += 1


@compiled
def find_runs(known: Any, before: Any, count: int, runs: Any) -> None:
    """Put blocks that the same requests have, one after the other, together: a run has the number of its
    first block. `runs` gets, at that place: where it starts, where it ends, and what of it was reused."""
    for key in range(count):
        block, parent = known[key], before[key]
        if parent >= 0 and known[parent].requests == block.requests:
            block.run = known[parent].run
        else:
            block.run = key
            start = 0 if parent < 0 else runs[known[parent].run].end
            runs[key].start = runs[key].end = start
        runs[block.run].end += block.extent
        runs[block.run].reused += block.reused


@compiled
def add_overlaps(
    ids: Any, starts: Any, held: Any, size: int, target: Any, length: int, overlaps: Any
) -> None:
    """How many of the first `length` tokens, whose blocks are `target`, each request begins with."""
    for request in range(len(held)):
        first, most, at = starts[request], min(held[request], length), 0
        while at * size < most and ids[first + at] == target[at]:
            at += 1
        overlaps[request] = min(at * size, most)

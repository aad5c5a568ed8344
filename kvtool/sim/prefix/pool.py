"""vLLM's pool in arrays: the blocks that have a hash, found by the id of their content."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtool.jit import part

NONE = -1


def record(wide: str, narrow: str = "") -> np.dtype[np.void]:
    """A record of integers: 64 bits for what counts, 32 for what points."""
    return np.dtype(
        [(name, np.int64) for name in wide.split()] + [(name, np.int32) for name in narrow.split()]
    )


POOL = record(
    "num_blocks size policy blanks numbered spares oldest newest clock heaped requests tenant evicted"
)
"""`blanks`: free blocks without a hash. They need no number of their own: blocks with a hash have one,
`numbered` so many were given, and `spares` of these are of no block now. `tenant`: whose request runs."""
LISTED = record("", "id twin newer older tenant spare")
"""A block of the list, least recently used first. `twin`: the next younger one with the same id;
`spare` is a column of its own: a stack of numbers."""
HEAPED = record("first second hits cached user", "id twin depth place tenant spare heap")
"""A block of the other policies: the least (first, second) goes first. `heap` is a column of its own:
blocks as a binary heap, and `place` is where in it a block stands. `user`: the last request that found
it, counted from 1."""


@part
def number_of_new(pool: Any, blocks: Any) -> int:
    """A number for a block that gets a hash."""
    if pool.spares > 0:
        pool.spares -= 1
        return blocks[pool.spares].spare
    pool.numbered += 1
    return pool.numbered - 1


@part
def gain_id(blocks: Any, block_of: Any, at: int, name: int) -> None:
    """A block can be found by its content, unless an older one is."""
    block = blocks[at]
    block.id, block.twin = name, NONE
    if name < 0:
        return
    before = block_of[name]
    if before < 0:
        block_of[name] = at
        return
    while blocks[before].twin >= 0:
        before = blocks[before].twin
    blocks[before].twin = at


@part
def lose_id(pool: Any, blocks: Any, block_of: Any, at: int) -> None:
    """A block is taken for something else: another with its content is found from now on, or none."""
    name, twin = blocks[at].id, blocks[at].twin
    if name >= 0:
        before = block_of[name]
        if before == at:
            block_of[name] = twin
        else:
            while blocks[before].twin != at:
                before = blocks[before].twin
            blocks[before].twin = twin
    blocks[at].id = NONE  # else `forget` would take it for a block that is cached
    blocks[pool.spares].spare = at
    pool.spares += 1

"""Where the blocks of a case lie: block tables in order, shuffled, or left by an allocator's run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtool.bench.attention.case import Case
from kvtool.sim.block_pool import BlockPool

Tables = tuple[NDArray[np.int32], int]
"""(block table [batch, most blocks], blocks of the pool); −1 where a sequence has no block."""

SPARE = 4
"""A quarter more blocks than the sequences need: the neighbours that come and go live there."""
MAX_NEIGHBOUR = 64
"""Blocks of the longest neighbour."""


def block_tables(case: Case, seed: int) -> Tables:
    """The block tables of a case in its pattern."""
    return _PATTERNS[case.pattern](case, np.random.default_rng(seed))


def _sequential(case: Case, rng: np.random.Generator) -> Tables:
    return _filled(case, np.arange(sum(case.blocks), dtype=np.int32)), sum(case.blocks)


def _shuffled(case: Case, rng: np.random.Generator) -> Tables:
    return _filled(case, rng.permutation(sum(case.blocks)).astype(np.int32)), sum(case.blocks)


def _filled(case: Case, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
    table = np.full((case.batch, max(case.blocks)), -1, dtype=np.int32)
    start = 0
    for row, count in enumerate(case.blocks):
        table[row, :count] = blocks[start : start + count]
        start += count
    return table


def _fragmented(case: Case, rng: np.random.Generator) -> Tables:
    """What the paged allocator leaves: the sequences grow a block at a time, in turn, while short
    neighbours are placed between them and freed again in any order."""
    needed = sum(case.blocks)
    pool = BlockPool(needed + max(needed // SPARE, 1), case.block_size)
    neighbours: list[int] = []
    born, left = 0, list(case.blocks)
    for row, tokens in enumerate(case.lengths):
        pool.allocate(row, min(tokens, case.block_size))
        left[row] -= 1
    spare = pool.num_blocks - needed
    growing = [row for row in range(case.batch) if left[row] > 0]
    while growing:
        for row in growing:
            pool.append(row, min(case.block_size, case.lengths[row] - pool.num_tokens(row)))
            left[row] -= 1
        born += _churn(pool, neighbours, born, spare, rng)
        growing = [row for row in growing if left[row] > 0]
    table = np.full((case.batch, max(case.blocks)), -1, dtype=np.int32)
    for row in range(case.batch):
        blocks = pool.block_table(row)
        table[row, : len(blocks)] = blocks
    return table, pool.num_blocks


def _churn(
    pool: BlockPool, neighbours: list[int], born: int, spare: int, rng: np.random.Generator
) -> int:
    """A neighbour comes, and others go until it fits beside those that stay. How many came."""
    size = int(rng.integers(1, min(MAX_NEIGHBOUR, spare) + 1))
    held = sum(len(pool.block_table(("neighbour", one))) for one in neighbours)
    while neighbours and held + size > spare:
        gone = neighbours.pop(int(rng.integers(len(neighbours))))
        held -= len(pool.block_table(("neighbour", gone)))
        pool.free(("neighbour", gone))
    pool.allocate(("neighbour", born), size * pool.block_size)
    neighbours.append(born)
    return 1


_PATTERNS: dict[str, Callable[[Case, np.random.Generator], Tables]] = {
    "sequential": _sequential,
    "shuffled": _shuffled,
    "fragmented": _fragmented,
}

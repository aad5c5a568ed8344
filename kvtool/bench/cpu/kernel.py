"""The kernel of attention on the CPU, compiled: chunks of sequences in, partial results out.

A tile of tokens passes through all KV heads before the next tile comes, so that a block is read
whole, whatever its layout; the rows that come next are asked of memory while these are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvtool.bench.cpu.vectors import (
    STEP,
    exponentials,
    largest,
    mix_step,
    prefetch,
    scale_row,
    score_step,
)
from kvtool.jit import vectorised, vectorised_part

Array = np.ndarray[Any, np.dtype[Any]]
TILE = 32
"""Tokens between two looks at the maximum: K and V of one head in fp32 and 128 wide fill 32 KiB."""


class Pool(NamedTuple):
    """Keys or values: the flat numbers, and strides in elements."""

    numbers: Array
    block: int
    head: int
    token: int


class Shape(NamedTuple):
    """Sizes that a kernel knows when it runs."""

    kv_heads: int
    heads: int  # query heads of a KV head, and zeros up to a multiple of STEP
    head_dim: int
    num_blocks: int
    block_size: int
    line: int  # elements of a cache line


class Partial(NamedTuple):
    """A chunk's result for each query head: the sum of 2**(s - top) v, the top, the sum of 2**(s - top)."""

    sums: Array
    tops: Array
    totals: Array


@vectorised
def attend(
    work: Array, query: Array, keys: Pool, values: Pool, table: Array, shape: Shape,
    partial: Partial, rows: Array, scores: Array,
) -> bool:  # fmt: skip
    """Each chunk of `work` (sequence, start, stop, place of its result) into `partial`.

    Scratch: rows int64 [now and next, K and V, TILE], scores fp32 [heads, TILE].
    False: a block that is named does not exist.
    """
    for chunk in range(len(work)):
        sequence, start, stop, place = work[chunk]
        now = 0
        if not _find_rows(rows[now], table[sequence], start, stop, keys, values, shape):
            return False
        while start < stop:
            here = ahead = rows[now]
            following = start + TILE
            if following < stop:
                ahead = rows[1 - now]
                if not _find_rows(ahead, table[sequence], following, stop, keys, values, shape):
                    return False
            count = min(TILE, stop - start)
            for kv in range(shape.kv_heads):
                coming, head = (here, kv + 1) if kv + 1 < shape.kv_heads else (ahead, 0)
                q_row = (sequence * shape.kv_heads + kv) * shape.heads
                _score(query, q_row, keys, here[0], kv, coming[0], head, scores, count, shape)
                row = (place * shape.kv_heads + kv) * shape.heads
                _weigh(partial, row, scores, count, shape)
                _mix(partial.sums, row, values, here[1], kv, coming[1], head, scores, count, shape)
            start, now = following, 1 - now
    return True


@vectorised_part
def _find_rows(
    rows: Array, blocks: Array, start: int, stop: int, keys: Pool, values: Pool, shape: Shape
) -> bool:
    """Where the rows of a tile's tokens begin; behind the end the last one again and again, so that
    nothing else is read."""
    block = start // shape.block_size
    inside = start - block * shape.block_size
    name = blocks[block]
    for t in range(TILE):
        if not 0 <= name < shape.num_blocks:
            return False
        rows[0, t] = name * keys.block + inside * keys.token
        rows[1, t] = name * values.block + inside * values.token
        if start + t + 1 < stop:
            inside += 1
            if inside == shape.block_size:
                inside = 0
                block += 1
                name = blocks[block]
    return True


@vectorised_part
def _score(
    query: Array, q_row: int, keys: Pool, here: Array, kv: int, coming: Array, head: int,
    scores: Array, count: int, shape: Shape,
) -> None:  # fmt: skip
    """Scores of a tile for the query heads of a KV head; the next keys are asked for."""
    size = shape.head_dim
    for t in range(0, count, STEP):
        _ask(keys, coming, t, head, shape)
        for h in range(0, shape.heads, STEP):
            score_step(
                query, (q_row + h) * size, size, keys.numbers, here, t, kv * keys.head,
                scores, h * TILE + t, TILE,
            )  # fmt: skip


@vectorised_part
def _mix(
    sums: Array, row: int, values: Pool, here: Array, kv: int, coming: Array, head: int,
    weights: Array, count: int, shape: Shape,
) -> None:  # fmt: skip
    """Values of a tile into the sums of the query heads of a KV head; the next ones are asked for."""
    size = shape.head_dim
    for t in range(0, count, STEP):
        _ask(values, coming, t, head, shape)
        for h in range(0, shape.heads, STEP):
            mix_step(
                sums, (row + h) * size, size, values.numbers, here, t, kv * values.head,
                weights, h * TILE + t, TILE,
            )  # fmt: skip


@vectorised_part
def _ask(pool: Pool, rows: Array, t: int, head: int, shape: Shape) -> None:
    for one in range(t, t + STEP):
        first = rows[one] + head * pool.head
        for at in range(first, first + shape.head_dim, shape.line):
            prefetch(pool.numbers, at)


@vectorised_part
def _weigh(partial: Partial, row: int, scores: Array, count: int, shape: Shape) -> None:
    """Scores become weights against the running maximum; a new maximum shrinks what is summed."""
    for h in range(shape.heads):
        for t in range(count, TILE):
            scores[h, t] = -np.inf
        top = max(partial.tops[row + h], largest(scores, h * TILE, TILE))
        if top > partial.tops[row + h]:
            factor = np.exp2(partial.tops[row + h] - top)
            scale_row(partial.sums, (row + h) * shape.head_dim, shape.head_dim, factor)
            partial.totals[row + h] *= factor
            partial.tops[row + h] = top
        partial.totals[row + h] += exponentials(scores, h * TILE, TILE, top)

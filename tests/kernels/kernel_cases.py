"""Cases for the kernels in triton's interpreter, run by kernel_runner in a process of its own.

Whatever a kernel must not read is poison: NaN in every slot that no sequence sees (tails, freed
blocks, unused blocks), block ids that lead out of the address space past a sequence's end and
before its window, NaN in every result and workspace.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

RAGGED = (70, 0, 1, 33)
BLOCK_SIZES = tuple(1 << power for power in range(9))
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("NHD", "HND")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """One call of a decode kernel; walk "contiguous" is the twin. out_dtype None is q's."""

    dtype: str = "float32"
    group: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    layout: str = "NHD"
    lengths: tuple[int, ...] = RAGGED
    window: int = 0
    splits: int = 1
    tile: int = 16
    chunk_tiles: int = 2
    walk: str = "chunked"
    scale: float | None = None
    out_dtype: str | None = "float32"


def shapes() -> Iterator[DecodeCase]:
    """Every block size and dtype, with GQA ratios and layouts taking turns."""
    groups = itertools.cycle((1, 4, 8, 3, 2))
    layouts = itertools.cycle(LAYOUTS)
    for block_size in BLOCK_SIZES:
        for dtype in DTYPES if block_size in (1, 16, 256) else ("float16",):
            yield DecodeCase(
                dtype=dtype, group=next(groups), block_size=block_size, layout=next(layouts)
            )
    yield DecodeCase(group=20, kv_heads=1)  # more query heads than one matrix tile
    yield DecodeCase(group=71, kv_heads=1, lengths=(40,))  # Falcon: more than a program takes
    for dtype in DTYPES:  # results as q's dtype
        yield DecodeCase(dtype=dtype, out_dtype=None, scale=0.3)


def edges() -> Iterator[DecodeCase]:
    """Windows, splits, walks, head sizes, and lengths around blocks and tiles."""
    for head_dim in HEAD_DIMS[1:]:
        yield DecodeCase(head_dim=head_dim, dtype="float16", lengths=(37, 0), kv_heads=1)
    lengths = (199, 0, 16, 130)
    for walk, splits in itertools.product(("chunked", "naive", "contiguous"), (1, 3)):
        for window in (0, 1, 50):
            yield DecodeCase(
                walk=walk, splits=splits, window=window, lengths=lengths, kv_heads=1, block_size=8
            )
    # Fewer tiles than splits; a window as long as the sequence; blocks larger than tiles.
    yield DecodeCase(splits=7, lengths=(300, 65, 0), window=65, kv_heads=1)
    for block_size, tile, chunk_tiles in ((64, 16, 1), (64, 16, 3), (256, 32, 9), (4, 64, 1)):
        yield DecodeCase(
            block_size=block_size, tile=tile, chunk_tiles=chunk_tiles, splits=2, window=90,
            lengths=(311, 0, 256), kv_heads=1,
        )  # fmt: skip
    # A chunk that begins inside a block and ends in its 33rd; scores that overflow unless the highest
    # is taken off.
    yield DecodeCase(
        block_size=32, chunk_tiles=64, lengths=(1050,), window=1030, kv_heads=1, group=1
    )
    yield DecodeCase(scale=10.0)
    yield DecodeCase(lengths=(0, 0), splits=2)
    yield DecodeCase(lengths=(), splits=2)


def matrix() -> Iterator[DecodeCase]:
    """The whole product, lengths drawn for each."""
    draw = random.Random(0)
    for dtype, group, block_size, layout, window, splits, walk in itertools.product(
        DTYPES, (1, 2, 4, 7, 16), BLOCK_SIZES, LAYOUTS, (0, 23), (1, 3), ("chunked", "naive")
    ):
        yield DecodeCase(
            dtype=dtype, group=group, kv_heads=draw.choice((1, 2)), block_size=block_size,
            layout=layout, window=window, splits=splits, walk=walk, tile=draw.choice((16, 32)),
            chunk_tiles=draw.choice((1, 2, 3)), head_dim=draw.choice(HEAD_DIMS),
            lengths=tuple(draw.choice((0, 1, 16, draw.randrange(200))) for _ in range(2)),
            out_dtype=draw.choice((None, "float32")),
        )  # fmt: skip
    for dtype, layout, window, splits in itertools.product(DTYPES, LAYOUTS, (0, 23), (1, 3)):
        yield DecodeCase(
            dtype=dtype, layout=layout, window=window, splits=splits, walk="contiguous",
            head_dim=draw.choice(HEAD_DIMS), lengths=(draw.randrange(200), 0, 17),
        )  # fmt: skip

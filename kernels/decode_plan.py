"""How a decode kernel is cut up: from a ready table, so that no time goes to tuning on a GPU.

The numbers follow from sizes and from what triton makes of them (tests/kernels reads it from the
compiled code); none of them has been timed yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

WALKS = ("chunked", "naive")

# A K tile and a V tile together. 32 KiB: two in flight on each multiprocessor of an H200 cover the
# 23 KB that its bandwidth times its latency needs, and three programs fit into its shared memory.
# gfx942 has 64 KiB of it: with 32 KiB and the ids' scratch one program would fit, with 16 three.
TILE_BYTES = 32 * 1024
SMALL_TILE_BYTES = {"gfx942": 16 * 1024}
# A program that gets fewer tiles spends its time filling its pipeline.
MIN_TILES = 4
# No split is longer than this, so that one long sequence among short ones is spread out too.
MAX_SPLIT_TOKENS = 8192
MAX_SPLITS = 128
# What a wave of programs and the merge cost, in tiles (of about 2 µs, on an H200): assumed.
WAVE_TILES = 1
MERGE_TILES = 2
PROGRAMS_PER_SM = 2

# Stages, so that stages - 1 tiles are buffered. gfx942 has no loads that bypass registers: one tile is
# in shared memory while the next is in registers.
STAGES = {"sm_80": 3, "sm_90": 3, "sm_100": 4, "gfx942": 2, "interpreter": 1}
# A grid's second axis ends at 65,535, a program has at most 32 warps.
MOST = {"chunk_tiles": 1024, "num_stages": 16, "num_warps": 32, "num_splits": 65_535}
OTHER_STAGES = 2  # chips with about 100 KiB (sm_86, sm_89, sm_120) and unknown ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to run a decode kernel.

    tile: tokens a tile; chunk_tiles: tiles whose block ids are held in registers at once (unused by
    the contiguous kernel and the naive walk); walk: "chunked" reads the ids of a chunk ahead of its
    tiles, "naive" reads a tile's ids in the iteration that needs them.
    """

    tile: int
    chunk_tiles: int
    num_stages: int
    num_warps: int
    num_splits: int
    walk: str = "chunked"

    def __post_init__(self) -> None:
        if self.walk not in WALKS:
            raise ValueError(f"walk must be one of {', '.join(WALKS)}, not {self.walk!r}")
        if self.tile < 16 or self.tile & (self.tile - 1):
            raise ValueError(f"tile must be a power of two from 16 on, not {self.tile}")
        for name, most in MOST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} must be 1 to {most}, not {value}")
        if self.num_warps & (self.num_warps - 1):
            raise ValueError(f"num_warps must be a power of two, not {self.num_warps}")


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below number (at least 1)."""
    return 1 << max(number - 1, 0).bit_length()


def rows_for(group: int) -> int:
    """Rows of the query tile: a matrix unit takes 16; more than 64 would not fit in registers."""
    return min(64, max(16, next_power_of_2(group)))


def tile_for(*, head_dim: int, item_bytes: int, arch: str) -> int:
    """Tokens a tile: K and V together TILE_BYTES, with head_dim as it is padded in memory."""
    room = SMALL_TILE_BYTES.get(arch, TILE_BYTES)
    tokens = room // (2 * item_bytes * next_power_of_2(head_dim))
    return max(16, min(128, tokens))


def chunk_tiles_for(*, tile: int, block_size: int) -> int:
    """Tiles whose block ids are in registers at once.

    A chunk that ends drains the pipeline, so 1,024 tokens, 16 tiles of 64. The ids live in registers
    and are gathered through shared memory: more than 512 of them (block size 1) cost other values
    their registers.
    """
    ids = max(32, min(512, 1024 // block_size))
    if block_size <= tile:
        return max(1, ids * block_size // tile)
    # A chunk may begin inside a block: then its ids cover one block less.
    return (ids - 1) * block_size // tile + 1


def chunk_ids_for(*, tile: int, chunk_tiles: int, block_size: int) -> int:
    """Block ids that a chunk may touch wherever it begins, as a power of two (32 fill a warp)."""
    inside = max(block_size - tile, 0)
    return max(32, next_power_of_2(-(-(inside + chunk_tiles * tile) // block_size)))


@lru_cache(maxsize=4096)
def num_splits_for(*, sm_count: int, batch: int, kv_heads: int, max_context: int, tile: int) -> int:
    """Parts that each sequence is cut into: the fewest that keep the chip busy the shortest time.

    A program's time is its tiles, the chip's time that of its waves of programs. kv_heads counts
    programs of one sequence and split. The result only depends on shapes: a captured graph and an
    eager call agree.
    """
    tiles = max(1, -(-max_context // tile))
    programs = max(1, batch * kv_heads)
    slots = sm_count * PROGRAMS_PER_SM

    def cost(splits: int) -> int:
        per_split = max(MIN_TILES, -(-tiles // splits))
        used = -(-tiles // per_split)
        waves = -(-programs * used // slots)
        return waves * (per_split + WAVE_TILES) + (MERGE_TILES if splits > 1 else 0)

    most = max(1, min(MAX_SPLITS, tiles // MIN_TILES))
    least = min(most, -(-max_context // MAX_SPLIT_TOKENS)) if sm_count > 1 else 1
    return min(range(max(1, least), most + 1), key=lambda splits: (cost(splits), splits))


def plan_for(
    *,
    head_dim: int,
    item_bytes: int,
    block_size: int | None,
    arch: str,
    sm_count: int,
    batch: int,
    query_heads: int,
    kv_heads: int,
    max_context: int,
    num_splits: int | None = None,
    walk: str = "chunked",
) -> Plan:
    """The plan for a case; block_size None is the contiguous twin's. arch as in STAGES."""
    tile = tile_for(head_dim=head_dim, item_bytes=item_bytes, arch=arch)
    rows = rows_for(query_heads // kv_heads)
    row_groups = -(-(query_heads // kv_heads) // rows)
    splits = num_splits or num_splits_for(
        sm_count=sm_count,
        batch=batch,
        kv_heads=kv_heads * row_groups,
        max_context=max_context,
        tile=tile,
    )
    # fp32 multiplies without a matrix unit, whose operands would not fit in 4 warps' registers.
    return Plan(
        tile=tile,
        chunk_tiles=1 if block_size is None else chunk_tiles_for(tile=tile, block_size=block_size),
        num_stages=STAGES.get(arch, OTHER_STAGES),
        num_warps=8 if item_bytes == 4 or rows == 64 else 4,
        num_splits=splits,
        walk=walk,
    )

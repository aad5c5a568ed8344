"""The table of plans: sizes of tiles and chunks, and how many splits a case gets."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need triton, which is there on Linux only")

from kvtool.kernels import decode_plan

H200 = 132


def splits(batch: int, context: int, kv_heads: int = 8, sm_count: int = H200) -> int:
    """Splits of a bf16 layer with heads of 128."""
    return decode_plan.num_splits_for(
        sm_count=sm_count, batch=batch, kv_heads=kv_heads, max_context=context, tile=64
    )


@pytest.mark.parametrize(
    ("head_dim", "item_bytes", "tile"),
    [(64, 2, 128), (80, 2, 64), (128, 2, 64), (192, 2, 32), (256, 2, 32), (128, 4, 32), (256, 4, 16)],
)  # fmt: skip
def test_a_tile_is_cut_by_bytes(head_dim: int, item_bytes: int, tile: int) -> None:
    sizes = {"head_dim": head_dim, "item_bytes": item_bytes}
    assert decode_plan.tile_for(arch="sm_90", **sizes) == tile
    assert decode_plan.tile_for(arch="gfx942", **sizes) == max(16, tile // 2)


@pytest.mark.parametrize("block_size", [1 << power for power in range(9)])
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_a_chunk_has_ids_for_every_place_where_it_may_begin(tile: int, block_size: int) -> None:
    chunk_tiles = decode_plan.chunk_tiles_for(tile=tile, block_size=block_size)
    ids = decode_plan.chunk_ids_for(tile=tile, chunk_tiles=chunk_tiles, block_size=block_size)
    assert ids & (ids - 1) == 0
    assert chunk_tiles >= 4
    for begin in range(0, 1024, tile):
        last = begin + chunk_tiles * tile - 1
        assert last // block_size - begin // block_size < ids


def test_one_long_sequence_fills_the_chip_in_one_wave() -> None:
    for context in (8192, 131072):
        programs = 8 * splits(1, context)
        assert 0.9 * 2 * H200 <= programs <= 2 * H200


def test_a_batch_that_fills_the_chip_is_not_split() -> None:
    assert splits(32, 4096) == 1
    assert splits(64, 8192) == 1


def test_short_contexts_are_not_split() -> None:
    for context in (0, 1, 100, 400):
        assert splits(1, context) == 1


def test_a_long_context_is_split_in_a_full_batch_too() -> None:
    assert splits(32, 65536) >= 8


def test_a_split_has_some_tiles_to_fill_its_pipeline() -> None:
    for batch in (1, 3, 8, 40, 300):
        for context in (64, 1000, 4096, 131072):
            count = splits(batch, context)
            assert 1 <= count <= decode_plan.MAX_SPLITS
            assert count == 1 or -(-context // 64) // count >= decode_plan.MIN_TILES


def test_a_plan_follows_the_chip() -> None:
    sizes = {
        "head_dim": 128, "item_bytes": 2, "block_size": 16, "sm_count": H200, "batch": 1,
        "query_heads": 32, "kv_heads": 8, "max_context": 8192,
    }  # fmt: skip
    hopper = decode_plan.plan_for(arch="sm_90", **sizes)
    assert (hopper.tile, hopper.chunk_tiles, hopper.num_stages, hopper.num_warps) == (64, 16, 3, 4)
    assert decode_plan.plan_for(arch="gfx942", **sizes).num_stages == 2
    assert decode_plan.plan_for(arch="sm_120", **sizes).num_stages == 2
    assert decode_plan.plan_for(arch="sm_90", num_splits=5, **sizes).num_splits == 5
    assert decode_plan.plan_for(arch="interpreter", **{**sizes, "sm_count": 1}).num_splits == 1

"""The map of the pool: regions that are really held, by whom, and holes between them."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool.requests import Requests
from kvtool.sim.memory import ALLOCATORS, CONTIGUOUS, PAGED, STATIC_BATCH, Contiguous, Paged, memory
from kvtool.sim.scheduler import Scheduler
from kvtool.sim.settings import Settings
from kvtool.sim.snapshot import Region, memory_map

LIMITS = Settings(num_blocks=60, block_size=16, max_model_len=256)


def made(count: int = 200) -> Requests:
    """Requests of random lengths that all wait."""
    rng = np.random.default_rng(5)
    return Requests(
        arrival_ns=np.zeros(count, np.int64),
        prompt_tokens=rng.integers(1, 100, count),
        output_tokens=rng.integers(1, 100, count),
    )


def where(allocator: str) -> str:
    return "first-fit" if allocator in CONTIGUOUS else ""


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_regions_lie_in_the_pool_and_do_not_overlap(allocator: str) -> None:
    regions = sorted(memory_map(allocator, where(allocator), LIMITS, made()))
    assert len({region.owner for region in regions}) > 1
    end = 0
    for start, size, filled, _ in regions:
        assert start >= end
        assert 0 <= filled <= size
        end = start + size
    assert end <= LIMITS.num_slots


@pytest.mark.parametrize("allocator", [PAGED, *CONTIGUOUS])
def test_the_map_is_what_the_allocator_holds(allocator: str) -> None:
    store = memory(allocator, where(allocator), LIMITS)
    scheduler = Scheduler(made(), LIMITS, store)
    scheduler.run(until_ended=20)  # a tenth of the requests
    regions = memory_map(allocator, where(allocator), LIMITS, made())
    if isinstance(store, Paged):
        blocks = [block for _, table in store.pool.owners() for block in table]
        assert sorted(region.start for region in regions) == sorted(16 * b for b in blocks)
    elif isinstance(store, Contiguous):
        assert sorted(r[:2] for r in regions) == store.placement.regions()
    computed = sum(request.computed for request in scheduler.running)
    assert sum(region.filled for region in regions) == computed


def test_one_sees_the_holes_of_exact_reservations() -> None:
    regions = sorted(memory_map("oracle", "first-fit", LIMITS, made()))
    ends = [region.start + region.size for region in regions]
    starts = [region.start for region in regions[1:]]
    assert any(start > end for end, start in zip(ends, starts, strict=False))


def test_a_static_batch_has_rows_of_one_width() -> None:
    one = np.ones(3, np.int64)
    requests = Requests(
        arrival_ns=0 * one, prompt_tokens=np.array([5, 3, 4]), output_tokens=np.array([4, 2, 1])
    )
    # Rows of 5 + 4 - 1 slots; after half of the 4 steps the last two are done.
    assert memory_map(STATIC_BATCH, "", LIMITS, requests) == (
        Region(0, 8, 7, 0), Region(8, 8, 0, 1), Region(16, 8, 0, 2),
    )  # fmt: skip

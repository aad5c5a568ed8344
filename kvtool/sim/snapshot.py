"""A map of the pool in the middle of a run: who holds which slots, and where the holes are.

The fast engine counts blocks and does not know which are whose, so the first requests are run through
the plain scheduler and its allocators.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from kvtool.requests import Requests
from kvtool.sim.memory import STATIC_BATCH, Contiguous, Paged, memory
from kvtool.sim.scheduler import Scheduler
from kvtool.sim.settings import Settings
from kvtool.sim.static_batch import StaticBatches

MOST_REQUESTS, MOST_ENDED, MOST_STEPS = 2_000, 200, 20_000
"""Requests that are looked at; how many of them have ended, or steps been made, in the map."""


class Region(NamedTuple):
    """Slots of one owner that lie together; the first `filled` of them hold tokens."""

    start: int
    size: int
    filled: int
    owner: int


def memory_map(
    allocator: str, placement: str, settings: Settings, requests: Requests
) -> tuple[Region, ...]:
    """The regions of the pool when a tenth of the requests have ended (200 at most)."""
    if allocator == STATIC_BATCH:
        return _of_batch(settings, requests)
    store = memory(allocator, placement, settings)
    scheduler = Scheduler(requests, settings, store)
    ended = min(MOST_ENDED, max(1, len(requests) // 10))
    scheduler.run(until_ended=ended, most_steps=MOST_STEPS)
    regions = []
    for owner, request in enumerate(scheduler.running):
        if isinstance(store, Paged):
            size = settings.block_size
            for place, block in enumerate(store.pool.block_table(request.index)):
                filled = min(size, max(0, request.computed - place * size))
                regions.append(Region(block * size, size, filled, owner))
        elif isinstance(store, Contiguous):
            address, size = store.regions[request.index]
            regions.append(Region(address, size, request.computed, owner))
    return tuple(regions)


def _of_batch(settings: Settings, requests: Requests) -> tuple[Region, ...]:
    """The first batch when half of its steps are made: a row a request, all of one width."""
    batches = StaticBatches(source=[requests], num_requests=len(requests), settings=settings)
    batch = list(islice(batches.batches(), 1))
    if not batch:
        return ()
    members = batch[0]
    steps = max(member.output for member in members)
    width = max(member.prompt for member in members) + steps - 1
    half = steps // 2
    return tuple(
        Region(row * width, width, member.prompt + half if half < member.output else 0, row)
        for row, member in enumerate(members)
    )

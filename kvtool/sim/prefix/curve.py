"""The hit rate at every capacity from one pass: LRU over block hashes, by stack distance.

Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970: what a
smaller cache holds is the top of the stack of what a larger one holds. That is so for vLLM's pool too,
as long as no request is larger than the cache: once full, a pool of C blocks caches the C blocks freed
last, or C - 1 while the last request left a tail without a hash. So a block at distance d from the top
is a hit from d + 1 blocks on, or from d + 2.

Where a request is larger than the cache it is rejected, and below the largest request the stacks of two
capacities differ in more than size: there each capacity is replayed. So is all of a trace in which very
many prompts of whole blocks come again as they were (`curve_kernel`: each caches its last block twice).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtool.errors import KvtoolError
from kvtool.sim.prefix.blocks import InBlocks, ids_per_key, in_blocks_of
from kvtool.sim.prefix.curve_kernel import COPY, MOST_COPIES, TOTALS, add_distances, fill_tree
from kvtool.sim.prefix.grid import replay_all
from kvtool.sim.prefix.keys import Ints, Keys
from kvtool.sim.prefix.replay import Cache
from kvtool.sim.prefix.result import NONE as NO_OUTPUTS
from kvtool.sim.prefix.result import HitCurve
from kvtool.trace_blocks import HashedRequests

if TYPE_CHECKING:
    from kvtool.sim.prefix.result import Counts

Source = Callable[[], Iterable[HashedRequests]]
"""Gives the chunks of a trace anew."""
NEVER = 2**62
MOST_REPLAYED, AT_ONCE = 64, 16
"""Capacities where each has to be replayed, and how many of them in one reading: memory is theirs."""
MOST_BLOCKS = 2**28
"""Of all requests together: 2 GiB of steps."""


@dataclass(slots=True, kw_only=True)
class StackDistances:
    """Of each hit the least capacity at which it is one; fed by the chunk, whatever the capacities."""

    block_size: int
    totals: Any = field(default_factory=lambda: np.zeros(1, TOTALS).view(np.recarray)[0])
    seen_by: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """Of each id the last request that had it, + 1; 0: none."""
    live: Ints = field(default_factory=lambda: np.zeros(1 << 10, np.int32))
    """Of each request how many blocks it was the last one to have."""
    tree: Ints = field(default_factory=lambda: np.zeros((1 << 10) + 1, np.int32))
    """Their sums, as a Fenwick tree."""
    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1 << 10, np.int64))
    """By capacity: hits that there are from it on, less those that end (a difference array)."""

    elders: Any = field(default_factory=lambda: np.zeros(MOST_COPIES, COPY).view(np.recarray))
    ghosts: Any = field(default_factory=lambda: np.zeros(MOST_COPIES, COPY).view(np.recarray))

    def feed(self, prompts: InBlocks, num_ids: int) -> None:
        """The next requests."""
        blocks = (prompts.tokens + prompts.outputs) // self.block_size
        num_requests = int(self.totals.requests) + len(blocks)
        num_blocks = int(self.totals.blocks + blocks.sum())
        if num_blocks > MOST_BLOCKS:
            raise KvtoolError(
                f"the requests have more than {MOST_BLOCKS:,} blocks of {self.block_size:,} tokens, too many "
                "for a curve",
                "take larger blocks, or give single capacities: --capacity 1000,10000",
                code="too_large",
            )
        self.seen_by = _grown(self.seen_by, num_ids)
        self.steps = _grown(self.steps, num_blocks + MOST_COPIES + 4)
        if num_requests > len(self.live):
            self.live = _grown(self.live, num_requests)
            self.tree = np.zeros(len(self.live) + 1, np.int32)
            fill_tree(self.live, self.tree)
        add_distances(
            self.totals, self.seen_by, self.live, self.tree, self.steps, self.elders, self.ghosts,
            *prompts[:4], self.block_size,
        )  # fmt: skip

    @property
    def hit_blocks(self) -> NDArray[np.int64]:
        """By capacity, from 0 on; the last entry holds for all larger ones."""
        return np.cumsum(np.cumsum(self.steps))


def hit_curve(
    source: Source,
    *,
    block_size: int,
    capacities: Sequence[int] | None = None,
    cache_outputs: str = NO_OUTPUTS,
    points: int = 1000,
) -> HitCurve:
    """Hits at each of these capacities, or at so many from the largest request to the ceiling."""
    stack, keys = StackDistances(block_size=block_size), Keys()
    for requests in source():
        prompts = in_blocks_of(block_size, requests, keys.of(requests), cache_outputs=cache_outputs)
        num_ids = keys.count * ids_per_key(requests.block_size, block_size)
        stack.feed(prompts, num_ids)
    curve = _of_one_pass(stack, capacities, points)
    _replay_below(curve, source, cache_outputs)
    return curve


def _of_one_pass(stack: StackDistances, capacities: Sequence[int] | None, points: int) -> HitCurve:
    """The curve; below `exact_from` it is still to be replayed."""
    totals, hits = stack.totals, stack.hit_blocks
    largest, ceiling = int(totals.largest), int(hits.argmax())
    if totals.given_up:  # all that was ever cached, and a tail
        ceiling, points = int(totals.blocks - hits[-1]) + 1, min(points, MOST_REPLAYED)
    wanted = spread(largest, max(ceiling, largest), points)
    if capacities is not None:
        wanted = np.unique(np.asarray(capacities, np.int64))
    hit_blocks = hits[np.minimum(wanted, len(hits) - 1)]
    cached = np.minimum(totals.on_stack + totals.ghosts, wanted - totals.tail)
    return HitCurve(
        capacity_blocks=wanted,
        block_size=stack.block_size,
        requests=int(totals.requests),
        queried_tokens=int(totals.queried),
        hit_tokens=hit_blocks * stack.block_size,
        evicted_blocks=totals.blocks - hit_blocks - cached,
        rejected=np.zeros_like(wanted),
        exact_from=NEVER if totals.given_up else largest,
        largest_blocks=largest,
        ceiling_tokens=int(hits[-1]) * stack.block_size,
        ceiling_blocks=None if totals.given_up else max(ceiling, largest),
    )


def _replay_below(curve: HitCurve, source: Source, cache_outputs: str) -> None:
    """Replay each capacity below `exact_from`, and put what it comes to into the columns."""
    again = np.flatnonzero(curve.capacity_blocks < curve.exact_from)
    if not len(again):
        return
    caches = [
        Cache(capacity_blocks=capacity, block_size=curve.block_size, cache_outputs=cache_outputs)
        for capacity in curve.capacity_blocks[again].tolist()
    ]
    for first in range(0, len(caches), AT_ONCE):
        results = replay_all(caches[first : first + AT_ONCE], source())
        for at, result in zip(again[first:], results, strict=False):
            curve.hit_tokens[at], curve.rejected[at] = result.hit_tokens, result.rejected
            curve.evicted_blocks[at] = result.evicted_blocks


def spread(low: int, high: int, points: int) -> Counts:
    """Capacities from one to another, each larger than the last by the same factor where it can be."""
    low = max(1, low)
    return np.unique(np.rint(np.geomspace(low, max(low, high), points)).astype(np.int64))


def _grown(column: Any, size: int) -> Any:
    """At least so many entries, the new ones 0; room is doubled, not added."""
    if size <= len(column):
        return column
    grown = np.zeros(max(size, 2 * len(column)), column.dtype)
    grown[: len(column)] = column
    return grown

"""One cache looked at closely: why one request found what it found, and the tree at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvtool.prompts import Prompts
from kvtool.run import Row

if TYPE_CHECKING:
    from kvtool.sim.prefix.replay import Cache
    from kvtool.trace_blocks import HashedRequests

REJECTED, LOST, LAST_BLOCK, ROUNDED, NEW = "rejected", "lost", "last block", "rounded", "new"
"""What ends a hit, as in kvtool.sim.prefix.shared, or that the request is larger than the cache."""


def explain(prompts: Prompts, cache: Cache, number: int) -> Row:
    """What the request of that number (from 1) found in a cache, and what ended the hit.

    `last_request` had the first token that was no hit, after the same tokens; None: nobody.
    `needed_blocks` is the least capacity of a hash index by recency that finds all there is to find
    and has room for every request so far; None if there is nothing.
    """
    from kvtool.sim.prefix.blocks import ids_per_key, in_blocks_of
    from kvtool.sim.prefix.curve import StackDistances
    from kvtool.sim.prefix.grid import steps_of
    from kvtool.sim.prefix.keys import Keys
    from kvtool.sim.prefix.replay import start
    from kvtool.sim.prefix.result import KNOWN, NONE
    from kvtool.sim.prefix.shared import Shared

    size, keys, run = cache.block_size, Keys(), start(cache, with_hits=True)
    run.keys = keys
    shared = Shared(block_sizes=(), outputs=KNOWN if cache.cache_outputs == KNOWN else NONE)
    stack = StackDistances(block_size=size)
    steps_before, last_request = stack.steps, shared.last_requests(())
    for part in _up_to(prompts, number):
        of = keys.of(part)
        last_request, steps_before = shared.last_requests(of.tolist()), stack.steps.copy()
        for step in steps_of([run], part, of):
            step()
        shared.feed(part, keys, of)
        blocks = in_blocks_of(size, part, of, cache_outputs=cache.cache_outputs)
        stack.feed(blocks, keys.count * ids_per_key(part.block_size, size))
    steps = stack.steps
    steps[: len(steps_before)] -= steps_before  # what the last request alone adds
    by_capacity = stack.hit_blocks
    hits, found = int(run.hits[-1][-1]), int(by_capacity.max()) * size
    tokens, common = shared.last
    ends_at = max(0, hits) // prompts.block_size
    return {
        "request": number,
        "prompt_tokens": tokens,
        "hit_tokens": max(0, hits),
        "shared_tokens": common,
        "findable_tokens": found,
        "ended_by": _ended_by(hits, found, common, size),
        "last_request": last_request[ends_at] if ends_at < len(last_request) else None,
        "needed_blocks": max(int(by_capacity.argmax()), int(stack.totals.largest))
        if found
        else None,
    }


def _ended_by(hits: int, found: int, common: int, size: int) -> str:
    if hits < 0:
        return REJECTED
    if hits < found:
        return LOST
    if common // size * size > found:
        return LAST_BLOCK
    return ROUNDED if common > found else NEW


def _up_to(prompts: Prompts, number: int) -> Iterator[HashedRequests]:
    """The requests up to one, which comes alone."""
    left = number
    for requests in prompts:
        if left > len(requests):
            yield requests
            left -= len(requests)
            continue
        if left > 1:
            yield requests.part(0, left - 1)
        yield requests.part(left - 1, left)
        return


def drawn_tree(prompts: Prompts, cache: Cache) -> list[str]:
    """The radix tree after all requests, in lines of text."""
    from kvtool.sim.prefix.drawing import branch_of_replay, draw
    from kvtool.sim.prefix.replay import RadixReplay

    run = RadixReplay(cache=cache)
    for requests in prompts:
        run.feed(requests)
    return list(draw(branch_of_replay(run)))

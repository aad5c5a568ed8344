"""One cache looked at closely: why one request found what it found, and the tree at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvtool.prompts import Prompts
from kvtool.run import Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtool.sim.prefix.replay import Cache
    from kvtool.trace_blocks import HashedRequests

    Counts = NDArray[np.int64]

REJECTED, LOST, UNSERVED, LAST_BLOCK, ROUNDED, NEW = (
    "rejected", "lost", "unserved", "last block", "rounded", "new",
)  # fmt: skip
"""What ends a hit: the request is larger than the cache; the next block was evicted; who had it was
rejected itself; it is that of the last token; what is shared fills no block; nobody had it."""


def explain(prompts: Prompts, cache: Cache, number: int) -> Row:
    """What the request of that number (from 1) found in a cache, and what ended the hit.

    `last_request` is the last one that was served and had the next block after the same ones; None:
    nobody. `needed_blocks` is the least capacity of a hash index by recency that finds all there is to
    find and has room for every request so far; None if there is nothing, or it is not known.
    """
    from kvtool.sim.prefix.grid import replay_all

    (result,) = replay_all([cache], _up_to(prompts, number), with_hits=True)
    hits = result.hits
    assert hits is not None, "they were asked for"
    tokens, overlaps = _overlaps(prompts, cache, number)
    served = hits[: number - 1] >= 0
    shared = int(overlaps.max(initial=0))
    size, hit = cache.block_size, max(0, int(hits[number - 1]))
    findable = min(shared // size, max(0, tokens - 1) // size) * size
    having = (served & (overlaps >= hit + size)).nonzero()[0]
    return {
        "request": number,
        "prompt_tokens": tokens,
        "hit_tokens": hit,
        "shared_tokens": shared,
        "findable_tokens": findable,
        "ended_by": _ended_by(int(hits[number - 1]), findable, shared, size, bool(len(having))),
        "last_request": int(having[-1]) + 1 if len(having) and hit < findable else None,
        "needed_blocks": _needed(prompts, cache, number) if findable else None,
    }


def _ended_by(hits: int, findable: int, shared: int, size: int, was_served: bool) -> str:
    if hits < 0:
        return REJECTED
    if hits < findable:
        return LOST if was_served else UNSERVED
    if shared // size * size > findable:
        return LAST_BLOCK
    return ROUNDED if shared > findable else NEW


def _overlaps(prompts: Prompts, cache: Cache, number: int) -> tuple[int, Counts]:
    """Tokens of the request's prompt, and how many of its first ones each earlier request begins with."""
    import numpy as np

    from kvtool.sim.prefix.blocks import outputs_of
    from kvtool.sim.prefix.result import KNOWN
    from kvtool.sim.prefix.shared_kernel import add_overlaps

    *_, last = _up_to(prompts, number)
    length, found = int(last.prompt_tokens[-1]), []
    target = last.hash_ids[int(last.starts[-2]) :]
    for requests in _up_to(prompts, number):
        held = requests.prompt_tokens
        if cache.cache_outputs == KNOWN:
            held = held + outputs_of(requests, KNOWN)
        overlaps = np.zeros(len(requests), np.int64)
        add_overlaps(
            requests.hash_ids, requests.starts, held, requests.block_size, target, length, overlaps
        )
        found.append(overlaps)
    return length, np.concatenate(found)[:-1]


def _needed(prompts: Prompts, cache: Cache, number: int) -> int | None:
    """By what the last request alone adds to the hits at each capacity."""
    from kvtool.sim.prefix.blocks import ids_per_key, in_blocks_of
    from kvtool.sim.prefix.curve import StackDistances
    from kvtool.sim.prefix.keys import Keys

    keys, stack = Keys(), StackDistances(block_size=cache.block_size)
    done, before = 0, stack.steps
    for requests in _up_to(prompts, number):
        done += len(requests)
        last = len(requests) - 1 if done == number else len(requests)
        for part in (requests.part(0, last), requests.part(last, len(requests))):
            if not len(part):
                continue
            if done == number:
                before = stack.steps.copy()
            blocks = in_blocks_of(
                cache.block_size, part, keys.of(part), cache_outputs=cache.cache_outputs
            )
            stack.feed(blocks, keys.count * ids_per_key(part.block_size, cache.block_size))
    if stack.totals.given_up:
        return None
    stack.steps[: len(before)] -= before
    return max(int(stack.hit_blocks.argmax()), int(stack.totals.largest))


def _up_to(prompts: Prompts, number: int) -> Iterator[HashedRequests]:
    """The requests up to one."""
    left = number
    for requests in prompts:
        yield requests.first(left)
        left -= len(requests)
        if left <= 0:
            return


def drawn_tree(prompts: Prompts, cache: Cache) -> list[str]:
    """The radix tree after all requests, in lines of text."""
    from kvtool.sim.prefix.drawing import branch_of_replay, draw
    from kvtool.sim.prefix.replay import RadixReplay

    run = RadixReplay(cache=cache)
    for requests in prompts:
        run.feed(requests)
    return list(draw(branch_of_replay(run)))

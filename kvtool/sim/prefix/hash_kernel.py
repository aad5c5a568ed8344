"""The fast replay of vLLM's rules, least recently used first: kvtool.sim.prefix.block_index in arrays.

Requests come one after the other, so between two of them every block is free and the free list is: the
blanks, which only their number tells apart, then the blocks with a hash in the order of their freeing.
"""

from __future__ import annotations

from typing import Any

from kvtool.jit import compiled, part
from kvtool.sim.prefix.pool import NONE, gain_id, lose_id, number_of_new
from kvtool.sim.prefix.result import HIT, QUERIED, REJECTED, REQUESTS, TAKEN


@compiled
def replay_lru(
    pool: Any, blocks: Any, block_of: Any, tally: Any,
    ids: Any, starts: Any, tokens: Any, outputs: Any, tenants: Any, hits: Any,
) -> None:  # fmt: skip
    """Run the requests through the pool; `hits` gets the hit tokens of each, unless it is empty."""
    size = pool.size
    for request in range(len(tokens)):
        length = tokens[request]
        held = length + outputs[request]
        needed = (held + size - 1) // size
        tenant = tenants[request]
        pool.tenant = tenant
        tally[tenant, REQUESTS] += 1
        tally[tenant, QUERIED] += length
        if needed > pool.num_blocks:
            tally[tenant, REJECTED] += 1
            if len(hits) > 0:
                hits[request] = NONE
            continue
        first, last = starts[request], starts[request + 1]
        # The last token of a prompt is always computed, and with it its block.
        limit = first + max(0, length - 1) // size
        at = first
        while at < limit and block_of[ids[at]] >= 0:
            unlink(pool, blocks, block_of[ids[at]])
            at += 1
        tally[tenant, HIT] += (at - first) * size
        if len(hits) > 0:
            hits[request] = (at - first) * size
        new = needed - (at - first)
        evicted = max(0, new - pool.blanks)
        for _ in range(evicted):
            victim = pool.oldest
            unlink(pool, blocks, victim)
            tally[tenant, TAKEN + blocks[victim].tenant] += 1
            lose_id(pool, blocks, block_of, victim)
        pool.evicted += evicted
        pool.blanks += evicted - new + needed - held // size  # the tail has no hash
        # Freed from the last block to the first: of the output, of the prompt.
        for _ in range(held // size - (last - first)):
            block = number_of_new(pool, blocks)
            gain_id(blocks, block_of, block, NONE)
            append(pool, blocks, block)
        for one in range(last - 1, at - 1, -1):
            block = number_of_new(pool, blocks)
            gain_id(blocks, block_of, block, ids[one])
            append(pool, blocks, block)
        for one in range(at - 1, first - 1, -1):
            append(pool, blocks, block_of[ids[one]])


@part
def unlink(pool: Any, blocks: Any, at: int) -> None:
    """Take a block out of the list."""
    newer, older = blocks[at].newer, blocks[at].older
    if newer >= 0:
        blocks[newer].older = older
    else:
        pool.newest = older
    if older >= 0:
        blocks[older].newer = newer
    else:
        pool.oldest = newer


@part
def append(pool: Any, blocks: Any, at: int) -> None:
    """Put a block into the list as the newest."""
    newest = pool.newest
    blocks[at].newer, blocks[at].older, blocks[at].tenant = NONE, newest, pool.tenant
    if newest >= 0:
        blocks[newest].newer = at
    else:
        pool.oldest = at
    pool.newest = at

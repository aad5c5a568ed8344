"""The fast replay of vLLM's rules with other policies than its own: a heap in place of the list.

Without recency a block can go before those that follow it in its prompt. These stay, cannot be found
until it is back, and may by then have twins: blocks computed anew with the same content.

Blocks that a request found stay in the heap: they are in use for as long as it takes blocks, and who is
on top meanwhile is set aside.
"""

from __future__ import annotations

from typing import Any

from kvtool.jit import compiled, part
from kvtool.sim.prefix.heap import push, remove, sink
from kvtool.sim.prefix.pool import NONE, gain_id, lose_id, number_of_new
from kvtool.sim.prefix.result import HIT, QUERIED, REJECTED, REQUESTS, TAKEN

LRU, LFU, FIFO, LENGTH_AWARE = range(4)
"""`pool.policy`: places in kvtool.sim.prefix.result.POLICIES."""
DEEPEST = 1 << 31


@compiled
def replay_policy(
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
        pool.requests += 1
        pool.tenant = tenant
        tally[tenant, REQUESTS] += 1
        tally[tenant, QUERIED] += length
        if needed > pool.num_blocks:
            tally[tenant, REJECTED] += 1
            if len(hits) > 0:
                hits[request] = NONE
            continue
        first, last = starts[request], starts[request + 1]
        limit = first + max(0, length - 1) // size
        at = first
        while at < limit and block_of[ids[at]] >= 0:
            blocks[block_of[ids[at]]].user = pool.requests
            at += 1
        tally[tenant, HIT] += (at - first) * size
        if len(hits) > 0:
            hits[request] = (at - first) * size
        new = needed - (at - first)
        evicted = max(0, new - pool.blanks)
        left = evicted
        while left > 0:
            victim = blocks[0].heap
            remove(pool, blocks, victim)
            if blocks[victim].user != pool.requests:  # who was just found comes back below
                tally[tenant, TAKEN + blocks[victim].tenant] += 1
                lose_id(pool, blocks, block_of, victim)
                left -= 1
        pool.evicted += evicted
        pool.blanks += evicted - new + needed - held // size
        # Cached from the first block to the last, freed from the last to the first.
        begun = pool.clock
        pool.clock += 2 * (held // size)
        end = begun + held // size
        for one in range(held // size - 1, at - first - 1, -1):
            block = number_of_new(pool, blocks)
            blocks[block].hits, blocks[block].depth = 0, one
            blocks[block].cached, blocks[block].user = begun + one, 0
            gain_id(blocks, block_of, block, ids[first + one] if one < last - first else NONE)
            end += 1
            rank(pool, blocks, block, end)
            push(pool, blocks, block)
        for one in range(at - 1, first - 1, -1):
            block = block_of[ids[one]]
            blocks[block].hits += 1
            end += 1
            rank(pool, blocks, block, end)
            if blocks[block].place < 0:
                push(pool, blocks, block)
            elif pool.policy != FIFO:  # its turn is later than it was
                sink(pool, blocks, block, blocks[block].place)


@part
def rank(pool: Any, blocks: Any, at: int, now: int) -> None:
    """The turn of a block that is free again, by the policy."""
    block = blocks[at]
    block.second, block.tenant = now, pool.tenant
    if pool.policy == LFU:
        block.first = block.hits
    elif pool.policy == FIFO:
        block.first = block.cached
    elif pool.policy == LENGTH_AWARE:
        block.first = (block.hits + 1) * DEEPEST - block.depth
    else:
        block.first = 0

"""The fast replay of vLLM's rules, least recently used first: kvtool.sim.prefix.block_index in arrays.

Requests come one after the other, so between two of them every block is free and the free list is: the
blanks, which only their number tells apart, then the blocks with a hash in the order of their freeing.
"""

from __future__ import annotations

from typing import Any

from kvtool.jit import compiled, part
from kvtool.sim.prefix.counting import count_hit, count_query, count_rejection
from kvtool.sim.prefix.pool import NONE, gain_id, lose_id, number_of_new
from kvtool.sim.prefix.result import TAKEN


@compiled
def replay_lru(
    pool: Any, blocks: Any, block_of: Any, tally: Any,
    ids: Any, starts: Any, tokens: Any, outputs: Any, tenants: Any, hits: Any,
) -> None:  # fmt: skip
    """Run the requests through the pool; `hits` gets the hit tokens of each, unless it is empty."""
    size = pool.size
    for request in range(len(tokens)):
        length, tenant = tokens[request], tenants[request]
        held = length + outputs[request]
        needed = (held + size - 1) // size
        pool.tenant = tenant
        count_query(tally, tenant, length)
        if needed > pool.num_blocks:
            count_rejection(tally, tenant, hits, request)
            continue
        first = starts[request]
        # The last token of a prompt is always computed, and with it its block.
        limit = first + max(0, length - 1) // size
        at = first
        while at < limit and block_of[ids[at]] >= 0:
            unlink(pool, blocks, block_of[ids[at]])
            at += 1
        count_hit(tally, tenant, hits, request, (at - first) * size)
        take(pool, blocks, block_of, tally, needed - (at - first))
        pool.blanks += needed - held // size  # the tail has no hash
        free(pool, blocks, block_of, ids, first, at, starts[request + 1], held // size)


@part
def take(pool: Any, blocks: Any, block_of: Any, tally: Any, new: int) -> None:
    """Take so many blocks from the list: the blanks, and then those freed the longest ago."""
    evicted = max(0, new - pool.blanks)
    for _ in range(evicted):
        victim = pool.oldest
        unlink(pool, blocks, victim)
        tally[pool.tenant, TAKEN + blocks[victim].tenant] += 1
        lose_id(pool, blocks, block_of, victim)
    pool.evicted += evicted
    pool.blanks += evicted - new


@part
def free(
    pool: Any, blocks: Any, block_of: Any, ids: Any, first: int, found: int, last: int, full: int
) -> None:
    """Free a request's full blocks from the last to the first: of its output, those that were computed,
    those that were found (from `first` to `found` in `ids`)."""
    for _ in range(full - (last - first)):
        block = number_of_new(pool, blocks)
        gain_id(blocks, block_of, block, NONE)
        append(pool, blocks, block)
    for one in range(last - 1, found - 1, -1):
        block = number_of_new(pool, blocks)
        gain_id(blocks, block_of, block, ids[one])
        append(pool, blocks, block)
    for one in range(found - 1, first - 1, -1):
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

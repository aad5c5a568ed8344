"""The fast replay of vLLM's rules with other policies than its own: a heap in place of the list.

Without recency a block can go before those that follow it in its prompt. These stay, cannot be found
until it is back, and may by then have twins: blocks computed anew with the same content.

Blocks that a request found stay in the heap: they are in use for as long as it takes blocks, and who is
on top meanwhile is set aside.
"""

from __future__ import annotations

from typing import Any

from kvtool.jit import compiled, part
from kvtool.sim.prefix.counting import count_hit, count_query, count_rejection
from kvtool.sim.prefix.heap import push, remove, settle
from kvtool.sim.prefix.pool import NONE, gain_id, lose_id, number_of_new
from kvtool.sim.prefix.ranking import rank
from kvtool.sim.prefix.result import TAKEN


@compiled
def replay_policy(
    pool: Any, blocks: Any, block_of: Any, tally: Any,
    ids: Any, starts: Any, tokens: Any, outputs: Any, tenants: Any, hits: Any,
) -> None:  # fmt: skip
    """Run the requests through the pool; `hits` gets the hit tokens of each, unless it is empty."""
    size = pool.size
    for request in range(len(tokens)):
        length, tenant = tokens[request], tenants[request]
        held = length + outputs[request]
        needed = (held + size - 1) // size
        pool.requests += 1
        pool.tenant = tenant
        count_query(tally, tenant, length)
        if needed > pool.num_blocks:
            count_rejection(tally, tenant, hits, request)
            continue
        first = starts[request]
        limit = first + max(0, length - 1) // size
        at = first
        while at < limit and block_of[ids[at]] >= 0:
            blocks[block_of[ids[at]]].user = pool.requests
            at += 1
        count_hit(tally, tenant, hits, request, (at - first) * size)
        take(pool, blocks, block_of, tally, needed - (at - first))
        pool.blanks += needed - held // size
        free(pool, blocks, block_of, ids, first, at, starts[request + 1], held // size)


@part
def take(pool: Any, blocks: Any, block_of: Any, tally: Any, new: int) -> None:
    """Take so many blocks: the blanks, and then those whose turn it is."""
    evicted = max(0, new - pool.blanks)
    left = evicted
    while left > 0:
        victim = blocks[0].heap
        remove(pool, blocks, victim)
        if blocks[victim].user != pool.requests:  # who was just found comes back in `free`
            tally[pool.tenant, TAKEN + blocks[victim].tenant] += 1
            lose_id(pool, blocks, block_of, victim)
            left -= 1
    pool.evicted += evicted
    pool.blanks += evicted - new


@part
def free(
    pool: Any, blocks: Any, block_of: Any, ids: Any, first: int, found: int, last: int, full: int
) -> None:
    """Free a request's full blocks: cached from the first to the last, freed from the last to the first.
    Those from `first` to `found` in `ids` were found."""
    begun = pool.clock
    pool.clock += 2 * full
    now = begun + full
    for one in range(full - 1, found - first - 1, -1):
        block = number_of_new(pool, blocks)
        blocks[block].hits, blocks[block].depth = 0, one
        blocks[block].cached, blocks[block].user = begun + one, 0
        gain_id(blocks, block_of, block, ids[first + one] if one < last - first else NONE)
        now += 1
        give_turn(pool, blocks, block, now)
        push(pool, blocks, block)
    for one in range(found - 1, first - 1, -1):
        block = block_of[ids[one]]
        blocks[block].hits += 1
        now += 1
        give_turn(pool, blocks, block, now)
        if blocks[block].place < 0:
            push(pool, blocks, block)
        else:
            settle(pool, blocks, block, blocks[block].place)


@part
def give_turn(pool: Any, blocks: Any, at: int, now: int) -> None:
    """The turn of a block that is free again, and whose it was."""
    block = blocks[at]
    block.first = rank(pool.policy, block.hits, block.cached, block.depth)
    block.second, block.tenant = now, pool.tenant

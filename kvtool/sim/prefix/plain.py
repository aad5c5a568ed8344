"""The replays written plainly, token by token: what the fast ones are compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from kvtool.sim.prefix.block_index import BlockIndex
from kvtool.sim.prefix.radix_tree import RadixTree
from kvtool.sim.prefix.replay import Cache
from kvtool.sim.prefix.result import (
    HIT,
    KNOWN,
    NONE,
    QUERIED,
    RADIX,
    REJECTED,
    REQUESTS,
    TAKEN,
    UNIQUE,
    PrefixResult,
)  # fmt: skip
from kvtool.trace_blocks import HashedRequests

Taken = Counter[tuple[int, int]]
"""Blocks that one tenant evicted of another."""


class Request(NamedTuple):
    """The tokens of a prompt, those that are cached of its output, and whose it is."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    tenant: int = 0


def spelled(requests: HashedRequests, *, cache_outputs: str = NONE) -> Iterator[Request]:
    """Requests as tokens: a block's are its hash times its size and on, a unique output's are below 0.

    Of an output that is known, the last token is left out: nothing was computed from it. A unique one is
    there whole, unless it is one token, which comes from the prefill.
    """
    fresh, size = count(-1, -1), requests.block_size
    for index, length in enumerate(requests.prompt_tokens.tolist()):
        blocks = requests.hash_ids[requests.starts[index] : requests.starts[index + 1]].tolist()
        tokens = [block * size + offset for block in blocks for offset in range(size)]
        generated = int(requests.output_tokens[index])
        output: tuple[int, ...] = ()
        if generated > 1 and cache_outputs == UNIQUE:
            output = tuple(next(fresh) for _ in range(generated))
        elif generated > 1 and cache_outputs == KNOWN:
            output = tuple(tokens[length : length + generated - 1])
        tenant = 0 if requests.tenant is None else int(requests.tenant[index])
        yield Request(tuple(tokens[:length]), output, tenant)


def replay_plain(cache: Cache, requests: HashedRequests) -> PrefixResult:
    """The same as kvtool.sim.prefix.replay.replay of one chunk, with the hits of each request."""
    spelt = list(spelled(requests, cache_outputs=cache.cache_outputs))
    if cache.index == RADIX:
        return replay_tree(cache, RadixTree(cache.block_size, cache.policy), spelt)
    return replay_index(cache, BlockIndex(cache.capacity_blocks, cache.policy), spelt)


def replay_index(cache: Cache, index: BlockIndex, requests: Sequence[Request]) -> PrefixResult:
    """vLLM: look up, allocate prompt and output, free."""
    size = cache.block_size
    hits = []
    for prompt, output, tenant in requests:
        tokens = prompt + output
        keys = [tokens[:end] for end in range(size, len(tokens) + 1, size)]
        most = max(0, len(prompt) - 1) // size  # the last token is always computed
        allocation = index.allocate(keys, -(-len(tokens) // size), most, tenant=tenant)
        if allocation is None:
            hits.append(-1)
            continue
        hits.append(allocation.num_hits * size)
        index.free(allocation.table)
    return _result(requests, hits, index.taken, 0, index.num_cached)


def replay_tree(cache: Cache, tree: RadixTree, requests: Sequence[Request]) -> PrefixResult:
    """SGLang: match and lock; make room for the prompt, then the output; insert and unlock.

    A request larger than the cache is rejected once there is no room: with all evicted that can be. So
    does the harness of the measured rows, which drives SGLang's tree alone; its server refuses a request
    of that length on input, and nothing is evicted.
    """
    size = cache.block_size
    hits: list[int] = []
    taken: Taken = Counter()
    evicted_leaves = 0
    for prompt, output, tenant in requests:
        tokens = prompt + output
        match = tree.match(prompt[:-1], tenant=tenant)
        tree.lock(match.node)
        fits = -(-len(tokens) // size) <= cache.capacity_blocks
        for part in (prompt, tokens) if fits else (tokens,):
            wanted = -(-len(part) // size) * size - match.length
            gone = tree.evict(wanted - (cache.capacity_tokens - tree.num_tokens))
            evicted_leaves += len(gone)
            for node in gone:
                taken[tenant, node.tenant] += len(node.tokens) // size
        if fits:
            tree.insert(tokens, tenant=tenant)
        hits.append(match.length if fits else -1)
        tree.unlock(match.node)
    cached = tree.num_tokens // size
    return _result(requests, hits, taken, evicted_leaves, cached)


def _result(
    requests: Sequence[Request], hits: list[int], taken: Taken, leaves: int, cached: int
) -> PrefixResult:
    count = max((request.tenant for request in requests), default=0) + 1
    tally = [[0] * TAKEN + [taken[one, other] for other in range(count)] for one in range(count)]
    for request, hit in zip(requests, hits, strict=True):
        row = tally[request.tenant]
        row[REQUESTS] += 1
        row[REJECTED] += hit == -1
        row[QUERIED] += len(request.prompt)
        row[HIT] += max(0, hit)
    return PrefixResult(
        requests=len(requests),
        rejected=hits.count(-1),
        queried_tokens=sum(len(request.prompt) for request in requests),
        hit_tokens=sum(max(0, hit) for hit in hits),
        evicted_blocks=taken.total(),
        evicted_leaves=leaves,
        cached_blocks=cached,
        tally=tuple(map(tuple, tally)),
        hits=np.array(hits, np.int64),
    )

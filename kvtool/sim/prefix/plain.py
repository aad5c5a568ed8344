"""The replays written plainly, token by token: what the fast ones are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from kvtool.sim.prefix.block_index import BlockIndex
from kvtool.sim.prefix.radix_tree import RadixTree
from kvtool.sim.prefix.replay import Cache
from kvtool.sim.prefix.result import RADIX, UNIQUE, PrefixResult
from kvtool.trace_blocks import HashedRequests


class Request(NamedTuple):
    """The tokens of a prompt, and those that are cached of its output."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


def spelled(requests: HashedRequests, *, cache_outputs: bool) -> Iterator[Request]:
    """Requests as tokens: a block's are its hash times its size and on, an output's are below 0.

    An output of one token comes from the prefill and takes no slot.
    """
    fresh, size = count(-1, -1), requests.block_size
    for index, length in enumerate(requests.prompt_tokens.tolist()):
        blocks = requests.hash_ids[requests.starts[index] : requests.starts[index + 1]].tolist()
        tokens = [block * size + offset for block in blocks for offset in range(size)]
        generated = int(requests.output_tokens[index]) if cache_outputs else 0
        output = tuple(next(fresh) for _ in range(generated if generated > 1 else 0))
        yield Request(tuple(tokens[:length]), output)


def replay_plain(cache: Cache, requests: HashedRequests) -> PrefixResult:
    """The same as kvtool.sim.prefix.replay.replay of one chunk, with the hits of each request."""
    spelt = list(spelled(requests, cache_outputs=cache.cache_outputs == UNIQUE))
    if cache.index == RADIX:
        return replay_tree(cache, RadixTree(cache.block_size, cache.policy), spelt)
    return replay_index(cache, BlockIndex(cache.capacity_blocks, cache.policy), spelt)


def replay_index(cache: Cache, index: BlockIndex, requests: Sequence[Request]) -> PrefixResult:
    """vLLM: look up, allocate prompt and output, free."""
    size = cache.block_size
    hits = []
    for prompt, output in requests:
        tokens = prompt + output
        keys = [tokens[:end] for end in range(size, len(tokens) + 1, size)]
        most = max(0, len(prompt) - 1) // size  # the last token is always computed
        allocation = index.allocate(keys, -(-len(tokens) // size), most)
        if allocation is None:
            hits.append(-1)
            continue
        hits.append(allocation.num_hits * size)
        index.free(allocation.table)
    return _result(requests, hits, index.num_evicted, 0, index.num_cached)


def replay_tree(cache: Cache, tree: RadixTree, requests: Sequence[Request]) -> PrefixResult:
    """SGLang: match and lock; make room for the prompt, then the output; insert and unlock.

    A request larger than the cache is rejected once there is no room: with all evicted that can be.
    """
    size = cache.block_size
    hits: list[int] = []
    evicted_tokens = evicted_leaves = 0
    for prompt, output in requests:
        tokens = prompt + output
        match = tree.match(prompt[:-1])
        tree.lock(match.node)
        fits = -(-len(tokens) // size) <= cache.capacity_blocks
        for part in (prompt, tokens) if fits else (tokens,):
            wanted = -(-len(part) // size) * size - match.length
            gone = tree.evict(wanted - (cache.capacity_tokens - tree.num_tokens))
            evicted_leaves += len(gone)
            evicted_tokens += sum(len(node.tokens) for node in gone)
        if fits:
            tree.insert(tokens)
        hits.append(match.length if fits else -1)
        tree.unlock(match.node)
    cached = tree.num_tokens // size
    return _result(requests, hits, evicted_tokens // size, evicted_leaves, cached)


def _result(
    requests: Sequence[Request], hits: list[int], blocks: int, leaves: int, cached: int
) -> PrefixResult:
    return PrefixResult(
        requests=len(requests),
        rejected=hits.count(-1),
        queried_tokens=sum(len(request.prompt) for request in requests),
        hit_tokens=sum(max(0, hit) for hit in hits),
        evicted_blocks=blocks,
        evicted_leaves=leaves,
        cached_blocks=cached,
        hits=np.array(hits, np.int64),
    )

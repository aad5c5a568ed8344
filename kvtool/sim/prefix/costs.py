"""What an index costs a request: the two of them in Python, as their engines write them, over real tokens.

The compiled replays work on integers that stand for tokens, so their own time says nothing of an index.
Here the first requests go through a block index (names by SHA-256 of a block's tokens and of the name
before it, as in vLLM's v1/core/kv_cache_utils.py; a pool whose operations take the same time whatever its
size) and through a radix tree that compares tokens (SGLang's mem_cache/radix_cache.py), at the same capacity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from time import thread_time

import numpy as np

from kvtool.sim.blocks.pool import CachedPool
from kvtool.sim.prefix.plain import Request, replay_tree, spelled
from kvtool.sim.prefix.radix_tree import RadixTree
from kvtool.sim.prefix.replay import Cache
from kvtool.sim.prefix.result import RADIX
from kvtool.trace_blocks import HashedRequests

SAMPLE_TOKENS, SAMPLE_BLOCKS = 1 << 18, 1 << 20
"""Tokens of the prompts that are tried, and blocks of the largest pool."""


def seconds_per_request(cache: Cache, requests: HashedRequests) -> tuple[float, float, int]:
    """CPU seconds of the index, of these to name blocks, and how many requests were tried."""
    some = _sample(cache, requests)
    if not some:
        return 0.0, 0.0, 0
    if cache.index == RADIX:
        tree = RadixTree(cache.block_size, cache.policy)
        begun = thread_time()
        replay_tree(cache, tree, some)
        return (thread_time() - begun) / len(some), 0.0, len(some)
    content = [np.array(one.prompt + one.output, np.int64) for one in some]
    begun = thread_time()
    names = [names_of(tokens, cache.block_size) for tokens in content]
    named = thread_time()
    _run_pool(cache, some, names)
    done = thread_time()
    return (done - begun) / len(some), (named - begun) / len(some), len(some)


def _sample(cache: Cache, requests: HashedRequests) -> list[Request]:
    count = int(np.searchsorted(np.cumsum(requests.prompt_tokens), SAMPLE_TOKENS)) + 1
    some = spelled(requests.first(count), cache_outputs=cache.cache_outputs)
    return [one for one in some if len(one.prompt) + len(one.output) <= cache.capacity_tokens]


def names_of(tokens: np.ndarray[tuple[int], np.dtype[np.int64]], block_size: int) -> list[bytes]:
    """A name for each full block, which stands for all tokens before it too."""
    names, name = [], b""
    for end in range(block_size, len(tokens) + 1, block_size):
        name = hashlib.sha256(name + tokens[end - block_size : end].tobytes()).digest()
        names.append(name)
    return names


def _run_pool(cache: Cache, requests: Sequence[Request], names: Sequence[list[bytes]]) -> None:
    """Look up, allocate, free: the same whatever the policy, of which only LRU is vLLM's."""
    pool = CachedPool(min(cache.capacity_blocks, SAMPLE_BLOCKS), cache.block_size)
    for request, keys in zip(requests, names, strict=True):
        most = max(0, len(request.prompt) - 1) // cache.block_size
        table = pool.match(keys[:most])
        pool.touch(table)
        found = len(table)
        total = len(request.prompt) + len(request.output)
        table += pool.take(pool.blocks_for(total) - found)
        for place in range(found, len(keys)):
            pool.register(table[place], keys[place])
        pool.free(table)

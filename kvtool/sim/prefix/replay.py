"""A replay over a prefix cache: requests in by the chunk, one row out, memory by what is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtool.jit import must_compile
from kvtool.sim.prefix.blocks import Prompts, ids_per_key, in_blocks_of, outputs_of
from kvtool.sim.prefix.hash_kernel import replay_lru
from kvtool.sim.prefix.keys import Ints, Keys
from kvtool.sim.prefix.policy_kernel import replay_policy
from kvtool.sim.prefix.pool import HEAPED, LISTED, NONE, POOL
from kvtool.sim.prefix.radix_kernel import NODE, ROOT, TREE, replay_radix
from kvtool.sim.prefix.result import HASH, POLICIES, RADIX, UNIQUE, PrefixResult
from kvtool.sim.prefix.result import NONE as NO_OUTPUTS
from kvtool.trace_blocks import HashedRequests

AT_ONCE = 1 << 14
"""Requests of a radix replay between two looks at the room for nodes."""
FEWEST_KEYS = 1 << 20
"""Keys that are kept in any case: to forget some costs as much as to find them again."""
KEYS_PER_CACHED = 8
"""Keys a cached block, from which on those of other blocks are forgotten."""
Records = Any
Progress = Callable[[int], None]
"""Told how many requests are done since it was last told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A prefix cache: `capacity_blocks` usable blocks of `block_size` tokens."""

    capacity_blocks: int
    block_size: int
    index: str = HASH
    policy: str = "lru"
    cache_outputs: str = NO_OUTPUTS

    def __post_init__(self) -> None:
        if self.capacity_blocks < 1 or self.block_size < 1:
            raise ValueError("a cache has at least one block of at least one token")
        if self.index not in (HASH, RADIX) or self.policy not in POLICIES:
            raise ValueError(f"no cache is called {self.index} {self.policy}")

    @property
    def capacity_tokens(self) -> int:
        """Tokens that it holds."""
        return self.capacity_blocks * self.block_size


def replay(
    cache: Cache,
    source: Iterable[HashedRequests],
    *,
    with_hits: bool = False,
    progress: Progress = lambda done: None,
) -> PrefixResult:
    """Run chunks of requests through an empty cache, in their order."""
    run = start(cache, with_hits=with_hits)
    for requests in source:
        run.feed(requests)
        progress(len(requests))
    return run.result()


def start(cache: Cache, *, with_hits: bool = False) -> HashReplay | RadixReplay:
    """An empty cache that can be fed."""
    kind = HashReplay if cache.index == HASH else RadixReplay
    return kind(cache=cache, with_hits=with_hits)


def compiles(cache: Cache) -> bool:
    """Whether the first replay of this kind on this machine is still to come."""
    if cache.index == RADIX:
        return must_compile(replay_radix)
    return must_compile(replay_lru if cache.policy == "lru" else replay_policy)


@dataclass(slots=True, kw_only=True)
class HashReplay:
    """vLLM's index of block hashes over a pool."""

    cache: Cache
    with_hits: bool = False
    keys: Keys = field(default_factory=Keys)
    pool: Records = field(init=False)
    blocks: Records = field(init=False)
    block_of: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    hits: list[NDArray[np.int64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = np.zeros(1, POOL).view(np.recarray)[0]
        self.pool.num_blocks = self.pool.blanks = self.cache.capacity_blocks
        self.pool.size = self.cache.block_size
        self.pool.oldest = self.pool.newest = NONE
        self.pool.policy = POLICIES.index(self.cache.policy)
        self.blocks = np.zeros(0, LISTED if self.cache.policy == "lru" else HEAPED)
        self.blocks = self.blocks.view(np.recarray)

    def feed(self, requests: HashedRequests) -> None:
        """The next requests."""
        keys = self.keys.of(requests)
        self.run(
            in_blocks_of(
                self.cache.block_size, requests, keys,
                cache_outputs=self.cache.cache_outputs == UNIQUE,
            ),
            self.keys.count * ids_per_key(requests.block_size, self.cache.block_size),
        )  # fmt: skip
        self._forget(ids_per_key(requests.block_size, self.cache.block_size))

    def run(self, prompts: Prompts, num_ids: int) -> None:
        """The next requests, whose ids are below a number."""
        self.block_of = _grown(self.block_of, num_ids, NONE)
        full = int(((prompts.tokens + prompts.outputs) // self.cache.block_size).sum())
        most = min(self.cache.capacity_blocks, int(self.pool.numbered) + full)
        self.blocks = _grown_records(self.blocks, most)
        hits = np.zeros(len(prompts.tokens) if self.with_hits else 0, np.int64)
        kernel = replay_lru if self.cache.policy == "lru" else replay_policy
        kernel(self.pool, self.blocks, self.block_of, *prompts, hits)
        self.hits.append(hits)

    def _forget(self, each: int) -> None:
        """Drop the keys of blocks that are no longer cached, once they are most of all."""
        live = int(self.pool.numbered - self.pool.spares)
        if self.keys.count < FEWEST_KEYS or self.keys.count < KEYS_PER_CACHED * live:
            return
        kept = np.flatnonzero(self.block_of >= 0)
        new = self.keys.keep(kept // each)
        old_blocks = self.block_of[kept]
        names = new[kept // each] * each + kept % each
        self.block_of = np.full(self.keys.count * each, NONE, np.int32)
        self.block_of[names] = old_blocks
        # A twin has the id of the block that is found.
        ids = self.blocks.id[: self.pool.numbered]
        has_id = ids >= 0
        cached = has_id & (new[ids // each] >= 0)
        ids[cached] = new[ids[cached] // each] * each + ids[cached] % each

    def result(self) -> PrefixResult:
        """What it comes to so far."""
        pool = self.pool
        return PrefixResult(
            requests=int(pool.requests),
            rejected=int(pool.rejected),
            queried_tokens=int(pool.queried),
            hit_tokens=int(pool.hit_blocks) * self.cache.block_size,
            evicted_blocks=int(pool.evicted),
            evicted_leaves=0,
            cached_blocks=int(pool.numbered - pool.spares),
            hits=np.concatenate(self.hits) if self.with_hits and self.hits else None,
        )


@dataclass(slots=True, kw_only=True)
class RadixReplay:
    """SGLang's radix tree."""

    cache: Cache
    with_hits: bool = False
    keys: Keys = field(default_factory=Keys)
    tree: Records = field(init=False)
    nodes: Records = field(init=False)
    owner: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    hits: list[NDArray[np.int64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = np.zeros(1, TREE).view(np.recarray)[0]
        self.tree.capacity, self.tree.size = self.cache.capacity_tokens, self.cache.block_size
        self.tree.policy = POLICIES.index(self.cache.policy)
        self.nodes = np.zeros(1, NODE).view(np.recarray)
        self.nodes[ROOT].place = self.nodes[ROOT].parent = NONE
        self.tree.numbered = 1

    def feed(self, requests: HashedRequests) -> None:
        """The next requests."""
        self.run(requests, self.keys.of(requests))
        self._forget()

    def run(self, requests: HashedRequests, keys: Ints) -> None:
        """The next requests, with their keys."""
        self.tree.trace_size = requests.block_size
        self.owner = _grown(self.owner, self.keys.count, NONE)
        outputs = outputs_of(requests, self.cache.cache_outputs == UNIQUE)
        for first in range(0, len(requests), AT_ONCE):
            last = min(first + AT_ONCE, len(requests))
            # A request makes three nodes at most: two edges are cut, a leaf is new.
            live = int(self.tree.numbered - self.tree.spares)
            self.nodes = _grown_records(self.nodes, live + 3 * (last - first))
            hits = np.zeros(last - first if self.with_hits else 0, np.int64)
            replay_radix(
                self.tree, self.nodes, self.owner, self.keys.before, keys,
                requests.starts[first : last + 1], requests.prompt_tokens[first:last],
                outputs[first:last], hits,
            )  # fmt: skip
            self.hits.append(hits)

    def _forget(self) -> None:
        """Drop the keys of blocks that are no longer cached, once they are most of all."""
        kept = np.flatnonzero(self.owner >= 0)
        if self.keys.count < FEWEST_KEYS or self.keys.count < KEYS_PER_CACHED * len(kept):
            return
        new = self.keys.keep(kept)
        owners = self.owner[kept]
        self.owner = np.full(self.keys.count, NONE, np.int32)
        self.owner[new[kept]] = owners
        nodes = self.nodes[: self.tree.numbered]
        named = nodes.key >= 0
        nodes.key[named] = new[nodes.key[named]]

    def result(self) -> PrefixResult:
        """What it comes to so far."""
        tree, size = self.tree, self.cache.block_size
        return PrefixResult(
            requests=int(tree.requests),
            rejected=int(tree.rejected),
            queried_tokens=int(tree.queried),
            hit_tokens=int(tree.hit_tokens),
            evicted_blocks=int(tree.evicted_tokens) // size,
            evicted_leaves=int(tree.evicted_leaves),
            cached_blocks=int(tree.held) // size,
            hits=np.concatenate(self.hits) if self.with_hits and self.hits else None,
        )


def _grown(column: Ints, size: int, value: int) -> Ints:
    """At least so many entries, the new ones of one value; room is doubled, not added."""
    if size <= len(column):
        return column
    grown = np.full(max(size, 2 * len(column)), value, np.int32)
    grown[: len(column)] = column
    return grown


def _grown_records(records: Records, size: int) -> Records:
    """At least so many records."""
    if size <= len(records):
        return records
    grown = np.zeros(max(size, len(records) * 5 // 4), records.dtype).view(np.recarray)
    grown[: len(records)] = records
    return grown

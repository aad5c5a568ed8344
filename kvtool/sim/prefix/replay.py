"""A replay over a prefix cache: requests in by the chunk, one row out, memory by what is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtool.jit import must_compile
from kvtool.sim.prefix.blocks import InBlocks, ids_per_key, in_blocks_of, outputs_of, tenants_of
from kvtool.sim.prefix.hash_kernel import replay_lru
from kvtool.sim.prefix.keys import Ints, Keys
from kvtool.sim.prefix.policy_kernel import replay_policy
from kvtool.sim.prefix.pool import HEAPED, LISTED, NONE, POOL
from kvtool.sim.prefix.radix_kernel import NODE, ROOT, TREE, replay_radix
from kvtool.sim.prefix.result import (
    HASH,
    HIT,
    KNOWN,
    POLICIES,
    QUERIED,
    RADIX,
    REJECTED,
    REQUESTS,
    TAKEN,
    PrefixResult,
)  # fmt: skip
from kvtool.sim.prefix.result import NONE as NO_OUTPUTS
from kvtool.trace_blocks import HashedRequests

AT_ONCE = 1 << 14
"""Requests of a radix replay between two looks at the room for nodes."""
FEWEST_KEYS = 1 << 20
"""Keys that are kept in any case: to forget some costs as much as to find them again."""
KEYS_PER_CACHED = 8
"""Keys a cached block, from which on those of other blocks are forgotten."""
HASH_BYTES, TOKEN_BYTES = 32, 4
"""Of a SHA-256, which names a block in vLLM, and of a token on an edge of the tree."""
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
    each: int = 1
    """Ids a key: blocks that can end in one of the trace's."""
    tally: NDArray[np.int64] = field(default_factory=lambda: np.zeros((1, TAKEN + 1), np.int64))
    cpu_s: float = 0.0
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
        size, keys = self.cache.block_size, self.keys.of(requests)
        prompts = in_blocks_of(size, requests, keys, cache_outputs=self.cache.cache_outputs)
        self.run(prompts, ids_per_key(requests.block_size, size))
        forget(self.keys, [self])

    def run(self, prompts: InBlocks, each: int) -> None:
        """The next requests, with so many ids a key."""
        self.each = each
        self.block_of = _grown(self.block_of, self.keys.count * each, NONE)
        self.tally = _room_for(self.tally, prompts.tenants)
        full = int(((prompts.tokens + prompts.outputs) // self.cache.block_size).sum())
        most = min(self.cache.capacity_blocks, int(self.pool.numbered) + full)
        self.blocks = _grown_records(self.blocks, most)
        hits = np.zeros(len(prompts.tokens) if self.with_hits else 0, np.int64)
        kernel = replay_lru if self.cache.policy == "lru" else replay_policy
        self.cpu_s += _timed(
            kernel, self.pool, self.blocks, self.block_of, self.tally, *prompts, hits
        )
        self.hits.append(hits)

    @property
    def num_cached(self) -> int:
        """Blocks that have a hash."""
        return int(self.pool.numbered - self.pool.spares)

    def live_keys(self) -> Ints:
        """Keys of blocks that are cached."""
        kept = np.flatnonzero(self.block_of[: self.keys.count * self.each] >= 0)
        return (kept // self.each).astype(np.int32)

    def rename(self, new: Ints) -> None:
        """Keys have other numbers, those of no cached block none."""
        kept = np.flatnonzero(self.block_of[: len(new) * self.each] >= 0)
        old_blocks = self.block_of[kept]
        names = new[kept // self.each] * self.each + kept % self.each
        self.block_of = np.full(self.keys.count * self.each, NONE, np.int32)
        self.block_of[names] = old_blocks
        # A twin has the id of the block that is found.
        ids = self.blocks.id[: self.pool.numbered]
        named = ids >= 0
        ids[named] = new[ids[named] // self.each] * self.each + ids[named] % self.each

    def result(self) -> PrefixResult:
        """What it comes to so far. Its index: a record and a SHA-256 a cached block."""
        return PrefixResult(
            **_sums(self.tally, 1),
            evicted_blocks=int(self.pool.evicted),
            evicted_leaves=0,
            cached_blocks=self.num_cached,
            index_bytes=self.num_cached * (self.blocks.itemsize + HASH_BYTES),
            cpu_s=self.cpu_s,
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
    tally: NDArray[np.int64] = field(default_factory=lambda: np.zeros((1, TAKEN + 1), np.int64))
    cpu_s: float = 0.0
    hits: list[NDArray[np.int64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = np.zeros(1, TREE).view(np.recarray)[0]
        self.tree.capacity, self.tree.size = self.cache.capacity_tokens, self.cache.block_size
        self.tree.policy = POLICIES.index(self.cache.policy)
        self.tree.spelled = self.cache.cache_outputs == KNOWN
        self.nodes = np.zeros(1, NODE).view(np.recarray)
        self.nodes[ROOT].place = self.nodes[ROOT].parent = NONE
        self.tree.numbered = 1

    def feed(self, requests: HashedRequests) -> None:
        """The next requests."""
        self.run(requests, self.keys.of(requests))
        forget(self.keys, [self])

    def run(self, requests: HashedRequests, keys: Ints) -> None:
        """The next requests, with their keys."""
        self.tree.trace_size = requests.block_size
        self.owner = _grown(self.owner, self.keys.count, NONE)
        outputs = outputs_of(requests, self.cache.cache_outputs)
        tenants = tenants_of(requests)
        self.tally = _room_for(self.tally, tenants)
        for first in range(0, len(requests), AT_ONCE):
            last = min(first + AT_ONCE, len(requests))
            # A request makes three nodes at most: two edges are cut, a leaf is new.
            live = int(self.tree.numbered - self.tree.spares)
            self.nodes = _grown_records(self.nodes, live + 3 * (last - first))
            hits = np.zeros(last - first if self.with_hits else 0, np.int64)
            self.cpu_s += _timed(
                replay_radix,
                self.tree, self.nodes, self.owner, self.tally, self.keys.before, keys,
                requests.starts[first : last + 1], requests.prompt_tokens[first:last],
                outputs[first:last], tenants[first:last], hits,
            )  # fmt: skip
            self.hits.append(hits)

    def live_keys(self) -> Ints:
        """Keys of blocks that are cached."""
        return np.flatnonzero(self.owner[: self.keys.count] >= 0).astype(np.int32)

    def rename(self, new: Ints) -> None:
        """Keys have other numbers, those of no cached block none."""
        kept = np.flatnonzero(self.owner[: len(new)] >= 0)
        owners = self.owner[kept]
        self.owner = np.full(self.keys.count, NONE, np.int32)
        self.owner[new[kept]] = owners
        nodes = self.nodes[: self.tree.numbered]
        named = nodes.key >= 0
        nodes.key[named] = new[nodes.key[named]]

    def result(self) -> PrefixResult:
        """What it comes to so far. Its index: a record a node, and the tokens of its edges."""
        tree, size = self.tree, self.cache.block_size
        num_nodes = int(tree.numbered - tree.spares)
        return PrefixResult(
            **_sums(self.tally, size),
            evicted_blocks=int(tree.evicted_tokens) // size,
            evicted_leaves=int(tree.evicted_leaves),
            cached_blocks=int(tree.held) // size,
            index_bytes=num_nodes * self.nodes.itemsize + int(tree.held) * TOKEN_BYTES,
            cpu_s=self.cpu_s,
            hits=np.concatenate(self.hits) if self.with_hits and self.hits else None,
        )


def forget(keys: Keys, runs: Sequence[HashReplay | RadixReplay]) -> None:
    """Drop the keys of blocks that no run has cached any more, once they are most of all."""
    if keys.count < FEWEST_KEYS:
        return
    live = np.zeros(keys.count, np.bool_)
    for run in runs:
        live[run.live_keys()] = True
    if keys.count < KEYS_PER_CACHED * int(live.sum()):
        return
    new = keys.keep(np.flatnonzero(live))
    for run in runs:
        run.rename(new)


def _sums(tally: NDArray[np.int64], unit: int) -> dict[str, Any]:
    """The sums over tenants; evicted tokens as blocks of `unit`."""
    shares = tally.copy()
    shares[:, TAKEN:] //= unit
    return {
        "requests": int(tally[:, REQUESTS].sum()),
        "rejected": int(tally[:, REJECTED].sum()),
        "queried_tokens": int(tally[:, QUERIED].sum()),
        "hit_tokens": int(tally[:, HIT].sum()),
        "tally": tuple(tuple(row) for row in shares.tolist()),
    }


def _room_for(tally: NDArray[np.int64], tenants: NDArray[np.int64]) -> NDArray[np.int64]:
    """A row and a column for each tenant so far."""
    count = int(tenants.max(initial=0)) + 1
    if count <= len(tally):
        return tally
    grown = np.zeros((count, TAKEN + count), np.int64)
    grown[: len(tally), : tally.shape[1]] = tally
    return grown


def _timed(kernel: Callable[..., None], *arguments: Any) -> float:
    """CPU seconds of a call: other threads run beside it."""
    begun = thread_time()
    kernel(*arguments)
    return thread_time() - begun


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

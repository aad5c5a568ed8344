"""vLLM's prefix cache: an index of the hashes of full blocks over a pool with one free list.

Rules as in vLLM 0.32: v1/core/kv_cache_manager.py (lookup, allocation), block_pool.py (the index,
the free list) and single_type_kv_cache_manager.py (the order of freeing).

- A block is found by the hash of its tokens and of all before them, once it is full.
- A lookup ends at the first block that is missing, and leaves the last token of the prompt to compute.
- A free block keeps its hash until it is taken for another one: what is cached is what is free and was
  not needed since. The free list is in the order of eviction: blocks without a hash first.
- A request's blocks are freed from the last to the first, so that a prefix outlives what follows it.
- Two blocks can have one hash: a prompt of whole blocks computes its last block anew. The older is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(eq=False, slots=True)
class Block:
    """A physical block that was taken at least once."""

    key: Hashable = None
    """What stands for the hash of its tokens and of all before them; None: it has none."""
    depth: int = 0
    """Its place in the prompt that filled it."""
    ref_count: int = 0
    cached: int = 0
    hits: int = 0
    freed: int = 0
    """Times: when it got its key, and when it was freed last; between them, how often it was found."""
    tenant: int = 0
    """Whose request had it last."""


class Allocation(NamedTuple):
    """The block table of a request, and how many of its blocks were found in the cache."""

    table: list[Block]
    num_hits: int


Priority = Callable[[Block], tuple[int, ...]]

PRIORITIES: dict[str, Priority] = {
    "lru": lambda block: (block.freed,),
    "lfu": lambda block: (block.hits, block.freed),
    "fifo": lambda block: (block.cached, block.freed),
    # Mooncake's: of two that were found as often, the one deeper in its prompt goes first.
    "length-aware": lambda block: (block.hits, -block.depth, block.freed),
}
"""Which free block that has a hash is evicted first: the one with the least. vLLM's is lru."""


class BlockIndex:
    """`num_blocks` usable blocks: vLLM's null block comes on top.

    Invariants: a block is free or its ref count is the number of tables that it stands in; the index
    has each block that has a key, once, under that key; free blocks without a key are interchangeable.
    """

    def __init__(self, num_blocks: int, policy: str = "lru") -> None:
        self.num_blocks = num_blocks
        self.priority = PRIORITIES[policy]
        self.taken: Counter[tuple[int, int]] = Counter()
        """Blocks that lost their hash, by who needed one and whose it was."""
        self.index: dict[Hashable, list[Block]] = {}
        self._free: list[Block] = []
        self._num_blank = num_blocks
        self._clock = 0

    @property
    def num_free(self) -> int:
        """Blocks that no table holds, with a hash or without."""
        return self._num_blank + len(self._free)

    @property
    def num_evicted(self) -> int:
        """Blocks that lost their hash."""
        return self.taken.total()

    @property
    def num_cached(self) -> int:
        """Blocks that have a hash."""
        return sum(map(len, self.index.values()))

    def match(self, keys: Sequence[Hashable]) -> list[Block]:
        """The cached blocks of the longest prefix of these."""
        found: list[Block] = []
        for key in keys:
            if key not in self.index:
                break
            found.append(self.index[key][0])
        return found

    def allocate(
        self, keys: Sequence[Hashable], num_blocks: int, most: int, *, tenant: int = 0
    ) -> Allocation | None:
        """A tenant's table of so many blocks, the first `most` keys looked up; None if they do not fit.

        Keys are of the full blocks; what is beyond them has none. Nothing changes for None.
        """
        found = self.match(keys[:most])
        waiting = sum(block.ref_count == 0 for block in found)
        if num_blocks - len(found) > self.num_free - waiting:
            return None
        for block in found:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
            block.hits += 1
        new = [self._take(tenant) for _ in range(num_blocks - len(found))]
        for depth in range(len(found), min(len(keys), num_blocks)):
            self._cache(new[depth - len(found)], keys[depth], depth)
        for block in found + new:
            block.tenant = tenant
        return Allocation(found + new, len(found))

    def free(self, table: Sequence[Block]) -> None:
        """Give a request's blocks back, the last first; who has a hash stays cached."""
        for block in reversed(table):
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.key is None:
                self._num_blank += 1
            else:
                block.freed = self._now()
                self._free.append(block)

    def _take(self, tenant: int) -> Block:
        """A block without a hash, or else the one whose hash is lost next, to a tenant who needs it."""
        if self._num_blank:
            self._num_blank -= 1
            return Block(ref_count=1)
        victim = min(self._free, key=self.priority)
        self._free.remove(victim)
        same = self.index[victim.key]
        same.remove(victim)
        if not same:
            del self.index[victim.key]
        self.taken[tenant, victim.tenant] += 1
        return Block(ref_count=1)

    def _cache(self, block: Block, key: Hashable, depth: int) -> None:
        block.key, block.depth, block.cached = key, depth, self._now()
        self.index.setdefault(key, []).append(block)

    def _now(self) -> int:
        self._clock += 1
        return self._clock

"""vLLM's block pool with prefix caching, plainly: ref counts, one free list, blocks found by content.

Rules R10 to R16 as in vLLM 0.32's v1/core/block_pool.py, kv_cache_manager.py and
single_type_kv_cache_manager.py. Without caching it is the stack of kvtool.sim.block_pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from kvtool.sim.blocks.request import Hits, Request


class CachedPool:
    """Blocks 1 to `num_blocks`: vLLM's null block, 0, is never handed out.

    Invariants: a block is in the free list or its ref count is the number of tables that it stands in;
    the index has each block that has a key, once, under that key, in the order of registration.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted = 0
        self.index: dict[Hashable, dict[int, None]] = {}
        self.keys: dict[int, Hashable] = {}
        self.ref_counts = dict.fromkeys(range(1, num_blocks + 1), 0)
        self.free_list: OrderedDict[int, None] = OrderedDict.fromkeys(self.ref_counts)
        """From the next block to be taken on."""

    # -- what a request asks for

    def look_up(self, request: Request, most: int) -> Hits:
        """R10: of its first blocks, at most so many, those that are cached."""
        found: list[int] = []
        for block in range(most):
            one = self.match([request.key(block)])
            if not one:
                break
            found += one
        return Hits(len(found), found)

    def has_room(self, hits: Hits, num_blocks: int) -> bool:
        """R8: whether there are so many blocks, these hits among them."""
        return num_blocks - hits.num_blocks + self.num_idle(hits.where) <= self.num_free

    def hold(self, request: Request, hits: Hits) -> None:
        """R11: a request that is admitted begins with what was found for it."""
        self.touch(hits.where)
        request.table, request.registered = list(hits.where), hits.num_blocks

    def extend(self, request: Request, num_blocks: int) -> bool:
        """R4: so many blocks in all, if they can be had."""
        needed = num_blocks - len(request.table)
        if needed > self.num_free:
            return False
        request.table += self.take(max(0, needed))
        return True

    def schedule(self, request: Request, tokens: int) -> None:
        """R12: full blocks of tokens that are known get their keys, computed or not."""
        for block in range(request.registered, tokens // self.block_size):
            self.register(request.table[block], request.key(block))
            request.registered = block + 1

    def compute(self, request: Request) -> None:
        """Tokens of its prefill were computed: their blocks have keys since they were scheduled."""

    def release(self, request: Request, *, finished: bool) -> None:
        """R15: finished or preempted, its blocks stay cached as long as nobody takes them."""
        self.free(request.table)
        request.table, request.registered = [], 0

    # -- blocks

    @property
    def num_free(self) -> int:
        """Blocks that no table holds, with a key or without."""
        return len(self.free_list)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, keys: Sequence[Hashable]) -> list[int]:
        """R10: the cached blocks of the longest beginning of these keys, of copies the oldest."""
        found: list[int] = []
        for key in keys:
            if key not in self.index:
                break
            found.append(next(iter(self.index[key])))
        return found

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of these are in the free list."""
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def touch(self, blocks: Sequence[int]) -> None:
        """R11: a request uses these cached blocks too."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.free_list[block]
            self.ref_counts[block] += 1

    def take(self, count: int) -> list[int]:
        """R11: so many blocks from the head of the free list; one that has a key loses it."""
        taken = []
        for _ in range(count):
            block, _ = self.free_list.popitem(last=False)
            key = self.keys.pop(block, None)
            if key is not None:
                self.num_evicted += 1
                del self.index[key][block]
                if not self.index[key]:
                    del self.index[key]
            self.ref_counts[block] = 1
            taken.append(block)
        return taken

    def register(self, block: int, key: Hashable) -> None:
        """R12 and R13: a full block can be found by its content; copies are kept."""
        self.keys[block] = key
        self.index.setdefault(key, {})[block] = None

    def free(self, table: Sequence[int]) -> None:
        """R15: from the last to the first; blocks without a key go to the head, as one group."""
        blank = []
        for block in reversed(table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block]:
                continue
            if block in self.keys:
                self.free_list[block] = None
            else:
                blank.append(block)
        for block in reversed(blank):
            self.free_list[block] = None
            self.free_list.move_to_end(block, last=False)

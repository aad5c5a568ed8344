"""A block pool with SGLang's radix tree as its cache, plainly: blocks are free, a request's own, or the tree's.

SGLang 0.5.23's mem_cache/radix_cache.py and common.py (match_kv_cache, checkpoint, release_kv_cache), a
block being a page. What is in the tree is there once:
- a request that is admitted is matched, which stamps and splits, and its path is locked;
- whole leaves are evicted, least recently used first, until what free blocks lack is there;
- what a prefill or a chunk of it has computed is inserted once it has been computed, and so is all that
  was computed at the end; of blocks that the tree has already, the request's own are freed. While a
  request decodes nothing is inserted;
- each insertion cuts the tree where the prompt ends, so that an output can go without it;
- who is preempted (SGLang: retracted) inserts nothing: its own blocks are free, its path is unlocked.

Not here: SGLang evicts ahead when it retracts, and may refresh the prefixes of who waits.
"""

from __future__ import annotations

from typing import cast

from kvtool.sim.blocks.request import Hits, Request
from kvtool.sim.prefix.radix_tree import RadixTree


class RadixPool:
    """Blocks 1 to `num_blocks`, found by a tree whose tokens are the names of blocks.

    Invariants: each block is free, the tree's, or in one table behind what the tree has of it; a running
    request locks the path of its first `registered` blocks, which ends at its `node`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted = 0
        self.tree = RadixTree()
        self.cached: dict[int, int] = {}
        """The tree's blocks by their names."""
        self.free_blocks = list(range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be had: free ones, and those of the tree that nobody locks."""
        return len(self.free_blocks) + self.tree.num_tokens - self.tree.num_locked

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def look_up(self, request: Request, most: int) -> Hits:
        """Of its first blocks, at most so many, those that are cached."""
        return Hits(*self.tree.match(_names(request, most)))

    def has_room(self, hits: Hits, num_blocks: int) -> bool:
        """Whether there are so many blocks, these hits among them, once the hits are locked."""
        self.tree.lock(hits.where)
        has_room = num_blocks - hits.num_blocks <= self.num_free
        self.tree.unlock(hits.where)
        return has_room

    def hold(self, request: Request, hits: Hits) -> None:
        """A request that is admitted begins with what was found for it."""
        self.tree.lock(hits.where)
        request.table = [self.cached[name] for name in _names(request, hits.num_blocks)]
        request.node, request.registered = hits.where, hits.num_blocks

    def extend(self, request: Request, num_blocks: int) -> bool:
        """So many blocks in all, if they can be had."""
        needed = num_blocks - len(request.table)
        if needed > self.num_free:
            return False
        self._evict(needed - len(self.free_blocks))
        request.table += [self.free_blocks.pop() for _ in range(needed)]
        return True

    def schedule(self, request: Request, tokens: int) -> None:
        """Nothing is found before it has been computed."""

    def compute(self, request: Request) -> None:
        """Tokens of its prefill were computed: full blocks of them can be found."""
        old = request.node
        self._insert(request)
        self.tree.lock(request.node)
        self.tree.unlock(old)

    def release(self, request: Request, *, finished: bool) -> None:
        """What was computed stays cached if it is finished, and nothing more than before if it is not."""
        old = request.node
        if finished:
            self._insert(request)
        self.free_blocks += request.table[request.registered :]
        self.tree.unlock(old)
        request.table, request.registered, request.node = [], 0, None

    def _insert(self, request: Request) -> None:
        """Full blocks of computed tokens into the tree; its copies of what was there are freed."""
        names = _names(request, request.computed // self.block_size)
        if not names:
            return
        self.tree.insert(names)
        prompt = request.prompt_tokens // self.block_size
        if 0 < prompt < len(names):
            self.tree.insert(names[:prompt])
        for block in range(request.registered, len(names)):
            own = request.table[block]
            found = self.cached.setdefault(names[block], own)
            if found != own:
                self.free_blocks.append(own)
                request.table[block] = found
        request.node, request.registered = self.tree.match(names).node, len(names)

    def _evict(self, num_blocks: int) -> None:
        for node in self.tree.evict(num_blocks):
            self.num_evicted += len(node.tokens)
            self.free_blocks += [self.cached.pop(name) for name in node.tokens]


def _names(request: Request, num_blocks: int) -> tuple[int, ...]:
    """Of its first blocks, as numbers: kvtool.sim.blocks.spelling."""
    return tuple(cast(int, request.key(block)) for block in range(num_blocks))

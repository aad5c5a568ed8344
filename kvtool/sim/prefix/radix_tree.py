"""A radix tree of token sequences, as SGLang caches prefixes: edges are runs, leaves are evicted.

Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024,
section 3; rules as in SGLang 0.5's mem_cache/radix_cache.py and evict_policy.py, with its pages
called blocks: sequences are cut to whole blocks, and nodes split between blocks.

What decides which leaf goes first:
- match() gives the nodes of its path one time stamp. If it ends within an edge, the edge is split
  there: the upper part is a new node with a later stamp of its own, and the rest keeps the stamp
  of the match, although it was not matched.
- insert() stamps the path once more and counts a hit on each node of it, the new one included.
- evict() takes whole leaves, though less was asked for; a parent without children is a leaf.
- A locked node, and with it each node above, is in use: it is not evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens below a prefix that its parents spell."""

    tokens: Tokens
    """On the edge from the parent: whole blocks, at least one; none at the root."""
    parent: Node | None
    created: int
    used: int
    """When it was last matched, inserted or made."""
    hits: int = 0
    locks: int = 0
    """Requests in this subtree that are running: 0 means that it may be evicted once a leaf."""
    tenant: int = 0
    """Whose request used it last."""
    children: dict[Tokens, Node] = field(default_factory=dict)
    """By the first block of their tokens, in which no two agree."""

    @property
    def depth(self) -> int:
        """Tokens from the root to the end of this node's run."""
        length, node = 0, self
        while node.parent is not None:
            length += len(node.tokens)
            node = node.parent
        return length


class Match(NamedTuple):
    """The longest cached prefix: its tokens, and the node where it ends (the root: none)."""

    length: int
    node: Node


Priority = Callable[[Node], tuple[int, ...]]

PRIORITIES: dict[str, Priority] = {
    "lru": lambda node: (node.used,),
    "lfu": lambda node: (node.hits, node.used),
    "fifo": lambda node: (node.created,),
    # Not SGLang's: of two that were hit as often, the one whose prefix is longer goes first.
    "length-aware": lambda node: (node.hits, -node.depth, node.used),
}
"""Which leaf is evicted first: the one with the least."""


class RadixTree:
    """Cached token sequences, whole blocks of them.

    Invariants: the runs from the root to a node spell a cached prefix; children differ in their
    first block; a node has at least as many locks as all its children together; `num_tokens` is the
    sum of the runs, `num_locked` of those with locks.
    """

    def __init__(self, block_size: int = 1, policy: str = "lru") -> None:
        self.block_size = block_size
        self.priority = PRIORITIES[policy]
        self.num_tokens = 0
        self.num_locked = 0
        self._clock = 0
        self.root = Node((), None, created=0, used=0, locks=1)

    def match(self, tokens: Sequence[int], *, tenant: int = 0) -> Match:
        """The longest cached prefix; the tree is split where it ends, so that it ends at a node.

        The nodes on the path are now the tenant's.
        """
        left = self._whole_blocks(tokens)
        node, length, now = self.root, 0, self._now()
        node.used = now
        while (child := self._child(node, left)) is not None:
            child.used, child.tenant = now, tenant
            common = self._common(child.tokens, left)
            length += common
            left = left[common:]
            if common < len(child.tokens):
                return Match(length, self._split(child, common, tenant))
            node = child
        return Match(length, node)

    def insert(self, tokens: Sequence[int], *, tenant: int = 0) -> Match:
        """Cache a sequence: the prefix that was there already, and the node where it now ends.

        The nodes on the path, the new ones included, are now the tenant's.
        """
        left = self._whole_blocks(tokens)
        node, length, now = self.root, 0, self._now()
        node.used = now
        while (child := self._child(node, left)) is not None:
            child.used, child.tenant = now, tenant
            common = self._common(child.tokens, left)
            length += common
            left = left[common:]
            node = self._split(child, common, tenant) if common < len(child.tokens) else child
            node.hits += 1
        if left:
            node = self._add(node, left, tenant)
        return Match(length, node)

    def lock(self, node: Node) -> None:
        """A request uses the prefix that ends here."""
        for one in self._path(node):
            if one.locks == 0:
                self.num_locked += len(one.tokens)
            one.locks += 1

    def unlock(self, node: Node) -> None:
        """It no longer does."""
        for one in self._path(node):
            assert one.locks > 0, "unlocked more often than locked"
            one.locks -= 1
            if one.locks == 0:
                self.num_locked -= len(one.tokens)

    def evict(self, num_tokens: int) -> list[Node]:
        """Leaves that nobody uses, until so many tokens are free or none is left; what went.

        Each call ranks all leaves anew, O(N log N), as SGLang's own does (sgl-project/sglang#20125).
        Here it may: nothing is kept that could go stale, and the order is that of `priority` alone,
        which is what the heap of the fast replay is compared with.
        """
        if num_tokens <= 0:
            return []
        leaves = [
            self._ranked(node) for node in self.nodes() if not node.children and not node.locks
        ]
        heapq.heapify(leaves)
        gone: list[Node] = []
        freed = 0
        while freed < num_tokens and leaves:
            leaf = heapq.heappop(leaves)[-1]
            parent = leaf.parent
            assert parent is not None, "the root is always locked"
            del parent.children[leaf.tokens[: self.block_size]]
            gone.append(leaf)
            freed += len(leaf.tokens)
            if not parent.children and not parent.locks:
                heapq.heappush(leaves, self._ranked(parent))
        self.num_tokens -= freed
        return gone

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before their children."""
        waiting = [*self.root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def _ranked(self, node: Node) -> tuple[tuple[int, ...], int, Node]:
        """For a heap: no two nodes are made at one time, so that nodes are never compared."""
        return self.priority(node), node.created, node

    def _whole_blocks(self, tokens: Sequence[int]) -> Tokens:
        return tuple(tokens[: len(tokens) // self.block_size * self.block_size])

    def _child(self, node: Node, left: Tokens) -> Node | None:
        return node.children.get(left[: self.block_size]) if left else None

    def _common(self, run: Tokens, left: Tokens) -> int:
        """Tokens of the whole blocks in which both begin alike."""
        most = min(len(run), len(left))
        for at in range(0, most, self.block_size):
            if run[at : at + self.block_size] != left[at : at + self.block_size]:
                return at
        return most

    def _split(self, node: Node, length: int, tenant: int) -> Node:
        """Cut an edge in two: a new node of its first tokens, above the one of the rest."""
        parent = node.parent
        assert parent is not None, "the root has no edge"
        now = self._now()
        upper = Node(
            node.tokens[:length], parent, created=now, used=now,
            hits=node.hits, locks=node.locks, tenant=tenant,
        )  # fmt: skip
        parent.children[upper.tokens[: self.block_size]] = upper
        node.tokens = node.tokens[length:]
        node.parent = upper
        upper.children[node.tokens[: self.block_size]] = node
        return upper

    def _add(self, parent: Node, tokens: Tokens, tenant: int) -> Node:
        now = self._now()
        node = Node(tokens, parent, created=now, used=now, hits=1, tenant=tenant)
        parent.children[tokens[: self.block_size]] = node
        self.num_tokens += len(tokens)
        return node

    def _path(self, node: Node) -> Iterator[Node]:
        """From a node up to below the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _now(self) -> int:
        """A later time than any before: events count, not seconds."""
        self._clock += 1
        return self._clock

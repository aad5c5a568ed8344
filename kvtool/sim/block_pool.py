"""The paged allocator: physical blocks, their ref counts, and a block table for every sequence.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023, section 4: logical blocks are filled from left to right, a new physical block is taken only
when the last one is full, and blocks are shared by ref count and copied on write.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from kvtool.errors import KvtoolError


class Copy(NamedTuple):
    """A block whose content must be copied before the next token is written."""

    source: int
    target: int


class OutOfBlocks(KvtoolError):
    """Fewer free blocks than the call needs. Nothing has changed."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(
            f"{needed:,} blocks are needed and {free:,} are free",
            "free a sequence, or make the pool larger",
            code="out_of_blocks",
        )


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each, numbered from 0.

    Invariants: a block is free or its ref count is the number of tables that it stands in; a table
    has ceil(tokens / block_size) blocks; only the tail block of a table has empty slots.
    The free list is a stack: what was freed last is taken first, as vLLM 0.32 does without prefix
    caching (core/block_pool.py, free_blocks: a table's last block in front).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a pool has at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts: list[int] = []
        """Of each block that was ever taken: memory is bounded by what is used, not by the pool."""
        self._freed: list[int] = []
        self._tables: dict[Hashable, list[int]] = {}
        self._tokens: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        return self.num_blocks - len(self._ref_counts) + len(self._freed)

    @property
    def free_blocks(self) -> list[int]:
        """The free blocks in the order in which they will be taken."""
        return [*self._freed[::-1], *range(len(self._ref_counts), self.num_blocks)]

    def block_table(self, sequence: Hashable) -> tuple[int, ...]:
        """The physical block of each logical block of a sequence."""
        return tuple(self._tables[sequence])

    def num_tokens(self, sequence: Hashable) -> int:
        """Tokens of a sequence that have a slot."""
        return self._tokens[sequence]

    def ref_count(self, block: int) -> int:
        """How many tables a block stands in; 0: it is free."""
        return self._ref_counts[block] if block < len(self._ref_counts) else 0

    def slot(self, sequence: Hashable, position: int) -> int:
        """Where the token at a position lies: block × block_size + offset."""
        if not 0 <= position < self._tokens[sequence]:
            raise IndexError(f"position {position} of {self._tokens[sequence]} tokens")
        logical, offset = divmod(position, self.block_size)
        return self._tables[sequence][logical] * self.block_size + offset

    def __contains__(self, sequence: Hashable) -> bool:
        return sequence in self._tables

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, sequence: Hashable, num_tokens: int) -> None:
        """Give a new sequence the blocks of its first tokens. Raises OutOfBlocks."""
        if sequence in self._tables:
            raise ValueError(f"sequence {sequence!r} has a block table already")
        self._check(self.blocks_for(num_tokens))  # checked before the sequence exists
        self._tables[sequence] = [self._pop() for _ in range(self.blocks_for(num_tokens))]
        self._tokens[sequence] = num_tokens

    def blocks_to_append(self, sequence: Hashable, num_tokens: int = 1) -> int:
        """Free blocks that `append` would take: new ones, and one to copy a shared tail into."""
        tokens = self._tokens[sequence]
        new = self.blocks_for(tokens + num_tokens) - len(self._tables[sequence])
        return new + (num_tokens > 0 and self._tail_is_shared(sequence))

    def append(self, sequence: Hashable, num_tokens: int = 1) -> Copy | None:
        """Make room for more tokens: a block only when the tail is full. Raises OutOfBlocks.

        A tail that others hold too is first copied (copy-on-write): the copy to carry out, or None.
        """
        self._check(self.blocks_to_append(sequence, num_tokens))
        table = self._tables[sequence]
        copy = None
        if num_tokens > 0 and self._tail_is_shared(sequence):
            copy = Copy(table[-1], self._pop())
            self._ref_counts[copy.source] -= 1
            table[-1] = copy.target
        self._tokens[sequence] += num_tokens
        while len(table) < self.blocks_for(self._tokens[sequence]):
            table.append(self._pop())
        return copy

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """A second sequence with the same tokens: every block shared, none allocated."""
        if child in self._tables:
            raise ValueError(f"sequence {child!r} has a block table already")
        self._tables[child] = list(self._tables[parent])
        self._tokens[child] = self._tokens[parent]
        for block in self._tables[child]:
            self._ref_counts[block] += 1

    def free(self, sequence: Hashable) -> None:
        """Forget a sequence; blocks that no other table holds are free again."""
        del self._tokens[sequence]
        for block in self._tables.pop(sequence):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._freed.append(block)

    def owners(self) -> Iterable[tuple[Hashable, tuple[int, ...]]]:
        """Every live sequence with its block table."""
        return ((sequence, tuple(table)) for sequence, table in self._tables.items())

    def _tail_is_shared(self, sequence: Hashable) -> bool:
        """Whether the next token falls into a block that another table holds too."""
        has_room = self._tokens[sequence] % self.block_size != 0
        return has_room and self._ref_counts[self._tables[sequence][-1]] > 1

    def _check(self, count: int) -> None:
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free)

    def _pop(self) -> int:
        """The block that was freed last, else the lowest that was never taken."""
        if not self._freed:
            self._ref_counts.append(1)
            return len(self._ref_counts) - 1
        block = self._freed.pop()
        self._ref_counts[block] = 1
        return block

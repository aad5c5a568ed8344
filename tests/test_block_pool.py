"""The paged allocator against a naive one: every sequence reads its own tokens back, whatever is shared."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtool.errors import KvtoolError
from kvtool.sim.block_pool import BlockPool, Copy, OutOfBlocks


def ref_counts(pool: BlockPool) -> list[int]:
    """Of every block."""
    return [pool.ref_count(block) for block in range(pool.num_blocks)]


class PoolMachine(RuleBasedStateMachine):
    """Sequences are written, forked and freed; `slots` is the memory, `texts` what each has written."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.texts: dict[int, list[int]] = {}
        self.made = 0
        self.written = 0

    def pick(self, data: st.DataObject) -> int:
        """One of the live sequences."""
        return data.draw(st.sampled_from(sorted(self.texts)), label="sequence")

    def write(self, sequence: int, count: int) -> None:
        """New tokens, no two alike, into the slots that the pool has given."""
        for _ in range(count):
            position = len(self.texts[sequence])
            self.slots[self.pool.slot(sequence, position)] = self.written
            self.texts[sequence].append(self.written)
            self.written += 1

    def fails(self, needed: int, call: Any, *args: object) -> bool:
        """Whether a call needs more than is free: then it says so, and nothing changes."""
        free = self.pool.num_free
        if needed <= free:
            return False
        before = deepcopy(vars(self.pool))
        with pytest.raises(OutOfBlocks) as caught:
            call(*args)
        assert caught.value.code == "out_of_blocks"
        assert f"{needed:,} blocks are needed and {free:,} are free" in str(caught.value)
        assert vars(self.pool) == before
        return True

    @rule(count=st.integers(0, 20))
    def allocate(self, count: int) -> None:
        sequence, self.made = self.made, self.made + 1
        needed = -(-count // self.pool.block_size)
        if self.fails(needed, self.pool.allocate, sequence, count):
            assert sequence not in self.pool
            return
        expected = tuple(self.pool.free_blocks[:needed])
        self.pool.allocate(sequence, count)
        assert self.pool.block_table(sequence) == expected
        self.texts[sequence] = []
        self.write(sequence, count)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), count=st.one_of(st.just(1), st.integers(0, 12)))
    def append(self, data: st.DataObject, count: int) -> None:
        sequence, size = self.pick(data), self.pool.block_size
        table, tokens = self.pool.block_table(sequence), len(self.texts[sequence])
        shared = sum(table[-1:] == other[-1:] for _, other in self.pool.owners()) > 1
        copies = count > 0 and tokens % size > 0 and shared
        needed = -(-(tokens + count) // size) - len(table) + copies
        assert self.pool.blocks_to_append(sequence, count) == needed
        if self.fails(needed, self.pool.append, sequence, count):
            return
        expected = self.pool.free_blocks[:needed]
        copy = self.pool.append(sequence, count)
        assert copy == (Copy(table[-1], expected[0]) if copies else None)
        kept = table[:-1] if copies else table
        assert self.pool.block_table(sequence) == (*kept, *expected)
        if copy is not None:
            source, target = copy.source * size, copy.target * size
            self.slots[target : target + size] = self.slots[source : source + size]
        self.write(sequence, count)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.pick(data), self.made
        self.made += 1
        free = self.pool.free_blocks
        self.pool.fork(parent, child)
        assert self.pool.free_blocks == free
        assert self.pool.block_table(child) == self.pool.block_table(parent)
        self.texts[child] = list(self.texts[parent])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        table, free = self.pool.block_table(sequence), self.pool.free_blocks
        own = [block for block in table if self.pool.ref_count(block) == 1]
        self.pool.free(sequence)
        del self.texts[sequence]
        assert self.pool.free_blocks == [*reversed(own), *free]  # its last block on top
        assert sequence not in self.pool

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def refuse_a_name_twice(self, data: st.DataObject) -> None:
        sequence, other = self.pick(data), self.pick(data)
        before = deepcopy(vars(self.pool))
        with pytest.raises(ValueError, match="has a block table already"):
            self.pool.allocate(sequence, 1)
        with pytest.raises(ValueError, match="has a block table already"):
            self.pool.fork(other, sequence)
        assert vars(self.pool) == before

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence, text in self.texts.items():
            assert self.pool.num_tokens(sequence) == len(text)
            places = [self.pool.slot(sequence, at) for at in range(len(text))]
            assert [self.slots[place] for place in places] == text
            for position in (-1, len(text)):
                with pytest.raises(IndexError):
                    self.pool.slot(sequence, position)

    @invariant()
    def every_block_is_free_or_counted(self) -> None:
        pool = self.pool
        owners = dict(pool.owners())
        assert owners.keys() == self.texts.keys()
        uses = Counter(block for table in owners.values() for block in table)
        assert ref_counts(pool) == [uses[block] for block in range(pool.num_blocks)]
        free = pool.free_blocks
        assert len(free) == pool.num_free == pool.num_blocks - len(uses)
        assert sorted([*free, *uses]) == list(range(pool.num_blocks))
        for sequence, table in owners.items():
            assert len(set(table)) == len(table)
            empty = len(table) * pool.block_size - len(self.texts[sequence])
            assert 0 <= empty < pool.block_size

    @invariant()
    def shared_blocks_have_the_same_tokens_before_them(self) -> None:
        size = self.pool.block_size
        seen: dict[int, list[int]] = {}
        for sequence, table in self.pool.owners():
            for logical, block in enumerate(table):
                text = self.texts[sequence][: (logical + 1) * size]
                assert seen.setdefault(block, text) == text

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for sequence in list(self.texts):
            self.pool.free(sequence)
        assert self.pool.num_free == self.pool.num_blocks
        assert list(self.pool.owners()) == []
        assert set(ref_counts(self.pool)) == {0}


def test_any_history() -> None:
    few = settings(max_examples=60, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(PoolMachine, settings=few)


@pytest.mark.slow
def test_any_history_many_times() -> None:
    many = settings(max_examples=400, stateful_step_count=80, deadline=None)
    run_state_machine_as_test(PoolMachine, settings=many)


def test_blocks_are_taken_in_order_and_given_back_on_top() -> None:
    pool = BlockPool(6, 4)
    pool.allocate("a", 9)
    pool.allocate("b", 4)
    assert (pool.block_table("a"), pool.block_table("b")) == ((0, 1, 2), (3,))
    pool.free("a")
    assert pool.free_blocks == [2, 1, 0, 4, 5]
    pool.append("b")
    pool.allocate("c", 8)
    assert (pool.block_table("b"), pool.block_table("c")) == ((3, 2), (1, 0))
    pool.free("b")
    assert pool.free_blocks == [2, 3, 4, 5]


def test_a_fork_shares_until_one_of_the_two_writes() -> None:
    pool = BlockPool(4, 4)
    pool.allocate("parent", 6)
    pool.fork("parent", "child")
    assert (pool.num_free, ref_counts(pool)) == (2, [2, 2, 0, 0])
    assert pool.append("child") == Copy(source=1, target=2)
    assert (pool.block_table("parent"), pool.block_table("child")) == ((0, 1), (0, 2))
    assert ref_counts(pool) == [2, 1, 1, 0]
    assert pool.append("parent") is None  # its tail is its own again
    pool.free("parent")
    assert pool.free_blocks == [1, 3]
    assert pool.slot("child", 6) == 2 * 4 + 2


def test_a_full_tail_is_shared_for_ever() -> None:
    pool = BlockPool(3, 4)
    pool.allocate("parent", 4)
    pool.fork("parent", "child")
    assert [pool.append(name) for name in ("parent", "child")] == [None, None]
    assert (pool.block_table("parent"), pool.block_table("child")) == ((0, 1), (0, 2))


def test_a_copy_needs_a_block_though_no_new_one_is_begun() -> None:
    pool = BlockPool(1, 4)
    pool.allocate("parent", 2)
    pool.fork("parent", "child")
    with pytest.raises(OutOfBlocks, match="1 blocks are needed and 0 are free"):
        pool.append("child")
    pool.free("parent")
    assert pool.append("child") is None


def test_an_error_is_one_that_the_command_line_prints() -> None:
    error = OutOfBlocks(1200, 7)
    assert isinstance(error, KvtoolError)
    assert str(error).startswith("1,200 blocks are needed and 7 are free")


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (16, 0), (-1, 16)])
def test_a_pool_has_blocks_of_tokens(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(num_blocks, block_size)

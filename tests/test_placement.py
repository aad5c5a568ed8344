"""First fit, best fit and buddy against a map with an entry for each slot."""

from __future__ import annotations

from itertools import groupby

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

from kvtool.sim.memory import PLACEMENTS
from kvtool.sim.placement import Buddy, Fit, placement, round_up_to_power


def pieces_of(num_slots: int) -> list[tuple[int, int]]:
    """The descending powers of two that a buddy pool is cut into: address and size."""
    pieces, address = [], 0
    while address < num_slots:
        size = 1
        while 2 * size <= num_slots - address:
            size *= 2
        pieces.append((address, size))
        address += size
    return pieces


class Map:
    """Which slots are taken, one by one; it finds holes by looking at all of them."""

    def __init__(self, num_slots: int) -> None:
        self.taken = [False] * num_slots
        self.regions: dict[int, int] = {}

    def free(self, address: int, end: int) -> bool:
        """Whether these slots are in the pool, and nobody's."""
        return end <= len(self.taken) and not any(self.taken[address:end])

    def set(self, address: int, size: int) -> None:
        """A region of this size at this address; 0: none."""
        old = self.regions.pop(address, 0)
        self.taken[address : address + old] = [False] * old
        assert self.free(address, address + size)
        self.taken[address : address + size] = [True] * size
        if size:
            self.regions[address] = size

    def holes(self) -> list[tuple[int, int]]:
        """Address and size of every run of free slots."""
        found = []
        for taken, run in groupby(range(len(self.taken)), key=lambda at: self.taken[at]):
            places = list(run)
            if not taken:
                found.append((places[0], len(places)))
        return found

    def buddies(self) -> list[tuple[int, int]]:
        """The largest free aligned powers of two, each within its piece of the pool."""
        found, rest = [], pieces_of(len(self.taken))
        while rest:
            address, size = rest.pop()
            if self.free(address, address + size):
                found.append((address, size))
            elif size > 1:
                rest += [(address, size // 2), (address + size // 2, size // 2)]
        return found

    def fit(self, size: int, *, best: bool) -> tuple[int, int] | None:
        """The lowest hole that is large enough, or the lowest of the smallest ones."""
        fits = [(length if best else 0, at) for at, length in self.holes() if length >= size]
        return (min(fits)[1], size) if fits else None

    def buddy(self, size: int) -> tuple[int, int] | None:
        """The lowest of the smallest free powers of two that are large enough."""
        fits = [(length, at) for at, length in self.buddies() if length >= size]
        return (min(fits)[1], round_up_to_power(size)) if fits else None

    def extended(self, name: str, address: int, size: int) -> int | None:
        """The size that a region can grow to where it stands."""
        end = address + self.regions[address]
        if name != "buddy":
            return size if self.free(end, address + size) else None
        wanted = round_up_to_power(size)
        inside = any(
            a <= address and address + wanted <= a + n for a, n in pieces_of(len(self.taken))
        )
        return (
            wanted
            if inside and address % wanted == 0 and self.free(end, address + wanted)
            else None
        )


class PlacementMachine(RuleBasedStateMachine):
    """A placement and the map do the same."""

    @initialize(
        name=st.sampled_from(PLACEMENTS),
        num_slots=st.one_of(st.sampled_from((1, 16, 32, 64, 24, 63)), st.integers(1, 100)),
    )
    def start(self, name: str, num_slots: int) -> None:
        self.name = name
        self.pool = placement(name, num_slots)
        self.map = Map(num_slots)

    def expected(self, size: int) -> tuple[int, int] | None:
        """Where the map would put a region."""
        if self.name == "buddy":
            return self.map.buddy(size)
        return self.map.fit(size, best=self.name == "best-fit")

    @rule(size=st.one_of(st.integers(1, 4), st.integers(1, 12), st.integers(1, 110)))
    def allocate(self, size: int) -> None:
        found = self.pool.allocate(size)
        assert found == self.expected(size)
        if found is not None:
            self.map.set(*found)

    @precondition(lambda self: self.map.regions)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.map.regions)))
        self.pool.free(address)
        self.map.set(address, 0)

    @precondition(lambda self: self.map.regions)
    @rule(data=st.data(), more=st.one_of(st.just(0), st.integers(1, 60)))
    def extend(self, data: st.DataObject, more: int) -> None:
        address = data.draw(st.sampled_from(sorted(self.map.regions)))
        size = self.map.regions[address] + (more or self.map.regions[address])  # 0: doubled
        larger = self.pool.extend(address, size)
        assert larger == self.map.extended(self.name, address, size)
        if larger is not None:
            self.map.set(address, larger)

    @invariant()
    def the_regions_are_those_of_the_map(self) -> None:
        regions = self.pool.regions()
        assert regions == sorted(self.map.regions.items())
        ends = [0, *(address + size for address, size in regions)]
        starts = [*(address for address, _ in regions), len(self.map.taken)]
        assert all(end <= start for end, start in zip(ends, starts, strict=True))
        if self.name == "buddy":
            assert all(size & size - 1 == 0 and address % size == 0 for address, size in regions)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for address in sorted(self.map.regions, key=lambda at: at % 7):
            self.pool.free(address)
        num_slots = len(self.map.taken)
        if self.name != "buddy":
            assert self.pool.allocate(num_slots) == (0, num_slots)
            return
        for piece in pieces_of(num_slots):
            assert self.pool.allocate(piece[1]) == piece
        assert self.pool.allocate(1) is None


def test_any_history() -> None:
    few = settings(max_examples=80, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(PlacementMachine, settings=few)


@pytest.mark.slow
def test_any_history_many_times() -> None:
    many = settings(max_examples=600, stateful_step_count=80, deadline=None)
    run_state_machine_as_test(PlacementMachine, settings=many)


def with_holes(name: str) -> Fit | Buddy:
    """40 slots with holes of 12 at 0, 4 at 16 and 8 at 24, and regions of 4 between and behind."""
    pool = placement(name, 40)
    assert isinstance(pool, Fit)
    for size in (12, 4, 4, 4, 8, 8):
        pool.allocate(size)
    for address in (0, 16, 24):
        pool.free(address)
    assert pool.regions() == [(12, 4), (20, 4), (32, 8)]
    return pool


def test_first_fit_takes_the_lowest_hole_and_best_fit_the_smallest() -> None:
    assert with_holes("first-fit").allocate(4) == (0, 4)
    assert with_holes("best-fit").allocate(4) == (16, 4)
    assert with_holes("best-fit").allocate(5) == (24, 5)
    assert with_holes("first-fit").allocate(13) is None
    assert with_holes("best-fit").allocate(13) is None


def test_the_lowest_of_equal_holes_is_taken() -> None:
    pool = placement("best-fit", 24)
    for size in (4, 4, 4, 4, 8):
        pool.allocate(size)
    for address in (8, 0):
        pool.free(address)
    assert pool.allocate(3) == (0, 3)


def test_a_freed_region_joins_the_holes_at_both_sides() -> None:
    pool = with_holes("first-fit")
    pool.free(20)
    assert pool.allocate(16) == (16, 16)


def test_a_region_grows_into_the_hole_behind_it_and_no_further() -> None:
    pool = with_holes("first-fit")
    assert pool.extend(20, 13) is None
    assert pool.extend(20, 12) == 12
    assert pool.extend(12, 9) is None
    assert pool.extend(32, 9) is None  # the end of the pool
    assert pool.regions() == [(12, 4), (20, 12), (32, 8)]


@pytest.mark.parametrize(
    ("num_slots", "pieces"),
    [
        (64, [64]),
        (24, [16, 8]),
        (15_728, [8192, 4096, 2048, 1024, 256, 64, 32, 16]),
    ],
)
def test_a_buddy_pool_is_cut_into_powers_of_two(num_slots: int, pieces: list[int]) -> None:
    pool, address = Buddy(num_slots), 0
    for size in pieces:
        assert pool.allocate(size) == (address, size)
        address += size
    assert address == num_slots
    assert pool.allocate(1) is None


def test_a_buddy_region_is_split_from_below_and_merges_again() -> None:
    pool = Buddy(16)
    assert [pool.allocate(size) for size in (3, 1, 2)] == [(0, 4), (4, 1), (6, 2)]
    assert pool.allocate(8) == (8, 8)
    assert pool.allocate(2) is None
    pool.free(4)
    assert pool.allocate(2) == (4, 2)
    for address in (0, 4, 6, 8):
        pool.free(address)
    assert pool.allocate(16) == (0, 16)


def test_a_buddy_region_doubles_where_its_upper_buddies_are_free() -> None:
    pool = Buddy(16)
    for size in (2, 2, 4):
        pool.allocate(size)
    assert pool.extend(0, 4) is None
    pool.free(2)
    assert pool.extend(0, 3) == 4
    assert pool.extend(4, 8) is None  # it is an upper buddy itself
    pool.free(4)
    assert pool.extend(0, 16) == 16
    assert pool.allocate(1) is None


def test_an_upper_buddy_does_not_grow_into_the_region_behind_it() -> None:
    pool = Buddy(16)
    for _ in range(4):
        pool.allocate(4)
    pool.free(8)
    assert pool.extend(4, 8) is None
    assert pool.extend(12, 8) is None
    pool.free(4)
    assert pool.extend(0, 8) == 8


def test_a_buddy_region_does_not_grow_beyond_its_piece() -> None:
    pool = Buddy(24)
    assert pool.allocate(16) == (0, 16)
    assert pool.extend(0, 24) is None
    assert pool.allocate(8) == (16, 8)
    assert pool.extend(16, 16) is None


@pytest.mark.parametrize(
    ("size", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (16, 16), (17, 32), (2**40 + 1, 2**41)]
)
def test_round_up_to_power(size: int, power: int) -> None:
    assert round_up_to_power(size) == power

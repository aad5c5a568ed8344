"""Where a contiguous region goes in the pool: buddy, first fit, best fit. Plain, with real holes.

Knuth, The Art of Computer Programming, volume 1, section 2.5. Addresses and sizes are in slots
(tokens). `allocate` answers the address and the size really given, or None; nothing is ever moved.
"""

from __future__ import annotations

import bisect
from typing import Protocol


class Placement(Protocol):
    """A pool of slots that hands out contiguous regions."""

    def allocate(self, size: int) -> tuple[int, int] | None:
        """The address and the size of a region of at least `size` slots, or None."""

    def free(self, address: int) -> None:
        """Give a region back."""

    def extend(self, address: int, size: int) -> int | None:
        """Make a region larger where it stands: its new size, or None."""

    def regions(self) -> list[tuple[int, int]]:
        """Address and size of every region, in the order of addresses."""


class Fit:
    """Holes between regions, found by first fit (lowest address) or best fit (smallest hole)."""

    def __init__(self, num_slots: int, *, best: bool) -> None:
        self.num_slots = num_slots
        self.best = best
        self._regions: list[tuple[int, int]] = []

    def regions(self) -> list[tuple[int, int]]:
        """Address and size of every region, in the order of addresses."""
        return list(self._regions)

    def allocate(self, size: int) -> tuple[int, int] | None:
        """The lowest hole that is large enough, or the smallest one (the lowest among equals)."""
        fits = [hole for hole in self._holes() if hole[1] >= size]
        if not fits:
            return None
        address = min(fits, key=lambda hole: hole[1])[0] if self.best else fits[0][0]
        bisect.insort(self._regions, (address, size))
        return address, size

    def free(self, address: int) -> None:
        """The region becomes a hole, one with the holes at its sides."""
        del self._regions[self._index(address)]

    def extend(self, address: int, size: int) -> int | None:
        """Into the hole behind the region, if that is enough."""
        index = self._index(address)
        end = self._regions[index + 1][0] if index + 1 < len(self._regions) else self.num_slots
        if address + size > end:
            return None
        self._regions[index] = (address, size)
        return size

    def _index(self, address: int) -> int:
        return bisect.bisect_left(self._regions, (address, 0))

    def _holes(self) -> list[tuple[int, int]]:
        ends = [0, *(address + size for address, size in self._regions)]
        starts = [*(address for address, _ in self._regions), self.num_slots]
        return [(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]


class Buddy:
    """Regions of a power of two, split in halves and merged with their buddy when both are free.

    A pool that is no power of two is cut into descending powers of two (15,728 = 8,192 + 4,096 +
    2,048 + 1,024 + 256 + 64 + 32 + 16), so that every region is aligned to its size.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free: dict[int, list[int]] = {}  # size: sorted addresses
        self._sizes: dict[int, int] = {}
        address = 0
        for power in reversed(range(num_slots.bit_length())):
            if num_slots >> power & 1:
                self._free[1 << power] = [address]
                address += 1 << power

    def regions(self) -> list[tuple[int, int]]:
        """Address and size of every region, in the order of addresses."""
        return sorted(self._sizes.items())

    def allocate(self, size: int) -> tuple[int, int] | None:
        """The lowest free region of the smallest power of two that is large enough."""
        wanted = round_up_to_power(size)
        found = min((free for free, at in self._free.items() if at and free >= wanted), default=0)
        if not found:
            return None
        address = self._free[found].pop(0)
        while found > wanted:  # the upper half is free, the lower one is split on
            found //= 2
            bisect.insort(self._free.setdefault(found, []), address + found)
        self._sizes[address] = wanted
        return address, wanted

    def free(self, address: int) -> None:
        """The region becomes free and merges with its buddy as long as that is free as a whole."""
        size = self._sizes.pop(address)
        while (buddy := address ^ size) in self._free.get(size, ()):
            self._free[size].remove(buddy)
            address, size = min(address, buddy), size * 2
        bisect.insort(self._free.setdefault(size, []), address)

    def extend(self, address: int, size: int) -> int | None:
        """Doubling in place takes the upper buddy, step by step, if each is free as a whole."""
        have, wanted = self._sizes[address], round_up_to_power(size)
        steps = []
        while have < wanted:
            if address & have or address + have not in self._free.get(have, ()):
                return None
            steps.append(have)
            have *= 2
        for step in steps:
            self._free[step].remove(address + step)
        self._sizes[address] = have
        return have


def round_up_to_power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def placement(name: str, num_slots: int) -> Placement:
    """The plain placement of that name: buddy, first-fit or best-fit."""
    if name == "buddy":
        return Buddy(num_slots)
    return Fit(num_slots, best=name == "best-fit")

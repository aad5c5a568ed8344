"""Placements for the fast engine: the regions and holes of kvtool.sim.placement on integer arrays.

Regions are lines in a list by address; with buddy, `holes` has the free addresses of each
power of two. Same choices as the plain ones: the lowest address of the best candidates.
"""

from __future__ import annotations

from kvtool.sim.jit import part
from kvtool.sim.state import NONE, State

BUDDY, FIRST_FIT, BEST_FIT = range(3)


@part
def order_of(size: int) -> int:
    """The power of two that is at least `size`."""
    order = 0
    while (1 << order) < size:
        order += 1
    return order


@part
def place(s: State, size: int, line: int) -> int:
    """The address of a new region for a line, or NONE."""
    if s.run.placement == BUDDY:
        order = order_of(size)
        address = take_buddy(s, order)
        if address >= 0:
            set_region(s, line, address, 1 << order)
        return address
    before, address = find_hole(s, size, s.run.placement == BEST_FIT)
    if address >= 0:
        link_region(s, before, line)
        set_region(s, line, address, size)
    return address


@part
def set_region(s: State, line: int, address: int, size: int) -> None:
    """Note what a line holds, in its own fields and in the sums."""
    mine = s.lines[line]
    held = max(mine.room, 0)
    s.run.held += size - held
    pad = max(0, size - mine.final)
    s.run.internal += pad - mine.pad
    mine.pad = pad
    mine.room = size
    mine.address = address


@part
def release(s: State, line: int) -> None:
    """The region of a line becomes a hole."""
    mine = s.lines[line]
    s.run.held -= mine.room
    s.run.internal -= mine.pad
    if s.run.placement == BUDDY:
        give_buddy(s, mine.address, order_of(mine.room))
    else:
        unlink_region(s, line)
    mine.room = mine.address = NONE
    mine.pad = 0


@part
def extend(s: State, line: int, size: int) -> bool:
    """Make the region of a line larger where it stands, if what follows is free."""
    mine = s.lines[line]
    address = mine.address
    if s.run.placement == BUDDY:
        have, wanted = order_of(mine.room), order_of(size)
        for order in range(have, wanted):
            if address >> order & 1 or find_buddy(s, address + (1 << order), order) < 0:
                return False
        for order in range(have, wanted):
            drop_buddy(s, order, find_buddy(s, address + (1 << order), order))
        set_region(s, line, address, 1 << wanted)
        return True
    above = mine.above
    end = s.lines[above].address if above >= 0 else s.run.num_slots
    if address + size > end:
        return False
    set_region(s, line, address, size)
    return True


@part
def move(s: State, line: int, size: int) -> bool:
    """A larger region elsewhere; the old one is held until its tokens are copied."""
    mine = s.lines[line]
    if s.run.placement == BUDDY:
        order = order_of(size)
        address = take_buddy(s, order)
        if address < 0:
            return False
        give_buddy(s, mine.address, order_of(mine.room))
        set_region(s, line, address, 1 << order)
        return True
    before, address = find_hole(s, size, s.run.placement == BEST_FIT)
    if address < 0:
        return False
    unlink_region(s, line)
    link_region(s, before, line)
    set_region(s, line, address, size)
    return True


@part
def find_hole(s: State, size: int, best: bool) -> tuple[int, int]:
    """The line below a hole of at least `size` slots, and the hole's address; NONE if there is none."""
    below, line, start = NONE, s.run.first_region, 0
    found, address, smallest = NONE, NONE, 0
    while True:
        end = s.lines[line].address if line >= 0 else s.run.num_slots
        hole = end - start
        if hole >= size and (address < 0 or hole < smallest):
            found, address, smallest = below, start, hole
            if not best:
                return found, address
        if line < 0:
            return found, address
        start = end + s.lines[line].room
        below, line = line, s.lines[line].above


@part
def link_region(s: State, below: int, line: int) -> None:
    """Put a line into the list by address, above another or first."""
    above = s.lines[below].above if below >= 0 else s.run.first_region
    s.lines[line].below = below
    s.lines[line].above = above
    if below >= 0:
        s.lines[below].above = line
    else:
        s.run.first_region = line
    if above >= 0:
        s.lines[above].below = line


@part
def unlink_region(s: State, line: int) -> None:
    """Take a line out of the list by address."""
    below, above = s.lines[line].below, s.lines[line].above
    if below >= 0:
        s.lines[below].above = above
    else:
        s.run.first_region = above
    if above >= 0:
        s.lines[above].below = below


@part
def take_buddy(s: State, order: int) -> int:
    """The lowest free region of the smallest sufficient power of two, split down to `order`."""
    found = order
    while found < len(s.holes) and s.holes[found, 0] == 0:
        found += 1
    if found >= len(s.holes):
        return NONE
    lowest = 0
    for place in range(1, s.holes[found, 0]):
        if s.holes[found, 1 + place] < s.holes[found, 1 + lowest]:
            lowest = place
    address = s.holes[found, 1 + lowest]
    drop_buddy(s, found, lowest)
    while found > order:
        found -= 1
        add_buddy(s, found, address + (1 << found))
    return address


@part
def give_buddy(s: State, address: int, order: int) -> None:
    """Free a region and merge it with its buddy for as long as that is free."""
    while True:
        place = find_buddy(s, address ^ (1 << order), order)
        if place < 0:
            break
        drop_buddy(s, order, place)
        address &= ~(1 << order)
        order += 1
    add_buddy(s, order, address)


@part
def find_buddy(s: State, address: int, order: int) -> int:
    """The place of a free region in the list of its power of two, or NONE."""
    if order < len(s.holes):
        for place in range(s.holes[order, 0]):
            if s.holes[order, 1 + place] == address:
                return place
    return NONE


@part
def add_buddy(s: State, order: int, address: int) -> None:
    """Note a free region."""
    s.holes[order, 1 + s.holes[order, 0]] = address
    s.holes[order, 0] += 1


@part
def drop_buddy(s: State, order: int, place: int) -> None:
    """Forget a free region: the last one takes its place in the list."""
    s.holes[order, 0] -= 1
    s.holes[order, 1 + place] = s.holes[order, 1 + s.holes[order, 0]]

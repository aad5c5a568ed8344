"""Placements for the fast engine: the regions and holes of kvtool.sim.placement on integer arrays.

Regions are lines in a list by address; with buddy, `holes` has the free addresses of each
power of two. Same choices as the plain ones: the lowest address of the best candidates.
"""

from __future__ import annotations

from kvtool.sim.jit import part
from kvtool.sim.state import NONE, ORDERS, Lines, Run

BUDDY, FIRST_FIT, BEST_FIT = range(3)


@part
def order_of(size: int) -> int:
    """The power of two that is at least `size`."""
    order = 0
    while (1 << order) < size:
        order += 1
    return order


@part
def place(run: Run, lines: Lines, size: int, line: int) -> int:
    """The address of a new region for a line, or NONE."""
    if run.placement == BUDDY:
        order = order_of(size)
        address = take_buddy(run, lines, order)
        if address >= 0:
            set_region(run, lines, line, address, 1 << order)
        return address
    before, address = find_hole(run, lines, size, run.placement == BEST_FIT)
    if address >= 0:
        link_region(run, lines, before, line)
        set_region(run, lines, line, address, size)
    return address


@part
def set_region(run: Run, lines: Lines, line: int, address: int, size: int) -> None:
    """Note what a line holds, in its own fields and in the sums."""
    mine = lines[line]
    held = max(mine.room, 0)
    run.held += size - held
    pad = max(0, size - mine.final)
    run.internal += pad - mine.pad
    mine.pad = pad
    mine.room = size
    mine.address = address


@part
def release(run: Run, lines: Lines, line: int) -> None:
    """The region of a line becomes a hole."""
    mine = lines[line]
    run.held -= mine.room
    run.internal -= mine.pad
    if run.placement == BUDDY:
        give_buddy(run, lines, mine.address, order_of(mine.room))
    else:
        unlink_region(run, lines, line)
    mine.room = mine.address = NONE
    mine.pad = 0


@part
def extend(run: Run, lines: Lines, line: int, size: int) -> bool:
    """Make the region of a line larger where it stands, if what follows is free."""
    mine = lines[line]
    address = mine.address
    if run.placement == BUDDY:
        have, wanted = order_of(mine.room), order_of(size)
        for order in range(have, wanted):
            if address >> order & 1 or find_buddy(run, lines, address + (1 << order), order) < 0:
                return False
        for order in range(have, wanted):
            drop_buddy(run, lines, order, find_buddy(run, lines, address + (1 << order), order))
        set_region(run, lines, line, address, 1 << wanted)
        return True
    above = mine.above
    end = lines[above].address if above >= 0 else run.num_slots
    if address + size > end:
        return False
    set_region(run, lines, line, address, size)
    return True


@part
def move(run: Run, lines: Lines, line: int, size: int) -> bool:
    """A larger region elsewhere; the old one is held until its tokens are copied."""
    mine = lines[line]
    if run.placement == BUDDY:
        order = order_of(size)
        address = take_buddy(run, lines, order)
        if address < 0:
            return False
        give_buddy(run, lines, mine.address, order_of(mine.room))
        set_region(run, lines, line, address, 1 << order)
        return True
    before, address = find_hole(run, lines, size, run.placement == BEST_FIT)
    if address < 0:
        return False
    unlink_region(run, lines, line)
    link_region(run, lines, before, line)
    set_region(run, lines, line, address, size)
    return True


@part
def find_hole(run: Run, lines: Lines, size: int, best: bool) -> tuple[int, int]:
    """The line below a hole of at least `size` slots, and the hole's address; NONE if there is none."""
    below, line, start = NONE, run.first_region, 0
    found, address, smallest = NONE, NONE, 0
    while True:
        end = lines[line].address if line >= 0 else run.num_slots
        hole = end - start
        if hole >= size and (address < 0 or hole < smallest):
            found, address, smallest = below, start, hole
            if not best:
                return found, address
        if line < 0:
            return found, address
        start = end + lines[line].room
        below, line = line, lines[line].above


@part
def link_region(run: Run, lines: Lines, below: int, line: int) -> None:
    """Put a line into the list by address, above another or first."""
    above = lines[below].above if below >= 0 else run.first_region
    lines[line].below = below
    lines[line].above = above
    if below >= 0:
        lines[below].above = line
    else:
        run.first_region = line
    if above >= 0:
        lines[above].below = line


@part
def unlink_region(run: Run, lines: Lines, line: int) -> None:
    """Take a line out of the list by address."""
    below, above = lines[line].below, lines[line].above
    if below >= 0:
        lines[below].above = above
    else:
        run.first_region = above
    if above >= 0:
        lines[above].below = below


@part
def take_buddy(run: Run, lines: Lines, order: int) -> int:
    """The lowest free region of the smallest sufficient power of two, split down to `order`."""
    found = order
    while found < ORDERS and run.num_holes[found] == 0:
        found += 1
    if found >= ORDERS:
        return NONE
    lowest = 0
    for place in range(1, run.num_holes[found]):
        if lines[place].holes[found] < lines[lowest].holes[found]:
            lowest = place
    address = lines[lowest].holes[found]
    drop_buddy(run, lines, found, lowest)
    while found > order:
        found -= 1
        add_buddy(run, lines, found, address + (1 << found))
    return address


@part
def give_buddy(run: Run, lines: Lines, address: int, order: int) -> None:
    """Free a region and merge it with its buddy for as long as that is free."""
    while True:
        place = find_buddy(run, lines, address ^ (1 << order), order)
        if place < 0:
            break
        drop_buddy(run, lines, order, place)
        address &= ~(1 << order)
        order += 1
    add_buddy(run, lines, order, address)


@part
def find_buddy(run: Run, lines: Lines, address: int, order: int) -> int:
    """The place of a free region in the list of its power of two, or NONE."""
    if order < ORDERS:
        for place in range(run.num_holes[order]):
            if lines[place].holes[order] == address:
                return place
    return NONE


@part
def add_buddy(run: Run, lines: Lines, order: int, address: int) -> None:
    """Note a free region."""
    lines[run.num_holes[order]].holes[order] = address
    run.num_holes[order] += 1


@part
def drop_buddy(run: Run, lines: Lines, order: int, place: int) -> None:
    """Forget a free region: the last one takes its place in the list."""
    run.num_holes[order] -= 1
    lines[place].holes[order] = lines[run.num_holes[order]].holes[order]

"""Placements for the fast engine: the choices of kvtool.sim.placement on integer records.

The holes are a list in two columns of the lines, `hole_at` and `hole_size`, in no order: with buddy a
hole is a free power of two, aligned to its size.
"""

from __future__ import annotations

from kvtool.jit import part
from kvtool.sim.memory import PLACEMENTS
from kvtool.sim.state import NONE, Lines, Run

BUDDY, FIRST_FIT = PLACEMENTS.index("buddy"), PLACEMENTS.index("first-fit")


@part
def power_of_two(size: int) -> int:
    """The next power of two."""
    power = 1
    while power < size:
        power *= 2
    return power


@part
def take_hole(run: Run, lines: Lines, size: int) -> int:
    """The address of `size` slots taken out of the best hole, or NONE if none is large enough.

    First fit: the lowest hole; else the smallest one, the lowest among equals.
    """
    best = NONE
    for place in range(run.holes):
        if lines[place].hole_size < size:
            continue
        smaller = 0 if best < 0 else lines[place].hole_size - lines[best].hole_size
        if run.placement == FIRST_FIT:
            smaller = 0
        if best < 0 or smaller < 0 or (smaller == 0 and lines[place].hole_at < lines[best].hole_at):
            best = place
    if best < 0:
        return NONE
    address, left = lines[best].hole_at, lines[best].hole_size - size
    run.holes -= 1
    lines[best].hole_at, lines[best].hole_size = (
        lines[run.holes].hole_at,
        lines[run.holes].hole_size,
    )
    end = address + size + left
    while left > 0:  # buddy: the upper half, the upper half of the lower one, ...
        piece = (size + left) // 2 if run.placement == BUDDY else left
        add_hole(run, lines, end - piece, piece)
        end -= piece
        left -= piece
    return address


@part
def add_hole(run: Run, lines: Lines, address: int, size: int) -> None:
    """Note a hole, one with the holes at its sides; with buddy, with its buddy if that is free."""
    place = 0
    while place < run.holes:
        at, length = lines[place].hole_at, lines[place].hole_size
        if run.placement == BUDDY:
            joins = length == size and at == address ^ size
        else:
            joins = at + length == address or address + size == at
        if joins:
            address = min(address, at)
            size += length
            run.holes -= 1
            lines[place].hole_at = lines[run.holes].hole_at
            lines[place].hole_size = lines[run.holes].hole_size
            place = 0
        else:
            place += 1
    lines[run.holes].hole_at, lines[run.holes].hole_size = address, size
    run.holes += 1


@part
def grow_in_place(run: Run, lines: Lines, at: int, size: int) -> bool:
    """Make a region at most twice as large where it stands, if what follows is free."""
    line = lines[at]
    more = line.room if run.placement == BUDDY else size - line.room
    if run.placement == BUDDY and line.address & line.room:
        return False  # the upper of two buddies
    for place in range(run.holes):
        hole = lines[place]
        if hole.hole_at == line.address + line.room and hole.hole_size >= more:
            hole.hole_at += more
            hole.hole_size -= more
            if hole.hole_size == 0:
                run.holes -= 1
                hole.hole_at = lines[run.holes].hole_at
                hole.hole_size = lines[run.holes].hole_size
            set_region(run, lines, at, line.address, line.room + more)
            return True
    return False


@part
def place(run: Run, lines: Lines, at: int, size: int) -> bool:
    """A new region of at least `size` slots; the one that a line has is held until then."""
    if run.placement == BUDDY:
        size = power_of_two(size)
    address = take_hole(run, lines, size)
    if address < 0:
        return False
    if lines[at].room > 0:
        add_hole(run, lines, lines[at].address, lines[at].room)
    set_region(run, lines, at, address, size)
    return True


@part
def release(run: Run, lines: Lines, at: int) -> None:
    """The region of a line becomes a hole."""
    add_hole(run, lines, lines[at].address, lines[at].room)
    set_region(run, lines, at, NONE, 0)


@part
def set_region(run: Run, lines: Lines, at: int, address: int, size: int) -> None:
    """Note what a line holds, in its own fields and in the sums."""
    line = lines[at]
    pad = max(0, size - line.final)
    run.held += size - line.room
    run.internal += pad - line.pad
    line.pad, line.room, line.address = pad, size, address

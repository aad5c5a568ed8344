"""Blocks by their names, compiled: open addressing, a slot a name, which leads to its oldest copy.

Rule R13: copies of a block are kept, the oldest one is found, and each is forgotten for itself.
"""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.blocks.numbers import NO_NAME, NONE


@part
def slot_of(slots: Any, name: int) -> int:
    """The slot of a name, or the empty one where it would be."""
    mask = len(slots) - 1
    slot = name & mask
    while slots[slot].name != name and slots[slot].name != NO_NAME:
        slot = (slot + 1) & mask
    return slot


@part
def find(slots: Any, name: int) -> int:
    """The oldest block of that name, or NONE."""
    slot = slots[slot_of(slots, name)]
    return slot.block if slot.name == name else NONE


@part
def put(slots: Any, name: int, block: int) -> None:
    """A block that is the first of its name."""
    slot = slots[slot_of(slots, name)]
    slot.name, slot.block = name, block


@part
def gain_name(blocks: Any, slots: Any, at: int, name: int) -> None:
    """From now on a block can be found, behind its older copies."""
    block = blocks[at]
    block.name = name
    block.older = block.newer = NONE
    slot = slots[slot_of(slots, name)]
    if slot.name == NO_NAME:
        slot.name, slot.block = name, at
        block.newest = at
        return
    oldest = blocks[slot.block]
    block.older = oldest.newest
    blocks[oldest.newest].newer = at
    oldest.newest = at


@part
def lose_name(blocks: Any, slots: Any, at: int) -> None:
    """A block is taken for something else: the next copy is found from now on, or none."""
    block = blocks[at]
    slot = slot_of(slots, block.name)
    older, newer = block.older, block.newer
    block.name = NO_NAME
    if older >= 0:
        blocks[older].newer = newer
        if newer >= 0:
            blocks[newer].older = older
        else:
            blocks[slots[slot].block].newest = older
    elif newer >= 0:
        blocks[newer].older = NONE
        blocks[newer].newest = block.newest
        slots[slot].block = newer
    else:
        empty(slots, slot)


@part
def empty(slots: Any, slot: int) -> None:
    """Empty a slot, and move up what stands behind it and would not be found any more."""
    mask = len(slots) - 1
    hole = slot
    at = (slot + 1) & mask
    while slots[at].name != NO_NAME:
        home = slots[at].name & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            slots[hole].name, slots[hole].block = slots[at].name, slots[at].block
            hole = at
        at = (at + 1) & mask
    slots[hole].name = NO_NAME

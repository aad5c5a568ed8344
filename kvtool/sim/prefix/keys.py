"""Blocks of a trace as dense integers that stand for a block and all blocks before it.

A trace names its blocks by hashes; whether these cover what comes before is its own affair. Here each
pair (the block before, the name) gets the next integer, so that equal integers mean equal prefixes, a
block's predecessor is known, and everything about a block lies in arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtool.errors import KvtoolError
from kvtool.jit import compiled, part
from kvtool.trace_blocks import HashedRequests

Ints = NDArray[np.int32]
MOST_KEYS = 2**31 - 2
_FIRST_SLOTS = 1 << 19


@dataclass(slots=True, kw_only=True)
class Keys:
    """The integers given so far, and the table that finds them: open addressing, at most half full."""

    before: Ints = field(default_factory=lambda: np.zeros(_FIRST_SLOTS // 2, np.int32))
    """Of each key, the key of the block before it; -1: it is a prompt's first."""
    names: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_FIRST_SLOTS // 2, np.int64))
    count: int = 0
    _slots: Ints = field(default_factory=lambda: np.full(_FIRST_SLOTS, -1, np.int32))

    def of(self, requests: HashedRequests) -> Ints:
        """The key of each block of each request; new blocks get new ones."""
        keys = np.empty(len(requests.hash_ids), np.int32)
        places = np.zeros(2, np.int64)  # the request, the block: where to go on
        while True:
            self.count = int(
                give(
                    requests.hash_ids, requests.starts, keys, places,
                    self.before, self.names, self._slots, self.count,
                )
            )  # fmt: skip
            if places[1] == len(keys):
                return keys
            self._grow()

    def keep(self, live: NDArray[np.int64]) -> Ints:
        """Forget all keys but these and those before them; what each is called now, or -1."""
        kept = np.zeros(self.count, np.bool_)
        kept[live] = True
        with_ancestors(self.before, kept)
        new = np.where(kept, np.cumsum(kept, dtype=np.int32) - 1, -1).astype(np.int32)
        before, names = self.before[: self.count][kept], self.names[: self.count][kept]
        self.count = len(names)
        before = np.where(before < 0, -1, new[before]).astype(np.int32)
        size = max(_FIRST_SLOTS // 2, 1 << self.count.bit_length())
        self.before, self.names = np.resize(before, size), np.resize(names, size)
        self._slots = np.full(2 * size, -1, np.int32)
        place(self.before, self.names, self._slots, self.count)
        return new

    def _grow(self) -> None:
        if self.count >= MOST_KEYS // 2:
            raise KvtoolError(
                f"the trace has more than {MOST_KEYS // 2:,} different blocks",
                "cut it into parts",
                code="too_large",
            )
        size = 2 * len(self.before)
        self.before, self.names = np.resize(self.before, size), np.resize(self.names, size)
        self._slots = np.full(2 * size, -1, np.int32)
        place(self.before, self.names, self._slots, self.count)


@compiled
def give(
    names: Any, starts: Any, keys: Any, places: Any, before: Any, known: Any, slots: Any, count: int
) -> int:
    """Find or make the key of each block, from `places` on, until there is no room for a new one."""
    request, at = places[0], places[1]
    most = len(before)
    while at < len(names):
        while at >= starts[request + 1]:
            request += 1
        parent = np.int64(keys[at - 1]) if at > starts[request] else np.int64(-1)
        name = names[at]
        slot = slot_of(name, parent, known, before, slots)
        found = np.int64(slots[slot])
        if found < 0:
            if count == most:
                break
            found = np.int64(count)
            slots[slot] = found
            known[found] = name
            before[found] = parent
            count += 1
        keys[at] = found
        at += 1
    places[0], places[1] = request, at
    return count


@part
def slot_of(name: Any, parent: Any, known: Any, before: Any, slots: Any) -> Any:
    """Where the key of a block is, or is to be put: nothing ever leaves the table.

    First where its name says: traces count their blocks, and then neighbours are neighbours in memory.
    If another one is there, from where a hash of both says, in strides that it says too: such names
    fill long stretches, which must be left at once.
    """
    mask = np.uint64(len(slots) - 1)
    slot = np.uint64(name) & mask
    found = slots[slot]
    if found < 0 or (known[found] == name and before[found] == parent):
        return slot
    # Fibonacci hashing of both; the high bits are mixed down.
    mixed = np.uint64(name) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) + np.uint64(parent + 1) * np.uint64(
        0xBF58476D1CE4E5B9
    )
    mixed = mixed ^ (mixed >> np.uint64(32))
    slot, stride = mixed & mask, (mixed >> np.uint64(40)) | np.uint64(1)
    found = slots[slot]
    while found >= 0 and (known[found] != name or before[found] != parent):
        slot = (slot + stride) & mask
        found = slots[slot]
    return slot


@compiled
def place(before: Any, known: Any, slots: Any, count: int) -> None:
    """Put keys into a new, empty table."""
    for key in range(count):
        slots[slot_of(known[key], np.int64(before[key]), known, before, slots)] = key


@compiled
def with_ancestors(before: Any, kept: Any) -> None:
    """Keep what comes before a kept key: it has the smaller number."""
    for key in range(len(kept) - 1, -1, -1):
        if kept[key] and before[key] >= 0:
            kept[before[key]] = True

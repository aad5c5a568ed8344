"""A binary heap of records by (first, second), the least on top, from which any can be taken out.

The records are in `items`, whose column `heap` holds their numbers in the order of the heap; `owner`
counts them in `heaped`. A record knows where it stands: `place`, -1 outside.
"""

from __future__ import annotations

from typing import Any

from kvtool.jit import part


@part
def before(items: Any, one: int, other: int) -> bool:
    """Whether a record goes before another."""
    first, second = items[one].first, items[other].first
    return first < second or (first == second and items[one].second < items[other].second)


@part
def rise(items: Any, at: int, place: int) -> int:
    """Move a record up from a free place as far as it goes; where it then stands."""
    while place > 0:
        above = (place - 1) // 2
        parent = items[above].heap
        if not before(items, at, parent):
            break
        items[place].heap = parent
        items[parent].place = place
        place = above
    items[place].heap = at
    items[at].place = place
    return place


@part
def sink(owner: Any, items: Any, at: int, place: int) -> None:
    """Move a record down from a free place as far as it goes."""
    while True:
        below = 2 * place + 1
        if below >= owner.heaped:
            break
        if below + 1 < owner.heaped and before(items, items[below + 1].heap, items[below].heap):
            below += 1
        child = items[below].heap
        if not before(items, child, at):
            break
        items[place].heap = child
        items[child].place = place
        place = below
    items[place].heap = at
    items[at].place = place


@part
def settle(owner: Any, items: Any, at: int, place: int) -> None:
    """Move a record from a free place, or from its own after its turn changed, to where it belongs."""
    if rise(items, at, place) == place:
        sink(owner, items, at, place)


@part
def push(owner: Any, items: Any, at: int) -> None:
    """Put a record in."""
    owner.heaped += 1
    rise(items, at, owner.heaped - 1)


@part
def remove(owner: Any, items: Any, at: int) -> None:
    """Take a record out, wherever it stands."""
    place = items[at].place
    items[at].place = -1
    owner.heaped -= 1
    last = items[owner.heaped].heap
    if last == at:
        return
    settle(owner, items, last, place)

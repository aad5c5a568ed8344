"""Tables of plans that are whole on a narrow terminal: what matters least goes before a number is broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtool.view import Table

WIDTH = 80
"""Of a plain terminal. The same table on a wider one: a view is a function of its run alone."""
GAP = 3
"""Between two columns, as `kvtool.render` sets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column, and what may be done to it where room lacks."""

    name: str
    cells: tuple[str, ...]
    right: bool = True
    shorter: tuple[str, ...] = ()
    """The cells in fewer letters, tried before any column is dropped."""
    rank: int = 0
    """The highest is dropped first; 0 never is."""

    @property
    def width(self) -> int:
        """Of its name and cells on one line each."""
        return max(map(len, (self.name, *self.cells)))

    @property
    def same(self) -> str | None:
        """What all of several cells say; None where they differ, or there is one."""
        return self.cells[0] if len(self.cells) > 1 and len(set(self.cells)) == 1 else None

    @property
    def empty(self) -> bool:
        """Whether no cell says anything."""
        return set(self.cells) <= {"–", ""}


def table(columns: Sequence[Column], title: str = "") -> Table:
    """The columns that have something to say, as many as there is room for."""
    kept = _fitting([one for one in columns if not one.empty])
    return Table(
        columns=tuple(one.name for one in kept),
        rows=tuple(zip(*(one.cells for one in kept), strict=True)),
        right=frozenset(one.name for one in kept if one.right),
        title=title,
    )


def _fitting(columns: list[Column]) -> list[Column]:
    if _width(columns) > WIDTH:
        columns = [replace(one, cells=one.shorter or one.cells) for one in columns]
    while _width(columns) > WIDTH and any(one.rank for one in columns):
        columns.remove(max(columns, key=lambda one: one.rank))
    return columns


def _width(columns: list[Column]) -> int:
    return sum(one.width + GAP for one in columns) - GAP

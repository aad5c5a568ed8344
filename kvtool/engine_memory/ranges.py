"""A range of bytes, and lines of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtool.units import GIB


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes on one GPU: the fewest and the most that are likely, and the best guess."""

    low: int
    best: int
    high: int

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.best + other.best, self.high + other.high)

    def __or__(self, other: Range) -> Range:
        """Either of the two; the best guess is this one's."""
        return Range(min(self.low, other.low), self.best, max(self.high, other.high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Something that an engine keeps, and how that is known."""

    name: str
    range: Range
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """All of it on one rank."""

    lines: tuple[Line, ...]

    @property
    def total(self) -> Range:
        """The sum of the lines."""
        return total(line.range for line in self.lines)


NOTHING = Range(0, 0, 0)


def total(ranges: Iterable[Range]) -> Range:
    """The sum, end by end."""
    return sum(ranges, NOTHING)


def gib(low: float, best: float, high: float) -> Range:
    """A range given in GiB."""
    return Range(round(low * GIB), round(best * GIB), round(high * GIB))

"""What a run looks like to a person: tables, sentences and a chart. Pure functions of a Run.

A command's view is `view(run) -> View`; `kvtool.output` renders it as a terminal table, Markdown,
CSV (the rows themselves) or a picture, and `kvtool report` can do so again from a saved run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells are text already; numeric columns are right-aligned by name."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    right: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart, or single points: x and y in the units of the chart's axes."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    joined: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over a shared axis, and dashed levels such as a GPU's capacity."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    levels: tuple[tuple[str, float], ...] = ()
    marks: tuple[tuple[str, float], ...] = ()
    """Dashed uprights, such as the time after which nobody arrives."""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """Several charts of lines, one below the other, and what they are of."""

    charts: tuple[Chart, ...]
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Stacked bars, one below the other: the parts of each name, in the order of `parts`."""

    title: str
    x_label: str
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    colours: tuple[int, ...] = ()
    """Each part's place among the colours, so that it has the same one in every picture; -1: what is left.
    Empty: in their order, the last one being what is left."""
    labels: tuple[tuple[str, ...], ...] = ()
    """Of each row what its parts are called where there is room; empty: their share."""
    ends: tuple[str, ...] = ()
    """Of each row what stands behind its bar."""
    limits: tuple[tuple[str, float], ...] = ()
    """Dashed uprights, such as all of a GPU's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Areas:
    """Parts of a whole over x, stacked: `values` has the values of each part."""

    title: str
    x_label: str
    parts: tuple[str, ...]
    x: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """A strip of memory from 0 to `length`: pieces of (start, size, filled, owner), white between.

    What is filled of a piece has the owner's full colour, the rest a pale one.
    """

    title: str
    length: int
    pieces: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """Several small pictures, one below the other, with one legend for their parts."""

    title: str
    panels: tuple[Bars | Areas | Strip, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The human side of a run. Sentences belong to the answer and are printed below the tables; `lead` is
    what must be known before them, and is printed above."""

    tables: tuple[Table, ...]
    sentences: tuple[str, ...] = ()
    lead: tuple[str, ...] = ()
    chart: Chart | Charts | Panels | None = None

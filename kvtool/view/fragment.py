"""How `kvtool fragment` looks: the shares of the pool by allocator, a verdict, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtool.run import Row, Run
from kvtool.view import Areas, Bars, Panels, Strip, Table, View
from kvtool.view.verdicts import labels_of, named, sentences, value_of, varying_in
from kvtool.view.words import number

SHARES = ("token", "reserved", "internal", "padding", "external", "idle")
MEANING = (
    "█ token, ▓ reserved for later tokens, ▒ internal: held and never used, ░ padding, · external: "
    "free, but the next request does not fit, blank: idle."
)
BAR = "█▓▒░· "
BAR_WIDTH = 48
MOST_POINTS = 300
"""Of a share over time: a picture is a thousand pixels wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Film:
    """What a picture shows of a row besides its shares: (steps, shares) over time, and a map."""

    series: tuple[tuple[int, tuple[float, ...]], ...] = ()
    regions: tuple[tuple[int, int, int, int], ...] | None = None


def view(run: Run, films: Sequence[Film] = ()) -> View:
    """The shares in numbers and as stacked bars, what ran, and what it comes to."""
    return View(
        tables=(
            _table(run.rows, {share: _share(share) for share in SHARES}),
            _table(run.rows, {"the pool": bar}),
            _table(run.rows, _counts(run.rows)),
        ),
        sentences=(MEANING, *sentences(run.rows)),
        chart=_picture(run.rows, films) if films else None,
    )


def _table(rows: Sequence[Row], cells: Mapping[str, Callable[[Row], str]]) -> Table:
    """A line a row: its allocator, what tells it apart, and these cells."""
    varying = varying_in(rows)
    columns = ("allocator", *(name.replace("_", " ") for name in varying), *cells)
    return Table(
        columns=columns,
        rows=tuple(
            (
                named(row),
                *(value_of(row[name]) for name in varying),
                *(cell(row) for cell in cells.values()),
            )
            for row in rows
        ),
        right=frozenset(columns) - {"allocator", "the pool"},
    )


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[f'{name}_share']:.1%}"


def _counts(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """What ran, and what preempting or sharing comes to where it was asked about."""
    cells: dict[str, Callable[[Row], str]] = {
        "mean batch": lambda row: f"{row['mean_batch']:.2f}",
        "peak": lambda row: number(row["peak_batch"]),
        "completed": lambda row: number(row["completed"]),
        "preemptions": lambda row: number(row["preemptions"]),
    }
    if any(row["rejected"] for row in rows):
        cells["rejected"] = lambda row: number(row["rejected"])
    if any(row["preemption"] == "swap" for row in rows):
        cells["recomputed"] = lambda row: number(row["recomputed_tokens"])
        cells["swapped"] = lambda row: number(row["swapped_blocks"])
    elif any(row["n"] > 1 or row["shared_prefix"] for row in rows):
        cells["saved"] = lambda row: f"{row['saved_share']:.1%}"
        cells["copied"] = lambda row: number(row["copied_blocks"])
    else:
        cells["steps"] = lambda row: number(row["steps"])
    return cells


def bar(row: Row) -> str:
    """The six shares as so many letters; the largest remainders get what rounding leaves over."""
    exact = [row[f"{share}_share"] * BAR_WIDTH for share in SHARES]
    whole = [int(width) for width in exact]
    by_rest = sorted(range(len(exact)), key=lambda k: exact[k] - whole[k], reverse=True)
    for place in by_rest[: max(0, round(sum(exact)) - sum(whole))]:
        whole[place] += 1
    return "".join(letter * width for letter, width in zip(BAR, whole, strict=True))


def _picture(rows: Sequence[Row], films: Sequence[Film]) -> Panels:
    names = labels_of(rows)
    shares = tuple(tuple(row[f"{share}_share"] for share in SHARES) for row in rows)
    panels: list[Bars | Areas | Strip] = [
        Bars(
            title="shares of the pool, averaged over steps",
            x_label="of the pool's slots",
            parts=SHARES,
            rows=tuple(zip(names, shares, strict=True)),
        )
    ]
    for name, film in zip(names, films, strict=True):
        if film.series:
            panels.append(_areas(name, film))
    for name, row, film in zip(names, rows, films, strict=True):
        if film.regions is not None:
            title = f"{name}: the pool, a colour a request (pale: held, unused; white: free)"
            panels.append(Strip(title=title, length=row["pool_tokens"], pieces=film.regions))
    return Panels(title="Where the KV pool goes", panels=tuple(panels))


def _areas(name: str, film: Film) -> Areas:
    """The series with neighbours put together, until there are few enough for a picture."""
    series = list(film.series)
    while len(series) > MOST_POINTS:
        pairs = [series[k : k + 2] for k in range(0, len(series), 2)]
        series = [_together(pair) for pair in pairs]
    x, step = [], 0
    for steps, _ in series:
        x.append(step + steps / 2)
        step += steps
    values = tuple(tuple(shares[part] for _, shares in series) for part in range(len(SHARES)))
    return Areas(
        title=f"{name}: over time", x_label="step", parts=SHARES, x=tuple(x), values=values
    )


def _together(points: Sequence[tuple[int, tuple[float, ...]]]) -> tuple[int, tuple[float, ...]]:
    """The mean of neighbouring points, each as long as its steps."""
    steps = sum(count for count, _ in points)
    columns = zip(*([count * share for share in shares] for count, shares in points), strict=True)
    return steps, tuple(sum(column) / steps for column in columns)

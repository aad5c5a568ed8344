"""The picture of `kvtool prefix`: hit rate over capacity, its ceiling and knee, and what more buys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from kvtool.run import Row
from kvtool.view import Chart, Charts, Line
from kvtool.view.prefix_kinds import Series

MOST_POINTS, FEW_POINTS = 400, 3


def chart(groups: Sequence[Sequence[Series]]) -> Charts | None:
    """Each set of prompts by itself; None where no cache was tried at two capacities."""
    drawn = [
        series
        for group in groups
        if (
            series := [
                one for one in group if len({row["capacity_tokens"] for row in one.rows}) > 1
            ]
        )
    ]
    charts = [_rates(series) for series in drawn]
    if drawn and drawn[0][0].rows[0]["capacity_bytes"] is not None and len(drawn) == 1:
        charts.append(_bought(drawn[0]))
    return Charts(charts=tuple(charts)) if charts else None


def _rates(series: Sequence[Series]) -> Chart:
    """Hit rate over capacity; dots alone where not every request fits."""
    name, label = _capacity(series[0])
    lines: list[Line] = []
    for one in series:
        lines.append(_line(one.name, [row for row in _thinned(one) if not row["rejected"]], name))
        if outside := [row for row in one.replayed if row["rejected"]]:
            lines.append(replace(_line(f"{one.name}, some rejected", outside, name), joined=False))
    knee = next((one.knee for one in series if one.knee is not None), None)
    if knee is not None:
        lines.append(replace(_line("knee", [knee], name), joined=False))
    levels: dict[str, float] = {}
    for one in series:
        if one.ceiling is not None:
            share = 100 * one.ceiling / max(1, one.rows[-1]["queried_tokens"])
            levels[f"ceiling {share:.1f}"] = share
    model = one.rows[0]["model"]
    title = f"Prefix cache hit rate: {one.prompts}{f', {model}' if model else ''}"
    return Chart(
        title=title, x_label=label, y_label="hit rate (%)",
        lines=tuple(line for line in lines if line.x), levels=tuple(levels.items()), log_x=True,
    )  # fmt: skip


def _bought(series: Sequence[Series]) -> Chart:
    return Chart(
        title="What a GiB more buys",
        x_label=_capacity(series[0])[1],
        y_label="points of hit rate a GiB more",
        lines=tuple(line for one in series if (line := _gains(one)).x),
        log_x=True,
        log_y=True,
    )


def _capacity(one: Series) -> tuple[str, str]:
    """The field on the x axis, and its label."""
    if one.rows[0]["capacity_bytes"] is not None:
        return "capacity_bytes", "memory for the cache (bytes)"
    return "capacity_tokens", "capacity (tokens)"


def _line(name: str, rows: Sequence[Row], field: str) -> Line:
    return Line(
        name=name,
        x=tuple(row[field] for row in rows),
        y=tuple(100 * row["hit_rate"] for row in rows),
    )


def _gains(one: Series) -> Line:
    """The slope between two points some way apart (steps are no slope), at the second."""
    rows = one.replayed if len(one.replayed) > FEW_POINTS else _thinned(one, 24)
    pairs = [
        (row["capacity_bytes"], row["hit_rate"] - before["hit_rate"],
         row["capacity_bytes"] - before["capacity_bytes"])
        for before, row in itertools.pairwise(rows)
    ]  # fmt: skip
    rising = [(at, 100 * more * 2**30 / wider) for at, more, wider in pairs if more > 0]
    return Line(name=one.name, x=tuple(at for at, _ in rising), y=tuple(y for _, y in rising))


def _thinned(one: Series, most: int = MOST_POINTS) -> list[Row]:
    """So many rows at most, the first and the last among them."""
    last = len(one.rows) - 1
    if last < most:
        return list(one.rows)
    return [one.rows[round(place * last / (most - 1))] for place in range(most)]

"""The picture of `kvtool prefix`: hit rate over capacity, its ceiling and knee, and what more buys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvtool.run import Row
from kvtool.view import Chart, Charts, Line
from kvtool.view.prefix_kinds import Series

MOST_POINTS, FEW_POINTS = 400, 24


def chart(many: Sequence[Series]) -> Charts | None:
    """None where no cache was tried at two capacities."""
    drawn = [one for one in many if len(one.rows) > 1]
    if not drawn:
        return None
    by_bytes = drawn[0].rows[0]["capacity_bytes"] is not None
    name, label = (
        ("capacity_bytes", "memory for the cache (bytes)")
        if by_bytes
        else ("capacity_tokens", "capacity (tokens)")
    )
    several = len({one.prompts for one in drawn}) > 1
    levels: dict[str, float] = {}
    for one in drawn:
        queried = one.rows[-1]["queried_tokens"]
        key = f"ceiling, {one.prompts}" if several else "ceiling"
        levels[key] = max(levels.get(key, 0.0), 100 * one.ceiling / queried if queried else 0.0)
    lines = [_line(one, name, several) for one in drawn]
    knees = [
        Line(
            name=f"knee, {line.name}",
            x=(one.knee[name],),
            y=(100 * one.knee["hit_rate"],),
            joined=False,
        )
        for one, line in zip(drawn, lines, strict=True)
        if one.knee is not None and one.knee is not one.rows[0]
    ]
    title = "Prefix cache hit rate" if several else f"Prefix cache hit rate: {drawn[0].prompts}"
    rates = Chart(
        title=title,
        x_label=label,
        y_label="hit rate (% of prompt tokens)",
        lines=(*lines, *knees),
        levels=tuple(levels.items()),
        log_x=True,
    )
    if not by_bytes:
        return Charts(charts=(rates,))
    gains = Chart(
        title="What a GiB more buys",
        x_label=label,
        y_label="points of hit rate a GiB more",
        lines=tuple(_gains(one, line.name) for one, line in zip(drawn, lines, strict=True)),
        log_x=True,
        log_y=True,
    )
    return Charts(charts=(rates, gains))


def _line(one: Series, name: str, several: bool) -> Line:
    rows = _thinned(one)
    return Line(
        name=f"{one.prompts}: {one.name}" if several else one.name,
        x=tuple(row[name] for row in rows),
        y=tuple(100 * row["hit_rate"] for row in rows),
    )


def _gains(one: Series, label: str) -> Line:
    """The slope between two points some way apart (steps are no slope), at the second."""
    rows = one.replayed if len(one.replayed) > 3 else _thinned(one, FEW_POINTS)
    pairs = [
        (row["capacity_bytes"], row["hit_rate"] - before["hit_rate"],
         row["capacity_bytes"] - before["capacity_bytes"])
        for before, row in itertools.pairwise(rows)
    ]  # fmt: skip
    rising = [(at, 100 * more * 2**30 / wider) for at, more, wider in pairs if more > 0]
    return Line(name=label, x=tuple(at for at, _ in rising), y=tuple(y for _, y in rising))


def _thinned(one: Series, most: int = MOST_POINTS) -> list[Row]:
    """So many rows at most, the first and the last among them."""
    last = len(one.rows) - 1
    if last < most:
        return list(one.rows)
    return [one.rows[round(place * last / (most - 1))] for place in range(most)]

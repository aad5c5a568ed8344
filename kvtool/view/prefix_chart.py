"""The picture of `kvtool prefix`: hit rate over capacity, its ceiling and knee, and what more buys."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.view import Chart, Charts, Line
from kvtool.view.prefix_kinds import Series

MOST_POINTS = 400


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
    return Charts(
        charts=(
            Chart(
                title=title,
                x_label=label,
                y_label="hit rate (% of prompt tokens)",
                lines=(*lines, *knees),
                levels=tuple(levels.items()),
                log_x=True,
            ),
            Chart(
                title="What more of it buys",
                x_label=label,
                y_label=f"points of hit rate a {'GiB' if by_bytes else 'million tokens'} more",
                lines=tuple(_gains(one, name, line.name) for one, line in zip(drawn, lines, strict=True)),
                log_x=True,
            ),
        )
    )


def _line(one: Series, name: str, several: bool) -> Line:
    rows = _thinned(one)
    return Line(
        name=f"{one.prompts}: {one.name}" if several else one.name,
        x=tuple(row[name] for row in rows),
        y=tuple(100 * row["hit_rate"] for row in rows),
    )


def _gains(one: Series, name: str, label: str) -> Line:
    """The slope between two points, at the second, the points some way apart: steps are no slope."""
    rows = _thinned(one, 40)
    unit = 2**30 if name == "capacity_bytes" else 10**6
    pairs = list(zip(rows, rows[1:], strict=False))
    return Line(
        name=label,
        x=tuple(row[name] for _, row in pairs),
        y=tuple(
            100 * (row["hit_rate"] - before["hit_rate"]) * unit / (row[name] - before[name])
            for before, row in pairs
        ),
    )


def _thinned(one: Series, most: int = MOST_POINTS) -> list[dict[str, object]]:
    """So many rows at most, the first and the last among them."""
    last = len(one.rows) - 1
    if last < most:
        return list(one.rows)
    return [one.rows[round(place * last / (most - 1))] for place in range(most)]

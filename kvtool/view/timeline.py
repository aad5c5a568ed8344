"""A run of the scheduler over time, as a picture: batch, queue, the pool, preemptions."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.simulate import Timeline
from kvtool.view import Chart, Charts, Line

PANELS = (
    ("requests in a step", "batch", "requests"),
    ("requests that wait", "waiting", "requests"),
    ("the pool", "used_share", "blocks in use (%)"),
    ("preemptions so far", "preemptions", "preemptions"),
)


def timeline_chart(runs: Sequence[Timeline]) -> Charts:
    """A chart for each quantity, a line for each run."""
    return Charts(
        charts=tuple(
            Chart(
                title=title,
                x_label="seconds",
                y_label=label,
                lines=tuple(_line(run, name) for run in runs),
            )
            for title, name, label in PANELS
        )
    )


def _line(run: Timeline, name: str) -> Line:
    values: tuple[float, ...] = getattr(run, name)
    scale = 100.0 if name == "used_share" else 1.0
    return Line(name=run.name, x=run.end_s, y=tuple(scale * value for value in values))

"""A run of the scheduler over time, as a picture: batch, queue, the pool, preemptions."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from kvtool.run import Row
from kvtool.timeline import STRETCHES, Timeline
from kvtool.view import Chart, Charts, Line

LETTERS = 100
"""Across the picture."""
PANELS = (
    ("requests in a step", "batch", "requests"),
    ("requests that wait", "waiting", "requests"),
    ("the pool", "used_share", "blocks in use (%)"),
    ("preemptions so far", "preemptions", "preemptions"),
)


def timeline_chart(runs: Sequence[Timeline], rows: Sequence[Row]) -> Charts:
    """A chart for each quantity, a line for each run; preemptions where there are any."""
    ends = {run.last_arrival_s for run in runs if run.last_arrival_s}
    marks = tuple(("last arrival", end) for end in ends) if len(ends) == 1 else ()
    panels = PANELS if any(run.preemptions[-1:] > (0,) for run in runs) else PANELS[:-1]
    return Charts(
        title=_title(rows),
        charts=tuple(
            Chart(
                title=title,
                x_label="seconds",
                y_label=label,
                lines=tuple(_line(run, name) for run in runs),
                marks=marks,
            )
            for title, name, label in panels
        ),
    )


def _title(rows: Sequence[Row]) -> str:
    """What the rows share, what times rest on, and whether a queue has no end."""
    if not rows:
        return ""
    shared = {
        name: values.pop()
        for name in ("model", "gpu", "workload", "trace", "rate")
        if len(values := {row[name] for row in rows}) == 1
    }
    rate = shared.pop("rate", None)
    words = [str(value) for value in shared.values() if value is not None]
    if rate is not None:
        words.append(f"{rate} requests/s" if rate.replace(".", "").isdigit() else rate)
    which = dict.fromkeys(row["scheduler"] for row in rows if row["queue_grows"])
    grows = [f"the queue of {' and '.join(which)} grows without bound"] if which else []
    basis = {row["step_time_basis"] for row in rows}
    about = [f"step times: {basis.pop()}"] if len(basis) == 1 else []
    means = f"means over {STRETCHES} stretches of time"
    lines = ", ".join([*words, *grows]), *about, means
    return "\n".join(part for line in lines for part in wrap(line, LETTERS))


def _line(run: Timeline, name: str) -> Line:
    values: tuple[float, ...] = getattr(run, name)
    scale = 100.0 if name == "used_share" else 1.0
    return Line(name=run.name, x=run.end_s, y=tuple(scale * value for value in values))

"""A run of the scheduler over time: means that count how long steps took, and points for a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.requests import SECOND_NS

if TYPE_CHECKING:
    from kvtool.run import Row
    from kvtool.sim.replay import Replay
    from kvtool.sim.settings import Settings

STRETCHES = 300
OVER_TIME = (
    "used_share", "peak_used_blocks", "mean_waiting", "peak_waiting", "waiting_share", "unsorted_steps",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Means over equal stretches of time, whose ends are `end_s`."""

    name: str
    end_s: tuple[float, ...]
    batch: tuple[float, ...]
    waiting: tuple[float, ...]
    used_share: tuple[float, ...]
    """Of the pool's blocks."""
    preemptions: tuple[float, ...]
    """So far."""
    last_arrival_s: float = 0.0


def over_time(found: Replay, settings: Settings) -> Row:
    """Means over time, idle time too: of steps alone a mean counts short ones as much as long ones."""
    import numpy as np

    from kvtool.sim.blocks.numbers import MOST_SORTED
    from kvtool.sim.settings import LPM

    steps = found.steps
    if not len(steps["end_ns"]):
        return dict.fromkeys(OVER_TIME)
    lasts = steps["end_ns"] - steps["begin_ns"]
    span = float(steps["end_ns"][-1] - steps["begin_ns"][0]) or 1.0
    used, waiting = steps["used_blocks"], steps["waiting"]
    return {
        "used_share": float(np.dot(used, lasts / span)) / settings.num_blocks,
        "peak_used_blocks": int(used.max()),
        "mean_waiting": float(np.dot(waiting, lasts / span)),
        "peak_waiting": int(waiting.max()),
        "waiting_share": float(np.dot(waiting > 0, lasts / span)),
        "unsorted_steps": int((waiting > MOST_SORTED).sum()) if settings.policy == LPM else None,
    }


def timeline_of(name: str, found: Replay, settings: Settings) -> Timeline:
    """A run over time for a picture: means over equal stretches, weighted by how long steps took."""
    import numpy as np

    ends = found.steps["end_ns"].astype(np.float64) / SECOND_NS
    if not len(ends):
        return Timeline(name=name, end_s=(), batch=(), waiting=(), used_share=(), preemptions=())
    begins = found.steps["begin_ns"] / SECOND_NS
    edges = np.linspace(begins[0], ends[-1], min(STRETCHES, len(ends)) + 1)
    times = np.stack([begins, ends], axis=1).ravel()

    def mean(values: Any) -> tuple[float, ...]:
        """The integral up to each edge, as differences over their distance; between steps all is 0."""
        after = np.cumsum(values * (ends - begins))
        areas = np.stack([np.concatenate([[0.0], after[:-1]]), after], axis=1).ravel()
        at_edges = np.interp(edges, times, areas)
        return tuple((np.diff(at_edges) / np.diff(edges)).tolist())

    done = np.searchsorted(ends, edges[1:])
    preemptions = found.steps["preemptions"][np.minimum(done, len(ends) - 1)]
    return Timeline(
        name=name,
        end_s=tuple(edges[1:].tolist()),
        batch=mean(found.steps["batch"]),
        waiting=mean(found.steps["waiting"]),
        used_share=mean(found.steps["used_blocks"] / settings.num_blocks),
        preemptions=tuple(preemptions.tolist()),
        last_arrival_s=float(found.arrival_ns.max()) / SECOND_NS,
    )

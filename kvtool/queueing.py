"""Whether a queue has an end: how long it is while requests arrive, and what is served at most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtool.requests import SECOND_NS

if TYPE_CHECKING:
    from kvtool.requests import Column
    from kvtool.run import Row

GROWS, FEW_WAIT = 0.1, 10
"""Of who arrives in the second half, the share that the queue grows by; fewer than so many are no queue."""
SURE = 2
"""Standard deviations of as many Poisson arrivals: a queue that grows by less may only fluctuate."""
BEYOND = 1.01
"""Arrivals over what is served at most, from which on the queue has no end: the latter is measured."""
FIRST, LAST, COHORTS = 0.1, 0.8, 5
"""Shares of who ends, between which ends are counted; so many times as many as run at once are needed."""
NO_GROWTH = {
    "arrivals_per_s": None, "queue_mid": None, "queue_later": None, "queue_end": None,
    "queue_grows": False, "capacity_requests_per_s": None,
}  # fmt: skip
"""Where requests do not come one after the other."""


def looks(count: int) -> tuple[int, int, int]:
    """At which of so many arrivals the queue is looked at."""
    return count // 2, count * 3 // 4, count - 1


def queue_row(arrivals: Column, lengths: Sequence[int], most: int | None = None) -> Row:
    """Whether a queue has no end that is so long at the three `looks` at these arrivals; `most` requests
    ran at once, if that is known.

    It has none if in both of the last quarters it grew, and from the first look to the last by more than
    arrivals fluctuate, and by GROWS of who came in between, or by half to more than ever ran at once. A
    burst grows it in one of them alone.
    """
    mid, later, last = lengths
    came = max(1, len(arrivals) - len(arrivals) // 2)
    span_s = int(arrivals[-1] - arrivals[0]) / SECOND_NS
    fast = (last - mid) / came > GROWS
    slow = most is not None and last > mid * 3 / 2 and last > most
    sure = last - mid > SURE * math.sqrt(came)
    return {
        "arrivals_per_s": (len(arrivals) - 1) / span_s,
        "queue_mid": mid,
        "queue_later": later,
        "queue_end": last,
        "queue_grows": bool((fast or slow) and sure and mid < later < last and last > FEW_WAIT),
        "capacity_requests_per_s": None,
    }


def is_doubtful(row: Row) -> bool:
    """Whether a queue may have no end, though its growth may not show it: it is longer than it was."""
    if row["arrivals_per_s"] is None:
        return False
    return bool(row["queue_end"] > FEW_WAIT and row["queue_end"] > row["queue_mid"])


def beyond_capacity(row: Row, capacity: float | None) -> Row:
    """The row with what is served at most, and what follows from it; None: that is not known."""
    grows = capacity is not None and row["arrivals_per_s"] > BEYOND * capacity
    return {
        "capacity_requests_per_s": capacity,
        "queue_grows": bool(row["queue_grows"] or grows),
    }


def capacity_of(finish_ns: Any, most: int) -> float | None:
    """Requests a second that end while all wait: between a first cohort and the time when the queue is empty.

    `finish_ns` of those that ended, in a run in which all waited from the start; `most` ran at once. None if
    they are too few to tell.
    """
    import numpy as np

    ends = np.sort(finish_ns)
    count = len(ends)
    if count < COHORTS * max(most, 1):
        return None
    first, last = int(count * FIRST), int(count * LAST)
    lasts = int(ends[last] - ends[first])
    return (last - first) * SECOND_NS / lasts if lasts > 0 else None

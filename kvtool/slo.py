"""Service level objectives: which requests meet them, and the highest rate at which enough do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtool.errors import usage_error
from kvtool.requests import SECOND_NS

if TYPE_CHECKING:
    from kvtool.sim.replay import Replay

NAMES = ("ttft", "tpot", "e2e")
"""Each once a request: to the first token, (end − first token) / (output − 1), to the end."""
USUAL_SHARE = 0.99
MOST_TRIES, CLOSE = 40, 1.01
"""Rates that are tried at most, and how near the highest that keeps it and the lowest that does not are."""
LEAST_RATE, MOST_RATE = 1e-6, 1e9
"""Requests a second that --rate takes (kvtool.traffic)."""
_WORD = re.compile(r"(ttft|tpot|e2e)=([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|us|)")
_UNIT = {"s": SECOND_NS, "ms": SECOND_NS // 1000, "us": 1000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits in nanoseconds, and the share of requests that has to meet all of them."""

    limits: Mapping[str, int] = field(default_factory=dict)
    share: float = USUAL_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of a rate: whether it keeps the objective, the share of requests that met it, and
    whether the queue grew without end, which keeps none."""

    keeps: bool
    share: float
    grows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Highest:
    """The highest rate that keeps an objective, and the lowest that was tried and does not."""

    rate: float
    share: float
    refused_rate: float | None
    refused_share: float | None
    refused_grows: bool | None


def parse_slo(text: str, share: float | None = None) -> Slo:
    """`ttft=1s,tpot=50ms`."""
    limits: dict[str, int] = {}
    for word in text.split(","):
        match = _WORD.fullmatch(word.strip().lower())
        if match is None or not float(match[2]):
            raise usage_error(
                f"--slo: '{word.strip()[:40]}' is no objective",
                "write times of ttft, tpot and e2e: --slo ttft=1s,tpot=50ms",
            )
        if not match[3]:
            raise usage_error(
                f"--slo: '{match[0]}' has no unit",
                f"write s, ms or us: --slo {match[0]}s, or {match[0]}ms",
            )
        if match[1] in limits:
            raise usage_error(f"--slo: {match[1]} is given twice", "leave out one of the two")
        limits[match[1]] = round(float(match[2]) * _UNIT[match[3]])
        if not limits[match[1]]:
            raise usage_error(f"--slo: {match[0]} is less than a nanosecond", "give it more time")
    share = USUAL_SHARE if share is None else share
    if not 0 < share <= 1:
        raise usage_error(
            f"--slo-share: {share} is out of range",
            "give a share above 0 and up to 1, such as 0.99",
        )
    return Slo(limits=limits, share=share)


def met(slo: Slo, found: Replay) -> Any:
    """Which requests ended within every limit, with all their tokens or all that max_model_len allows."""
    good = _ended(found)
    for one in met_each(slo, found).values():
        good = good & one
    return good


def met_each(slo: Slo, found: Replay) -> dict[str, Any]:
    """The same for each limit alone."""
    import numpy as np

    outcomes, ended = found.outcomes, _ended(found)
    decoded = np.maximum(1, outcomes["generated"] - 1)
    times = {
        "ttft": outcomes["first_token_ns"] - found.arrival_ns,
        "tpot": (outcomes["finish_ns"] - outcomes["first_token_ns"]) / decoded,
        "e2e": outcomes["finish_ns"] - found.arrival_ns,
    }
    return {name: ended & (times[name] <= limit) for name, limit in slo.limits.items()}


def _ended(found: Replay) -> Any:
    from kvtool.sim.settings import CUT, DONE

    status = found.outcomes["status"]
    return (status == DONE) | (status == CUT)


def highest_rate(
    tried: Callable[[float], Trial], first: float, *, step: float = 2.0
) -> Highest | None:
    """The highest rate that keeps an objective, within CLOSE, of rates with four digits.

    From the first one up or down, by a step that is squared each time, then between the two by their
    mean. None if not even a thousandth of the first keeps it; nothing is refused if MOST_RATE keeps it.
    """
    low, high = 0.0, math.inf
    kept = refused = Trial(keeps=False, share=0.0)
    rate = first
    for _ in range(MOST_TRIES):
        rate = float(f"{min(max(rate, LEAST_RATE), MOST_RATE):.4g}")
        if (found := tried(rate)).keeps:
            low, kept = rate, found
        else:
            high, refused = rate, found
        if low >= MOST_RATE or (low and high / low <= CLOSE):
            break
        if not low and (rate < first / 1000 or rate <= LEAST_RATE):
            return None
        if low and high < math.inf:
            rate = math.sqrt(low * high)
        else:
            rate, step = (rate * step if low else rate / step), min(step * step, 1e3)
    if not low:
        return None
    known = high < math.inf
    return Highest(
        rate=low,
        share=kept.share,
        refused_rate=high if known else None,
        refused_share=refused.share if known else None,
        refused_grows=refused.grows if known else None,
    )

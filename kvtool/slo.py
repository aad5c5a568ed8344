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
_WORD = re.compile(r"(ttft|tpot|e2e)=([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|us)")
_UNIT = {"s": SECOND_NS, "ms": SECOND_NS // 1000, "us": 1000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits in nanoseconds, and the share of requests that has to meet all of them."""

    limits: Mapping[str, int] = field(default_factory=dict)
    share: float = USUAL_SHARE


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
        limits[match[1]] = round(float(match[2]) * _UNIT[match[3]])
    share = USUAL_SHARE if share is None else share
    if not 0 < share <= 1:
        raise usage_error(
            f"--slo-share: {share} is out of range",
            "give a share above 0 and up to 1, such as 0.99",
        )
    return Slo(limits=limits, share=share)


def met(slo: Slo, found: Replay) -> Any:
    """Which requests got all their tokens within every limit; who got none has not."""
    import numpy as np

    from kvtool.sim.settings import CUT, DONE

    outcomes = found.outcomes
    status, generated = outcomes["status"], outcomes["generated"]
    times = {
        "ttft": outcomes["first_token_ns"] - found.arrival_ns,
        "tpot": (outcomes["finish_ns"] - outcomes["first_token_ns"]) / np.maximum(1, generated - 1),
        "e2e": outcomes["finish_ns"] - found.arrival_ns,
    }
    good = (status == DONE) | (status == CUT)
    for name, limit in slo.limits.items():
        good &= times[name] <= limit
    return good


def highest_rate(keeps: Callable[[float], bool], first: float) -> float | None:
    """The highest rate that keeps an objective, within CLOSE; None if not even a thousandth of the first
    does. From the first rate up by doubling or down by halving, then between the two by their mean."""
    low, high = 0.0, math.inf
    rate = first
    for _ in range(MOST_TRIES):
        if keeps(rate):
            low = rate
        else:
            high = rate
        if low and high / low <= CLOSE:
            break
        if not low and rate < first / 1000:
            return None
        if math.isinf(high):
            rate = 2 * low
        elif not low:
            rate = high / 2
        else:
            rate = math.sqrt(low * high)
    return low or None

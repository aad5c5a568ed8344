"""How much faster one thing is than another, from a few rounds in each of which both were timed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtool.stats import median, paired_ratio

STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantiles of Student's t for so many rounds less one (The Probable Error of a Mean, 1908)."""

Interval = list[float]
"""[low, high], 95 %."""


def gain(baseline_s: Sequence[float], ours_s: Sequence[float]) -> tuple[float, Interval | None]:
    """The median of baseline/ours, round by round, and its 95 % interval.

    Steps of one round share what the machine did meanwhile, so a round counts once, however many
    steps it has. Fewer than 6 rounds hold no 95 % interval of resampled medians: there the ratios'
    logarithms are taken as normal. None with fewer than 3.
    """
    pairs = list(zip(baseline_s, ours_s, strict=False))
    ratio = paired_ratio([one for one, _ in pairs], [one for _, one in pairs])
    if len(pairs) < min(STUDENT):
        return ratio.median, None
    if len(pairs) > max(STUDENT):
        return ratio.median, [ratio.low, ratio.high]
    logs = [math.log(theirs / ours) for theirs, ours in pairs]
    mean = sum(logs) / len(logs)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in logs) / (len(logs) - 1))
    reach = STUDENT[len(pairs)] * deviation / math.sqrt(len(logs))
    return median([math.exp(one) for one in logs]), [math.exp(mean - reach), math.exp(mean + reach)]

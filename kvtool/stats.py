"""Statistics of repeated measurements: quantiles, and the ratio of two things measured in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Samples = Sequence[float] | NDArray[np.float64]

RESAMPLES = 2_000
CONFIDENCE = 0.95


class Ratio(NamedTuple):
    """The median of paired ratios and the interval that the bootstrap gives it."""

    median: float
    low: float
    high: float

    def spans(self, value: float) -> bool:
        """Whether the interval holds the value, so that the difference from it is not resolved."""
        return self.low <= value <= self.high


def quantile(samples: Samples, share: float) -> float:
    """The value below which that share of the samples lies, between neighbours by a line."""
    return float(np.quantile(np.asarray(samples, dtype=np.float64), share))


def median(samples: Samples) -> float:
    """The middle of the samples."""
    return quantile(samples, 0.5)


def paired_ratio(ours: Samples, theirs: Samples, *, seed: int = 0) -> Ratio:
    """The median of ours/theirs, sample by sample, with its 95 % interval.

    Pairs are measured side by side, so that a clock that drifts moves both. The interval is the
    percentile bootstrap (Efron and Tibshirani 1993, chapter 13): the pairs are drawn again with
    replacement, RESAMPLES times, and the interval holds the middle 95 % of the medians.
    Raises ValueError if the samples are no pairs.
    """
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(f"{len(ours)} and {len(theirs)} samples are no pairs")
    ratios = np.asarray(ours, dtype=np.float64) / np.asarray(theirs, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    medians = np.median(ratios[drawn], axis=1)
    tail = (1 - CONFIDENCE) / 2
    return Ratio(median(ratios), quantile(medians, tail), quantile(medians, 1 - tail))

"""Quantiles, and the ratio of what was measured in pairs."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool.stats import median, paired_ratio, quantile


def test_quantiles_lie_between_neighbours() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert quantile([0.0, 10.0], 0.1) == pytest.approx(1.0)


def test_a_drift_that_both_share_does_not_reach_the_ratio() -> None:
    drift = np.linspace(1, 3, 30)
    found = paired_ratio(list(1.1 * drift), list(drift))
    assert found == pytest.approx((1.1, 1.1, 1.1))
    assert not found.spans(1)


def test_a_difference_below_the_noise_is_not_resolved() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = 1 + 0.2 * rng.random(40), 1 + 0.2 * rng.random(40)
    assert paired_ratio(list(ours), list(theirs)).spans(1)


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        ours = 1.05 * np.exp(0.1 * rng.standard_normal(30))
        hits += paired_ratio(list(ours), [1.0] * 30, seed=seed).spans(1.05)
    assert 180 <= hits <= 199


def test_the_same_seed_gives_the_same_interval() -> None:
    samples = list(np.random.default_rng(2).random(20) + 1)
    assert paired_ratio(samples, [1.0] * 20, seed=3) == paired_ratio(samples, [1.0] * 20, seed=3)


def test_samples_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no pairs"):
        paired_ratio([], [])

"""Objectives: which requests meet them, and the highest rate that keeps one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.errors import KvtoolError
from kvtool.sim.settings import ABORTED, CUT, DONE, UNFINISHED
from kvtool.slo import CLOSE, LEAST_RATE, MOST_RATE, Slo, Trial, highest_rate, met, parse_slo
from kvtool.traffic import rate_of


def test_words_are_limits() -> None:
    slo = parse_slo("ttft=1s, TPOT=50ms,e2e=2.5s")
    assert slo == Slo(limits={"ttft": 10**9, "tpot": 50 * 10**6, "e2e": 2_500_000_000}, share=0.99)
    assert parse_slo("ttft=1s", 0.9).share == 0.9


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=0s", "ttft=0", "itl=1s", "ttft=-1s", "ttft=1h"]
)
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(KvtoolError, match="is no objective"):
        parse_slo(text)


def test_a_number_without_a_unit_is_told_so() -> None:
    with pytest.raises(KvtoolError, match="'ttft=1' has no unit") as told:
        parse_slo("ttft=1")
    assert told.value.hint == "write s, ms or us: --slo ttft=1s, or ttft=1ms"


def test_a_time_that_is_given_twice_is_refused() -> None:
    with pytest.raises(KvtoolError, match="ttft is given twice"):
        parse_slo("ttft=1ms,ttft=9s")


@pytest.mark.parametrize("share", [0.0, 1.5, math.nan])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(KvtoolError, match="out of range"):
        parse_slo("ttft=1s", share)


def test_who_meets_it() -> None:
    ms = 10**6
    found: Any = SimpleNamespace(
        arrival_ns=np.array([0, 0, 0, 0, 0, 0]) * ms,
        outcomes={
            "first_token_ns": np.array([100, 200, 100, 100, 100, -1]) * ms,
            "finish_ns": np.array([1000, 1000, 2000, 1000, 100, -1]) * ms,
            "generated": np.array([10, 10, 10, 10, 1, 0]),
            "status": np.array([DONE, DONE, CUT, ABORTED, DONE, UNFINISHED]),
        },
    )  # fmt: skip
    assert met(parse_slo("ttft=150ms"), found).tolist() == [True, False, True, False, True, False]
    assert met(parse_slo("tpot=100ms"), found).tolist() == [True, True, False, False, True, False]
    assert met(parse_slo("e2e=1s,tpot=1s"), found).tolist() == [
        True,
        True,
        False,
        False,
        True,
        False,
    ]
    assert met(Slo(), found).tolist() == [True, True, True, False, True, False]


@given(st.floats(0.01, 1e6), st.floats(0.01, 1e4), st.sampled_from([1.05, 2.0]))
def test_the_highest_rate_is_between_what_keeps_and_what_does_not(
    limit: float, first: float, step: float
) -> None:
    tried: list[float] = []

    def trial(rate: float) -> Trial:
        tried.append(rate)
        return Trial(keeps=rate <= limit, share=0.995 if rate <= limit else 0.5)

    found = highest_rate(trial, first, step=step)
    if found is None:
        assert limit < first / 500
        return
    assert found.refused_rate is not None
    assert found.rate <= limit < found.refused_rate <= found.rate * CLOSE
    assert {found.rate, found.refused_rate} <= set(tried)
    assert all(rate == float(f"{rate:.4g}") for rate in tried)
    assert (found.share, found.refused_share) == (0.995, 0.5)


def test_a_rate_that_no_bound_refuses_is_said_to_have_none() -> None:
    tried: list[float] = []

    def trial(rate: float) -> Trial:
        tried.append(rate)
        return Trial(keeps=True, share=1.0)

    found = highest_rate(trial, 3.0)
    assert found is not None
    assert (found.rate, found.refused_rate, found.refused_share) == (MOST_RATE, None, None)
    assert max(tried) == MOST_RATE == 1e9


def test_no_rate_is_tried_that_rate_does_not_take() -> None:
    tried: list[float] = []

    def trial(rate: float) -> Trial:
        tried.append(rate)
        return Trial(keeps=False, share=0.0)

    assert highest_rate(trial, 1e-5) is None
    assert min(tried) == LEAST_RATE
    assert (rate_of(str(LEAST_RATE)), rate_of(str(MOST_RATE))) == (1e-6, 1e9)
    for beyond in (LEAST_RATE / 2, MOST_RATE * 2):
        with pytest.raises(KvtoolError, match="is no rate"):
            rate_of(str(beyond))

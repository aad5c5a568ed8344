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
from kvtool.slo import CLOSE, Slo, highest_rate, met, parse_slo


def test_words_are_limits() -> None:
    slo = parse_slo("ttft=1s, TPOT=50ms,e2e=2.5s")
    assert slo == Slo(limits={"ttft": 10**9, "tpot": 50 * 10**6, "e2e": 2_500_000_000}, share=0.99)
    assert parse_slo("ttft=1s", 0.9).share == 0.9


@pytest.mark.parametrize("text", ["", "ttft", "ttft=1", "ttft=0s", "itl=1s", "ttft=-1s", "ttft=1h"])
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(KvtoolError, match="is no objective"):
        parse_slo(text)


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


@given(st.floats(0.01, 1e6), st.floats(0.01, 1e4))
def test_the_highest_rate_is_between_what_keeps_and_what_does_not(
    limit: float, first: float
) -> None:
    tried: list[float] = []

    def keeps(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = highest_rate(keeps, first)
    if found is None:
        assert limit < first / 500
        return
    assert found <= limit
    if len(tried) < 40:
        assert limit <= found * CLOSE

"""Paired sampling: every call in every round, all pools in turn, the budget kept."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from bench_cases import CPU

from kvtool.bench import timer
from kvtool.bench.timer import FEWEST, measure

pytest.importorskip("torch")


def test_every_call_has_a_sample_in_every_round_and_reads_every_pool() -> None:
    seen: dict[str, Counter[int]] = {"a": Counter(), "b": Counter()}

    def call(name: str) -> Any:
        def run(pool: int) -> None:
            seen[name][pool] += 1
            time.sleep(0.0005)

        return run

    samples, eager = measure(
        {name: call(name) for name in seen}, pools=3, device=CPU, rounds=8, budget_s=60, seed=0
    )
    assert eager == ()
    for name in seen:
        assert len(samples[name].wall_s) == len(samples[name].cpu_s) == 8
        assert min(samples[name].wall_s) >= 0.0005
        assert set(seen[name]) == {0, 1, 2}
        assert max(seen[name].values()) - min(seen[name].values()) <= 1


def test_a_sample_is_of_many_calls_where_one_is_short() -> None:
    calls = 0

    def run(pool: int) -> None:
        nonlocal calls
        calls += 1

    measure({"short": run}, pools=1, device=CPU, rounds=FEWEST, budget_s=60, seed=0)
    assert calls > 100 * FEWEST


def test_the_budget_ends_the_rounds_but_never_before_the_fewest() -> None:
    samples, _ = measure(
        {"slow": lambda pool: time.sleep(0.01)},
        pools=1,
        device=CPU,
        rounds=50,
        budget_s=0.0,
        seed=0,
    )
    assert len(samples["slow"].wall_s) == FEWEST


def test_waiting_is_no_work_of_the_processor() -> None:
    samples, _ = measure(
        {"sleeps": lambda pool: time.sleep(0.02)},
        pools=1,
        device=CPU,
        rounds=FEWEST,
        budget_s=5,
        seed=0,
    )
    assert max(samples["sleeps"].cpu_s) < 0.01 < min(samples["sleeps"].wall_s)


def test_the_order_within_a_round_changes() -> None:
    order: list[str] = []
    calls = {
        name: lambda pool, name=name: order.append(name) or time.sleep(0.003) for name in "abc"
    }
    measure(calls, pools=1, device=CPU, rounds=20, budget_s=60, seed=0)
    rounds = ["".join(order[-60:][k : k + 3]) for k in range(0, 60, 3)]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert len(set(rounds)) > 1


def test_pools_are_taken_in_turn() -> None:
    turns = timer._turns(3)
    assert [next(turns) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]

"""Rounds over the caches of a shape: their order, what is made of them, what an end leaves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_cases import LLAMA, case_of, decoder_of, tiny

from kvtool.bench.decode import growth as growth_of
from kvtool.bench.decode import uniform
from kvtool.bench.decode.gain import gain
from kvtool.bench.decode.growth import growth
from kvtool.bench.decode.kernels import Kernels, kernels_for
from kvtool.bench.decode.row import p99
from kvtool.bench.decode.sessions import Setting
from kvtool.bench.decode.settings import (
    CPU_CONTEXTS,
    GPU_CONTEXTS,
    DecodeRun,
    ModelChoice,
    Roofs,
)
from kvtool.bench.decode.uniform import uniform_rows, uniform_steps

FP32 = ModelChoice()


def test_a_gain_by_hand() -> None:
    """Three ratios of 2, 2.2 and 1.8: Student's 4.303 standard errors of their logarithms."""
    measured, interval = gain([2.0, 4.4, 1.8], [1.0, 2.0, 1.0])
    assert measured == pytest.approx(2.0)
    logs = [math.log(one) for one in (2.0, 2.2, 1.8)]
    mean = sum(logs) / 3
    error = math.sqrt(sum((one - mean) ** 2 for one in logs) / 2 / 3)
    assert interval == pytest.approx([math.exp(mean + t * error) for t in (-4.303, 4.303)])


def test_a_gain_needs_rounds_and_ignores_what_drifts() -> None:
    assert gain([2.0], [1.0]) == (2.0, None)
    assert gain([2.0, 3.0], [1.0, 1.0]) == (2.5, None)
    slower = [1.0, 2.0, 4.0]  # each round twice as slow as the one before
    measured, interval = gain([1.1 * one for one in slower], slower)
    assert measured == pytest.approx(1.1)
    assert interval == pytest.approx([1.1, 1.1])
    assert gain([2.0, 2.0, 2.0], [1.0, 1.0]) == (2.0, None)  # a round that was not finished
    many = [1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 1.0, 1.0]
    measured, interval = gain(many, [1.0] * 8)
    assert interval is not None
    assert min(many) < interval[0] < measured == 1.0 < interval[1] < max(many)


def test_one_in_a_hundred_is_not_told_of_two() -> None:
    assert p99([1.0, 2.0]) is None
    assert p99([1.0, 2.0, 3.0]) == pytest.approx(2.98)


def run_of(*caches: str, **given: Any) -> DecodeRun:
    given = {"repeats": 3, "exponent_contexts": ()} | given
    return DecodeRun(cases=tuple(case_of(one) for one in caches), **given)


def test_caches_take_turns() -> None:
    told: list[str] = []
    run = run_of("paged", "dynamic", "static")
    rows = list(uniform_rows(tiny(LLAMA), FP32, run, Roofs(), advance=told.append))
    assert len(told) == uniform_steps(tiny(LLAMA), FP32, run) == 1 + 9
    assert [one.split(",")[0] for one in told[1:]] == ["dynamic", "paged", "static"] * 3
    for row in rows:
        assert row["repeats"] == 3
        assert row["tpot_s_p50"] <= row["tpot_s_p99"]
        assert row["baseline"] == "dynamic"
        low, high = row["measured_gain_ci"]
        assert low <= row["measured_gain"] <= high
    assert rows[0]["measured_gain_ci"] == [1, 1]


@pytest.mark.parametrize("repeats", [1, 2])
def test_few_rounds_have_no_interval(repeats: int) -> None:
    rows = list(
        uniform_rows(tiny(LLAMA), FP32, run_of("dynamic", "paged", repeats=repeats), Roofs())
    )
    for row in rows:
        assert row["tpot_s_p99"] is row["measured_gain_ci"] is None
        assert row["measured_gain"] > 0
        assert row["itl_s_p99"] > 0


def test_without_a_baseline_nothing_is_a_gain() -> None:
    (row,) = uniform_rows(tiny(LLAMA), FP32, run_of("paged"), Roofs())
    names = ("baseline", "measured_gain", "measured_gain_ci", "predicted_gain")
    assert [row[name] for name in names] == [None] * 4
    assert row["same_tokens"] is True


def stopping_at(call: int, kind: type[BaseException]) -> Any:
    """Kernels whose paged decode ends at a call."""

    def make(device: str, threads: int) -> Kernels:
        right, calls = kernels_for(device, threads), []

        def paged(*given: Any) -> torch.Tensor:
            calls.append(1)
            if len(calls) == call:
                raise kind
            return right.paged(*given)

        return replace(right, paged=paged)

    return make


def test_ctrl_c_in_the_second_round_keeps_the_first() -> None:
    """Two layers and eleven steps a run, two steps before the first: the 30th call is in the second."""
    make = stopping_at(30, KeyboardInterrupt)
    rows, told = [], []
    run = run_of("dynamic", "paged", "static", exponent_contexts=(16, 32, 64))
    found = uniform_rows(tiny(LLAMA), FP32, run, Roofs(), advance=told.append, make_kernels=make)
    with pytest.raises(KeyboardInterrupt):
        rows.extend(found)
    assert {row["cache"]: row["repeats"] for row in rows} == {
        "dynamic": 2,
        "paged": 1,
        "static": 1,
    }
    assert all(row["same_tokens"] for row in rows)
    assert all(row["time_exponent"] is None for row in rows)


def test_contexts_that_do_not_fit_into_memory_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = Setting(decoder=decoder_of(LLAMA), kernels=kernels_for("cpu"))
    contexts = (16, 32, 64, 128)
    found = growth(setting, case_of("paged"), contexts)
    assert found["exponent_contexts"] == list(contexts)
    needed = sum(
        growth_of.case_bytes(setting.decoder.plan, growth_of._at(case_of("paged"), 64), 4).values()
    )
    monkeypatch.setattr(growth_of, "available_bytes", lambda device: needed)
    assert growth(setting, case_of("paged"), contexts)["exponent_contexts"] == [16, 32, 64]
    monkeypatch.setattr(growth_of, "available_bytes", lambda device: needed - 1)
    assert growth(setting, case_of("paged"), contexts) == {}


def test_the_end_of_the_growth_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 1 s and 1 ms a token: the fit is low, its end is steeper."""
    setting = Setting(decoder=decoder_of(LLAMA), kernels=kernels_for("cpu"))
    monkeypatch.setattr(
        growth_of, "_step_s", lambda setting, case, seed: 1 + (case.prompt_tokens + 1) / 1000
    )
    found = growth(setting, case_of("none"), (64, 128, 256, 511))
    end = math.log((1 + 0.511) / (1 + 0.256)) / math.log(511 / 256)
    assert found["time_exponent_end"] == pytest.approx(end)
    assert found["time_exponent"] < 0.8 * end


def test_a_gpu_is_timed_where_launches_no_longer_count() -> None:
    assert min(GPU_CONTEXTS) >= max(CPU_CONTEXTS) == 1024
    assert DecodeRun(cases=()).exponent_contexts == CPU_CONTEXTS


def test_one_wrong_run_of_three_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = uniform.timed, []

    def timed(setting: Any, case: Any, ids: Any) -> Any:
        run = right(setting, case, ids)
        calls.append(case.cache)
        if calls.count("paged") == 2 and case.cache == "paged":
            tokens = run.tokens.clone()
            tokens[1, 5] = (tokens[1, 5] + 1) % 128
            run = replace(run, tokens=tokens)
        return run

    monkeypatch.setattr(uniform, "timed", timed)
    rows = list(uniform_rows(tiny(LLAMA), FP32, run_of("dynamic", "paged"), Roofs()))
    assert [row["same_tokens"] for row in rows] == [True, False]

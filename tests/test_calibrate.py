"""A step's time fitted to measured rows: the law they were made from, whose it is, how far off it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.calibrate import Fit, _fitted, _points, calibrated, differs
from kvtool.config import load_config
from kvtool.errors import KvtoolError
from kvtool.model_pool import gpus_of
from kvtool.sim.settings import StepTime
from kvtool.step_law import StepLaw

NS = 10**9


def saved(place: Path, rows: list[dict[str, Any]], **env: str) -> str:
    place.write_text(json.dumps({"schema": 1, "command": "bench decode", "env": env, "rows": rows}))
    return str(place)


def measured(
    base: float,
    token: float,
    context: float,
    batches: tuple[int, ...],
    prompts: tuple[int, ...] = (128, 1024),
    **more: Any,
) -> list[dict[str, Any]]:
    """What a machine with such a law would show."""
    return [
        {
            "run": "uniform", "cache": "paged", "model": "smollm2-135m", "layers": 4, "dtype": "fp32",
            "device": "cpu", "batch": batch, "prompt_tokens": prompt, "output_tokens": 100,
            "ttft_s": (base + (token + context) * batch * prompt) / NS,
            "tpot_s_p50": (base + token * batch + context * batch * (prompt + 50)) / NS, **more,
        }
        for batch in batches for prompt in prompts
    ]  # fmt: skip


@given(st.integers(10**5, 10**8), st.integers(100, 10**6), st.integers(10, 10**4))
def test_a_fit_finds_the_law(tmp_path_factory: Any, base: int, token: int, context: int) -> None:
    place = tmp_path_factory.mktemp("run") / "run.json"
    fit = calibrated(saved(place, measured(base, token, context, (1, 8, 64))))
    step = fit.law.step_time
    assert step.base_ns == pytest.approx(base, rel=0.01, abs=2)
    assert step.token_ns == pytest.approx(token, rel=0.01, abs=2)
    assert step.context_ns == pytest.approx(context, rel=0.01, abs=2)
    assert step.read_ns == 0
    assert "off by 0% at most" in fit.law.source


def test_no_term_is_below_zero(tmp_path: Path) -> None:
    rows = measured(10**6, 10**4, 100, (1, 8))
    for row in rows:  # a second token costs nothing more, and context less than nothing
        row["tpot_s_p50"] = 0.001 / row["prompt_tokens"]
    assert min(_fitted(_points(rows)) or ()) >= 0
    with pytest.raises(KvtoolError, match="no law of base, tokens and context fits"):
        calibrated(saved(tmp_path / "run.json", rows))


def test_of_the_terms_those_are_kept_that_leave_the_least() -> None:
    """Which one to leave out is not said by the lowest of numbers of different units."""
    rows = measured(0, 0, 0, (1, 8))
    taken = ((20, 20), (5, 20), (100, 20), (100, 1))
    for row, (ttft_ms, tpot_ms) in zip(rows, taken, strict=True):
        row |= {"ttft_s": ttft_ms / 1e3, "tpot_s_p50": tpot_ms / 1e3}
    base, token, context = _fitted(_points(rows)) or ()
    assert base == pytest.approx(1_101_014e-9, rel=1e-3)
    assert token == pytest.approx(5_250e-9, rel=1e-3)
    assert context == 0


def test_a_pair_that_leaves_less_goes_before_one_that_is_tried_first(tmp_path: Path) -> None:
    rows = measured(1e6, 0, 100, (1, 8))
    for row in rows:  # a token of a prefill costs less than nothing beside its context
        row["ttft_s"] *= 0.97
    step = calibrated(saved(tmp_path / "run.json", rows)).law.step_time
    assert step.token_ns == 0
    assert step.context_ns == pytest.approx(100, rel=0.05)


def test_noise_of_context_is_not_carried_to_long_contexts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = measured(5e6, 2e5, 1, (1, 2, 4))
    for row in rows:
        row["tpot_s_p50"] *= rng.uniform(0.8, 1.2)
        row["ttft_s"] *= rng.uniform(0.8, 1.2)
    fit = calibrated(saved(tmp_path / "run.json", rows))
    assert fit.law.step_time.context_ns == 0
    assert "context is not resolved" in fit.law.basis.replace("what context costs is", "context is")
    assert fit.law.step_time.token_ns == pytest.approx(2e5, rel=0.3)


def test_the_error_is_the_largest_share_of_a_measured_time(tmp_path: Path) -> None:
    """Of a short step that is 30 % off beside long ones, and after what the law keeps of a term."""
    rows = measured(1e6, 1e4, 100, (1, 8, 64))
    rows[0]["tpot_s_p50"] *= 1.5
    fit = calibrated(saved(tmp_path / "run.json", rows))
    law, worst = fit.law.step_time, 0.0
    for row in rows:
        batch, prompt = row["batch"], row["prompt_tokens"]
        for tokens, context, took in (
            (batch * prompt, batch * prompt, row["ttft_s"]),
            (batch, batch * (prompt + 50), row["tpot_s_p50"]),
        ):
            worst = max(worst, abs(law.ns(tokens, context) / NS / took - 1))
    assert 0.15 < worst < 0.5
    assert f"off by {worst:.0%} at most" in fit.law.source


def test_rows_that_are_no_steps_of_a_batch_are_left_out(tmp_path: Path) -> None:
    rows = measured(1e6, 1e4, 100, (1, 8))
    again = measured(9e6, 1e6, 900, (1, 8), cache="none")
    mixed = measured(7e6, 1e5, 900, (800,), run="ragged")
    other = measured(3e6, 1e5, 300, (1, 8), cache="dynamic")
    fit = calibrated(saved(tmp_path / "run.json", [*other, *again, *mixed, *rows]))
    assert fit.law.step_time.base_ns == pytest.approx(1e6, rel=1e-3)
    assert (
        "fitted to 8 measured times with the paged cache (10 other rows left out)" in fit.law.source
    )
    assert "measured with batches of 1 to 8 and prompts of 128 to 1,024 tokens" in fit.law.source
    fit = calibrated(saved(tmp_path / "run.json", [*again, *other]))
    assert fit.law.step_time.base_ns == pytest.approx(3e6, rel=1e-3)
    assert "with the dynamic cache (4 other rows left out)" in fit.law.source
    with pytest.raises(KvtoolError, match="none of its rows is of a batch of equal prompts"):
        calibrated(saved(tmp_path / "run.json", [*again, *mixed]))


def test_rows_of_one_model_are_fitted(tmp_path: Path) -> None:
    rows = measured(1e6, 1e4, 100, (1, 8)) + measured(5e6, 1e5, 900, (1, 8), model="other")
    fit = calibrated(saved(tmp_path / "run.json", rows))
    assert fit.model == "smollm2-135m"
    assert fit.law.step_time.base_ns == pytest.approx(1e6, rel=1e-3)
    assert "(4 other rows left out)" in fit.law.source


@pytest.mark.parametrize(
    ("rows", "resolved"),
    [
        (measured(1e6, 1e4, 100, (1, 8)), True),
        (measured(1e6, 1e4, 0, (1, 8)), False),
        (measured(1e6, 1e4, 100, (1, 8, 64), prompts=(128,)), False),
    ],
)
def test_a_term_that_is_not_there_is_told(
    tmp_path: Path, rows: list[dict[str, Any]], resolved: bool
) -> None:
    source = calibrated(saved(tmp_path / "run.json", rows)).law.source
    told = "context not resolved: run bench decode with several --prompt-tokens" in source
    assert told is not resolved


def test_a_term_below_the_noise_is_not_resolved(tmp_path: Path) -> None:
    rows = measured(1e6, 1e4, 0.5, (1, 8))
    for number, row in enumerate(rows):
        row["tpot_s_p50"] *= 1.2 if number % 2 else 0.9
    assert "context not resolved" in calibrated(saved(tmp_path / "run.json", rows)).law.source


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as a saved run"),
        ("[]", "none of its rows says"),
        ('{"rows": 7}', "none of its rows says"),
        ('{"rows": [{"batch": 1}]}', "none of its rows says"),
        (json.dumps({"rows": measured(1e6, 1e4, 0, (1,))[:1]}), "do not tell base"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: str, message: str) -> None:
    place = tmp_path / "run.json"
    place.write_text(content)
    with pytest.raises(KvtoolError, match=message):
        calibrated(str(place))


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KvtoolError, match="cannot be read"):
        calibrated(str(tmp_path / "none.json"))


def test_a_fit_says_whose_it_is(tmp_path: Path) -> None:
    on_gpu = measured(1e6, 1e4, 100, (1, 8), device="cuda", dtype="bf16", layers=30)
    fit = calibrated(saved(tmp_path / "run.json", on_gpu, device_name="NVIDIA H200"))
    assert fit.of == "smollm2-135m (30 layers, bf16) on NVIDIA H200"
    assert (
        fit.law.basis
        == "fitted to smollm2-135m (30 layers, bf16) on NVIDIA H200, as run.json has it, "
        "off by 0% at most"
    )
    bare = [
        {k: v for k, v in row.items() if k not in ("model", "layers", "dtype", "device")}
        for row in on_gpu
    ]
    fit = calibrated(saved(tmp_path / "run.json", bare))
    assert fit.of == "a model without a name on a machine without a name"


def of(model: str, layers: int, dtype: str, device: str) -> Fit:
    law = StepLaw(step_time=StepTime(), source="")
    return Fit(law=law, model=model, layers=layers, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("fit", "gpu", "dtype", "same"),
    [
        (of("llama-3-8b", 32, "bf16", "NVIDIA A100-SXM4-40GB"), "a100-40gb", None, True),
        (of("llama-3-8b", 32, "bf16", "NVIDIA A100-SXM4-80GB"), "a100-40gb", None, False),
        (of("llama-3-8b", 32, "bf16", "NVIDIA H100 80GB HBM3"), "h100", None, True),
        (of("llama-3-8b", 32, "bf16", "NVIDIA H100 80GB HBM3"), "h100:2", None, False),
        (of("llama-3-8b", 32, "bf16", "NVIDIA H100 80GB HBM3"), "h200", None, False),
        (of("llama-3-8b", 32, "bf16", "NVIDIA A10"), "a100-40gb", None, False),
        (of("llama-3-8b", 32, "bf16", "NVIDIA H200"), "h200", "fp16", False),
        (of("llama-3-8b", 32, "fp16", "NVIDIA H200"), "h200", "fp16", True),
        (of("llama-3-8b", 4, "bf16", "NVIDIA H200"), "h200", None, False),
        (of("llama-2-7b", 32, "bf16", "NVIDIA H200"), "h200", None, False),
        (of("llama-3-8b", 32, "bf16", "cpu"), None, None, True),
    ],
)
def test_a_fit_of_something_else_is_told(
    fit: Fit, gpu: str | None, dtype: str | None, same: bool
) -> None:
    gpus = None if gpu is None else gpus_of(gpu, None)
    told = differs(fit, load_config, model="llama-3-8b", gpus=gpus, dtype=dtype)
    assert (told is None) is same


def test_a_fit_of_something_else_is_told_plainly() -> None:
    fit = of("smollm2-135m", 4, "fp32", "cpu")
    told = differs(
        fit, load_config, model="llama-3-8b", gpus=gpus_of("a100-40gb", None), dtype=None
    )
    assert told == (
        "fitted to smollm2-135m (4 layers, fp32) on cpu, not to llama-3-8b (32 layers, bf16) on a100-40gb: "
        "times are the former's, and nothing is priced"
    )
    assert differs(fit, load_config, model=None, gpus=None, dtype=None) is None

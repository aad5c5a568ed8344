"""Laws of a step's time: a roofline by hand, and a fit that finds the law it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.config import load_config
from kvtool.errors import KvtoolError
from kvtool.prefill import prefill_of
from kvtool.step_law import OVERHEAD_NS, READ_EFFICIENCY, calibrated, law_of


def test_the_roofline_of_llama_3_8b_on_an_h100_by_hand() -> None:
    # 16,060,522,496 B of weights and 131,072 B a token at 0.8 of 3.35 TB/s; 2 FLOPs for each of
    # 6,979,321,856 + 525,336,576 parameters at half of 989 TFLOP/s.
    law = law_of(prefill_of(load_config, "llama-3-8b", gpu="h100"))
    step = law.step_time
    assert step.base_ns == OVERHEAD_NS
    assert step.read_ns == round(16_060_522_496 / (3350 * READ_EFFICIENCY))
    assert step.context_ns == round(131_072 / (3350 * READ_EFFICIENCY)) == 49
    assert step.token_ns == round(2 * 7_504_658_432 / (989e3 * 0.5))
    assert "an estimate" in law.source


def test_without_a_gpu_there_is_no_time() -> None:
    with pytest.raises(KvtoolError, match="no time without a GPU"):
        law_of(prefill_of(load_config, "llama-3-8b"))


def saved(place: Path, rows: list[dict[str, Any]]) -> str:
    place.write_text(json.dumps({"schema": 1, "command": "bench decode", "rows": rows}))
    return str(place)


def measured(
    base: float, token: float, context: float, batches: tuple[int, ...]
) -> list[dict[str, Any]]:
    """What a machine with such a law would show."""
    return [
        {
            "batch": batch, "prompt_tokens": prompt, "output_tokens": 100,
            "ttft_s": (base + (token + context) * batch * prompt) / 1e9,
            "tpot_s_p50": (base + token * batch + context * batch * (prompt + 50)) / 1e9,
        }
        for batch in batches for prompt in (128, 1024)
    ]  # fmt: skip


@given(st.integers(10**5, 10**8), st.integers(100, 10**6), st.integers(10, 10**4))
def test_a_fit_finds_the_law(tmp_path_factory: Any, base: int, token: int, context: int) -> None:
    place = tmp_path_factory.mktemp("run") / "run.json"
    law = calibrated(saved(place, measured(base, token, context, (1, 8, 64))))
    step = law.step_time
    assert step.base_ns == pytest.approx(base, rel=0.01, abs=2)
    assert step.token_ns == pytest.approx(token, rel=0.01, abs=2)
    assert step.context_ns == pytest.approx(context, rel=0.01, abs=2)
    assert step.read_ns == 0


def test_no_term_is_below_zero(tmp_path: Path) -> None:
    rows = measured(10**6, 10**4, 100, (1, 8))
    for row in rows:  # a second token costs nothing more, and context less than nothing
        row["tpot_s_p50"] = 0.001 / row["prompt_tokens"]
    step = calibrated(saved(tmp_path / "run.json", rows)).step_time
    assert min(step.base_ns, step.token_ns, step.context_ns) >= 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as a saved run"),
        ("[]", "none of its rows says"),
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

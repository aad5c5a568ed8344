"""What engines printed of their pools, against kvtool: scripts/accuracy_plan.py on the rows of tests/data."""

from __future__ import annotations

from typing import Any

import pytest
from scripts_of import script

plan = script("accuracy_plan")
models = plan.MODELS
ROWS = plan.rows_of(plan.DATA)
BY_ID = {row["id"]: row for row in ROWS}


def row(name: str, **changed: Any) -> dict[str, Any]:
    return {**BY_ID[name], **changed}


@pytest.mark.parametrize("one", ROWS, ids=lambda row: row["id"])
def test_a_row_is_as_it_was_printed_or_has_its_reason(one: dict[str, Any]) -> None:
    found = plan.outcome(one)
    assert found.checks, found.model
    assert bool(found.off) == bool(plan.reason(found)), found.off


@pytest.mark.parametrize("one", ROWS, ids=lambda row: row["id"])
def test_every_row_that_allows_an_interval_has_its_rate_compared(one: dict[str, Any]) -> None:
    found = {check.what: check.ok for check in plan.outcome(one).checks}
    assert ("rate" in found) == bool(one["implied_range"])
    if one["agrees"] and one["implied_range"]:
        assert found["rate"] or one["id"] == "LT107"


def test_no_reason_is_idle() -> None:
    off = {one["id"] for one in ROWS if plan.outcome(one).off}
    assert set(plan.MISSES) <= off


@pytest.mark.parametrize(
    ("name", "changed", "what"),
    [
        ("LT001", {"implied_range": [400_000.0, 401_000.0]}, "rate"),
        ("LT049", {"model": "Qwen/Qwen3-8B"}, "tokens"),
        ("LT049", {"kv_dtype": "fp8"}, "rate"),
        ("LT027", {"tp": 4}, "blocks of swap space"),
        ("LT035", {"max_model_len": 4000}, "concurrency"),
        ("LT057", {"max_model_len": 200_000}, "GiB of one request"),
        ("LT056", {"kv_dtype": "fp8"}, "longest request"),
        ("LT007", {"gpu": "8xA100 40GB", "id": "LT000"}, "GiB of the pool"),
    ],
)
def test_what_is_wrong_is_found(name: str, changed: dict[str, Any], what: str) -> None:
    checks = {check.what: check.ok for check in plan.outcome(row(name, **changed)).checks}
    assert checks[what] is False


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ", "mixtral-8x7b"),
        ("DeepSeek-R1-Distill-Qwen-32B class", "qwen2.5-32b"),
        ("DeepSeek-R1-Distill-Qwen-1.5B", None),
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1"),
        ("DeepSeek-R1 (mla off, K q8_0)", "deepseek-r1"),
        ("llama3:70b", "llama-3-70b"),
        ("meta-llama/Llama-3.1-8B-Instruct + EAGLE draft", "llama-3.1-8b"),
        ("Qwen/Qwen-14B-Chat-Int4", None),
        ("Qwen/Qwen3.5-27B or 35B-A3B", None),
        ("Qwen3-30B-A3B-FP8 class (48L,4 kv heads)", "qwen3-30b-a3b"),
        ("(not named)", None),
    ],
)
def test_models_by_the_names_that_logs_have(text: str, preset: str | None) -> None:
    found = models.preset_of(text)
    assert (found.name if found else None) == preset


@pytest.mark.parametrize(
    ("formula", "tp", "kv_dtype", "rate"),
    [
        ("2*40*20*128*2 (Hkv 40/tp 2)", 2, "f16/bf16", 409_600),
        ("2*40*1*128*2 (MQA, replicated per rank)", 2, "f16/bf16", 20_480),
        ("2*(32+1 draft layer)*8*128*2", 1, "f16/bf16", 135_168),
        ("48128*q8_0 + 48128*f16", 1, "q8_0/f16", 147_392),
        ("36*(256+64)*2 (MLA)", 1, "f16/bf16", 23_040),
        ("61*576*1", 1, "fp8", 35_136),
    ],
)
def test_formulas_make_configs(formula: str, tp: int, kv_dtype: str, rate: int) -> None:
    one = row("LT001", model="?", formula=formula, tp=tp, kv_dtype=kv_dtype, engine="other")
    assert models.of_row(one).rate == rate


def test_a_row_without_name_or_formula_is_not_guessed() -> None:
    assert plan.outcome(row("LT001", model="(not named)", formula=None)).checks == ()


def test_vllm_0_24_counts_tokens_by_concurrency_and_length() -> None:
    """Its gemma-4-31b has windows, so that no rate times its tokens is the memory."""
    found = models.of_row(BY_ID["LT053"])
    assert found.rule == "concurrency × length, 1 in flight"
    assert found.rates[0] == 60 * 16 * 256 * 2 * 2


def test_a_pool_is_planned_from_what_a_log_says() -> None:
    one = row("LT007", id="LT000")
    known = models.pool_row(one, models.of_row(one))
    assert (known["gpu"], known["tp"], known["util"]) == ("h100", 8, 0.95)
    assert known["weights_gib"] == pytest.approx(12.39 / 8, rel=0.02)
    assert models.pool_row(row("LT007", gpu=None), models.of_row(one)) is None

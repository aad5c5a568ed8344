"""Every provider of a case: right where it is there, a note where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_cases import CPU, case

from kvtool.bench.attention import data as cases
from kvtool.bench.attention import providers, torch_providers
from kvtool.bench.attention.correct import expected, verdict
from kvtool.bench.attention.measure import measure_case
from kvtool.bench.attention.prepared import Missing, Prepared
from kvtool.bench.attention.providers import Provider

pytest.importorskip("torch")
TESTS = Path(__file__).parent
CASES = [
    {},
    {"layout": "nhd", "kv_dtype": "bf16", "pattern": "shuffled"},
    {"kv_dtype": "fp16", "block_size": 1, "head_dim": 80},
    {"batch": 3, "skew": 3, "block_size": 4, "pattern": "fragmented", "query_heads": 8},
    {"batch": 1, "context_tokens": 1, "block_size": 256, "threads": 2},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
@pytest.mark.parametrize("name", ["paged", "contiguous", "sdpa", "gather-sdpa"])
def test_a_provider_of_the_cpu_is_right(name: str, changes: dict[str, Any]) -> None:
    data = cases.make(case(**changes), CPU, seed=0)
    provider = providers.providers_of("cpu")[name]
    data.fill_padding(float("nan") if provider.masks_padding else 0.0)
    found = verdict(data, provider.prepare(data), expected(data))
    assert found.correct, found


def test_the_providers_of_a_gpu_are_handed_the_case_as_they_document_it() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, TESTS / "gpu_providers_interpreted.py"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum("right" in line for line in lines) == 22
    assert [line for line in lines if "missing" in line] == [
        "flash_attn missing: its paged cache is laid out nhd"
    ] * 2


def test_the_names_are_the_same_on_every_device() -> None:
    names = {*providers.NAMES, *providers.ON_REQUEST}
    assert names == set(providers.providers_of("cpu")) == set(providers.providers_of("cuda"))


def _measured(monkeypatch: pytest.MonkeyPatch, name: str, prepare: Any) -> Any:
    """What a case gives when one provider is replaced."""
    real = providers.providers_of("cpu")
    monkeypatch.setattr(
        "kvtool.bench.attention.measure.providers_of",
        lambda kind: {**real, name: Provider(prepare, False)},
    )
    data = cases.make(case(), CPU, seed=0)
    return measure_case(data, names=["contiguous", "sdpa"], budget_s=0.1, seed=0)


def test_a_wrong_provider_gets_a_row_and_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_a_little(data: cases.Data) -> Prepared:
        right = torch_providers.sdpa(data)
        return replace(right, output=lambda pool: right.output(pool) * 1.01)

    found = _measured(monkeypatch, "sdpa", off_by_a_little)
    contiguous, sdpa = found.rows
    assert contiguous["correct"] is True
    assert contiguous["gb_per_s"] > 0
    assert sdpa["correct"] is False
    assert sdpa["error_share"] > 1
    assert {sdpa[key] for key in ("time_s_p50", "gb_per_s", "overhead", "samples")} == {None}
    assert set(sdpa) == set(contiguous)


def test_a_missing_or_refusing_provider_is_a_note_and_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(data: cases.Data) -> Prepared:
        raise Missing("it is not installed")

    def refusing(data: cases.Data) -> Prepared:
        raise RuntimeError("block size must be\na multiple of 256")

    found = _measured(monkeypatch, "sdpa", missing)
    assert [row["provider"] for row in found.rows] == ["contiguous"]
    assert found.notes == ["sdpa has no row: it is not installed"]
    found = _measured(monkeypatch, "sdpa", refusing)
    assert found.notes == ["sdpa has no row: RuntimeError: block size must be a multiple of 256"]


def test_a_row_adds_up() -> None:
    data = cases.make(case(batch=2, context_tokens=200), CPU, seed=0)
    found = measure_case(data, names=list(providers.NAMES), budget_s=0.5, seed=0, peak=1e10)
    assert [row["provider"] for row in found.rows] == ["paged", "contiguous", "sdpa", "gather-sdpa"]
    for row in found.rows:
        assert row["time_s_min"] <= row["time_s_p10"] <= row["time_s_p50"] <= row["time_s_p90"]
        assert row["gb_per_s"] == pytest.approx(row["bytes_useful"] / row["time_s_p50"] / 1e9)
        assert row["read_fraction"] == pytest.approx(row["gb_per_s"] / row["read_roof_gb_per_s"])
        assert row["copy_fraction"] == pytest.approx(row["gb_per_s"] / row["copy_roof_gb_per_s"])
        assert row["samples"] >= 5
        assert row["bytes_moved"] >= row["bytes_useful"]
    paged, contiguous, _, gather = found.rows
    assert contiguous["overhead"] is None
    low, high = paged["overhead_ci"]
    assert low <= paged["overhead"] <= high
    assert paged["bytes_moved"] == paged["bytes_useful"] + data.case.table_bytes
    # Two sequences of 13 blocks of 16 tokens, K and V of 2 heads of 64 in fp32, written and read.
    gathered = 2 * (2 * 13 * 16 * 2 * 2 * 64 * 4)
    assert gather["bytes_moved"] == gather["bytes_useful"] + gathered + data.case.table_bytes
    assert {note.split(" has")[0] for note in found.notes} == {"flashinfer", "flash-attn", "vllm"}

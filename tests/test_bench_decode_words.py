"""What `kvtool bench decode` takes and says: lists, notes, tables and sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtool.bench.decode.settings import ROW
from kvtool.cli.bench_decode_run import _graph_notes
from kvtool.view.bench_decode import sentences, tables

pytest.importorskip("torch")
Kvtool = Callable[..., Any]
CONFIG = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    "max_position_embeddings": 512,
}  # fmt: skip


def row(**given: Any) -> dict[str, Any]:
    """A finished row of a uniform run."""
    known = {
        "run": "uniform", "model": "tiny", "cache": "paged", "device": "cpu", "batch": 1,
        "prompt_tokens": 20, "output_tokens": 8, "block_size": 16, "dtype": "fp32", "layers": 2,
        "weights": "random", "weights_bytes": 1000, "bytes_per_token": 10, "repeats": 3,
        "ttft_s": 0.1, "tpot_s_p50": 0.1, "itl_s_p99": 0.1, "output_tokens_per_s": 10.0,
        "kv_reserved_bytes": 10, "kv_used_bytes": 10, "step_bytes": 2000, "step_cache_bytes": 0, "same_tokens": True,
        "ties": 0, "baseline": "dynamic", "predicted_gain": 1.1, "measured_gain": 1.05,
        "measured_gain_ci": [1.01, 1.09], "cuda_graph": False,
    }  # fmt: skip
    return ROW | known | given


def cell(one: dict[str, Any], column: str) -> str:
    table = tables([row(cache="dynamic"), one])[0]
    return table.rows[1][table.columns.index(column)]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "1.05×"),
        ({"measured_gain_ci": [0.9, 1.2]}, "1.05× ?"),
        ({"measured_gain_ci": [0.8, 0.9], "measured_gain": 0.85}, "0.85×"),
        ({"measured_gain_ci": None}, "1.05× ?"),
        ({"measured_gain": None, "baseline": None, "measured_gain_ci": None}, "–"),
        ({"cache": "dynamic", "measured_gain": 1.0, "measured_gain_ci": None}, "1.00×"),
    ],
)
def test_a_gain_that_is_not_resolved_has_a_question_mark(given: Any, text: str) -> None:
    assert cell(row(**given), "gain") == text


def test_how_steps_are_run_is_shown_where_it_matters() -> None:
    eager = [row(cache="dynamic"), row()]
    assert "steps are" not in tables(eager)[0].columns
    for rows in (
        [row(cache="dynamic"), row(cuda_graph=True)],
        [row(device="cuda", cuda_graph=True)],
        [row(), row(cache="continuous", cuda_graph=None)],
    ):
        assert "steps are" in tables(rows)[0].columns
    assert cell(row(cuda_graph=True), "steps are") == "a graph"
    assert cell(row(cuda_graph=None), "steps are") == "–"


def test_a_failed_recording_is_a_note() -> None:
    notes = _graph_notes([row(), row(cache="static", batch=4, graph_error="it counts in Python")])
    assert notes == ["static, batch 4: its decode steps are no CUDA graph: it counts in Python"]


def said(*rows: dict[str, Any]) -> str:
    return " ".join(sentences(rows, {}))


def test_more_than_bytes_give_is_explained() -> None:
    assert "at equal bandwidth" in said(row())
    assert "more than fewer bytes give" not in said(row())
    assert "paged: more than fewer bytes give" in said(row(measured_gain_ci=[1.2, 1.4]))
    assert "more than fewer bytes give" not in said(row(measured_gain_ci=[1.0, 1.4]))
    assert "more than fewer bytes give" not in said(row(measured_gain_ci=None, measured_gain=9))


@pytest.mark.parametrize(("end", "told"), [(1.1, True), (0.7, True), (1.3, False), (0.5, False)])
def test_a_law_is_told_only_if_its_end_follows_it(end: float, told: bool) -> None:
    fit = {"time_exponent": 0.9, "exponent_contexts": [128, 256, 512], "time_exponent_end": end}
    text = said(row(cache="none", **fit))
    assert "to the power of: none 0.90" in text
    assert ("takes about n^1.9" in text) is told


def test_paging_is_told_for_every_block_size() -> None:
    shared = {"run": "ragged", "kv_budget_bytes": 1000, "max_model_len": 64, "samples": 1,
              "requests": 4, "baseline": "contiguous-max", "steps": 1, "preemptions": 0,
              "peak_batch": 4}  # fmt: skip
    rows = [
        row(**shared, cache="contiguous-max", mean_batch=2.0, block_size=None),
        row(**shared, mean_batch=4.0),
        row(**shared, mean_batch=3.0, block_size=64, measured_gain_ci=[0.9, 1.2]),
    ]
    text = said(*rows)
    assert "blocks of 16 runs 4.0 sequences at a time" in text
    assert "blocks of 64 runs 3.0 sequences" in text
    assert text.count("not resolved in 3 rounds), and") == 0
    assert text.count("1.05 times their tokens/s (not resolved in 3 rounds).") == 1
    assert "blocks of" not in said(*rows[:2])


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return ("bench", "decode", "--model", str(path), "--device", "cpu", "--batch", "1",
            "--cache", "dynamic,contiguous", "--output-tokens", "4")  # fmt: skip


def test_lists_are_run_or_said_to_be_cut(kvtool: Kvtool, tiny: tuple[str, ...]) -> None:
    ran = kvtool(
        *tiny, "--prompt-tokens", "20,30", "--block-size", "16,64", "--num-requests", "3",
        "--repeats", "1", "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    ragged = [one for one in ran.json["rows"] if one["run"] == "ragged"]
    assert [one["block_size"] for one in ragged] == [None, 16, 64]
    assert {one["repeats"] for one in ran.json["rows"]} == {1}
    (note,) = [one for one in ran.json["notes"] if "different lengths" in one]
    assert "the first --prompt-tokens, 20" in note
    ran = kvtool(*tiny, "--prompt-tokens", "20", "--num-requests", "0", "--json")
    assert {one["repeats"] for one in ran.json["rows"]} == {3}
    assert not any("different lengths" in one for one in ran.json["notes"])


def test_a_list_of_dtypes_is_a_usage_error(kvtool: Kvtool, tiny: tuple[str, ...]) -> None:
    ran = kvtool(*tiny, "--prompt-tokens", "20", "--dtype", "fp32,bf16")
    assert ran.code == 2
    assert "--dtype takes one value" in ran.err


def test_a_window_bounds_the_share_of_the_cache() -> None:
    windowed = row(bytes_per_token=3072, step_bytes=1000, step_cache_bytes=12)
    assert "the cache is 1.2% of the bytes" in " ".join(sentences([windowed], {}))

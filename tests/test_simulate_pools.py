"""`kvtool simulate --disaggregate`: its rows, what it refuses, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MADE = ("--model", "llama-3-8b", "--workload", "chat", "--num-requests", "300")
APART = ("--disaggregate", "prefill=h100:2,decode=h200:3", "--link", "400Gb")


@pytest.fixture
def rows(kvtool: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    """The rows of `kvtool simulate …`."""

    def run(*argv: str) -> list[dict[str, Any]]:
        ran = kvtool("simulate", *argv, "--json")
        assert ran.code == 0, ran.err
        found: list[dict[str, Any]] = ran.json["rows"]
        return found

    return run


def test_each_kind_has_its_gpus_its_pool_and_its_clock(rows: Any) -> None:
    (row,) = rows(*MADE, *APART, "--rate", "8", "--slo", "ttft=1s,tpot=50ms")
    (h200,) = rows(*MADE, "--gpu", "h200", "--rate", "8")
    (h100,) = rows(*MADE, "--gpu", "h100", "--rate", "8")
    assert (row["scheduler"], row["gpu"], row["num_gpus"]) == (
        "disaggregated",
        "h100-sxm:2+h200:3",
        5,
    )
    assert (row["prefill_instances"], row["decode_instances"]) == (2, 3)
    for name, alone in (("prefill", h100), ("decode", h200)):
        for key in ("num_blocks", "base_ns", "read_ns", "token_ns", "context_ns"):
            assert row[f"{name}_{key}"] == alone[key]
    assert row["usd_per_hour"] == pytest.approx(2 * h100["usd_per_hour"] + 3 * h200["usd_per_hour"])
    assert row["tokens_per_usd"] == pytest.approx(
        row["output_tokens_per_s"] * 3600 / row["usd_per_hour"]
    )
    assert row["generated_tokens"] == h100["generated_tokens"]
    assert row["finished"] == 300
    assert row["slo_met_share"] == 1.0
    assert row["goodput_requests_per_s"] == pytest.approx(row["requests_per_s"])
    assert row["transfer_bytes"] % 131_072 == 0 < row["transfer_bytes"]
    assert 0 < row["prefill_utilisation"] < row["decode_utilisation"] <= 1
    assert row["mean_batch"] is None
    assert row["prefill_mean_batch"] >= 1


def test_instances_of_several_ranks(rows: Any) -> None:
    kinds = "prefill=h100:4/tp2,decode=h100:4"
    (row,) = rows(*MADE, "--disaggregate", kinds, "--link", "50GB/s", "--tp", "4")
    assert (row["prefill_instances"], row["decode_instances"], row["num_gpus"]) == (2, 1, 8)
    assert row["link_bits_per_s"] == 400 * 10**9
    assert row["decode_read_ns"] == pytest.approx(row["prefill_read_ns"] / 2, rel=1e-6)


def test_a_slow_link_binds_and_adds_to_the_second_token_alone(rows: Any) -> None:
    words = (*MADE, "--disaggregate", APART[1], "--rate", "8", "--link", "1000Gb,0.5Gb")
    fast, slow = rows(*words)
    assert [row["link_bits_per_s"] for row in (fast, slow)] == [10**12, 5 * 10**8]
    assert fast["ttft_s_p99"] == slow["ttft_s_p99"]
    assert slow["transfer_s_p50"] > 100 * fast["transfer_s_p50"]
    assert slow["e2e_s_p50"] > fast["e2e_s_p50"]
    assert slow["itl_s_p50"] < 2 * fast["itl_s_p50"]
    assert slow["binds"] == "link"
    assert slow["link_utilisation"] > 100 * fast["link_utilisation"]
    assert fast["binds"] != "link"


def test_what_binds_is_said(kvtool: Any) -> None:
    few = kvtool(
        "simulate", *MADE, "--disaggregate", "prefill=h100:1,decode=h100:8", "--link", "4Tb"
    )
    assert "The prefill instances bind: a request waits" in few.out
    assert "of KV cache are sent" in few.out
    tight = kvtool("simulate", *MADE, "--disaggregate", "prefill=h100:8,decode=h100:1", "--link", "4Tb",
                   "--max-num-seqs", "8")  # fmt: skip
    assert "The decode instances bind" in tight.out


def test_the_highest_rate_that_keeps_an_objective(rows: Any) -> None:
    words = (*MADE, *APART, "--slo", "ttft=200ms,tpot=10ms")
    (found,) = rows(*words, "--find-rate")
    assert found["slo_met_share"] >= 0.99
    (above,) = rows(*words, "--rate", str(round(float(found["rate"]) * 1.5, 2)))
    assert above["slo_met_share"] < 0.99 or above["queue_grows"]


def test_a_queue_at_any_of_the_three_grows(rows: Any) -> None:
    words = ("--model", "llama-3-8b", "--workload", "chat", "--num-requests", "1000", "--rate", "30",
             "--disaggregate", "prefill=h100:1,decode=h100:1")  # fmt: skip
    assert not rows(*words, "--link", "400Gb")[0]["queue_grows"]
    assert rows(*words, "--link", "1Gb")[0]["queue_grows"]
    assert rows(*words, "--link", "400Gb", "--max-num-seqs", "4")[0]["queue_grows"]


def test_a_line_a_request(rows: Any, tmp_path: Path) -> None:
    place = tmp_path / "out.jsonl"
    rows(*MADE, *APART, "--per-request", str(place))
    assert len(place.read_text().splitlines()) == 300


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--link", "5Gb"), "--link is of --disaggregate"),
        ((*MADE, "--disaggregate", "prefill=h100,decode=h100"), "over a link"),
        (("--disaggregate", "prefill=h100,decode=h100", "--link", "5Gb"), "depends on the model"),
        ((*MADE, "--disaggregate", "prefill=h100", "--link", "5Gb"), "there is no decode"),
        ((*MADE, "--disaggregate", "prefill=h100,prefill=h100", "--link", "5Gb"), "no kind of its own"),
        ((*MADE, "--disaggregate", "h100:4", "--link", "5Gb"), "no kind of its own"),
        ((*MADE, "--disaggregate", "prefill=h999,decode=h100", "--link", "5Gb"), "h999"),
        ((*MADE, "--disaggregate", "prefill=h100:3/tp2,decode=h100", "--link", "5Gb"), "no whole instances"),
        ((*MADE, *APART[:2], "--link", "fast"), "is no rate"),
        ((*MADE, *APART[:2], "--link", "0Gb"), "slower than"),
        ((*MADE, *APART, "--gpu", "h100"), "exclude each other"),
        ((*MADE, *APART, "--num-blocks", "90"), "exclude each other"),
        ((*MADE, *APART, "--scheduler", "static"), "exclude each other"),
        ((*MADE, *APART, "--policy", "priority"), "not modelled with --policy"),
        ((*MADE, *APART, "--preemption", "swap", "--cpu-blocks", "9"), "not modelled with --preemption"),
        ((*MADE, *APART, "--per-step", "x.jsonl"), "not modelled with --per-step"),
        ((*MADE, *APART, "-o", "x.svg"), "not modelled with a picture"),
        ((*MADE, *APART, "--on-stall", "stop"), "not modelled with --on-stall"),
    ],
)  # fmt: skip
def test_words_that_are_refused(kvtool: Any, words: tuple[str, ...], error: str) -> None:
    ran = kvtool("simulate", *words)
    assert ran.code != 0
    assert error in ran.err
    assert ran.err.count("\n") == 2

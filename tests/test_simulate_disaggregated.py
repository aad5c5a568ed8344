"""`kvtool simulate --disaggregate`: its rows, what it refuses, and what it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sim_cases import requests
from test_disaggregated import ONE_EACH, WIDE

from kvtool.cli.simulate_disaggregated import link_bits
from kvtool.requests import Requests
from kvtool.run import Row
from kvtool.sim.disaggregated import Split, replay_disaggregated
from kvtool.sim.settings import StepTime
from kvtool.simulate_disaggregated import growth_of_disaggregated, row_of_disaggregated

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
    assert "Prefill instances bind: a request waits" in few.out
    assert "of KV cache are sent" in few.out
    tight = kvtool("simulate", *MADE, "--disaggregate", "prefill=h100:8,decode=h100:1", "--link", "4Tb",
                   "--max-num-seqs", "8")  # fmt: skip
    assert re.search("Decode instances bind: a request waits [0-9.]+ s for a decode", tight.out)
    assert "s for a decode instance on average, " in tight.out


def test_steps_that_are_too_slow_are_no_queue(kvtool: Any, rows: Any) -> None:
    words = (*MADE, *APART, "--rate", "8", "--slo")
    told = kvtool("simulate", *words, "tpot=2ms").out
    assert "No queue: steps are too slow, those of decode make a TPOT p90 of" in told
    assert "where --slo asks for 2.0 ms" in told
    assert "Nothing binds: a request waits" in kvtool("simulate", *words, "tpot=50ms").out
    (row,) = rows(*words, "tpot=2ms")
    assert (row["binds"], row["slo_met_share"] < 0.1) == (None, True)
    # A lone request keeps an instance stepping, and next to no seat taken.
    header = next(line for line in told.splitlines() if line.startswith("instances of"))
    assert header.split("  ")[0] == "instances of"
    assert "stepping   seats used" in header
    assert "busy" not in header
    assert row["decode_utilisation"] > 0.9 > 0.05 > row["decode_seats_used"]


def test_the_gap_to_the_second_token_is_told(kvtool: Any, rows: Any) -> None:
    words = (*MADE, "--disaggregate", "prefill=h100:8,decode=h100:1", "--link", "4Tb",
             "--max-num-seqs", "8")  # fmt: skip
    (row,) = rows(*words)
    assert row["itl_s_p99"] < 0.1 < 20 < row["second_token_s_p50"] < row["second_token_s_p99"]
    lines = kvtool("simulate", *words).out.splitlines()
    assert [line for line in lines if line.startswith("token 1 to 2") and line.count(" s") == 3]
    assert "token 1 to 2" not in kvtool("simulate", *MADE, "--gpu", "h100").out


@pytest.mark.parametrize(
    ("word", "bits"),
    [
        ("400Gb", 400 * 10**9), ("400gbps", 400 * 10**9), ("400Gbps", 400 * 10**9), ("400Gb/s", 400 * 10**9),
        ("400gb/s", 400 * 10**9), ("50GB/s", 400 * 10**9), ("50GBps", 400 * 10**9), ("1.5Tb", 15 * 10**11),
        ("25Gbit/s", 25 * 10**9), ("1GiB/s", 8 * 2**30),
    ],
)  # fmt: skip
def test_rates_of_links(word: str, bits: int) -> None:
    assert link_bits(word) == bits


# -- by hand: kvtool.simulate_disaggregated on the case of tests/test_disaggregated.py


def row_of(asked: Requests, split: Split) -> Row:
    found = replay_disaggregated(asked, split)
    return row_of_disaggregated(found, asked, split) | growth_of_disaggregated(found)


def test_a_row_by_hand() -> None:
    # A prefill of 440 ns; sent 440-500 and 500-512; decode steps 500-550 (one) and 550-600 (both).
    row = row_of(requests([20, 10, 4], [3, 1, 2]), ONE_EACH)
    ns = 1e-9
    told = {
        "span_s": 600 * ns, "steps": 3, "generated_tokens": 6, "transfer_bytes": 72,
        "prefill_wait_s_mean": 0.0, "link_wait_s_mean": 30 * ns, "decode_wait_s_mean": 19 * ns,
        "binds": "link",
        "transfer_s_p50": 60 * ns, "transfer_s_p90": 72 * ns, "transfer_s_p99": 72 * ns,
        "link_utilisation": 72 / 600,
        "second_token_s_p50": 110 * ns, "second_token_s_p90": 160 * ns, "second_token_s_p99": 160 * ns,
        "prefill_steps": 1, "prefill_utilisation": 440 / 600, "prefill_mean_batch": 3.0,
        "prefill_seats_used": 3 / 256, "prefill_mean_waiting": 0.0, "prefill_mean_used_blocks": 9.0,
        "decode_steps": 2, "decode_utilisation": 100 / 600, "decode_mean_batch": 1.5,
        "decode_seats_used": 1.5 / 256, "decode_mean_waiting": 0.0, "decode_mean_used_blocks": 7.0,
        "aborted": 0, "larger_than_pool": 0,
    }  # fmt: skip
    assert {name: row[name] for name in told} == pytest.approx(told)
    two = row_of(requests([20, 10, 4], [3, 1, 2]), replace(ONE_EACH, num_decode=2))
    # The second decode instance steps 512-562 alone; the first 500-600.
    assert two["decode_utilisation"] == pytest.approx(150 / 600 / 2)
    assert two["decode_wait_s_mean"] == 0
    # Two links: each sends one, and nobody waits for the other.
    links = row_of(requests([20, 10, 4], [3, 1, 2]), replace(ONE_EACH, num_prefill=2))
    assert links["prefill_utilisation"] == pytest.approx((300 + 240) / links["span_s"] / 1e9 / 2)
    assert links["link_utilisation"] == pytest.approx(72 / links["span_s"] / 1e9 / 2)
    one_seat = replace(ONE_EACH.decode, max_num_seqs=1)
    row = row_of(requests([20, 10, 4], [3, 1, 2]), replace(ONE_EACH, decode=one_seat))
    # 500-550 the first alone, 550-600 the other waits from 512 on, 600-650 it is alone.
    assert row["decode_mean_waiting"] == pytest.approx(1 / 3)
    assert row["decode_seats_used"] == 1.0
    assert row["binds"] == "link"  # to send takes longer than to wait for the seat
    fast = replace(ONE_EACH, decode=one_seat, bits_per_s=100 * ONE_EACH.bits_per_s)
    assert row_of(requests([20, 10, 4], [3, 1, 2]), fast)["binds"] == "decode"


def test_who_waits_where_by_hand() -> None:
    """At the third and at the last of four arrivals, which is at three quarters too."""
    every = [0, 1000, 2000, 3000]

    def lengths(asked: Requests, split: Split) -> tuple[int, int, int]:
        row = row_of(asked, split)
        return row["queue_mid"], row["queue_later"], row["queue_end"]

    # At a decode instance with one seat, from 152 to 5152: the second from 1152 on, the third from 2152.
    seat = replace(ONE_EACH, decode=replace(ONE_EACH.decode, max_num_seqs=1, max_model_len=200))
    seat = replace(seat, prefill=replace(WIDE, max_model_len=200))
    assert lengths(requests([4] * 4, [101] * 4, every), seat) == (1, 2, 2)
    # At a link that takes 1500 for each: busy from 140 with one, from 1640 with the next, from 3140.
    slow = replace(ONE_EACH, bits_per_s=64 * 10**6)
    assert lengths(requests([4] * 4, [2] * 4, every), slow) == (0, 1, 1)
    # At a prefill instance of 1500 for each: from 0, 1500 and 3000 on.
    law = StepTime(base_ns=1500, token_ns=0, context_ns=0)
    busy = replace(ONE_EACH, prefill=replace(WIDE, step_time=law))
    assert lengths(requests([4] * 4, [1] * 4, every), busy) == (1, 0, 0)
    # Who is aborted, because the decode's pool is too small, waits no longer.
    small = replace(ONE_EACH, decode=replace(ONE_EACH.decode, num_blocks=4))
    assert lengths(requests([20] * 4, [3] * 4, every), small) == (0, 0, 0)


def test_larger_than_a_pool_are_not_all_that_are_aborted() -> None:
    whole = replace(WIDE, chunked_prefill=False, max_batched_tokens=16)
    split = replace(ONE_EACH, prefill=whole, decode=replace(ONE_EACH.decode, num_blocks=3))
    row = row_of(requests([20, 13, 4], [3, 3, 3]), split)
    assert (row["aborted"], row["larger_than_pool"], row["finished"]) == (2, 1, 1)


def test_sums_of_times_outgrow_64_bits() -> None:
    law = StepTime(base_ns=3 * 10**18, token_ns=0, context_ns=0)
    split = replace(ONE_EACH, prefill=replace(WIDE, max_num_seqs=1, step_time=law))
    row = row_of(requests([4, 4, 4], [1, 1, 1]), split)
    assert row["prefill_wait_s_mean"] == pytest.approx(3e9)
    assert row["binds"] == "prefill"
    # Times in steps of many instances: 4 × 3 × 10^18.
    split = replace(ONE_EACH, num_prefill=4, prefill=replace(WIDE, step_time=law))
    row = row_of(requests([4] * 4, [1] * 4), split)
    assert row["prefill_utilisation"] == pytest.approx(1.0)


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

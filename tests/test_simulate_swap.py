"""Preemption by swap: its time in both schedulers, and `kvtool simulate --preemption swap`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sim_cases import Case, engine, requests, run_plain

from kvtool.errors import KvtoolError
from kvtool.sim.settings import Settings, StepTime

LAW = StepTime(base_ns=1000, token_ns=10, context_ns=0)
TIGHT = Settings(
    num_blocks=40, block_size=4, max_model_len=120, preemption="swap", cpu_blocks=1000, step_time=LAW
)  # fmt: skip
WORDS = ("--workload", "chat", "--num-requests", "300", "--num-blocks", "400")
SWAP = ("--preemption", "swap", "--cpu-blocks", "10000")


def long_ends(settings: Settings) -> tuple[int, int]:
    """The end of a run that all wait for from the start, and the blocks it moved."""
    rng = np.random.default_rng(3)
    case = Case(requests=requests(*rng.integers(1, 50, (2, 60)).tolist()), settings=settings)
    totals = engine(case, recorded=True).run().totals()
    assert totals.end_ns == run_plain(case).totals().end_ns
    return totals.end_ns, totals.swapped_blocks


def test_a_step_lasts_longer_by_each_block_it_moves() -> None:
    free, moved = long_ends(TIGHT)
    assert moved > 50
    dear, again = long_ends(replace(TIGHT, step_time=replace(LAW, swap_ns=37)))
    assert (dear - free, again) == (37 * moved, moved)
    computed, none = long_ends(replace(TIGHT, preemption="recompute", cpu_blocks=0))
    assert none == 0
    assert computed > free  # what was swapped need not be computed anew


def test_a_victim_waits_for_its_blocks_to_leave_and_to_return() -> None:
    # Blocks of 4: both need a third one at step 2, and there are 4. The second goes and comes back.
    settings = Settings(
        num_blocks=4, block_size=4, max_model_len=16, preemption="swap", cpu_blocks=9,
        step_time=StepTime(base_ns=10, token_ns=0, context_ns=0, swap_ns=100),
    )  # fmt: skip
    case = Case(requests=requests([7, 7], [6, 3]), settings=settings)
    steps = run_plain(case).steps()["end_ns"]
    fast = engine(case, recorded=True).run()
    assert fast.all_steps()["end_ns"].tolist() == steps
    took = np.diff([0, *steps]).tolist()
    assert took == [10, 10, 210, 10, 10, 10, 210]


def test_a_clock_without_room_ends_in_an_error() -> None:
    with pytest.raises(KvtoolError, match="beyond 2"):
        long_ends(replace(TIGHT, step_time=replace(LAW, swap_ns=10**17)))


def test_rows_of_both_ways_of_preempting(kvtool: Callable[..., Any]) -> None:
    words = (*WORDS, "--model", "llama-3-8b", "--preemption", "recompute,swap",
             "--cpu-blocks", "20,10000", "--swap-bandwidth", "25GB/s")  # fmt: skip
    computed, few, many = kvtool("simulate", *words, "--json").json["rows"]
    ways = [(row["preemption"], row["cpu_blocks"]) for row in (computed, few, many)]
    assert ways == [("recompute", 0), ("swap", 20), ("swap", 10_000)]
    assert [row["swap_ns"] for row in (computed, few, many)] == [0, 83_886, 83_886]
    assert round(131_072 * 16 / 25) == 83_886  # 2 MiB a block
    assert (computed["swapped_blocks"], computed["swapped_bytes"]) == (0, 0)
    assert many["swapped_blocks"] > 0 == many["recomputed_tokens"]
    assert many["swapped_bytes"] == many["swapped_blocks"] * 16 * 131_072
    assert many["swapped_blocks"] > few["swapped_blocks"] > 0 < few["recomputed_tokens"]
    text = kvtool("simulate", *words[:-4], "--cpu-blocks", "10000", "--preemption", "swap").out
    assert "moved out and in" in text


def test_ranks_move_their_shares_at_once(kvtool: Callable[..., Any]) -> None:
    words = (*WORDS, *SWAP, "--model", "llama-3-8b", "--swap-bandwidth", "25GB/s", "--json")
    (one,) = kvtool("simulate", *words).json["rows"]
    (four,) = kvtool("simulate", *words, "--tp", "4").json["rows"]
    assert four["swap_ns"] == round(one["swap_ns"] / 4)
    assert four["swapped_bytes"] == four["swapped_blocks"] * 16 * 131_072


def test_without_a_model_there_are_blocks_and_no_bytes(kvtool: Callable[..., Any]) -> None:
    ran = kvtool("simulate", *WORDS, *SWAP, "--json")
    (row,) = ran.json["rows"]
    assert row["swapped_blocks"] > 0
    assert row["swapped_bytes"] is None
    assert any("swapping takes no time" in note for note in ran.json["notes"])
    (timed,) = kvtool("simulate", *WORDS, *SWAP, "--step-time", "swap_ns=5", "--json").json["rows"]
    assert timed["swap_ns"] == 5
    assert timed["end_ns"] == row["end_ns"] + 5 * row["swapped_blocks"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--preemption", "swap"), "has no blocks to swap to"),
        (("--preemption", "drop"), "'drop' is not known"),
        (("--cpu-blocks", "5"), "--cpu-blocks is of --preemption swap"),
        (("--swap-bandwidth", "5GB/s"), "--swap-bandwidth is of --preemption swap"),
        ((*SWAP, "--swap-bandwidth", "5GB/s"), "depend on the model"),
        ((*SWAP, "--model", "llama-3-8b", "--swap-bandwidth", "5GB"), "is no rate"),
        ((*SWAP, "--model", "llama-3-8b", "--swap-bandwidth", "0GB/s"), "nothing moves"),
        ((*SWAP, "--model", "llama-3-8b", "--swap-bandwidth", "1B/s"), "would take"),
        (
            (*SWAP, "--model", "llama-3-8b", "--swap-bandwidth", "5GB/s", "--step-time", "swap_ns=1"),
            "leave out one",
        ),
        ((*SWAP, "--scheduler", "static"), "is not modelled with"),
        ((*SWAP, "--policy", "priority"), "is not modelled with"),
        ((*SWAP, "--async-scheduling"), "is not modelled with"),
    ],
)  # fmt: skip
def test_words_that_are_refused(
    kvtool: Callable[..., Any], words: tuple[str, ...], error: str
) -> None:
    ran = kvtool("simulate", *WORDS, *words)
    assert ran.code != 0
    assert error in ran.err
    assert ran.err.count("\n") == 2


def test_requests_that_follow_others_are_not_swapped(
    kvtool: Callable[..., Any], tmp_path: Path
) -> None:
    place = tmp_path / "in.jsonl"
    lines = [
        {"arrival_ns": 0, "prompt_tokens": 4, "output_tokens": 4, "parent": -1, "think_ns": 0},
        {"arrival_ns": -1, "prompt_tokens": 4, "output_tokens": 4, "parent": 0, "think_ns": 5},
    ]
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = kvtool("simulate", "--requests", str(place), "--num-blocks", "50", *SWAP)
    assert "requests that follow others" in ran.err
    assert ran.err.count("\n") == 2

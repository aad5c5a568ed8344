"""kvtool simulate: the command against what vLLM's scheduler did, its times against a plain count."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from ran import Ran
from sim_cases import (
    BLOCK_ROW_IDS,
    ROW_IDS,
    Case,
    differences,
    drawn_requests,
    drawn_settings,
    requests,
    rows,
    run_plain,
    settings_of,
)

from kvtool.cli import simulate as command
from kvtool.cli.options import defaults_of
from kvtool.cli.scheduler_options import scheduler_grid
from kvtool.errors import KvtoolError
from kvtool.requests import Requests
from kvtool.sim import engine, kernel, replay
from kvtool.sim.blocks import kernel as blocks_kernel
from kvtool.sim.memory import Paged, Request
from kvtool.sim.scheduler import Scheduler
from kvtool.sim.settings import STATUSES, Settings, StepTime
from kvtool.simulate import percentiles, row_of

Kvtool = Callable[..., Ran]
QUICK = {"a3", "b8", "c5", "f4", "f7", "h1", "e7", "i3", "j4"}
"""Rows with preemptions, long prefills, a limit on active requests, every status and a stop; turns
with a prefix cache, priorities, and asynchronous steps that end unforeseen."""
HUNDRED = [
    {
        "arrival_ns": 30_000_000 * k,
        "prompt_tokens": 40 + 7 * k % 90,
        "output_tokens": 1 + 11 * k % 60,
    }
    for k in range(100)
]
TIGHT = ("--num-blocks", "14", "--max-num-seqs", "8", "--max-model-len", "300")


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    """A file of requests."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def flags_of(settings: Settings) -> list[str]:
    """The options that ask for these settings."""
    flags = []
    for one in fields(Settings):
        value, flag = getattr(settings, one.name), one.name.replace("_", "-")
        if one.name == "step_time":
            law = (f"{part.name}={getattr(value, part.name)}" for part in fields(StepTime))
            flags += ["--step-time", ",".join(law)]
        elif one.name not in ("preemption", "cpu_blocks", "long_prefill_adaptive"):
            if isinstance(value, bool):
                flags.append(f"--{'' if value else 'no-'}{flag}")
            elif value is not None:
                flags += [f"--{flag}", str(value)]
    return flags + ["--long-prefill-adaptive"] * settings.long_prefill_adaptive


# --- what vLLM decided ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in (*ROW_IDS, *BLOCK_ROW_IDS)
    ],
)
def test_a_row_is_what_vllm_decided(name: str, kvtool: Kvtool, tmp_path: Path) -> None:
    row = rows()[name]
    asked = row["requests"]
    names = [name for name in asked if name != "n"]
    lines = [{name: asked[name][k] for name in names} for k in range(asked["n"])]
    out, steps = tmp_path / "out.jsonl", tmp_path / "steps.jsonl"
    ran = kvtool(
        "simulate", "--requests", write(tmp_path / "in.jsonl", lines), *flags_of(settings_of(row)),
        "--per-request", out, "--per-step", steps, "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    by_request, by_step = read(out), read(steps)
    columns = {key: [line[key] for line in by_request] for key in by_request[0]}
    columns["status"] = [STATUSES.index(word) for word in columns["status"]]
    told = {key: [line[key] for line in by_step] for key in by_step[0]}
    assert differences(row, columns, told) == []
    assert set(row["truth"]["per_request"]) - {"arrival_ns"} <= set(columns)
    assert differs_in_totals(row["truth"], ran.json["rows"][0]) == []


def differs_in_totals(truth: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Totals that are not as vLLM had them."""
    totals = truth["totals"]
    expected = {
        **{name: totals[name] for name in (
            "preemptions", "queried_tokens", "hit_tokens", "evictions", "scheduled_tokens",
            "generated_tokens", "finished", "rejected", "unfinished",
        )},
        "cut": totals["cut_by_max_model_len"],
        "aborted": totals["aborted_stall"],
        "requery_tokens": totals["requery_tokens_after_preemption"],
        "rehit_tokens": totals["rehit_tokens_after_preemption"],
        "steps": truth["steps"],
        "end_ns": truth["end_ns"],
        "used_block_steps": truth["per_step"]["used_blocks"]["sum"],
    }  # fmt: skip
    return [name for name, value in expected.items() if row[name] != value]


def test_a_parent_that_reproduces_the_arrivals_changes_nothing(
    kvtool: Kvtool, tmp_path: Path
) -> None:
    source, out = write(tmp_path / "in.jsonl", HUNDRED), tmp_path / "out.jsonl"
    files = ("--per-request", out, "--per-step", tmp_path / "steps.jsonl")
    plain = kvtool("simulate", "--requests", source, *TIGHT, *files, "--json")
    before = [out.read_bytes(), files[3].read_bytes()]
    ended = read(out)
    dependent, parent = [dict(line) for line in HUNDRED], None
    for k, line in enumerate(HUNDRED):
        if parent is not None and 0 <= ended[parent]["finish_ns"] <= line["arrival_ns"]:
            think_ns = line["arrival_ns"] - ended[parent]["finish_ns"]
            dependent[k] |= {"arrival_ns": -1, "parent": parent, "think_ns": think_ns}
        parent = k
        while (
            parent and not 0 <= ended[parent]["finish_ns"] <= HUNDRED[min(k + 1, 99)]["arrival_ns"]
        ):
            parent -= 1
    assert sum(line["arrival_ns"] == -1 for line in dependent) > 50
    waiting = write(tmp_path / "waiting.jsonl", dependent)
    again = kvtool("simulate", "--requests", waiting, *TIGHT, *files, "--json")
    assert [out.read_bytes(), files[3].read_bytes()] == before
    row, other = plain.json["rows"][0], again.json["rows"][0]
    assert row["preemptions"] > 5
    apart = {
        "trace": "",
        "capacity_requests_per_s": None,
    }  # who waits for others has no other arrivals
    assert {**row, **apart} == {**other, **apart}


def test_a_child_of_a_request_that_never_ends_never_comes(kvtool: Kvtool, tmp_path: Path) -> None:
    lines = [
        {"arrival_ns": 0, "prompt_tokens": 400, "output_tokens": 1},
        {"arrival_ns": -1, "parent": 0, "think_ns": 5, "prompt_tokens": 3, "output_tokens": 2},
    ]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = (
        "simulate",
        "--requests",
        source,
        "--num-blocks",
        "4",
        "--per-request",
        out,
        "--json",
    )
    ran = kvtool(*command, "--on-stall", "stop")
    assert [line["status"] for line in read(out)] == ["unfinished", "unfinished"]
    assert ran.json["rows"][0]["unfinished"] == 2
    assert "--on-stall stop ended the run" in " ".join(ran.json["notes"])
    ran = kvtool(*command)
    assert [line["status"] for line in read(out)] == ["aborted", "done"]
    assert ran.json["rows"][0]["ttft_s_p50"] is not None


def test_a_trace_that_names_blocks_is_cached(kvtool: Kvtool, tmp_path: Path) -> None:
    lines = [
        {"timestamp": t, "input_length": n, "output_length": 9, "hash_ids": ids}
        for t, n, ids in ((0, 1024, [1, 2]), (9000, 1100, [1, 2, 3]), (9000, 600, [4, 2]))
    ]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    limits = ("--num-blocks", "200,20", "--block-size", "64", "--prefix-caching")
    first = kvtool("simulate", "--requests", source, "--num-blocks", "200", *limits[2:],
                   "--per-request", out, "--json")  # fmt: skip
    assert [line["cached_tokens_first"] for line in read(out)] == [0, 1024, 0]
    (row,) = first.json["rows"]
    assert (row["queried_tokens"], row["hit_tokens"], row["evictions"]) == (2724, 1024, 0)
    assert row["prefix_caching"] is True
    text = kvtool("simulate", "--requests", source, *limits).out
    assert "hit rate" in text
    assert "37.6%" in text
    said = kvtool("simulate", "--requests", source, "--num-blocks", "200", *limits[2:]).out
    assert "1,024 of 2,724 prompt tokens were cached, 37.6%; 0 evictions." in said
    without = kvtool("simulate", "--requests", source, "--num-blocks", "200", "--json").json
    assert without["rows"][0]["hit_tokens"] == 0
    assert any("not read: hash_ids" in note for note in without["notes"])


def test_priorities_are_said_to_be_there_or_not(kvtool: Kvtool, tmp_path: Path) -> None:
    alike = [{"prompt_tokens": 20, "output_tokens": 5} for _ in range(4)]
    apart = [{**line, "priority": 4 - k} for k, line in enumerate(alike)]
    out = tmp_path / "out.jsonl"
    one = ("--num-blocks", "9", "--max-num-seqs", "1", "--per-request", out)
    for lines, policy, says, order in (
        (alike, "priority", "all requests have one priority", [0, 5, 10, 15]),
        (apart, "fcfs", "priorities are not looked at", [0, 5, 10, 15]),
        (apart, "priority", "", [15, 10, 5, 0]),
    ):
        source = write(tmp_path / "in.jsonl", lines)
        ran = kvtool("simulate", "--requests", source, *one, "--policy", policy)
        notes = ("all requests have one priority", "priorities are not looked at")
        assert [note for note in notes if note in ran.err] == ([says] if says else [])
        assert [line["admit_step"] for line in read(out)] == order


def test_segments_that_do_not_add_up_are_an_error_of_two_lines(
    kvtool: Kvtool, tmp_path: Path
) -> None:
    line = {"prompt_tokens": 20, "output_tokens": 5, "segments": [1, 0, 19], "out_stream": 7}
    source = write(tmp_path / "in.jsonl", [line])
    ran = kvtool("simulate", "--requests", source, "--num-blocks", "9", "--prefix-caching")
    assert ran.code == 1
    assert len(ran.err.strip().splitlines()) == 2
    assert "line 1: segments: 19 tokens, where prompt_tokens is 20" in ran.err


# --- times ----------------------------------------------------------------------------------------


class EveryToken(Scheduler):
    """The plain scheduler that writes down when each token of each request came."""

    def _process(self, scheduled: list[tuple[Request, int]]) -> None:
        for request, _ in scheduled:
            if request.computed == request.num_tokens:
                self.times.setdefault(request.index, []).append(self.clock_ns)
        super()._process(scheduled)

    times: dict[int, list[int]]


def nearest_rank(values: list[float], percent: int) -> float | None:
    """The definition, on a sorted list."""
    return sorted(values)[max(1, ceil(len(values) * percent / 100)) - 1] / 1e9 if values else None


def check_times(asked: Requests, limits: Settings) -> dict[str, Any]:
    """The row of the fast engine against the times of every token."""
    scheduler = EveryToken(asked, limits, Paged(limits))
    scheduler.times = {}
    scheduler.run()
    outcomes, times = scheduler.result.outcomes, scheduler.times
    arrivals = asked.arrival_ns.tolist()
    ended = [k for k, one in enumerate(outcomes) if STATUSES[one.status] in ("done", "cut")]
    values: dict[str, list[float]] = {
        "ttft": [times[k][0] - arrivals[k] for k in ended],
        "itl": [b - a for tokens in times.values() for a, b in pairwise(tokens)],
        "e2e": [times[k][-1] - arrivals[k] for k in ended],
        "tpot": [
            (times[k][-1] - times[k][0]) / (len(times[k]) - 1) for k in ended if len(times[k]) > 1
        ],
    }
    found = replay.replay(asked, limits)
    row = row_of(found, asked, limits)
    for name, of in values.items():
        if name == "itl" and found.gaps is None:
            continue
        for percent in (50, 90, 99):
            assert row[f"{name}_s_p{percent}"] == nearest_rank(of, percent), (name, percent)
    return row


def test_times_are_those_of_every_token_through_preemptions() -> None:
    rng = np.random.default_rng(3)
    asked = requests(
        rng.integers(1, 90, 150).tolist(),
        rng.integers(1, 60, 150).tolist(),
        np.cumsum(rng.integers(0, 40_000_000, 150)).tolist(),
    )
    row = check_times(asked, Settings(num_blocks=12, max_num_seqs=16, max_batched_tokens=64))
    assert row["preemptions"] > 20
    assert row["itl_s_p99"] > 2 * row["itl_s_p50"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_requests(30, 40), drawn_settings(40))
def test_both_engines_give_the_same_row(asked: Requests, limits: Settings) -> None:
    limits = replace(limits, preemption="recompute", cpu_blocks=0)
    row = check_times(asked, limits)
    other = row_of(replay._run_blocks(asked, limits, lambda ended: None, None), asked, limits)
    if row["itl_s_p50"] is None:
        other |= {name: None for name in other if name.startswith("itl")}
    assert row == other
    steps = run_plain(Case(requests=asked, settings=limits)).steps()
    assert row["waiting_steps"] == sum(waiting > 0 for waiting in steps["waiting"])
    assert row["waiting_steps"] == sum(
        row[f"waiting_for_{what}_steps"] for what in ("seqs", "tokens", "blocks")
    )


def test_percentiles_are_by_nearest_rank_and_weighted() -> None:
    values = np.array([30, 10, 20])
    assert percentiles(values) == [20, 30, 30]
    assert percentiles(values, np.array([1, 98, 1])) == [10, 10, 20]
    assert percentiles(values, np.array([0, 0, 0])) == [None] * 3
    assert percentiles(values[:0]) == [None] * 3
    assert percentiles(np.arange(1, 101)) == [50, 90, 99]


def test_rates_count_from_the_first_arrival(kvtool: Kvtool, tmp_path: Path) -> None:
    lines = [{"arrival_ns": 5_000_000_000, "prompt_tokens": 10, "output_tokens": 5}]
    source = write(tmp_path / "in.jsonl", lines)
    law = "base_ns=100000000,token_ns=0,context_ns=0"
    ran = kvtool("simulate", "--trace", source, "--num-blocks", "9", "--step-time", law, "--json")
    row = ran.json["rows"][0]
    assert (row["end_ns"], row["span_s"]) == (5_500_000_000, 0.5)
    assert (row["output_tokens_per_s"], row["requests_per_s"]) == (10.0, 2.0)
    assert (row["ttft_s_p50"], row["tpot_s_p50"], row["itl_s_p99"]) == (0.1, 0.1, 0.1)
    none = kvtool(
        "simulate", "--trace", source, "--num-blocks", "9", "--json", "--step-time",
        "base_ns=0,token_ns=0,context_ns=0",
    ).json["rows"][0]  # fmt: skip
    assert (none["span_s"], none["requests_per_s"], none["e2e_s_p50"]) == (0.0, None, 0.0)


# --- rows and lists -------------------------------------------------------------------------------


def test_a_row_has_what_the_contract_names(kvtool: Kvtool, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", HUNDRED)
    found = kvtool("simulate", "--requests", source, *TIGHT, "--json").json
    (row,) = found["rows"]
    times = {f"{name}_s_p{p}" for name in ("ttft", "itl", "tpot", "e2e") for p in (50, 90, 99)}
    settings = {one.name for one in fields(Settings)} - {"step_time"}
    assert times | settings <= set(row)
    assert set(row) >= {
        "scheduler", "requests", "base_ns", "token_ns", "context_ns", "policy", "prefix_caching",
        "async_scheduling", "finish_by", "output_tokens_per_s", "requests_per_s", "mean_batch",
        "peak_batch", "recomputed_tokens", "swapped_blocks", "swapped_bytes", "tokens_per_usd", "steps", "end_ns",
        "preemptions", "queried_tokens", "hit_tokens", "requery_tokens", "rehit_tokens",
        "evictions", "scheduled_tokens", "generated_tokens", "finished", "cut", "rejected",
        "aborted", "unfinished", "used_block_steps",
    }  # fmt: skip
    assert (row["scheduler"], row["trace"], row["swapped_bytes"]) == ("chunked", "in.jsonl", None)
    assert (row["num_blocks"], row["max_num_seqs"], row["max_num_active_seqs"]) == (14, 8, 8)
    assert row["finished"] + row["rejected"] + row["aborted"] + row["unfinished"] == 100
    assert row["scheduled_tokens"] == (
        sum(line["prompt_tokens"] + line["output_tokens"] - 1 for line in HUNDRED)
        + row["recomputed_tokens"]
    )
    assert found["params"]["num_blocks"] == "14"
    assert found["params"]["step_time"] is None
    law = StepTime()
    assert (row["base_ns"], row["token_ns"], row["context_ns"], row["read_ns"]) == (
        law.base_ns, law.token_ns, law.context_ns, law.read_ns,
    )  # fmt: skip
    again = kvtool("simulate", "--requests", source, *TIGHT, "--json").json
    assert json.dumps(again["rows"]) == json.dumps(found["rows"])


def test_lists_are_run_in_the_order_given(kvtool: Kvtool, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", HUNDRED)
    lists = ("--num-blocks", "40,20", "--block-size", "16,8", "--watermark", "0,0.25")
    ran = kvtool("simulate", "--requests", source, *lists, "--no-chunked-prefill", "--json")
    names = ("num_blocks", "block_size", "watermark")
    found = ran.json["rows"]
    assert [tuple(row[name] for name in names) for row in found] == [
        (blocks, size, mark) for blocks in (40, 20) for size in (16, 8) for mark in (0.0, 0.25)
    ]
    assert {row["scheduler"] for row in found} == {"continuous"}
    one = kvtool(
        "simulate", "--requests", source, "--num-blocks", "20", "--block-size", "8",
        "--watermark", "0.25", "--no-chunked-prefill", "--json",
    )  # fmt: skip
    assert one.json["rows"] == found[-1:]
    text = kvtool("simulate", "--requests", source, *lists).out
    assert "num blocks" in text
    assert "Most output tokens/s" in text


def test_the_defaults_are_those_of_the_scheduler() -> None:
    defaults = {
        name: option
        for name, option in defaults_of(command.simulate).items()
        if name in {one.name for one in fields(Settings)} - {"num_blocks"}
    }
    assert len(defaults) == 20
    assert [Settings(num_blocks=1, **one) for one in scheduler_grid(defaults)] == [
        Settings(num_blocks=1)
    ]
    assert scheduler_grid({}) == [{}]
    assert scheduler_grid({"step_time": "token_ns=7"}) == [{"step_time": StepTime(token_ns=7)}]


def test_the_ways_to_finish_are_one_schedule(kvtool: Kvtool, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", HUNDRED)
    ways = [
        kvtool("simulate", "--requests", source, *TIGHT, "--finish-by", way, "--json").json["rows"][
            0
        ]
        for way in ("max-tokens", "eos")
    ]
    assert ways[0].pop("finish_by") != ways[1].pop("finish_by")
    assert ways[0] == ways[1]


def test_who_is_not_served_is_told(kvtool: Kvtool, tmp_path: Path) -> None:
    lines = [
        {"prompt_tokens": 200, "output_tokens": 1},
        {"prompt_tokens": 60, "output_tokens": 1},
        {"prompt_tokens": 90, "output_tokens": 50},
        {"prompt_tokens": 4, "output_tokens": 4},
    ]
    source = write(tmp_path / "in.jsonl", lines)
    limits = ("--max-model-len", "100", "--num-blocks", "5", "--max-batched-tokens", "64")
    ran = kvtool("simulate", "--requests", source, *limits, "--block-size", "16")
    assert ran.code == 0
    assert (
        "1 of 4 requests rejected: the prompt is empty, or not shorter than --max-model-len"
        in ran.err
    )
    assert "1 of 4 requests aborted: larger than the pool, 80 tokens" in ran.err
    assert "it has no arrivals" in ran.err
    assert "2 of 4 requests are served" in ran.out
    assert "Not served: 1 rejected" in ran.out
    whole = kvtool(
        "simulate", "--requests", source, *limits, "--no-chunked-prefill", "--num-blocks", "90"
    )
    assert "1 of 4 requests aborted: without chunked prefill" in whole.err
    cut = kvtool("simulate", "--requests", source, *limits, "--num-blocks", "90")
    assert "1 of 4 requests cut" in cut.err
    silent = kvtool("simulate", "--requests", source, *limits, "-q")
    assert silent.err == ""


def test_a_step_that_cannot_serve_all_that_decode_has_no_itl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = requests([4] * 8, [6] * 8)
    run = engine.Engine.run

    def skipping(self: engine.Engine) -> engine.Engine:
        run(self).state.run.skips += 1
        return self

    monkeypatch.setattr(engine.Engine, "run", skipping)
    limits = Settings(num_blocks=40)
    row = row_of(replay.replay(asked, limits), asked, limits)
    assert row["itl_s_p50"] is None
    assert row["tpot_s_p50"] is not None


def test_what_binds_is_named() -> None:
    asked = requests([30] * 60, [20] * 60)
    found = {}
    for name, limits in {
        "max_num_seqs": Settings(num_blocks=1000, max_num_seqs=4),
        "num_blocks": Settings(num_blocks=12),
        "max_batched_tokens": Settings(num_blocks=1000, max_batched_tokens=64),
        None: Settings(num_blocks=1000),
    }.items():
        found[name] = row_of(replay.replay(asked, limits), asked, limits)["binds"]
        whole = replace(limits, chunked_prefill=False)
        assert row_of(replay.replay(asked, whole), asked, whole)["binds"] == name
    assert list(found) == list(found.values())


# --- files, refusals and interrupts ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says", "code"),
    [
        (["--prefix-caching"], "in.jsonl does not say what its prompts consist of", 1),
        (["--policy", "priority", "--async-scheduling"], "was not measured", 1),
        (["--policy", "lifo"], "--policy: 'lifo' is not known", 2),
        (["--on-stall", "abort"], "--on-stall: 'abort' is not known", 2),
        (["--finish-by", "eot"], "--finish-by: 'eot' is not known", 2),
        (["--watermark", "1"], "--watermark: '1' is not a share", 2),
        (["--watermark", "nan"], "--watermark: 'nan' is not a share", 2),
        (["--watermark", "-0.1"], "--watermark: '-0.1' is not a share", 2),
        (["--step-time", "base=1"], "--step-time: 'base' is not known", 2),
        (["--step-time", "base_ns=1.5"], "base_ns takes whole ns", 2),
        (["--step-time", "base_ns=1000000000001"], "base_ns takes whole ns", 2),
        (["--step-time", "base_ns=1,base_ns=2"], "'base_ns' is given twice", 2),
        (["--block-size", "65537"], "--block-size: 65,537 is out of range", 2),
        (["--num-blocks", "0"], "--num-blocks: 0 is out of range", 2),
        (["--max-num-seqs", "100000"], "--max-num-seqs: 100,000 is out of range", 2),
        (["--num-blocks", "2000m", "--block-size", "1024"], "more than 2^40 tokens", 2),
        (["--num-blocks", "1..1000", "--block-size", "1..1000"], "1,000,000 rows are too many", 2),
        (["--num-blocks", "1,2", "--per-request", "x.jsonl"], "are of one run", 2),
        (["--per-request", "x.json"], "it is written as JSON lines", 2),
        (["--per-step", "nowhere/x.jsonl"], "the folder does not exist", 1),
        (["--per-step", "x.jsonl", "--per-request", "./x.jsonl"], "name one file", 2),
        (["--per-step", "in.jsonl"], "it is the file that is read", 2),
        (["-o", "in.jsonl"], "it is the file that is read", 2),
        (["--trace-format", "azur"], "no format of traces is called 'azur'", 2),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_before_it_costs_anything(
    argv: list[str], says: str, code: int, kvtool: Kvtool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", HUNDRED)
    before = (tmp_path / "in.jsonl").read_bytes()
    asked = argv if "--num-blocks" in argv else ["--num-blocks", "20", *argv]
    ran = kvtool("simulate", "--requests", "in.jsonl", *asked, "--json")
    assert ran.code == code
    assert says in ran.json["error"]["message"]
    assert ran.json["rows"] == []
    assert ran.json["params"]["requests"] == "in.jsonl" or "-o" in argv
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert (tmp_path / "in.jsonl").read_bytes() == before
    assert len(ran.err.strip().splitlines()) == 2


def test_unsupported_is_a_code_of_its_own(kvtool: Kvtool, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", HUNDRED)
    both = ("--policy", "priority", "--async-scheduling")
    ran = kvtool("simulate", "--requests", source, *TIGHT, *both, "--json")
    assert ran.json["error"] == {
        "code": "unsupported",
        "message": "--policy priority with --async-scheduling: what vLLM does was not measured",
        "hint": "leave out one of them",
    }


@pytest.mark.parametrize("law", ["context_ns=1000000000000", "token_ns=1000000000000"])
def test_a_clock_beyond_64_bits_is_refused(law: str) -> None:
    ((limits),) = scheduler_grid({"step_time": law})
    most = requests([8000] * 9, [100] * 9)
    with pytest.raises(KvtoolError, match=r"2\^6[23] ns"):
        replay.replay(
            requests([2**30], [2**40]),
            Settings(num_blocks=2**26, **limits | {"max_model_len": 2**40}),
        )
    assert replay.replay(most, Settings(num_blocks=4000, **limits)).steps["end_ns"][-1] > 0


@pytest.mark.parametrize("dependent", [False, True])
def test_a_clock_that_goes_over_in_many_steps_is_seen(dependent: bool) -> None:
    asked = requests([1, 1], [60_000, 1], [2**60, -1 if dependent else 2**60])
    if dependent:
        asked = replace(asked, parent=np.array([-1, 0]), think_ns=np.array([0, 0]))
    law = StepTime(base_ns=10**12, token_ns=10**12, context_ns=10**10)
    with pytest.raises(KvtoolError, match=r"2\^63 ns"):
        replay.replay(asked, Settings(num_blocks=5000, max_model_len=2**16, step_time=law))


def test_a_file_that_cannot_be_written_costs_no_row_and_no_file(
    kvtool: Kvtool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write(tmp_path / "in.jsonl", HUNDRED), tmp_path / "out.jsonl"
    out.write_text("before")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    ran = kvtool("simulate", "--requests", source, *TIGHT, "--per-request", out, "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "write_failed"
    assert len(ran.json["rows"]) == 1
    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("dependent", [False, True])
def test_an_interrupt_keeps_what_was_done(
    dependent: bool, kvtool: Kvtool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [dict(line) for line in HUNDRED]
    if dependent:
        lines[-1] |= {"arrival_ns": -1, "parent": 0, "think_ns": 0}
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    advance, blocks_advance = kernel.advance, blocks_kernel.advance

    def interrupted(state: Any, queue: Any, last: bool, most: int) -> int:
        advance(state, queue, last, 300)
        raise KeyboardInterrupt

    def stopped(state: Any, most: int) -> int:
        while state.run.step < 300:
            blocks_advance(state, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel, "advance", interrupted)
    monkeypatch.setattr(blocks_kernel, "advance", stopped)
    command = ("simulate", "--requests", source, "--max-num-seqs", "8", "--json")
    ran = kvtool(*command, "--num-blocks", "14", "--per-request", out)
    assert ran.code == 130
    assert ran.json["error"]["code"] == "interrupted"
    (row,) = ran.json["rows"]
    assert row["steps"] == 300
    assert row["unfinished"] > 0
    assert row["itl_s_p50"] > 0
    assert not out.exists()
    assert f"interrupted after {100 - row['unfinished']} of 100 requests" in ran.json["notes"][-1]
    assert len(kvtool(*command, "--num-blocks", "14,20").json["rows"]) == 1


def test_the_first_run_says_that_it_compiles(
    kvtool: Kvtool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", HUNDRED)
    monkeypatch.setattr(engine, "compiles", lambda: True)
    said = "compiling the simulator, once on this machine"
    ran = kvtool("simulate", "--requests", source, *TIGHT, "--json")
    assert said in ran.err
    assert said not in ran.out
    assert said not in kvtool("simulate", "--requests", source, *TIGHT, "-q").err


def test_requests_from_standard_input(
    kvtool: Kvtool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", HUNDRED)
    by_name = kvtool("simulate", "--requests", source, *TIGHT, "--json").json["rows"]
    with Path(source).open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        ran = kvtool("simulate", "--trace", "-", *TIGHT, "--json")
    assert [{**row, "trace": "in.jsonl"} for row in ran.json["rows"]] == by_name

"""What `kvtool simulate` says first, which row it names the best, and what it refuses at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtool.requests import Requests
from kvtool.sim.replay import replay
from kvtool.sim.settings import Settings, StepTime
from kvtool.simulate import growth_of
from kvtool.timeline import timeline_of
from kvtool.view.timeline import timeline_chart

CHAT = ("simulate", "--workload", "chat", "--num-requests", "400", "--num-blocks", "4000", "-q")
QUICK = "base_ns=1000000,token_ns=10000,context_ns=10"


@pytest.fixture
def said(kvtool: Any) -> Any:
    def run(*words: str, code: int = 0) -> str:
        ran = kvtool(*CHAT, "--step-time", QUICK, *words)
        assert ran.code == code, ran.err
        return ran.out

    return run


def at(ns: list[int], output: int = 1) -> Requests:
    """Requests of one prompt token at these times."""
    return Requests(
        arrival_ns=np.array(ns, np.int64), prompt_tokens=np.ones(len(ns), np.int64),
        output_tokens=np.full(len(ns), output, np.int64),
    )  # fmt: skip


# --- first


def test_what_changes_the_meaning_of_the_times_is_said_before_them(said: Any) -> None:
    assert said("--rate", "500").startswith("The queue grows without bound: ")
    assert said().startswith("All requests wait from the start: TTFT and E2E are of a queue")
    assert said("--rate", "200", "--num-requests", "20").startswith("The arrivals last ")
    assert said("--rate", "2").startswith("output tokens/s")
    found = said("--slo", "ttft=100ms,tpot=10ms", "--find-rate")
    assert found.startswith("The highest rate that keeps the objective: ")
    several = said("--rate", "2,500")
    assert several.startswith("The queue grows without bound with rate 500: ")


def test_times_are_of_who_is_served(kvtool: Any, tmp_path: Path) -> None:
    place = tmp_path / "in.jsonl"
    lines = [{"arrival_ns": k * 10**8, "prompt_tokens": 10 if k % 2 else 5000, "output_tokens": 2}
             for k in range(40)]  # fmt: skip
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = kvtool("simulate", "--requests", str(place), "--num-blocks", "50", "-q").out
    assert out.startswith("Times are of the 20 of 40 requests that are served.")


def test_a_markdown_page_has_it_first_too(kvtool: Any) -> None:
    out = kvtool(*CHAT, "--step-time", QUICK, "--rate", "500", "--format", "md").out
    assert out.startswith("The queue grows without bound: ")


# --- best


def test_the_best_is_named_by_the_objective_among_those_with_an_end(said: Any) -> None:
    out = said("--rate", "2,8,500", "--slo", "ttft=1s,tpot=50ms")
    assert "Of the 2 rows without an endless queue that served most:" in out
    assert "Highest goodput: " in out
    assert "with rate 500" not in out.split("without an endless queue")[1]


def test_what_is_equal_is_not_won(said: Any) -> None:
    out = said("--scheduler", "continuous,chunked", "--rate", "4")
    assert "continuous and chunked make the same schedule" in out
    assert "Most output tokens/s: " in out
    assert "with each of them." in out
    cut = said("--scheduler", "continuous,chunked", "--rate", "4", "--max-batched-tokens", "1100")
    assert "make the same schedule" in cut or "with scheduler" in cut


def test_a_value_given_twice_is_run_once(kvtool: Any) -> None:
    rows = kvtool(*CHAT, "--rate", "5,5", "--json").json["rows"]
    assert len(rows) == 1


# --- costs


def test_what_a_return_finds_in_the_cache_is_not_computed_again(kvtool: Any) -> None:
    words = ("simulate", "--workload", "agent", "--num-requests", "200", "--num-blocks", "2500",
             "--prefix-caching", "--rate", "20", "--step-time", QUICK, "-q")  # fmt: skip
    (row,) = kvtool(*words, "--json").json["rows"]
    assert row["preemptions"] > 0
    assert row["rehit_tokens"] > 0
    lost = row["requery_tokens"] - row["rehit_tokens"]
    assert row["recomputed_tokens"] <= lost
    assert "more were found in the cache at the return" in kvtool(*words).out


def test_swaps_that_take_no_time_are_said_to(kvtool: Any) -> None:
    words = ("simulate", "--workload", "chat", "--num-requests", "200", "--num-blocks", "300",
             "--preemption", "swap", "--cpu-blocks", "1000", "-q")  # fmt: skip
    assert "taken to last no time: give --swap-bandwidth" in kvtool(*words).out


def test_static_batches_wait_for_the_batch(kvtool: Any) -> None:
    words = ("simulate", "--workload", "chat", "--num-requests", "60", "--num-blocks", "90000",
             "--scheduler", "static", "--rate", "0.5", "-q")  # fmt: skip
    (row,) = kvtool(*words, "--json").json["rows"]
    assert row["binds"] == "batch"
    assert row["waiting_for_blocks_steps"] == 0
    assert "The static batch binds" in kvtool(*words).out
    noted = kvtool(*words[:-1], "--watermark", "0.5").err
    assert "static batches do not look at --watermark" in noted


# --- growth


def test_a_burst_at_the_end_is_no_queue_without_end() -> None:
    law = StepTime(base_ns=10, token_ns=0, context_ns=0)
    one = Settings(num_blocks=99, block_size=4, max_model_len=16, max_num_seqs=1, step_time=law)
    calm = [k * 100 for k in range(200)]
    assert not growth_of(replay(at([*calm, *[20_000] * 100]), one))["queue_grows"]
    assert growth_of(replay(at([k * 5 for k in range(300)]), one))["queue_grows"]
    assert not growth_of(replay(at([0] * 100 + [10 + k * 100 for k in range(200)]), one))[
        "queue_grows"
    ]


# --- pictures


def test_between_steps_nothing_runs() -> None:
    law = StepTime(base_ns=10, token_ns=0, context_ns=0)
    settings = Settings(num_blocks=9, block_size=4, max_model_len=16, step_time=law)
    found = replay(at([0, 1000]), settings)
    line = timeline_of("x", found, settings)
    widths = np.diff([0.0, *line.end_s])
    assert float((np.array(line.batch) * widths).sum()) == pytest.approx(20e-9)
    assert line.last_arrival_s == pytest.approx(1e-6)


def test_each_panel_has_its_own_quantity(kvtool: Any) -> None:
    law = StepTime(base_ns=10, token_ns=0, context_ns=0)
    settings = Settings(
        num_blocks=4, block_size=2, max_model_len=16, max_num_seqs=2, step_time=law
    )  # fmt: skip
    found = replay(at([0, 0, 0, 5], output=6), settings)
    assert found.preemptions > 0
    line = timeline_of("x", found, settings)
    rows = kvtool(*CHAT, "--rate", "4", "--json").json["rows"]
    charts = timeline_chart([line], rows)
    drawn = {chart.title: chart.lines[0].y for chart in charts.charts}
    assert drawn["requests in a step"] == line.batch
    assert drawn["requests that wait"] == line.waiting
    assert drawn["the pool"] == tuple(100 * share for share in line.used_share)
    assert drawn["preemptions so far"] == line.preemptions
    assert line.preemptions[-1] == found.preemptions
    assert max(line.used_share) < 1.01 < max(line.waiting) + max(line.batch)
    assert charts.title.startswith("chat, 4 requests/s")
    calm = timeline_of("x", replay(at([0]), settings), settings)
    assert "preemptions so far" not in {c.title for c in timeline_chart([calm], rows).charts}


# --- refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prefix-caching",), "--workload chatter, of which there are lengths alone"),
        (("--num-requests", "1000000000"), "1,000,000,000 requests are more than 33,554,432"),
        (("--rate", "1_0"), "'1_0' is no rate"),
        (("--rate", "٣"), "is no rate"),
        (("--rate", "trace"), "--rate trace is of a file"),
        (("--rate", ",".join(map(str, range(1, 12_000)))), "rows are too many"),
        (("--trace-format", "azure"), "--trace-format is of a file"),
        (("--efficiency", "0.4"), "--efficiency is of a GPU's roofline"),
        (("--scheduler", "chunked", "--no-chunked-prefill"), "exclude each other"),
    ],
)
def test_words_that_cannot_be_meant(kvtool: Any, words: tuple[str, ...], message: str) -> None:
    name = "vllm-paper" if "chatter" in message else "chat"
    asked = ("simulate", "--workload", name, "--num-blocks", "4000", *words)
    ran = kvtool(*asked)
    assert ran.code in (1, 2)
    assert len(ran.err.strip().splitlines()) == 2, ran.err
    assert message.replace("chatter", "vllm-paper") in ran.err


def test_a_workload_is_the_same_with_and_without_a_cache(kvtool: Any) -> None:
    shared = ("simulate", "--workload", "multi-turn-chat", "--num-requests", "400", "--num-blocks", "4000",
              "-q", "--rate", "4", "--json")  # fmt: skip
    (cached,) = kvtool(*shared, "--prefix-caching").json["rows"]
    (plain,) = kvtool(*shared).json["rows"]
    assert cached["hit_tokens"] > 0 == plain["queried_tokens"]
    assert cached["generated_tokens"] == plain["generated_tokens"]
    ran = kvtool(*CHAT, "--prefix-caching", "--rate", "4")
    assert (ran.code, "such as multi-turn-chat" in ran.err) == (2, True)


def test_files_that_are_read_are_not_overwritten(kvtool: Any, tmp_path: Path) -> None:
    place = tmp_path / "emp.jsonl"
    place.write_text('{"prompt_tokens": 9, "output_tokens": 9}\n' * 20)
    before = place.read_text()
    ran = kvtool("simulate", "--dist", f"empirical:{place}", "--num-requests", "5", "--num-blocks",
                 "99", "--per-request", str(place))  # fmt: skip
    assert ran.code == 2
    assert "it is the file that is read" in ran.err
    fit = tmp_path / "fit.json"
    fit.write_text("{}")
    ran = kvtool("simulate", "--calibrate", str(fit), "--num-blocks", "99", "-o", str(fit))
    assert ran.code == 2
    assert place.read_text() == before
    assert fit.read_text() == "{}"


def test_a_request_has_its_arrival_and_its_prompt_in_the_file(kvtool: Any, tmp_path: Path) -> None:
    place = tmp_path / "out.jsonl"
    ran = kvtool(*CHAT, "--rate", "4", "--per-request", str(place), "--json")
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    times = sorted(line["first_token_ns"] - line["arrival_ns"] for line in lines)
    assert times[len(times) // 2 - 1] / 1e9 == ran.json["rows"][0]["ttft_s_p50"]
    assert min(line["prompt_tokens"] for line in lines) > 0


# --- interrupted, and what a rate cannot be found for


def test_an_interrupt_between_two_runs_keeps_the_rows(
    kvtool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtool.cli import simulate_run

    seen: list[int] = []

    def notes_of(*_: Any, **__: Any) -> list[str]:
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(simulate_run, "notes_of", notes_of)
    ran = kvtool(*CHAT, "--rate", "1,2,3", "--json")
    assert ran.code == 130
    assert ran.json["rows"][0]["rate"] == "1"
    assert ran.json["error"]["code"] == "interrupted"


def test_a_rate_that_is_not_found_costs_its_case_alone(kvtool: Any) -> None:
    words = ("simulate", "--dist", "fixed:300", "--num-requests", "100", "--slo", "ttft=1s",
             "--find-rate", "-q", "--json")  # fmt: skip
    ran = kvtool(*words, "--num-blocks", "10,1000")
    assert ran.code == 1
    assert [row["num_blocks"] for row in ran.json["rows"]] == [1000]
    assert ran.json["error"]["code"] == "no_rate"
    assert "num blocks 10:" in ran.json["error"]["message"]
    still = kvtool(
        *words, "--num-blocks", "1000", "--step-time", "base_ns=0,token_ns=0,context_ns=0"
    )
    assert "its steps take no time" in still.err


def test_a_run_that_is_no_run_is_refused(kvtool: Any, tmp_path: Path) -> None:
    for name, text in (
        ("deep", "[" * 100_000),
        ("rows", '{"rows": 5}'),
        ("huge", '{"rows": [{}]}'),
    ):
        place = tmp_path / f"{name}.json"
        place.write_text(text)
        ran = kvtool("simulate", "--num-blocks", "99", "--calibrate", str(place), "--json")
        assert ran.json["error"]["code"] == "not_calibrated", name
    ran = kvtool("simulate", "--num-blocks", "99", "--calibrate", "/dev/zero", "--json")
    assert ran.json["error"]["code"] == "not_calibrated"

"""`kvtool simulate` over time: made requests, a GPU's clock, objectives, the highest rate, pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtool.requests import Requests
from kvtool.sim.replay import replay
from kvtool.sim.settings import Settings, StepTime
from kvtool.simulate import growth_of
from kvtool.timeline import timeline_of

ON_H100 = ("--model", "llama-3-8b", "--gpu", "h100", "--num-requests", "300")


@pytest.fixture
def rows(kvtool: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    """The rows of `kvtool simulate …`."""

    def run(*argv: str, code: int = 0) -> list[dict[str, Any]]:
        ran = kvtool("simulate", *argv, "--json")
        assert ran.code == code, ran.err
        found: list[dict[str, Any]] = ran.json["rows"]
        return found

    return run


def test_a_gpu_gives_the_pool_and_the_clock(rows: Any, kvtool: Any) -> None:
    (row,) = rows(*ON_H100, "--workload", "chat", "--rate", "4")
    assert (row["model"], row["gpu"], row["num_gpus"]) == ("llama-3-8b", "h100-sxm", 1)
    assert row["num_blocks"] * 16 * 131_072 == pytest.approx(56.7 * 2**30, rel=0.01)
    assert row["read_ns"] == round((16_060_522_496 - 128_256 * 4096 * 2) / (3350 * 0.8))
    assert row["workload"] == "chat"
    assert row["trace"] is None
    # Nobody waits for long: a prefill and a step or two in the way.
    assert 0.006 < row["ttft_s_p50"] < 0.05
    assert row["itl_s_p50"] > (row["base_ns"] + row["read_ns"]) / 1e9
    assert row["usd_per_hour"] > 0
    assert row["tokens_per_usd"] == pytest.approx(
        row["output_tokens_per_s"] * 3600 / row["usd_per_hour"]
    )
    (priced,) = rows(*ON_H100, "--workload", "chat", "--rate", "4", "--price", "1")
    assert priced["tokens_per_usd"] == pytest.approx(row["output_tokens_per_s"] * 3600)
    basis = "a roofline of llama-3-8b on h100-sxm at 0.8 of the bandwidth and 0.5 of the peak"
    assert row["step_time_basis"] == f"{basis}, an estimate"
    assert f"{basis}, an estimate." in kvtool("simulate", *ON_H100).out


def test_static_batches_serve_less_than_continuous_ones(rows: Any) -> None:
    found = rows(*ON_H100, "--workload", "chat", "--scheduler", "static,continuous,chunked")
    static, continuous, chunked = found
    assert [row["scheduler"] for row in found] == ["static", "continuous", "chunked"]
    assert {row["finished"] for row in found} == {300}
    assert {row["generated_tokens"] for row in found} == {static["generated_tokens"]}
    assert static["output_tokens_per_s"] < continuous["output_tokens_per_s"]
    assert chunked["chunked_prefill"] > continuous["chunked_prefill"]


def test_the_same_requests_come_at_another_rate(rows: Any) -> None:
    found = rows(*ON_H100, "--workload", "chat", "--rate", "2,20,saturated")
    assert [row["rate"] for row in found] == ["2", "20", "saturated"]
    assert found[0]["arrivals_per_s"] == pytest.approx(2, rel=0.25)
    assert found[1]["arrivals_per_s"] == pytest.approx(20, rel=0.25)
    assert found[2]["arrivals_per_s"] is None
    assert found[0]["e2e_s_p99"] < found[1]["e2e_s_p99"] < found[2]["e2e_s_p99"]


def test_a_file_has_its_own_times_or_a_rate(rows: Any, tmp_path: Path) -> None:
    place = tmp_path / "in.jsonl"
    lines = [{"arrival_ns": k * 10**9, "prompt_tokens": 40, "output_tokens": 5} for k in range(50)]
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("--requests", str(place), "--num-blocks", "100")
    (own,) = rows(*words)
    assert (own["rate"], own["trace"]) == ("trace", "in.jsonl")
    assert own["arrivals_per_s"] == pytest.approx(1.0)
    fast, all_now, few = (
        rows(*words, *more)[0]
        for more in (("--rate", "100"), ("--rate", "saturated"), ("--num-requests", "7"))
    )
    assert fast["arrivals_per_s"] == pytest.approx(100, rel=0.5)
    assert all_now["arrivals_per_s"] is None
    assert few["requests"] == 7


def test_an_objective_and_the_highest_rate_that_keeps_it(rows: Any, kvtool: Any) -> None:
    words = (*ON_H100, "--workload", "chat", "--slo", "ttft=500ms,tpot=20ms")
    (found,) = rows(*words, "--find-rate")
    rate = float(found["rate"])
    assert found["slo_met_share"] >= 0.99
    assert (found["slo_ttft_s"], found["slo_tpot_s"], found["slo_e2e_s"]) == (0.5, 0.02, None)
    (at,) = rows(*words, "--rate", found["rate"])
    assert at["slo_met_share"] == pytest.approx(found["slo_met_share"], abs=0.01)
    # Twice as many requests, of another seed, have to keep it too: they decide.
    above_it = (*words, "--seed", "1", "--num-requests", "600", "--rate", str(round(rate * 1.3, 3)))
    (above,) = rows(*above_it)
    assert above["slo_met_share"] < 0.99
    assert 0 < above["goodput_requests_per_s"] < above["requests_per_s"]
    ran = kvtool("simulate", *words[:-1], "ttft=1ms", "--find-rate", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (1, "no_rate")
    assert "no rate keeps the objective" in ran.err


def test_a_queue_without_end_is_said_first(kvtool: Any, rows: Any) -> None:
    words = ("--workload", "chat", "--num-requests", "2000", "--num-blocks", "200",
             "--step-time", "base_ns=20000000")  # fmt: skip
    said = kvtool("simulate", *words, "--rate", "50").out
    assert said.startswith("The queue grows without bound: ")
    assert rows(*words, "--rate", "50")[0]["queue_grows"]
    assert not rows(*words, "--rate", "0.5")[0]["queue_grows"]
    assert "grows without bound" not in kvtool("simulate", *words, "--rate", "0.5").out


def test_growth_is_of_arrivals_and_not_of_the_end() -> None:
    requests = Requests(
        arrival_ns=np.arange(200) * 10, prompt_tokens=np.full(200, 4), output_tokens=np.full(200, 4)
    )
    law = StepTime(base_ns=10, token_ns=0, context_ns=0)
    slow = Settings(num_blocks=9, block_size=4, max_model_len=16, max_num_seqs=1, step_time=law)
    wide = Settings(num_blocks=99, block_size=4, max_model_len=16, max_num_seqs=50, step_time=law)
    assert growth_of(replay(requests, slow))["queue_grows"]
    assert not growth_of(replay(requests, wide))["queue_grows"]
    # A queue that grows slowly grows too: 21 ns a request where one comes every 20.
    requests = Requests(
        arrival_ns=np.arange(4000) * 20, prompt_tokens=np.full(4000, 4),
        output_tokens=np.full(4000, 1),
    )  # fmt: skip
    for base_ns, grows in ((21, True), (19, False)):
        law = StepTime(base_ns=base_ns, token_ns=0, context_ns=0)
        one = replace(slow, step_time=law)
        assert growth_of(replay(requests, one))["queue_grows"] == grows


def test_a_picture_over_time(kvtool: Any, tmp_path: Path) -> None:
    place = tmp_path / "run.svg"
    ran = kvtool(
        "simulate",
        *ON_H100,
        "--workload",
        "chat",
        "--scheduler",
        "static,chunked",
        "-o",
        str(place),
    )
    assert ran.code == 0, ran.err
    drawn = place.read_text()
    assert drawn.count('<g id="axes_') == 3  # nobody is preempted


def test_a_timeline_is_the_integral_of_the_steps() -> None:
    requests = Requests(
        arrival_ns=np.array([0, 0, 70]), prompt_tokens=np.array([4, 2, 3]),
        output_tokens=np.array([3, 9, 2]),
    )  # fmt: skip
    law = StepTime(base_ns=10, token_ns=1, context_ns=0)
    settings = Settings(num_blocks=50, block_size=4, max_model_len=50, step_time=law)
    found = replay(requests, settings)
    line = timeline_of("x", found, settings)
    ends = found.steps["end_ns"] / 1e9
    widths = np.diff([0.0, *line.end_s])
    took = np.diff([0.0, *ends.tolist()])
    assert line.end_s[-1] == pytest.approx(ends[-1])
    for name, column in (("batch", "batch"), ("waiting", "waiting")):
        area = float((np.array(getattr(line, name)) * widths).sum())
        assert area == pytest.approx(float((found.steps[column] * took).sum()))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--requests", "x.jsonl", "--workload", "chat"], "--workload says otherwise"),
        (["--find-rate"], "--find-rate is of an objective"),
        (["--slo", "fast"], "is no objective"),
        (["--slo", "ttft=1s", "--find-rate", "--rate", "3"], "looks for the rate"),
        (["--slo", "ttft=1s", "--slo-share", "0.9"], "--slo-share is of --find-rate"),
        (["--gpu", "h100"], "--gpu depends on the model"),
        (["--kv-dtype", "fp8"], "--kv-dtype depends on the model"),
        (["--scheduler", "orca"], "--scheduler: 'orca' is not known"),
        (["--scheduler", "static", "--policy", "priority"], "knows no prefix caching"),
        (["--calibrate", "none.json"], "cannot be read as a saved run"),
        (["--calibrate", "none.json", "--step-time", "token_ns=1"], "both say what a step takes"),
        (["--price", "-1"], "is no price"),
        (["--price", "nan"], "is no number"),
        (["--model", "orion-14b", "--gpu", "h100:4", "--num-blocks", "90"], "orion has no recipe"),
        (["--rate", "never"], "--rate"),
        (["--requests", "none.jsonl"], "none.jsonl"),
    ],
)  # fmt: skip
def test_words_that_are_refused(kvtool: Any, words: list[str], error: str) -> None:
    ran = kvtool("simulate", *words)
    assert ran.code != 0
    assert error in ran.err
    assert ran.err.count("\n") == 2


def test_a_calibrated_clock(rows: Any, kvtool: Any, tmp_path: Path) -> None:
    place = tmp_path / "run.json"
    measured = [
        {
            "run": "uniform", "cache": "paged", "model": "smollm2-135m", "layers": 4, "dtype": "fp32",
            "device": "cpu", "batch": batch, "prompt_tokens": prompt, "output_tokens": 100,
            "ttft_s": (5e6 + 3100 * batch * prompt) / 1e9,
            "tpot_s_p50": (5e6 + 3000 * batch + 100 * batch * (prompt + 50)) / 1e9,
        }
        for batch in (1, 16) for prompt in (128, 2048)
    ]  # fmt: skip
    place.write_text(json.dumps({"rows": measured}))
    words = ("--workload", "chat", "--num-requests", "50", "--num-blocks", "5000")
    (row,) = rows(*words, "--calibrate", str(place))
    assert row["base_ns"] == pytest.approx(5e6, rel=0.01)
    assert row["token_ns"] == pytest.approx(3000, rel=0.02)
    assert row["context_ns"] == pytest.approx(100, abs=2)
    assert "fitted to 8 measured times" in kvtool("simulate", *words, "--calibrate", str(place)).err
    # Nobody asked for a model or a GPU; of another one the times are told to be, and have no price.
    (own,) = rows(*words, "--calibrate", str(place), "--price", "1")
    assert own["usd_per_hour"] == 1
    words = (*ON_H100, "--workload", "chat", "--calibrate", str(place), "--price", "1")
    (other,) = rows(*words)
    assert (other["usd_per_hour"], other["tokens_per_usd"]) == (None, None)
    assert other["base_ns"] == row["base_ns"]
    assert (
        "fitted to smollm2-135m (4 layers, fp32) on cpu, not to llama-3-8b (32 layers, bf16) on h100-sxm: "
        "times are the former's" in kvtool("simulate", *words).err
    )


def test_prompts_that_share_are_cached(rows: Any, kvtool: Any) -> None:
    words = ("--workload", "agent", "--num-requests", "200", "--num-blocks", "60000", "--rate", "2")
    (without,) = rows(*words)
    (cached,) = rows(*words, "--prefix-caching")
    assert (without["hit_tokens"], without["workload"]) == (0, "agent")
    assert cached["hit_tokens"] > 0.8 * cached["queried_tokens"] > 0
    assert cached["generated_tokens"] == without["generated_tokens"]
    assert cached["ttft_s_p50"] < without["ttft_s_p50"]
    assert cached["made"]["num_prefixes"] == 8
    ran = kvtool("simulate", *words, "--prompt-mean", "9")
    assert (ran.code, "has lengths of its own" in ran.err) == (2, True)
    assert "no workload is called 'agentz'" in kvtool("simulate", "--workload", "agentz").err


def test_the_cache_finds_what_the_replay_of_prompts_finds(rows: Any, kvtool: Any) -> None:
    # One request at a time in a pool without end: the scheduler's hits are those of kvtool prefix.
    words = ("--workload", "multi-turn-chat", "--num-requests", "100")
    (timed,) = rows(*words, "--num-blocks", "100000", "--prefix-caching", "--max-num-seqs", "1")
    found = kvtool("prefix", *words, "--index", "hash", "--capacity", "100000", "--json").json[
        "rows"
    ]
    assert timed["queried_tokens"] == found[0]["queried_tokens"]
    assert timed["hit_tokens"] == found[0]["hit_tokens"]

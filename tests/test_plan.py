"""Plans: memory to the byte where it is known, what it holds, how fast; the command line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ran import Ran

from kvtool import catalog
from kvtool.capacity import capacity, max_context
from kvtool.config import load_config
from kvtool.decode_speed import (
    Loads,
    Machine,
    attention_intensity,
    memory_bound_below,
    ridge,
    speed,
    weights_intensity,
)
from kvtool.errors import KvtoolError
from kvtool.model import read_model
from kvtool.plan import PlanCase, plan_row, planned
from kvtool.plan_model import model_for
from kvtool.plan_query import PlanQuery, gpus_named
from kvtool.planning import cases_of, split_of
from kvtool.units import GIB

Kvtool = Callable[..., Ran]


def case(model: str, gpu: str, **more: Any) -> PlanCase:
    """The one case of these words."""
    loaded = load_config(model)
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    query = PlanQuery(gpus=gpus_named(gpu), **more)
    lost: list[KvtoolError] = []
    found = list(cases_of(model_for(loaded, shape, query), query, lost))
    if lost:
        raise lost[0]
    (one,) = found
    return one


def loads(model: str, gpu: str = "h100", **more: Any) -> Loads:
    found = case(model, gpu, **more).loads
    assert found is not None
    return found


# -- memory


def test_lines_add_up_and_keep_their_order() -> None:
    found = case("llama-3.1-70b", "h100:8", engines=("vllm",), reserve=GIB).memory
    assert [line.name for line in found.gives] == [
        "weights", "activations", "CUDA graphs", "context and communication", "reserve",
    ]  # fmt: skip
    assert found.left.best == found.has.range.best - sum(one.range.best for one in found.gives)
    assert found.left.low <= found.left.best <= found.left.high
    for line in (found.has, *found.gives):
        assert 0 <= line.range.low <= line.range.best <= line.range.high
        assert line.basis
    # An eighth of the matrices, and norms whole: 161 of 8,192.
    norms = 161 * 8192 * 2
    assert found.of("weights") == (2 * 70_553_706_496 - norms) // 8 + norms
    assert found.of("reserve") == GIB


def test_memory_that_a_log_prints_is_taken_as_it_is() -> None:
    found = case("llama-3.1-8b", "h100", engines=("vllm",), kv_memory=20 * GIB)
    row = plan_row(planned(found))
    assert row["kv_budget_bytes"] == {"low": 20 * GIB, "best": 20 * GIB, "high": 20 * GIB}
    assert (row["num_blocks"], row["bytes_per_block"]) == (20 * GIB // (16 * 131_072), 16 * 131_072)
    assert row["max_concurrency"] == row["num_blocks"] / 512
    assert row["kv_tokens"] == int(row["max_concurrency"] * 8192)
    assert row["weights_bytes"] == 0


def test_what_is_asked_of_the_engine_is_what_size_says(kvtool: Kvtool) -> None:
    for model in ("gemma-3-27b", "qwen3-next-80b-a3b", "deepseek-v3", "gpt-oss-20b"):
        words = (model, "-c", "8k", "--engine", "vllm", "--kv-memory", "30GiB", "--json", "-q")
        size = kvtool("size", *words).json["rows"][0]
        plan = kvtool("plan", *words, "--gpu", "h200", "--max-batched-tokens", "8192").json["rows"][
            0
        ]
        for name in ("num_blocks", "bytes_per_block", "block_size", "max_concurrency"):
            assert plan[name] == size[name], (model, name)
        assert plan["kv_tokens"] == size["kv_cache_size_tokens"]
        assert plan["request_bytes"] == size["one_request_bytes"]


def test_experts_over_replicas_leave_more_memory() -> None:
    whole = case("qwen3-30b-a3b", "h100:4", tps=(1,))
    spread = case("qwen3-30b-a3b", "h100:4", tps=(1,), expert_parallel=True)
    assert (whole.replicas, spread.replicas) == (4, 4)
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert whole.memory.of("weights") - spread.memory.of("weights") == experts * 3 // 4


def test_a_pipeline_divides_the_layers() -> None:
    alone, staged = case("llama-3.1-8b", "h100"), case("llama-3.1-8b", "h100:2", pps=(2,))
    assert (staged.holder.layout.tp, staged.holder.layout.pp, staged.replicas) == (1, 2, 1)
    assert 0.5 < staged.memory.of("weights") / alone.memory.of("weights") < 0.6
    assert 2 * planned(staged).holds.request_bytes == planned(alone).holds.request_bytes


# -- what it holds


@pytest.mark.parametrize("engine", ["ideal", "vllm"])
def test_the_longest_context_fits_and_a_longer_one_does_not(engine: str) -> None:
    holder = case("llama-3.1-8b", "l4", engines=(engine,)).holder
    for users in (1, 3):
        longest = max_context(holder, 3 * GIB, users)
        assert 0 < longest < 131_072
        step = holder.row(longest)["block_size"] or 1
        assert capacity(holder, longest, 3 * GIB).whole_requests >= users
        assert capacity(holder, longest + step, 3 * GIB).whole_requests < users


def test_a_shortfall_holds_nothing_and_is_no_negative_count() -> None:
    row = plan_row(planned(case("llama-3-70b", "h100", engines=("vllm",))))
    assert row["kv_budget_bytes"]["best"] < 0
    assert (row["num_blocks"], row["kv_tokens"], row["max_concurrency"]) == (0, 0, 0)
    assert (row["fits"], row["binds"], row["max_context"]) == (False, "weights", None)
    request, block = row["request_bytes"], row["bytes_per_block"]  # the null block
    assert row["missing_bytes"] == request + block - row["kv_budget_bytes"]["best"]
    assert row["tpot_s"] is None


def test_sixty_four_users_of_a_70b_at_8k(kvtool: Kvtool) -> None:
    ran = kvtool("plan", "llama-3-70b", "--gpu", "h100", "-c", "8k", "-b", "64", "--json")
    (row,) = ran.json["rows"]
    assert (ran.code, ran.json["error"]["code"]) == (1, "does_not_fit")
    assert row["cache_bytes"] == 160 * GIB
    assert row["weights_bytes"] == 2 * 70_553_706_496
    assert not row["fits"]
    wide = kvtool("plan", "llama-3-70b", "--gpu", "h100:8", "-c", "8k", "-b", "64", "--json")
    assert (wide.code, wide.json["rows"][0]["fits"]) == (0, True)
    assert wide.json["rows"][0]["request_bytes"] == 80 * 2 * 128 * 2 * 8192


def test_replicas_serve_beside_each_other() -> None:
    one = plan_row(planned(case("llama-3.1-8b", "h100", engines=("vllm",))))
    four = plan_row(planned(case("llama-3.1-8b", "h100:4", engines=("vllm",), tps=(1,))))
    assert (four["tp"], four["dp"], four["gpus"]) == (1, 4, 4)
    assert four["max_concurrency"] == 4 * one["max_concurrency"]
    assert four["kv_tokens"] == one["kv_tokens"]
    assert four["output_tokens_per_s"] == pytest.approx(4 * one["output_tokens_per_s"])
    assert four["usd_per_million_tokens"] == pytest.approx(one["usd_per_million_tokens"])
    split = plan_row(planned(case("llama-3.1-8b", "h100:4", tps=(1,), users=(10,))))
    assert split["batch"] == 3


def test_gpus_that_are_left_over_are_refused() -> None:
    (gpus,) = gpus_named("h100:8")
    with pytest.raises(KvtoolError, match="8 GPUs are no"):
        split_of(gpus, 3, 1, None)
    split = split_of(gpus, None, 2, 2)
    assert (split.tp, split.pp, split.replicas) == (2, 2, 2)


# -- speed


def test_a_step_of_llama_3_8b_by_hand() -> None:
    """7,504,658,432 parameters are read without the table, 131,072 B a token of cache."""
    found, machine = loads("llama-3-8b"), Machine(bandwidth=3.35e12, flops=989e12)
    assert found.dense_bytes == 2 * (8_030_261_248 - 128_256 * 4096)
    assert found.token_flops == 2 * 7_504_658_432
    step = speed(found, machine, batch=16, context=4096)
    assert step.cache_bytes == 16 * 4096 * 131_072
    reading = (found.dense_bytes + step.cache_bytes) / 3.35e12 / 0.8
    assert step.tpot_s == pytest.approx(0.001 + reading)
    assert step.output_tokens_per_s == pytest.approx(16 / step.tpot_s)
    assert (step.binds, ridge(machine)) == ("bandwidth", pytest.approx(989 / 3.35))


def test_intensity_is_the_gqa_ratio_and_about_the_batch() -> None:
    llama = loads("llama-3-70b", "h100:8")
    assert attention_intensity(llama, 8192) == pytest.approx(8)
    fp8 = loads("llama-3-70b", "h100:8", kv_dtypes=("fp8",))
    assert attention_intensity(fp8, 8192) == pytest.approx(16)
    assert attention_intensity(loads("llama-2-7b"), 4096) == pytest.approx(1)
    # A latent of 576 numbers for 128 heads, twice multiplied: far more than any GQA.
    assert attention_intensity(loads("deepseek-v3", "h200:16"), 8192) > 100 / 16
    assert weights_intensity(llama, 7) == pytest.approx(7, rel=0.01)


def test_where_decode_stops_being_bound_by_memory() -> None:
    machine = Machine(bandwidth=3.35e12, flops=989e12)
    found = loads("llama-3-8b")
    least = memory_bound_below(found, machine, 1)
    assert least is not None
    for batch, binds in ((least - 1, "bandwidth"), (least, "compute")):
        assert speed(found, machine, batch=batch, context=1).binds == binds
    # 0.8 of the bandwidth and half the rate: 295 × 0.5 / 0.8 FLOP a byte.
    assert least == pytest.approx(295.2 * 0.5 / 0.8, rel=0.05)
    assert memory_bound_below(found, machine, 8192) is None


def test_a_few_requests_do_not_read_all_experts() -> None:
    found = loads("mixtral-8x7b", "h200")
    one = 32 * 3 * 4096 * 14_336 * 2
    assert found.expert_bytes == 8 * one
    assert found.weights_bytes(1) - found.dense_bytes == pytest.approx(2 * one)
    assert found.weights_bytes(1000) - found.dense_bytes == pytest.approx(8 * one)
    assert found.weights_bytes(2) - found.dense_bytes == pytest.approx(8 * one * (1 - 0.75**2))


def test_stages_come_one_after_the_other() -> None:
    machine = Machine(bandwidth=3.35e12, flops=989e12)
    alone = speed(loads("llama-3-8b"), machine, batch=8, context=1024)
    staged = speed(loads("llama-3-8b", "h100:2", pps=(2,)), machine, batch=8, context=1024)
    assert staged.tpot_s < alone.tpot_s
    assert staged.tpot_s > 0.5 * alone.tpot_s
    assert 2 * staged.weights_bytes == pytest.approx(alone.weights_bytes)


def test_windows_are_read_no_further() -> None:
    found = loads("mistral-7b-v0.1")
    assert found.cache_bytes(4096) == found.cache_bytes(32_768)
    assert found.attention_flops(4096) == found.attention_flops(32_768)


def saved(place: Path, overhead: float, share: float, **env: str) -> str:
    """A run on a GPU that reads at a share of 4.8 TB/s, and computes at 0.4 of 989 TFLOP/s."""
    rows = [
        {
            "run": "uniform", "cache": "paged", "model": "x", "layers": 32, "dtype": "bf16",
            "device": "cuda" if env else "cpu", "batch": batch, "prompt_tokens": 128, "output_tokens": 100,
            "ttft_s": 0.1, "tpot_s_p50": overhead + count / (share * 4.8e12), "step_bytes": count,
            "mfu_prefill": 0.5, "matmul_peak_flops": 0.8 * 989e12,
        }
        for batch, count in ((1, 16 * 10**9), (8, 20 * 10**9), (64, 64 * 10**9))
    ]  # fmt: skip
    place.write_text(json.dumps({"schema": 1, "command": "bench decode", "env": env, "rows": rows}))
    return str(place)


def test_measured_shares_take_the_place_of_assumed_ones(kvtool: Kvtool, tmp_path: Path) -> None:
    run = saved(tmp_path / "run.json", 0.002, 0.6, device_name="NVIDIA H200")
    words = ("plan", "llama-3-8b", "--gpu", "h200", "-b", "8", "-c", "1k", "--json")
    ran = kvtool(*words, "--calibrate", run)
    (row,) = ran.json["rows"]
    read = row["read_weights_bytes"] + row["read_cache_bytes"]
    assert row["tpot_s"] == pytest.approx(0.002 + read / (0.6 * 4.8e12), rel=1e-3)
    assert "0.60 of the peak bandwidth and 0.40 of the peak rate" in " ".join(ran.json["notes"])
    (typed,) = kvtool(*words, "--efficiency", "0.6").json["rows"]
    assert typed["tpot_s"] == pytest.approx(row["tpot_s"] - 0.001, rel=1e-3)
    both = kvtool(*words, "--calibrate", run, "--efficiency", "0.6")
    assert "say the same" in both.err


def test_a_cpu_says_nothing_of_gpus(kvtool: Kvtool, tmp_path: Path) -> None:
    words = ("plan", "llama-3-8b", "--gpu", "h200", "--calibrate")
    ran = kvtool(*words, saved(tmp_path / "run.json", 0.002, 0.6))
    assert (ran.code, "measured on cpu, of which no peak is known" in ran.err) == (1, True)
    fast = kvtool(*words, saved(tmp_path / "run.json", 0.0, 1.6, device_name="NVIDIA H200"))
    assert "which no such GPU does" in fast.err


# -- every preset, and words


def test_every_preset_is_planned_or_refused_by_name() -> None:
    counted = 0
    for preset in catalog.model_presets():
        loaded = load_config(preset.name)
        shape = read_model(loaded.config, catalog.class_defaults()["types"])
        query = PlanQuery(gpus=gpus_named("h200"), contexts=(512,), allow_long=True)
        lost: list[KvtoolError] = []
        try:
            for one in cases_of(model_for(loaded, shape, query), query, lost):
                row = plan_row(planned(one))
                assert row["max_concurrency"] >= 0
                assert math.isfinite(row["weights_bytes"])
                counted += 1
        except KvtoolError as error:
            lost.append(error)
        lost = [error for error in lost if error.code != "weights_not_counted"]
        assert [error.code for error in lost if error.code != "config_not_understood"] == []
    assert counted > 195


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "plan needs a GPU"),
        (("--gpu", "h1oo"), "no GPU is called 'h1oo'"),
        (("--gpu", "h100:x"), "--gpu: 'x' is not a whole number"),
        (("--gpu", "h100:8", "--tp", "3"), "no 2 replicas of 3"),
        (("--gpu", "h100:3", "--tp", "3"), "--tp 3 does not divide"),
        (("--gpu", "h100", "--gpu-memory-utilization", "1.5"), "is no share"),
        (("--gpu", "h100", "--reserve", "2"), "is not an amount of memory"),
        (("--gpu", "h100", "--weights", "12parsec"), "is not an amount of memory"),
        (("--gpu", "h100", "--price", "-1"), "is no price"),
        (("--gpu", "h100", "--solve", "kontext"), "is not known"),
        (("--gpu", "h100", "-c", "9000"), "above the model's maximum of 8,192"),
        (("--gpu", "h100", "--efficiency", "0.1,0.2,0.3"), "two shares at most"),
        (("--gpu", "m4-max-128gb", "--kv-dtype", "fp7"), "unknown dtype 'fp7'"),
    ],
)
def test_words_that_are_refused(kvtool: Kvtool, words: tuple[str, ...], message: str) -> None:
    ran = kvtool("plan", "llama-3-8b", *words)
    assert ran.code in (1, 2)
    assert message in ran.err
    assert len(ran.err.strip().splitlines()) == 2


def test_what_is_said_of_a_plan(kvtool: Kvtool) -> None:
    said = kvtool("plan", "llama-3-70b", "--gpu", "h100:8", "--engine", "vllm", "--explain").out
    assert said.startswith("Fits: ")
    for text in (
        "8 × h100-sxm (tp 8)", "Weights take 16.43 GiB of each GPU",
        "attention does 8 for each byte of cache", "vllm serve meta-llama/Meta-Llama-3-70B",
        "--tensor-parallel-size 8", "profile run of 8,192 tokens",
    ):  # fmt: skip
        assert text in said
    several = kvtool("plan", "llama-3-70b", "--gpu", "h100:4,h100:8", "-q")
    assert several.code == 0
    assert "KV GiB" in several.out


def test_given_weights_scale_what_a_step_reads() -> None:
    counted = loads("llama-3-8b")
    half = loads("llama-3-8b", weights=8_030_261_248)
    assert half.dense_bytes == pytest.approx(counted.dense_bytes / 2)
    assert replace(half, dense_bytes=counted.dense_bytes) == counted

"""What limits a plan besides memory, what its speed is of, and commands that start what was planned."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_cases import case_of
from ran import Ran

from kvtool.decode_speed import Machine, speed
from kvtool.plan import plan_row, planned
from kvtool.plan_flags import row_of
from kvtool.units import GIB

Kvtool = Callable[..., Ran]
MACHINE = Machine(bandwidth=3.35e12, flops=989e12)


def row(name: str, gpu: str = "h100", engine: str = "vllm", **words: Any) -> dict[str, Any]:
    return plan_row(planned(case_of(name, gpu, engine, **words)[2]))


# -- requests that run


def test_an_engine_runs_no_more_than_its_limit() -> None:
    words = {"contexts": (1024,)}
    free = row("qwen2-0.5b", "l4", **words)
    assert free["whole_requests"]["best"] > 256 == free["max_num_seqs"] == free["runs"]
    assert (free["batch"], free["binds"]) == (256, "max_num_seqs")
    few = row("qwen2-0.5b", "l4", users=(300,), max_num_seqs=256, **words)
    assert (few["fits"], few["binds"], few["missing_bytes"]) == (False, "max_num_seqs", 0)
    assert few["tpot_s"] is None
    # Nobody said: the engine is told of the users, and its sampler takes more.
    more = row("qwen2-0.5b", "l4", users=(300,), **words)
    assert (more["fits"], more["max_num_seqs"], more["batch"]) == (True, 300, 300)
    assert (
        "--max-num-seqs 300"
        in row_of(case_of("qwen2-0.5b", "l4", users=(300,), **words)[2])["command"]
    )
    assert row("qwen2-0.5b", "l4", "ideal", **words)["max_num_seqs"] is None


def test_what_does_not_fit_has_no_speed() -> None:
    found = row("llama-3.1-70b", "h100:8", contexts=(32_768,), users=(64,))
    assert not found["fits"]
    assert found["whole_requests"]["best"] > 0
    for name in ("tpot_s", "output_tokens_per_s", "usd_per_million_tokens", "read_cache_bytes"):
        assert found[name] is None


def test_requests_are_whole_and_have_a_range() -> None:
    # Five requests of 512 blocks, but one block is vLLM's own.
    found = row("llama-3.1-8b", kv_memory=5 * GIB, contexts=(8192,), allow_long=True)
    assert found["max_concurrency"] == 5
    assert found["whole_requests"] == {"low": 4, "best": 4, "high": 4}
    short = row("llama-3.1-8b", kv_memory=5 * GIB, contexts=(8192,), users=(5,))
    assert short["missing_bytes"] == short["bytes_per_block"]
    wide = row("llama-3.1-8b", "l4", contexts=(8192,), users=(3,))["whole_requests"]
    assert wide["low"] < wide["best"] < wide["high"]


def test_tokens_a_second_are_those_of_the_users() -> None:
    one = row("llama-3.1-8b", "h100:4", tps=(1,), users=(4,))
    two = row("llama-3.1-8b", "h100:4", tps=(1,), users=(2,))
    assert one["batch"] == two["batch"] == 1
    assert two["output_tokens_per_s"] == pytest.approx(one["output_tokens_per_s"] / 2)
    assert two["output_tokens_per_s"] == pytest.approx(2 / two["tpot_s"])


def test_memory_that_is_no_end_is_none() -> None:
    assert row("falcon-mamba-7b", "l4")["max_context"] is None
    assert row("llama-3.1-8b", contexts=(200_000,), allow_long=True)["max_context"] > 200_000
    assert row("llama-3.1-8b", "h200", contexts=(8192,))["max_context"] == 131_072


# -- what a step reads


def test_stages_do_not_hurry_one_request() -> None:
    alone, staged = (
        case_of("qwen3-30b-a3b", gpu, "ideal", pps=(pp,), tps=(1,), contexts=(1024,))[2].loads
        for gpu, pp in (("h100", 1), ("h100:4", 4))
    )
    assert alone is not None
    assert staged is not None
    one = speed(alone, MACHINE, batch=1, context=1024)
    four = speed(staged, MACHINE, batch=1, context=1024)
    assert 4 * four.weights_bytes == pytest.approx(one.weights_bytes)
    assert 4 * four.cache_bytes == pytest.approx(one.cache_bytes)
    assert four.tpot_s == pytest.approx(one.tpot_s)


def test_experts_that_replicas_share_are_chosen_by_all_their_tokens() -> None:
    loads = case_of("deepseek-v3", "h200:16", "ideal", tps=(8,), dps=(2,), expert_parallel=True)[
        2
    ].loads
    assert loads is not None
    assert (loads.experts, loads.chosen, loads.sharers) == (256, 8, 2)
    read = loads.weights_bytes(32) - loads.dense_bytes
    assert read / loads.expert_bytes == pytest.approx(1 - (31 / 32) ** 64)


def test_replicas_of_vllm_share_experts_whether_they_are_spread_or_cut() -> None:
    words = {"tps": (8,), "dps": (2,)}
    cut, spread = (
        row("deepseek-v3", "h200:16", expert_parallel=ep, **words)["weights_bytes"]
        for ep in (False, True)
    )
    apart = row("deepseek-v3", "h200:16", "ideal", **words)["weights_bytes"]
    assert cut == spread < 0.6 * apart


def test_states_are_read_and_written_as_the_engine_holds_them() -> None:
    _, _, case = case_of("falcon-mamba-7b", "l4")
    found = plan_row(planned(case))
    assert case.loads is not None
    assert case.loads.cache_bytes(8192) == 2 * found["request_bytes"]
    assert found["attention_intensity"] is None


def test_a_text_is_read_behind_cross_attention() -> None:
    _, _, case = case_of("whisper-large-v3", "h100", "ideal", contexts=(448,))
    assert case.loads is not None
    assert case.loads.cache_bytes(448) == plan_row(planned(case))["request_bytes"]


def checkpoint(folder: Path, elements: int, name: str = "model.safetensors") -> None:
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [elements], "data_offsets": [0, elements]}}
    ).encode()
    with (folder / name).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + elements)  # a hole


def test_headers_say_what_is_read_too(kvtool: Kvtool, tmp_path: Path) -> None:
    config = json.loads(kvtool("presets", "models", "--show", "llama-3.1-8b", "--json").out)[
        "rows"
    ][0]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("plan", str(tmp_path), "--gpu", "h100", "-c", "8k", "--json")
    whole = 9 * 10**9  # of 8,030,261,248 parameters in eight bits and some scales
    checkpoint(tmp_path, whole)
    ran = kvtool(*words)
    (found,) = ran.json["rows"]
    counted = row("llama-3.1-8b", "h100", "ideal")
    assert found["weights_bytes"] == whole
    share = whole / counted["weights_bytes"]
    assert found["read_weights_bytes"] == pytest.approx(
        share * counted["read_weights_bytes"], rel=1e-6
    )
    assert "by its config they would be 14.96 GiB" in " ".join(ran.json["notes"])


def test_a_part_of_a_download_is_no_checkpoint(kvtool: Kvtool, tmp_path: Path) -> None:
    config = json.loads(kvtool("presets", "models", "--show", "llama-3.1-8b", "--json").out)[
        "rows"
    ][0]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("plan", str(tmp_path), "--gpu", "h100", "-c", "8k", "--json")
    checkpoint(tmp_path, 10**9, "model-00001-of-00004.safetensors")
    ran = kvtool(*words)
    assert ran.json["rows"][0]["weights_bytes"] == 16_060_522_496
    assert "has 1 of the 4 files of model" in " ".join(ran.json["notes"])
    (tmp_path / "model-00001-of-00004.safetensors").rename(tmp_path / "model.safetensors")
    ran = kvtool(*words)
    assert ran.json["rows"][0]["weights_bytes"] == 16_060_522_496
    assert "which is not the whole model" in " ".join(ran.json["notes"])


# -- commands


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ({"reserve": GIB}, "--gpu-memory-utilization 0.887"),
        ({"kv_memory": 5 * GIB}, f"--kv-cache-memory-bytes {5 * GIB}"),
        ({"kv_dtypes": ("fp8",)}, "--kv-cache-dtype fp8"),
        ({"max_model_len": 9000}, "--max-model-len 9000"),
        ({"max_num_seqs": 7}, "--max-num-seqs 7"),
        ({}, "--gpu-memory-utilization 0.9 "),
    ],
)
def test_commands_start_what_was_planned(words: dict[str, Any], flag: str) -> None:
    assert flag in row_of(case_of("llama-3.1-8b", **words)[2])["command"]


def test_commands_of_other_dtypes(kvtool: Kvtool) -> None:
    words = ("plan", "llama-3.1-8b", "--gpu", "h100", "--engine", "vllm", "--json")

    def command(*more: str) -> str:
        return str(kvtool(*words, *more).json["rows"][0]["command"])

    assert "--dtype float16" in command("--dtype", "fp16")
    assert "--dtype" not in command().replace("--kv-cache-dtype", "")
    assert "--quantization fp8" in command("--weights-dtype", "fp8")
    assert "'<meta-llama/Llama-3.1-8B in int4>'" in command("--weights-dtype", "int4")
    assert "--disable-hybrid-kv-cache-manager" in command("--no-hybrid")
    assert "--max-model-len 2048 " in command("--workload", "chat")
    assert command("--enforce-eager").endswith(" --enforce-eager")


def test_without_graphs_more_is_left_for_the_cache(kvtool: Kvtool) -> None:
    words = ("plan", "llama-3.1-8b", "--gpu", "h100", "--engine", "vllm", "--json")
    graphs, eager = (kvtool(*words, *more) for more in ((), ("--enforce-eager",)))
    whole, more = graphs.json["rows"][0], eager.json["rows"][0]
    taken = next(one for one in whole["memory"] if one["name"] == "CUDA graphs")
    assert taken["best"] == more["kv_budget_bytes"]["best"] - whole["kv_budget_bytes"]["best"] > 0
    assert (whole["enforce_eager"], more["enforce_eager"]) == (False, True)
    assert "without CUDA graphs" in " ".join(eager.json["notes"])
    assert "without CUDA graphs" not in " ".join(graphs.json["notes"])
    assert kvtool(*words[:4], "--enforce-eager").code == 2


# -- lists, of which one that fails costs no other


def test_one_that_cannot_be_costs_no_other(kvtool: Kvtool) -> None:
    ran = kvtool("plan", "llama-3-8b", "--gpu", "h100:8", "--tp", "8,3", "--json")
    assert (ran.code, [one["tp"] for one in ran.json["rows"]]) == (1, [8])
    assert "no 2 replicas of 3" in ran.err
    ran = kvtool("plan", "qwen3.5-9b", "--gpu", "h100", "--engine", "all", "--no-hybrid", "--json")
    assert {one["engine"] for one in ran.json["rows"]} >= {"ideal", "transformers"}
    ran = kvtool("plan", "llama-3.1-405b", "--gpu", "h100", "--engine", "all", "--json")
    assert (ran.code, len(ran.json["rows"])) == (1, 3)


def test_each_row_has_its_own_ways(kvtool: Kvtool) -> None:
    words = ("--gpu", "h100:2", "--ways", "-c", "8k,32k", "--engine", "ideal,vllm", "--json")
    for one in kvtool("plan", "llama-3.1-8b", *words).json["rows"]:
        assert {(way["engine"], way["context_tokens"]) for way in one["ways"]} == {
            (one["engine"], one["context_tokens"])
        }


def test_no_preset_that_fits_is_an_error(kvtool: Kvtool) -> None:
    ran = kvtool("plan", "llama-3.1-8b", "--gpu", "all", "-b", "1000000", "-c", "128k")
    assert (ran.code, ran.out) == (1, "")
    assert "none of the GPU presets" in ran.err


@pytest.mark.parametrize("gpu", ["m4-max-128gb", "rtx-a6000", "rtx-3090", "h100-nvl"])
def test_gpus_without_a_rate_are_planned(kvtool: Kvtool, gpu: str) -> None:
    ran = kvtool("plan", "llama-3.1-8b", "--gpu", gpu, "-c", "8k")
    assert ran.code == 0, ran.err
    (found,) = kvtool("plan", "llama-3.1-8b", "--gpu", gpu, "-c", "8k", "--json").json["rows"]
    assert found["tpot_s"] > 0
    if found["ridge"] is None:
        assert (found["step_binds"], found["compute_bound_from"]) == ("bandwidth", None)


def test_grids_are_kept_and_gone_on_with(kvtool: Kvtool, tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    words = ("plan", "llama-3-8b", "qwen3-8b", "--gpu", "h100,l4", "-c", "1k,2k", "-o", str(path))
    first = kvtool(*words, "--json")
    assert (first.code, len(first.json["rows"]), len(path.read_text().splitlines())) == (0, 8, 8)
    again = kvtool(*words, "--json")
    assert again.json["rows"] == first.json["rows"]
    assert "grid.jsonl: 8 of 8 rows were there" in again.json["notes"]
    alone = kvtool("plan", "llama-3-8b", "--gpu", "h100,l4", "-c", "1k,2k", "--json")
    assert alone.json["rows"] == first.json["rows"][:4]
    big = kvtool(
        "plan", "llama-3-70b", "--gpu", "h100", "-c", "1k,2k", "-o", str(tmp_path / "g.jsonl")
    )
    assert (big.code, "--gpu" in big.err.splitlines()[-1]) == (1, True)  # what would fit, even so


# -- words that would change nothing


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "all", "--tp", "4"), "--tp would change nothing"),
        (("--gpu", "all", "--pp", "2"), "--pp would change nothing"),
        (("--gpu", "all", "--ways"), "--ways would change nothing"),
        (("--gpu", "all", "--kv-dtype", "auto,fp8"), "--gpu all takes one --kv-dtype"),
        (("--gpu", "h100", "--solve", "batch", "-b", "4"), "--batch gives it"),
        (("--gpu", "h100", "--solve", "context", "-c", "4k"), "--context gives it"),
        (("--gpu", "h100", "--solve", "kv-dtype", "--kv-dtype", "fp8"), "--kv-dtype gives it"),
        (("--gpu", "h100:8", "--solve", "gpus"), "--gpu says it"),
        (("--gpu", "h100", "--solve", "batch", "--levers"), "--levers would change nothing"),
        (("--gpu", "h100", "--num-requests", "9"), "--num-requests is of --workload"),
        (("--gpu", "h100", "--prompt-tokens", "9"), "--prompt-tokens is of --disaggregate"),
        (("--gpu", "h100", "--prefix-caching"), "--prefix-caching is of vLLM"),
        (("--gpu", "h100", "--no-hybrid"), "--hybrid is of vLLM"),
        (("--gpu", "h100", "--engine-version", "0.7"), "--engine-version is of vLLM"),
        (("--gpu", "h100", "--kv-memory", "9GiB", "--reserve", "1GiB"), "--reserve would change nothing"),
        (("--gpu", "h100", "--backend", "nope"), "'nope' is not known"),
        (("--gpu", "h100", "-c", "1..1000", "-b", "1..1000"), "1,000,000 plans are asked for at once"),
        (("--gpu", "h100", "--weights", "0B"), "a model has some"),
        (("--gpu", "h100", "--price", "1e-310"), "is no price"),
        (("--gpu", "h100", "-c", "1000000000", "--allow-long"), "is out of range"),
        (("--gpu", "h100", "--jobs", "2", "--levers"), "is made in one process"),
        (("--gpu", "h100", "--disaggregate", "prefill=all,decode=h100", "--link", "4Gb"), "one preset for each"),
    ],
)  # fmt: skip
def test_words_that_change_nothing_are_refused(
    kvtool: Kvtool, words: tuple[str, ...], message: str
) -> None:
    ran = kvtool("plan", "llama-3.1-8b", *words)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert len(ran.err.strip().splitlines()) == 2


def test_bits_are_no_bytes(kvtool: Kvtool) -> None:
    def rate(text: str) -> float:
        ran = kvtool(
            "plan", "llama-3.1-8b", "--gpu", "h100", "--tiers", f"cpu=64GiB@{text}", "--json"
        )
        return float(ran.json["rows"][0]["tiers"][0]["bytes_per_s"])

    assert rate("25GB/s") == 8 * rate("25Gb/s") == 25e9


def test_replaced_users_are_planned_anew() -> None:
    _, _, case = case_of("llama-3.1-8b", users=(3,))
    assert planned(replace(case, users=10**5)).fits is False


def test_a_grid_is_not_replaced_by_something_else(kvtool: Kvtool, tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    words = ("plan", "llama-3-8b", "--gpu", "h100", "-c", "4k")
    assert kvtool(*words, "-o", str(path)).code == 0
    kept = path.read_bytes()
    for more in (("--levers",), ("--ways",)):
        ran = kvtool(*words, *more, "-o", str(path))
        assert (ran.code, "it holds a grid" in ran.err) == (2, True)
    ranked = kvtool("plan", "llama-3-8b", "--gpu", "all", "-o", str(path))
    assert (ranked.code, path.read_bytes()) == (2, kept)


def test_what_commands_may_not_hide(kvtool: Kvtool) -> None:
    def notes(*words: str) -> str:
        return " ".join(kvtool("plan", *words, "--json").json["notes"])

    assert "keys that 8 bits break" in notes("qwen2.5-7b", "--gpu", "h100", "--kv-dtype", "fp8")
    assert "several nodes" in notes("llama-3-70b", "--gpu", "h100:16", "--engine", "vllm")
    assert "bf16, as vLLM takes it" in notes("starcoder2-15b", "--gpu", "h100", "--engine", "vllm")
    words = ("starcoder2-15b", "--gpu", "h100", "--engine", "vllm", "--json")
    (found,) = kvtool("plan", *words).json["rows"]
    assert (found["dtype"], "--dtype bfloat16" in found["command"]) == ("bf16", True)
    words = (
        "qwen3-32b",
        "--gpu",
        "h200",
        "--engine",
        "vllm",
        "-c",
        "64k",
        "--allow-long",
        "--json",
    )
    assert (
        kvtool("plan", *words)
        .json["rows"][0]["command"]
        .startswith("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 ")
    )


def test_a_plan_that_is_not_the_best_way_says_so(kvtool: Kvtool) -> None:
    said = kvtool("plan", "deepseek-v3", "--gpu", "h200:16", "--engine", "vllm", "--ways", "-q").out
    assert "The plan above is way " in said
    (found,) = kvtool(
        "plan", "deepseek-v3", "--gpu", "h200:16", "--engine", "vllm", "--levers", "--json"
    ).json["rows"]
    assert any(one["lever"] == "split" for one in found["levers"])

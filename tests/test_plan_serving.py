"""Plans of models and engines that are not plain: experts, latents, encoders, real lengths; one roofline for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from plan_cases import case_of, model_of
from ran import Ran

from kvtool.beyond import disaggregation, prefill_on
from kvtool.beyond.tiers import offload
from kvtool.errors import KvtoolError
from kvtool.levers import alternatives
from kvtool.plan import plan_row, planned
from kvtool.plan_flags import row_of
from kvtool.plan_query import PlanQuery, gpus_named
from kvtool.solving import solve
from kvtool.units import TIB

Kvtool = Callable[..., Ran]


def row(name: str, gpu: str = "h100", engine: str = "vllm", **words: Any) -> dict[str, Any]:
    return plan_row(planned(case_of(name, gpu, engine, **words)[2]))


# -- experts


@pytest.mark.parametrize(
    ("name", "gpu", "users"),
    [("gpt-oss-120b", "h100", 100), ("qwen3-30b-a3b", "h100", 7), ("mixtral-8x7b", "h100", 24)],
)
def test_gpus_are_found_for_experts_that_not_every_number_of_ranks_cuts(
    name: str, gpu: str, users: int
) -> None:
    query = PlanQuery(gpus=gpus_named(gpu), engines=("vllm",), users=(users,), contexts=(8192,))
    found = solve("gpus", model_of(name, query), query)
    assert found.error is None
    assert found.plan.fits
    assert found.plan.case.users == users


def test_experts_are_cut_in_whole_blocks() -> None:
    # 1,536 columns on 8 ranks are 192: no multiple of the 128 that share a scale.
    with pytest.raises(
        KvtoolError, match="1,536 columns are not cut over 8 ranks in whole blocks of 128"
    ):
        case_of("minimax-m2.5", "h100:8", expert_parallel=False)
    assert row("minimax-m2.5", "h100:8", expert_parallel=True)["fits"]
    assert row("minimax-m2.5", "h100:8", "ideal")["fits"]
    # 2,048 columns: 16 ranks cut them into 128, 32 do not.
    assert row("deepseek-v3", "h200:16", tps=(8,), dps=(2,))["fits"]
    with pytest.raises(KvtoolError, match="not cut over 32 ranks"):
        case_of("deepseek-v3", "h200:32", tps=(8,), dps=(4,))


def test_a_default_tp_divides_the_heads(kvtool: Kvtool) -> None:
    assert (row("qwen2.5-7b", "h100:8")["tp"], row("qwen2.5-7b", "h100:8")["dp"]) == (4, 2)
    dense = kvtool("plan", "llama-3-8b", "--gpu", "h100:2", "--engine", "vllm", "--ep")
    assert (dense.code, "has no experts to spread" in dense.err) == (2, True)


# -- commands


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ({"tps": (2,), "pps": (2,), "dps": (2,)},
         "--tensor-parallel-size 2 --pipeline-parallel-size 2 --data-parallel-size 2 "),
        ({"tps": (4,), "dps": (2,), "expert_parallel": True},
         "--tensor-parallel-size 4 --data-parallel-size 2 --enable-expert-parallel "),
        ({}, "--tensor-parallel-size 8 "),
        ({"max_batched_tokens": 4096}, "--max-num-batched-tokens 4096 "),
        ({}, "--max-num-batched-tokens 8192 "),
        ({"block_size": 32}, "--block-size 32 "),
    ],
)  # fmt: skip
def test_the_command_splits_the_gpus_as_planned(words: dict[str, Any], flags: str) -> None:
    command = row_of(case_of("qwen3-30b-a3b", "h100:8", **words)[2])["command"]
    assert flags in f"{command} "


# -- latents


def test_fp8_is_vllms_own_layout_where_an_indexer_selects(kvtool: Kvtool) -> None:
    words = ("plan", "deepseek-v3.2", "--gpu", "h200:8", "-c", "32k", "--engine", "vllm", "--json")
    ran = kvtool(*words, "--kv-dtype", "fp8")
    (found,) = ran.json["rows"]
    assert found["kv_dtype"] == "fp8_ds_mla"
    assert found["request_bytes"] == 32_768 * 61 * (656 + 132)
    assert "--kv-cache-dtype fp8_ds_mla" in found["command"]
    assert found["attention_intensity"] is None
    assert "attention that selects reads less of the cache" in " ".join(ran.json["notes"])
    typed = kvtool(*words, "--kv-dtype", "fp8_ds_mla").json["rows"][0]
    assert typed == found
    other = kvtool("plan", "deepseek-v3", "--gpu", "h200:8", "--kv-dtype", "fp8_ds_mla")
    assert "is vLLM's own layout" in other.err
    plain = row("deepseek-v3", "h200:8", kv_dtypes=("fp8",), contexts=(32_768,))
    assert (plain["kv_dtype"], plain["request_bytes"]) == ("fp8", 32_768 * 61 * 576)


# -- encoders


@pytest.mark.parametrize(("name", "context"), [("whisper-large-v3", 448), ("t5-large", 512)])
def test_attention_to_a_text_counts_on_both_sides(name: str, context: int) -> None:
    found = row(name, "h100", "ideal", contexts=(context,), dtype=None)
    width = {"bf16": 2, "fp16": 2, "fp32": 4}[found["kv_dtype"]]
    assert found["attention_intensity"] == pytest.approx(2 / width)  # a KV head for each head


# -- limits


def test_an_engine_is_told_to_run_more() -> None:
    model, query, case = case_of("llama-3.1-8b", users=(40,), max_num_seqs=16, contexts=(8192,))
    assert planned(case).binds == "max_num_seqs"
    (told,) = alternatives(model, query, case)
    assert (told.change.flags, told.fits) == ("--max-num-seqs 40", True)


def test_real_lengths_run_no_more_than_the_limit(kvtool: Kvtool) -> None:
    words = (
        "plan",
        "llama-3.1-8b",
        "--gpu",
        "h200",
        "--engine",
        "vllm",
        "--workload",
        "chat",
        "--json",
    )
    (few,) = kvtool(*words, "--max-num-seqs", "64").json["rows"]
    assert few["lengths"]["max_concurrency_running"] == few["runs"] == 64
    assert few["lengths"]["requests"] == 10_000


def test_a_share_of_the_memory_is_an_engines(kvtool: Kvtool) -> None:
    ran = kvtool("plan", "llama-3.1-8b", "--gpu", "h100", "--gpu-memory-utilization", "0.5")
    assert (ran.code, "--gpu-memory-utilization is of vLLM" in ran.err) == (2, True)
    words = ("--engine", "ideal,vllm", "--gpu-memory-utilization", "0.5,0.9", "--json")
    found = kvtool("plan", "llama-3.1-8b", "--gpu", "h100", *words).json["rows"]
    assert [one["gpu_memory_utilization"] for one in found] == [None, 0.5, 0.9]


# -- one roofline


@pytest.mark.parametrize("name", ["llama-3-70b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3"])
def test_decoding_apart_takes_what_the_plan_says(name: str) -> None:
    words = {"tps": (8,), "engines": ("vllm",), "allow_long": True}
    query = PlanQuery(gpus=gpus_named("h200:8"), **words)
    model = model_of(name, query)
    gpus = gpus_named("h200:8")[0]
    apart = disaggregation(model, query, gpus, gpus, 400e9, 32_512, 512)
    users = (apart.batch,)
    alone = row(name, "h200:8", tps=(8,), contexts=(32_768,), users=users, allow_long=True)
    assert apart.tpot_s == pytest.approx(alone["tpot_s"], rel=1e-6)


def test_shares_of_the_peaks_count_everywhere() -> None:
    slow = {"read_efficiency": 0.4, "compute_efficiency": 0.2}
    found = []
    for words in ({}, slow):
        query = PlanQuery(gpus=gpus_named("h100:8"), tps=(4,), **words)
        model = model_of("llama-3-70b", query)
        gpus = gpus_named("h100:4")[0]
        found.append(disaggregation(model, query, gpus, gpus, 400e9, 2048, 256))
    fast, slower = found
    assert slower.prefill_s == pytest.approx(2.5 * fast.prefill_s)
    overhead = 1e-3
    assert slower.tpot_s - overhead == pytest.approx(2 * (fast.tpot_s - overhead))
    loads = []
    for words in ({}, slow):
        model, query, case = case_of("llama-3-70b", "h100:8", contexts=(8192,), **words)
        prefill = prefill_on(model, query, case.gpu, 8)
        (disk,) = offload(
            case, prefill, cpu_bytes=0, disk_bytes=TIB, cpu_bandwidth=6e9, disk_bandwidth=6e9
        )
        loads.append(disk.prefill_s)
    assert loads[1] == pytest.approx(2.5 * loads[0])

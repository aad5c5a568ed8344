"""Beyond one GPU: splits, prefill and decode apart, caches on CPU and disk, by hand and by the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from plan_cases import case_of, model_of
from ran import Ran

from kvtool import catalog
from kvtool.beyond import Apart, Ways, disaggregation, offload, parallel_rows, prefill_on
from kvtool.errors import KvtoolError
from kvtool.plan import plan_row, planned
from kvtool.plan_query import PlanQuery, gpus_named
from kvtool.prefill import seconds
from kvtool.units import GIB, TIB

LINK = 400e9
TOKEN = 131_072
"""Bytes of a token of Llama-3-8B in bf16."""


def ways(name: str, gpu: str, count: int, engine: str = "vllm") -> Ways:
    query = PlanQuery(gpus=gpus_named(gpu), engines=(engine,))
    return parallel_rows(model_of(name, query), query, catalog.gpu_preset(gpu), count)


def apart(
    prefill: str,
    decode: str,
    prompt: int,
    output: int,
    *,
    name: str = "llama-3-8b",
    link: float = LINK,
) -> Apart:
    query = PlanQuery(gpus=gpus_named("h100"), engines=("vllm",), tps=(1,))
    (first,), (second,) = gpus_named(prefill), gpus_named(decode)
    return disaggregation(model_of(name, query), query, first, second, link, prompt, output)


# -- ways to split


def test_all_ways_to_split_are_there_and_the_best_is_first() -> None:
    found = ways("llama-3-70b", "h100", 8)
    splits = [(row["tp"], row["pp"], row["dp"]) for row in found.rows]
    assert len(set(splits)) == len(splits) == 10  # ordered products of three that make 8
    assert {tp * pp * dp for tp, pp, dp in splits} == {8}
    fits = [row["fits"] for row in found.rows]
    assert fits == sorted(fits, reverse=True)
    speeds = [row["output_tokens_per_s"] for row in found.rows if row["fits"]]
    assert speeds == sorted(speeds, reverse=True)
    assert splits[0] == (8, 1, 1)
    missing = [row["missing_bytes"] for row in found.rows if not row["fits"]]
    assert missing == sorted(missing)
    assert splits[-1] == (1, 1, 8)  # 131 GiB of weights on each


def test_a_row_is_that_of_the_plan() -> None:
    _, _, case = case_of("llama-3-70b", "h100:8", tps=(4,), pps=(2,))
    row = next(r for r in ways("llama-3-70b", "h100", 8).rows if (r["tp"], r["pp"]) == (4, 2))
    flags = "--tp 4 --pp 2 --dp 1 --dcp 1"
    assert row == plan_row(planned(case)) | {"kv_copies": 1.0, "flags": flags}


def test_heads_that_do_not_divide_are_refused_with_the_reason() -> None:
    found = ways("llama-3-70b", "h100", 6)
    assert {row["tp"] for row in found.rows} == {1, 2}
    reasons = {one.reason: {way.tp for way in one.ways} for one in found.refused}
    assert reasons["--tp 3 does not divide 64 query heads of llama"] == {3}
    assert reasons["--tp 6 does not divide 64 query heads of llama"] == {6}
    assert any("pp" in str(way) and "dp 2" in str(way) for one in found.refused for way in one.ways)


def test_copied_heads_do_not_shrink() -> None:
    rows = {row["tp"]: row for row in ways("llama-3-70b", "h100", 16).rows if row["pp"] == 1}
    by_tp = {tp: row["request_bytes"] for tp, row in rows.items() if row["dcp"] == 1}
    assert by_tp[4] == 2 * by_tp[8]
    shared = [r for r in ways("llama-3-70b", "h100", 16).rows if r["tp"] == 16]
    plain, cut = sorted(shared, key=lambda row: row["dcp"])
    assert (plain["dcp"], plain["request_bytes"], plain["kv_copies"]) == (1, by_tp[8], 2.0)
    assert (cut["dcp"], cut["request_bytes"], cut["kv_copies"]) == (2, by_tp[8] // 2, 1.0)


def test_latents_are_whole_on_each_rank_unless_tokens_are_shared() -> None:
    rows = [r for r in ways("deepseek-v3", "h200", 16).rows if (r["tp"], r["dp"]) == (16, 1)]
    copies = {row["dcp"]: row["kv_copies"] for row in rows}
    assert copies == {1: 16, 2: 8, 4: 4, 8: 2, 16: 1}
    request = {row["dcp"]: row["request_bytes"] for row in rows}
    assert request[1] == 8192 * 576 * 2 * 61 == 16 * request[16]


def test_experts_are_spread_over_replicas_too() -> None:
    found = ways("qwen3-30b-a3b", "h100", 4, "ideal")
    rows = [r for r in found.rows if (r["tp"], r["pp"]) == (1, 1)]
    weights = {row["expert_parallel"]: row["weights_bytes"] for row in rows}
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert weights[False] - weights[True] == experts * 3 // 4
    assert not any(row["expert_parallel"] for row in ways("llama-3-8b", "h100", 2).rows)


def test_experts_that_are_spread_over_one_replica_are_no_row_of_their_own() -> None:
    rows = ways("deepseek-v3", "h200", 16).rows
    cuts = [(row["tp"], row["pp"], row["dp"], row["dcp"]) for row in rows]
    spread = [row["dp"] for row in rows if row["expert_parallel"]]
    assert spread
    assert min(spread) > 1
    assert len(cuts) == len(
        set(cuts)
    )  # over replicas vLLM shares experts either way: one row of two
    # 60 experts are no whole number on 8 ranks: 7.5 of their bytes, or 8 whole ones.
    odd = [row for row in ways("qwen1.5-moe-a2.7b", "h100", 8).rows if row["tp"] == 8]
    assert {row["expert_parallel"] for row in odd} == {False, True}


def test_flags_of_a_way_are_its_own() -> None:
    for row in ways("deepseek-v3", "h200", 4).rows:
        words = row["flags"].split()
        named = dict(zip(words[:8:2], map(int, words[1:8:2]), strict=True))
        assert named == {f"--{name}": row[name] for name in ("tp", "pp", "dp", "dcp")}
        assert (words[8:] == ["--ep"]) == row["expert_parallel"]


def test_more_stages_than_layers_are_refused() -> None:
    found = ways("llama-3-8b", "h100", 64)
    (why,) = [one for one in found.refused if "layers of llama" in one.reason]
    assert {way.pp for way in why.ways} == {64}


# -- prefill and decode apart


def test_a_gib_over_400_gigabits_takes_21_milliseconds() -> None:
    found = apart("h100", "h100", 8190, 2)
    assert found.kv_bytes == TOKEN * 8190
    assert TOKEN * 8192 == GIB
    assert found.transfer_s == pytest.approx(0.021475 * 8190 / 8192, rel=1e-4)


def test_seconds_by_hand() -> None:
    """H100: 989.4 TFLOP/s at a half, 3,350 GB/s at 0.8; 7.5 G parameters in the layers' matrices."""
    found, gpu = apart("h100:2", "h100:1", 4096, 512), catalog.gpu_preset("h100")
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    head, pair = 4096 * 128_256, 4 * 32 * 32 * 128
    flops = 2 * 32 * layer * 4096 + 2 * head + pair * 4096 * 4097 / 2
    rate = (gpu.dense_bf16_tflops or 0.0) * 1e12 * 0.5
    assert found.prefill_s == pytest.approx(flops / rate, rel=1e-3)
    read = gpu.bandwidth_gb_s * 1e9 * 0.8
    context = found.batch * (4096 + 256)
    tpot = 1e-3 + (2 * (32 * layer + head) + context * TOKEN) / read
    assert found.tpot_s == pytest.approx(tpot, rel=1e-3)
    assert found.decode_s == pytest.approx(511 * tpot, rel=1e-3)
    # One decode instance takes batch / decode_s requests a second, a prefill GPU gives 1 / prefill_s.
    busy = found.prefill_s * found.batch / found.decode_s
    assert found.prefill_gpus_per_decode_gpu == pytest.approx(busy)
    assert found.requests_per_s == pytest.approx(
        min(2 / found.prefill_s, found.batch / found.decode_s)
    )


def test_the_batch_is_what_fits_at_the_end() -> None:
    found = apart("h100", "h100", 4096, 512)
    _, _, case = case_of("llama-3-8b", contexts=(4608,))
    assert found.batch == planned(case).holds.whole_requests


@pytest.mark.parametrize(
    ("prefill", "prompt", "output", "binds"),
    [(2, 7936, 256, "decode"), (1, 7936, 256, "prefill"), (1, 161, 338, "decode")],
)
def test_the_estimate_is_what_a_run_comes_to(
    kvtool: Callable[..., Ran], prefill: int, prompt: int, output: int, binds: str
) -> None:
    """Many equal requests, apart and undivided: but for the first and last of them."""
    found = apart(f"h100:{prefill}", "h100:1", prompt, output)
    common = (
        "--model", "llama-3-8b", "--prompt-dist", f"fixed:{prompt}", "--prompt-cap", "8192",
        "--output-dist", f"fixed:{output}", "--num-requests", str(24 * found.batch),
        "--max-num-seqs", str(found.batch), "--max-model-len", "8192", "--json", "-q",
    )  # fmt: skip
    split = ("--disaggregate", f"prefill=h100:{prefill},decode=h100:1", "--link", "400Gb")
    both = kvtool("simulate", *common, *split).json["rows"][0]
    assert found.binds == binds
    assert both["requests_per_s"] == pytest.approx(found.requests_per_s, rel=0.05)
    assert both["decode_mean_batch"] == pytest.approx(found.settled_batch, rel=0.1)
    assert both["itl_s_p50"] == pytest.approx(found.settled_tpot_s, rel=0.05)
    mixed = kvtool("simulate", *common, "--gpu", "h100").json["rows"][0]
    undivided = mixed["requests_per_s"] * (prefill + 1)
    assert undivided == pytest.approx(found.mixed_requests_per_s, rel=0.05)
    assert mixed["tpot_s_p50"] == pytest.approx(found.mixed_tpot_s, rel=0.05)


@pytest.mark.parametrize(
    ("prefill", "prompt", "output"), [(1, 4096, 256), (1, 7936, 256), (2, 161, 338)]
)
def test_undivided_at_the_same_rate_is_what_a_run_comes_to(
    kvtool: Callable[..., Ran], prefill: int, prompt: int, output: int
) -> None:
    """Requests that come by chance, at the rate that the divided GPUs serve."""
    found = apart(f"h100:{prefill}", "h100:1", prompt, output)
    rate = found.same_requests_per_s / (prefill + 1)
    run = kvtool(
        "simulate", "--model", "llama-3-8b", "--gpu", "h100", "--rate", f"{rate:.4f}",
        "--prompt-dist", f"fixed:{prompt}", "--output-dist", f"fixed:{output}", "--prompt-cap", "8192",
        "--num-requests", str(min(2000, 16 * found.batch)), "--max-num-seqs", str(found.batch),
        "--max-model-len", "8192", "--json", "-q",
    ).json["rows"][0]  # fmt: skip
    assert run["tpot_s_p50"] == pytest.approx(found.same_rate_mixed_tpot_s, rel=0.15)
    assert found.same_rate_mixed_tpot_s < found.mixed_tpot_s


def test_the_rule_weighs_times_between_tokens_against_requests_at_one_rate() -> None:
    found = apart("h100", "h100", 7936, 256)
    assert found.same_requests_per_s == 0.75 * found.requests_per_s
    assert found.requests_per_s < found.mixed_requests_per_s
    assert found.same_rate_tpot_s < found.settled_tpot_s  # fewer decode at a time
    saved = 1 - found.same_rate_tpot_s / found.same_rate_mixed_tpot_s
    assert found.saved_tpot_share == pytest.approx(saved)
    lost = 1 - found.requests_per_s / found.mixed_requests_per_s
    assert found.lost_requests_share == pytest.approx(lost)
    assert found.saved_tpot_share > found.lost_requests_share > 0
    assert found.pays
    assert "at 75% of the most" in found.rule
    # To be as fast undivided, they would serve fewer still.
    assert found.mixed_requests_per_s_at_tpot < found.requests_per_s
    # Of 9 prefill GPUs for one decode GPU of short prompts nearly all is idle.
    idle = apart("h100:9", "h100", 64, 512)
    assert idle.idle_share > 0.8
    assert not idle.pays


def test_gpus_that_wait_would_decode_faster_undivided() -> None:
    # Six for prompts keep no more than 1 in 3 busy; undivided at that rate, seven decode small batches.
    found = apart("h100:6", "h100:1", 4096, 256)
    assert found.prefill_gpus_per_decode_gpu < 2
    # Each at its own highest rate, 27 ms against 72 would seem to speak for dividing them.
    assert found.same_rate_mixed_tpot_s < found.same_rate_tpot_s < found.mixed_tpot_s
    assert found.mixed_requests_per_s_at_tpot > 1.5 * found.requests_per_s
    assert not found.pays


def test_where_more_are_served_apart_both_are_taken_at_the_undivided_rate() -> None:
    # L4s read slowly and hold few requests: prompts are all that they are good for.
    found = apart("l4:8", "h100:1", 7000, 300)
    assert found.same_requests_per_s == 0.75 * found.mixed_requests_per_s
    assert found.mixed_requests_per_s < found.requests_per_s
    assert found.same_rate_tpot_s < found.settled_tpot_s
    assert found.lost_requests_share < 0
    assert found.pays


def test_a_slow_link_binds() -> None:
    found = apart("h100", "h100", 4096, 512, link=10**9)
    assert found.binds == "link"
    assert found.requests_per_s == pytest.approx(1 / found.transfer_s)
    assert found.settled_batch < 5


def test_an_undivided_instance_whose_steps_all_hold_prompts() -> None:
    found = apart("h100", "h100", 8000, 3)
    # 4,000 tokens of prompts for each that decodes: 8,192 tokens have room for 8,192 / 4,001.
    assert found.mixed_batch == pytest.approx(8192 / 4001)
    assert found.batch > 50


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(KvtoolError, match="nothing is left to decode"):
        apart("h100", "h100", 100, 1)
    with pytest.raises(KvtoolError, match=r"decode: an instance of 1 × l4 holds no request"):
        apart("h100", "l4", 100, 40_000, name="llama-3.1-8b")
    with pytest.raises(KvtoolError, match="holds no request"):
        apart("h100", "h100", 100, 100, name="llama-3-70b")


# -- CPU and disk


def test_a_cache_on_the_cpu_by_hand() -> None:
    model, query, case = case_of("llama-3-8b")
    prefill = prefill_on(model, query, case.gpu, 1)
    cpu, disk = offload(
        case,
        prefill,
        cpu_bytes=256 * GIB,
        disk_bytes=2 * TIB,
        cpu_bandwidth=50e9,
        disk_bandwidth=5e9,
    )
    assert (cpu.tier, cpu.request_bytes, cpu.num_blocks) == ("cpu", GIB, 256 * 512)
    assert (cpu.requests, cpu.tokens) == (256, 256 * 8192)
    assert (disk.requests, disk.tokens) == (2048, 2048 * 8192)
    assert cpu.load_s == pytest.approx(GIB / 50e9)
    assert disk.load_s == pytest.approx(GIB / 5e9)
    alone = float(seconds(prefill, np.array([8192]), np.array([0]))[0])
    assert cpu.prefill_s == disk.prefill_s == alone
    assert cpu.loads_faster
    assert disk.loads_faster


@pytest.mark.parametrize("rate", [1e9, 4e9, 4.6e9, 5e9, 50e9])
def test_the_break_even_is_where_loading_begins_to_win_for_good(rate: float) -> None:
    model, query, case = case_of("llama-3-8b")
    prefill = prefill_on(model, query, case.gpu, 1)
    (found,) = offload(
        case, prefill, cpu_bytes=GIB, disk_bytes=0, cpu_bandwidth=rate, disk_bandwidth=1
    )
    wins = [
        -(-context // 16) * 16 * TOKEN / rate
        < seconds(prefill, np.array([context]), np.array([0]))[0]
        for context in range(1, 8193)
    ]
    first = next((at for at in range(8192) if all(wins[at:])), None)
    assert found.break_even_context == (None if first is None else first + 1)
    assert found.loads_faster == wins[-1]


def test_ranks_load_side_by_side_and_share_the_disk() -> None:
    _model, _query, case = case_of("llama-3-70b", "h100:8")
    cpu, disk = offload(
        case, None, cpu_bytes=TIB, disk_bytes=TIB, cpu_bandwidth=50e9, disk_bandwidth=5e9
    )
    whole = 8192 * 327_680
    assert cpu.request_bytes == whole
    assert cpu.load_s == pytest.approx(whole / 8 / 50e9)
    assert disk.load_s == pytest.approx(whole / 5e9)
    assert cpu.prefill_s is cpu.break_even_context is cpu.loads_faster is None


@pytest.mark.parametrize("engine", ["vllm", "ideal"])
def test_copies_of_latents_are_offloaded_each(engine: str) -> None:
    _, _, case = case_of("deepseek-v3", "h200:16", engine, tps=(16,))
    (cpu,) = offload(case, None, cpu_bytes=TIB, disk_bytes=0, cpu_bandwidth=50e9, disk_bandwidth=1)
    assert cpu.request_bytes == 16 * 8192 * 576 * 2 * 61
    assert cpu.requests == pytest.approx(TIB / cpu.request_bytes, rel=1e-3)
    assert (cpu.num_blocks is None) == (engine == "ideal")


def test_max_model_len_does_not_make_a_request_longer() -> None:
    _model, _query, case = case_of("llama-3-8b", contexts=(1024,))
    options = replace(case.holder.options, max_model_len=8192)
    case = replace(case, holder=replace(case.holder, options=options))
    (cpu,) = offload(case, None, cpu_bytes=GIB, disk_bytes=0, cpu_bandwidth=1e9, disk_bandwidth=1)
    assert cpu.request_bytes == 1024 * TOKEN


def test_a_prefill_that_is_not_counted_says_so() -> None:
    model, query, case = case_of("jamba-v0.1", "h200:2")
    with pytest.raises(KvtoolError) as failed:
        prefill_on(model, query, case.gpu, 2)
    assert failed.value.code == "prefill_not_counted"
    assert "hit rates" not in failed.value.hint

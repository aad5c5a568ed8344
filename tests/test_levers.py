"""What would make a plan fit, and what levers gain: by hand, and planned anew from the flags."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_models import asked, model

from kvtool.catalog import gpu_preset, gpu_presets
from kvtool.dtypes import DTYPES, parse_kv_dtype
from kvtool.engine_memory.usable import torch_total
from kvtool.errors import KvtoolError
from kvtool.fitting import plan_first
from kvtool.levers import Alternative, alternatives, cache_or_weights, cheapest, levers
from kvtool.levers.caveats import ACCURACY, KERNELS, NATIVE, STORAGE, UNKNOWN, of_cache, support
from kvtool.levers.changes import ORDER, bits
from kvtool.levers.presets import by_hour, by_tokens, runs
from kvtool.levers.weights import quantised, why_not
from kvtool.plan import PlanCase
from kvtool.plan_model import PlanModel
from kvtool.plan_query import PlanQuery, gpus_named
from kvtool.planning import cases_of
from kvtool.units import GIB

SMALL = "llama-3.1-8b"
"""128 KiB a token in bf16: 1 GiB for 8k."""
ROOM = 20 * GIB


def case_of(name: str, query: PlanQuery) -> PlanCase:
    return next(cases_of(model(name), query, []))


def others(name: str, query: PlanQuery) -> tuple[Alternative, ...]:
    return alternatives(model(name), query, case_of(name, query))


def by_flags(found: tuple[Alternative, ...]) -> dict[str, Alternative]:
    return {one.change.flags: one for one in found}


def test_forty_users_in_memory_for_twenty() -> None:
    query = asked("h100", kv_memory=ROOM, contexts=(8192,), users=(40,))
    found = others(SMALL, query)
    assert [(one.change.flags, one.fits) for one in found] == [
        ("--kv-dtype fp8", True),
        ("--kv-dtype int4", True),
        ("--kv-dtype int4/int2", True),
        ("--context 4096", True),
        ("--batch 20", True),
        ("--gpu h100-sxm:2 --tp 2", True),
        ("--kv-dtype int8", False),  # 132 bytes where fp8 takes 128
    ]
    fp8 = found[0]
    assert (fp8.row["max_concurrency"], fp8.row["max_context"]) == (40.0, 8192)
    assert fp8.usd_per_hour == 3.29


def test_vllm_has_no_integers_and_transformers_no_kv_dtype() -> None:
    query = asked("h100", "vllm", kv_memory=ROOM, contexts=(8192,), users=(40,))
    flags = by_flags(others(SMALL, query))
    assert {one for one in flags if "kv-dtype" in one} == {"--kv-dtype fp8"}
    plain = asked("h100", "transformers", kv_memory=ROOM, contexts=(8192,), users=(40,))
    flags = by_flags(others(SMALL, plain))
    assert not [one for one in flags if "kv-dtype" in one]
    assert "--batch 20" in flags


def test_llama_70b_with_64_users_does_not_fit_an_80_gb_gpu() -> None:
    query = asked("h100", "vllm", contexts=(8192,), users=(64,))
    case = case_of("llama-3-70b", query)
    found = others("llama-3-70b", query)
    fits = [one for one in found if one.fits]
    assert len(fits) > 20
    assert fits[-1].usd_per_hour is None
    assert "--gpu h100-sxm:8 --tp 8" in by_flags(tuple(fits))
    # 160 GiB of cache and 131 of weights.
    known = {one.id: torch_total(one)[0].best for one in gpu_presets()}
    for one in fits:
        assert one.gpus * known[one.plan.case.gpu.id] > 291 * GIB
    # Neither fp8 suffices: both are tried.
    missed = [one.change.flags for one in found if not one.fits]
    assert missed[:2] == ["--gpu-memory-utilization 0.95", "--kv-dtype fp8"]
    assert missed[-1] == "--kv-dtype fp8 --weights-dtype int4"
    few = alternatives(model("llama-3-70b"), query, case, most=3)
    assert len([one for one in few if one.fits]) == 4  # and more of the same
    assert few[0].change.flags == found[0].change.flags


def test_the_order_is_no_cost_before_cost_then_usd_an_hour() -> None:
    query = asked("a100-80gb", contexts=(65536,), users=(16,))
    found = others(SMALL, query)
    fits = [one for one in found if one.fits]
    assert list(found) == fits + [one for one in found if not one.fits]
    same = [one for one in fits if (one.plan.case.gpu.id, one.gpus) == ("a100-80gb", 1)]
    assert fits[: len(same)] == same
    ranks = [ORDER.index(one.change.lever) for one in same]
    assert ranks == sorted(ranks)
    rest = fits[len(same) :]
    more = [one for one in rest if one.plan.case.gpu.id == "a100-80gb"]
    assert rest[: len(more)] == more  # of the GPU that is there
    prices = [one.usd_per_hour for one in rest[len(more) :]]
    priced = [one for one in prices if one is not None]
    assert prices == sorted(priced) + [None] * (len(prices) - len(priced))
    # int4 alone suffices, so nothing is combined.
    assert "both" not in {one.change.lever for one in found}
    assert same[0].change.flags == "--kv-dtype int4"


def test_a_price_that_was_typed_is_that_gpus() -> None:
    query = asked("h100", contexts=(131072,), users=(8,), price=1.0)
    found = by_flags(others(SMALL, query))
    assert found["--kv-dtype fp8"].usd_per_hour == 1.0
    assert found["--gpu h100-sxm:2 --tp 2"].usd_per_hour == 2.0
    others_ = [one for one in found.values() if one.plan.case.gpu.id == "h200"]
    assert [one.usd_per_hour for one in others_] == [4.39 * others_[0].gpus]


def test_the_lowest_utilisation_that_fits() -> None:
    query = asked("h100", "vllm", utilizations=(0.5,), contexts=(8192,), users=(24,))
    found = others(SMALL, query)
    first = found[0]
    assert first.change.lever == "utilisation"
    share = float(first.change.flags.split()[1])
    again = replace(query, utilizations=(round(share - 0.01, 2),))
    assert 0.5 < share < 0.6
    assert not plan_first(model(SMALL), again).fits
    assert "leaves" in first.change.caveat
    assert not [
        one for one in others(SMALL, asked("h100", users=(99,))) if "util" in one.change.flags
    ]


def test_experts_over_replicas() -> None:
    query = asked("h100:2", "vllm", dps=(2,), contexts=(8192,), users=(64,))
    found = others("gpt-oss-120b", query)
    assert found[0].change.flags == "--ep"
    spread = plan_first(model("gpt-oss-120b"), replace(query, expert_parallel=True))
    assert found[0].plan.holds == spread.holds
    assert spread.case.memory.of("weights") < 35 * GIB
    alone = asked("h100", "vllm", contexts=(8192,), users=(64,))
    assert "--ep" not in by_flags(others("gpt-oss-120b", alone))


def test_what_is_quantised_already_is_not_quantised_again() -> None:
    query = asked("h100", "vllm", contexts=(8192,), users=(64,))
    levers_ = {one.change.lever for one in others("gpt-oss-120b", query)}
    assert "weights" not in levers_
    assert why_not(model("gpt-oss-120b"), query) == "the weights are quantised already"
    named = model(SMALL)
    assert why_not(named, replace(query, weights=8 * GIB)) == "the weights are quantised already"
    assert why_not(named, replace(query, weights=15 * GIB)) == ""
    assert why_not(replace(named, stored=None), query) == "the weights are not counted"
    assert "--kv-memory" in why_not(named, replace(query, kv_memory=GIB))
    fp8 = others(SMALL, replace(query, kv_dtypes=("fp8",), contexts=(65536,)))
    assert not [one for one in fp8 if one.change.lever == "kv-dtype"]


def test_weights_in_fewer_bits_by_hand() -> None:
    named = model(SMALL)
    linear = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    rest = 8_030_261_248 - linear
    fp8, _ = quantised(named, asked("h100"), "fp8")
    assert fp8.stored is not None
    assert fp8.stored.bytes == linear + 4 * linear // 128**2 + 2 * rest
    int4, query = quantised(named, asked("h100", weights=16_060_522_496 // 2), "int4")
    assert int4.stored is not None
    # 4 bits, and a 16-bit scale and a 4-bit zero for 128.
    assert int4.stored.bytes == (4 * 128 + 20) * linear // 128 // 8 + 2 * rest
    assert query.weights == -(-int4.stored.bytes // 2)


def test_caveats_name_who_computes_and_who_measured() -> None:
    bf16 = DTYPES["bf16"]
    kv = {
        name: parse_kv_dtype(name, auto=bf16)
        for name in ("auto", "fp8", "int8", "int4", "int4/int2")
    }
    a100, h100, t4 = gpu_preset("a100-80gb"), gpu_preset("h100"), gpu_preset("t4")
    assert support(h100, kv["fp8"]) == NATIVE
    assert support(gpu_preset("mi300x"), kv["fp8"]) == NATIVE  # e4m3fnuz
    assert support(a100, kv["fp8"]) == STORAGE
    assert support(a100, kv["int8"]) == support(h100, kv["auto"]) == NATIVE
    assert support(a100, kv["int4"]) == support(h100, kv["int4/int2"]) == KERNELS
    assert support(t4, kv["auto"]) == UNKNOWN
    assert support(gpu_preset("b200"), parse_kv_dtype("nvfp4", auto=bf16)) == NATIVE
    assert support(a100, parse_kv_dtype("bf16/fp8", auto=bf16)) == STORAGE
    shape = model(SMALL).shape
    assert of_cache(a100, kv["fp8"], shape).startswith(
        "fp8 on a100-80gb: storage only; fp8 KV kept"
    )
    assert of_cache(h100, kv["fp8"], shape) == ACCURACY["fp8"]
    assert "2402.02750" in of_cache(h100, kv["int4/int2"], shape)
    assert "lmdeploy" in of_cache(h100, kv["int8"], shape)
    assert "verl#4435" in of_cache(h100, kv["fp8"], model("qwen2.5-7b").shape)
    assert "vllm#38652" in of_cache(h100, kv["fp8"], model("deepseek-v3").shape)
    assert [bits(kv[name]) for name in ("auto", "int8", "int4/int2")] == [16, 8, 3]


def test_the_cheapest_presets() -> None:
    query = asked("h100", "vllm")
    found = cheapest(model("llama-3-70b"), query, 8192, 64)
    assert list(found) == sorted(found, key=by_hour)
    assert len({one.plan.case.gpu.id for one in found}) == len(found)
    assert found[:3] == cheapest(model("llama-3-70b"), query, 8192, 64, most=3)
    assert {one.plan.case.users for one in found} == {64}
    assert {one.plan.case.context for one in found} == {8192}
    for one in found:
        assert one.fits
        assert one.gpus in (1, 2, 4, 8, 16)
        case = one.plan.case
        # Half as many fit in no way.
        half = replace(query, gpus=gpus_named(case.gpu.id), contexts=(8192,), users=(64,))
        for tp, dp in ((tp, dp) for tp in (1, 2, 4, 8) for dp in (1, 2)):
            pp = one.gpus // 2 // tp // dp
            if pp:
                smaller = replace(half, tps=(tp,), pps=(pp,), dps=(dp,))
                assert not plan_first(model("llama-3-70b"), smaller).fits
    with pytest.raises(KvtoolError, match="above the model's maximum"):
        cheapest(model("llama-3-70b"), query, 2**20, 1)


def test_ranked_by_what_a_token_costs() -> None:
    found = cheapest(model(SMALL), asked("all", "vllm"), 8192, 32, by="tokens")
    assert list(found) == sorted(found, key=by_tokens)
    costs = [one.usd_per_million_tokens for one in found]
    known = [one for one in costs if one is not None]
    assert costs[: len(known)] == sorted(known)
    hours = [one.usd_per_hour for one in found[len(known) :]]
    priced = [one for one in hours if one is not None]
    assert hours == sorted(priced) + [None] * (len(hours) - len(priced))
    first = found[0]
    rate = first.row["output_tokens_per_s"]
    assert first.usd_per_hour is not None
    assert known[0] == pytest.approx(first.usd_per_hour / 3600 / rate * 1e6)


def test_presets_that_cannot_run_it_are_left_out() -> None:
    assert not runs(gpu_preset("v100-32gb"), "vllm", "bf16")
    assert runs(gpu_preset("v100-32gb"), "vllm", "fp16")
    assert runs(gpu_preset("v100-32gb"), "ideal", "fp32")
    assert not runs(gpu_preset("m4-max-128gb"), "vllm", "bf16")
    assert runs(gpu_preset("m4-max-128gb"), "ideal", "bf16")
    assert not runs(gpu_preset("mi325x"), "ideal", "bf16")  # whose memory is not known
    apple = cheapest(model(SMALL), asked("h100"), 8192, 1, presets=(gpu_preset("m4-max-128gb"),))
    assert [one.gpus for one in apple] == [1]
    none = cheapest(
        model("llama-3-70b"), asked("h100"), 8192, 1, presets=(gpu_preset("m1-max-64gb"),)
    )
    assert none == ()


def rows_of(name: str, query: PlanQuery) -> dict[str, Any]:
    return {row["flags"]: row for row in levers(model(name), query, case_of(name, query))}


def test_levers_by_hand() -> None:
    # 20 requests of 1 GiB; a step reads them and the weights but the embedding table.
    query = asked("h100", kv_memory=ROOM, contexts=(8192,))
    rows = rows_of(SMALL, query)
    assert list(rows) == [
        "--kv-dtype int4/int2", "--kv-dtype int4", "--gpu h100-sxm:2 --tp 2", "--kv-dtype fp8",
        "--context 4096", "--kv-dtype int8",
    ]  # fmt: skip
    assert [row["users"] for row in rows.values()] == [98, 75, 40, 40, 40, 38]
    assert [row["users_gained"] for row in rows.values()] == [78, 55, 20, 20, 20, 18]
    assert {row["batch"] for row in rows.values()} == {20}
    read = 2 * (8_030_261_248 - 128256 * 4096)
    fp8 = rows["--kv-dtype fp8"]
    assert fp8["tpot_s"] == pytest.approx(1e-3 + (read + 10 * GIB) / 3350e9 / 0.8)
    assert fp8["tpot_gained_s"] == pytest.approx(10 * GIB / 3350e9 / 0.8)
    assert fp8["request_bytes"] == GIB // 2
    assert [rows[f"--kv-dtype {name}"]["support"] for name in ("fp8", "int4")] == [NATIVE, KERNELS]
    assert rows["--context 4096"]["support"] is None


def test_users_are_those_that_really_run() -> None:
    # vLLM sets a block aside: of five requests of 512 blocks, four run in 5 GiB, and of ten nine.
    rows = rows_of(SMALL, asked("h100", "vllm", kv_memory=5 * GIB, contexts=(8192,)))
    fp8 = rows["--kv-dtype fp8"]
    assert (fp8["batch"], fp8["users"], fp8["users_gained"]) == (4, 9, 5)


def test_levers_are_compared_at_the_users_that_were_asked_for() -> None:
    query = asked("h100:8", "vllm", contexts=(8192,), users=(64,))
    rows = rows_of("llama-3-70b", query)
    assert {row["batch"] for row in rows.values()} == {64}
    order = [(-row["users_gained"], -row["tpot_gained_s"]) for row in rows.values()]
    assert order == sorted(order)
    # Eight KV heads on 16 ranks: a request takes as much of each, and only weights make room.
    wide = rows["--gpu h100-sxm:16 --tp 16"]
    assert wide["request_bytes"] == 5 * GIB // 16
    assert "8 KV heads are copied on 16 ranks" in wide["caveat"]
    assert wide["usd_per_hour"] == 16 * 3.29
    fp8 = next(row for row in rows.values() if row["lever"] == "weights")
    assert fp8["users_gained"] > 0
    share = rows["--gpu-memory-utilization 0.95"]
    assert share["tpot_gained_s"] == 0
    # 5 % of 79.18 GiB, in requests of 5/16 GiB.
    assert share["users_gained"] in (12, 13)


def test_replicas_gain_each() -> None:
    query = asked("h100:3", kv_memory=ROOM, contexts=(8192,), dps=(3,))
    rows = rows_of(SMALL, query)
    assert rows["--kv-dtype fp8"]["users"] == 120
    assert rows["--kv-dtype fp8"]["batch"] == 60
    assert rows["--gpu h100-sxm:6 --tp 2 --dp 3"]["users"] == 120


def said(name: str, query: PlanQuery) -> str:
    return cache_or_weights(model(name), query, case_of(name, query))


def test_cache_or_weights_first() -> None:
    text = said("llama-3-70b", asked("h100:8", "vllm", contexts=(8192,), users=(64,)))
    assert text.startswith(
        "Quantise the cache first: at 64 requests of 8,192 tokens fp8 saves 10.00 GiB "
    )
    # 7.97 GiB of weights over 5/32 GiB a request.
    assert "7.97 GiB of weights" in text
    assert text.endswith("the cache saves more from 51 requests on")
    short = said("llama-3-70b", asked("h100:8", "vllm", contexts=(1024,), users=(8,)))
    assert short.startswith("Quantise the cache first for users, the weights first for TPOT")
    few = said("qwen3-30b-a3b", asked("h100", "vllm", contexts=(8192,), users=(2,)))
    assert few.startswith("Quantise the weights first")
    none = said("llama-3-70b", asked("h100", "vllm", contexts=(8192,), users=(64,)))
    assert none.startswith("Neither the cache nor the weights alone")


def test_only_one_is_left_to_quantise() -> None:
    text = said("gpt-oss-120b", asked("h100", "vllm", contexts=(8192,)))
    assert text.startswith("Quantise the cache, the weights are quantised already: ")
    text = said(SMALL, asked("h100", "vllm", kv_dtypes=("fp8",), contexts=(8192,)))
    assert text.startswith("Quantise the weights, the cache is in fp8 already: ")
    text = said(SMALL, asked("h100", "transformers", contexts=(8192,)))
    assert text.startswith("Quantise the weights, transformers has no fp8 cache: ")
    assert said("gpt-oss-120b", asked("h100", kv_dtypes=("int4",), contexts=(8192,))) == ""


TYPED: dict[str, Callable[[str], dict[str, Any]]] = {
    "--kv-dtype": lambda v: {"kv_dtypes": (v,)},
    "--context": lambda v: {"contexts": (int(v),)},
    "--batch": lambda v: {"users": (int(v),)},
    "--gpu-memory-utilization": lambda v: {"utilizations": (float(v),)},
    "--gpu": lambda v: {"gpus": gpus_named(v)},
    "--tp": lambda v: {"tps": (int(v),)},
    "--pp": lambda v: {"pps": (int(v),)},
    "--dp": lambda v: {"dps": (int(v),)},
    "--dcp": lambda v: {"dcp": int(v)},
    "--max-num-seqs": lambda v: {"max_num_seqs": int(v)},
}


SET: dict[str, dict[str, Any]] = {
    "--ep": {"expert_parallel": True}, "--enforce-eager": {"enforce_eager": True},
}  # fmt: skip


def typed(named: PlanModel, query: PlanQuery, flags: str) -> tuple[PlanModel, PlanQuery]:
    """Model and query with flags on top, as the command line would read them."""
    words = shlex.split(flags)
    pairs = iter(words)
    for flag in pairs:
        if flag in ("--ep", "--enforce-eager"):
            query = replace(query, **SET[flag])
            continue
        value = next(pairs)
        if flag == "--weights-dtype":
            named, query = quantised(named, query, value)
            continue
        query = replace(query, **TYPED[flag](value))
    return named, query


MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-120b", "gemma-3-27b", "deepseek-v3")


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    gpu=st.sampled_from(("h100", "a100-40gb:2", "l4:4", "h200:8", "h100:16")),
    engine=st.sampled_from(("ideal", "vllm")),
    users=st.one_of(st.none(), st.integers(1, 400)),
    context=st.integers(1, 32768),
    dps=st.sampled_from((None, 1)),
)
def test_planned_anew_from_its_flags_an_alternative_is_what_it_says(
    name: str, gpu: str, engine: str, users: int | None, context: int, dps: int | None
) -> None:
    named: PlanModel = model(name)
    query = asked(gpu, engine, contexts=(context,), users=(users,), dps=(dps,))
    try:
        case = case_of(name, query)
    except (KvtoolError, StopIteration):  # a tp that does not divide the heads
        return
    for one in alternatives(named, query, case, most=6):
        anew = plan_first(*typed(named, query, one.change.flags))
        assert anew.fits == one.fits, one.change.flags
        assert anew.holds == one.plan.holds
        assert anew.longest == one.plan.longest
        assert anew.case.gpus == one.gpus
        assert anew.speed == one.plan.speed
        assert one.as_row()["flags"] == one.change.flags

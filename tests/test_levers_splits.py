"""The same GPUs split otherwise, where they do not hold what was asked."""

from __future__ import annotations

from dataclasses import replace

from planned_models import asked, model

from kvtool.levers import Alternative, alternatives, instead
from kvtool.levers.presets import gpu_change
from kvtool.plan_query import PlanQuery, gpus_named
from kvtool.planning import cases_of, split_of
from kvtool.solving import solve


def others(name: str, query: PlanQuery) -> tuple[Alternative, ...]:
    case = next(cases_of(model(name), query, []))
    return alternatives(model(name), query, case, most=1)


def test_the_same_gpus_split_otherwise() -> None:
    # Each of 16 ranks keeps all latents, and a batch of 64 × 32k tokens takes 137 GiB; eight ranks that share
    # their tokens need 17. Fewest flags first, then the way with most tokens a second.
    query = asked("h100:16", "vllm", contexts=(32768,), users=(64,), tps=(16,))
    found = others("deepseek-v3", query)
    assert [(one.change.flags, one.fits) for one in found[:2]] == [
        ("--tp 16 --dcp 8", True),
        ("--tp 16 --dcp 16", True),
    ]
    first, second = (one.plan for one in found[:2])
    assert first.holds.request_bytes == 32768 * 1152 * 61 // 8
    assert second.speed
    assert first.speed
    assert second.speed.output_tokens_per_s > first.speed.output_tokens_per_s
    assert found[0].change.words == "the same GPUs as tp 16, dcp 8"
    assert found[0].usd_per_hour == 16 * 3.29


def splits_of(name: str, query: PlanQuery) -> list[tuple[str, bool]]:
    found = others(name, query)
    return [(one.change.flags, one.fits) for one in found if one.change.lever == "split"]


def test_a_split_undoes_flags_that_were_typed() -> None:
    # 131 GiB of weights on each of eight replicas: tp 8 holds them.
    query = asked("h100:8", "vllm", dps=(8,), contexts=(8192,), users=(8,))
    assert splits_of("llama-3-70b", query) == [("--tp 8 --dp 1", True)]
    # Eight heads on 16 ranks are there twice; two ranks that hold the same one share its tokens.
    wide = asked("l4:16", "vllm", contexts=(8192,), users=(32,), tps=(16,))
    assert splits_of("llama-3-70b", wide) == [("--tp 16 --dcp 2", True)]
    # 627 GiB are too much in any way: the one that misses least.
    large = asked("h100:8", "vllm", dps=(8,), contexts=(32768,), users=(64,))
    assert splits_of("deepseek-v3", large) == [("--tp 8 --dp 1 --dcp 8", False)]
    assert splits_of("deepseek-v3", replace(large, dps=(1,), dcp=8, tps=(8,))) == []


def instead_of(what: str, name: str, query: PlanQuery) -> list[str]:
    found = solve(what, model(name), query)
    assert found.error is not None
    ways = instead(model(name), query, found)
    assert all(one.fits for one in ways)
    return [one.change.flags for one in ways]


def test_what_to_do_where_nothing_is_found() -> None:
    alone = asked("h100", "transformers", contexts=(8192,), users=(64,))
    # One process has all 131 GiB on one GPU: an MI300X holds 16 of the 64 users, 40 GiB, beside them.
    assert instead_of("gpus", "llama-3-70b", alone)[0] == "--gpu mi300x:4 --tp 1 --dp 4"
    wide = asked("h100:16", "vllm", contexts=(32768,), users=(64,), tps=(16,))
    found = instead_of("kv-dtype", "deepseek-v3", wide)
    assert found == ["--tp 16 --dcp 8", "--tp 16 --dcp 16", "--context 5792"]
    # A single request, and a single token: the users are not what is in the way.
    tight = asked("h100", "vllm", contexts=(8192,), users=(64,))
    batch = instead_of("batch", "llama-3-70b", tight)
    assert batch[0] == "--weights-dtype int4"
    context = instead_of("context", "llama-3-70b", tight)
    assert context[0] == "--weights-dtype fp8"


def test_an_engine_without_fp8_caches_is_offered_none() -> None:
    query = asked("h100", "transformers", contexts=(8192,), users=(64,))
    flags = {one.change.flags for one in others("llama-3-70b", query)}
    assert "--weights-dtype int4" in flags
    assert not any("--kv-dtype" in one for one in flags)


def test_what_is_shared_is_not_called_copied() -> None:
    query = asked("h200:8", "vllm", contexts=(32768,), users=(2000,))
    plain = gpu_change(model("deepseek-v3"), query, split_of(query.gpus[0], 8, 1, 1))
    assert "every rank of tp keeps all of a latent cache" in plain.caveat
    shared = replace(query, dcp=8)
    assert (
        "latent"
        not in gpu_change(model("deepseek-v3"), shared, split_of(query.gpus[0], 8, 1, 1)).caveat
    )
    heads = split_of(gpus_named("h100:16")[0], 16, 1, 1)
    assert "8 KV heads are copied" in gpu_change(model("llama-3-70b"), query, heads).caveat
    assert "copied" not in gpu_change(model("llama-3-70b"), replace(query, dcp=2), heads).caveat

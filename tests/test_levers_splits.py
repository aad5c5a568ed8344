"""The same GPUs split otherwise, where they do not hold what was asked."""

from __future__ import annotations

from dataclasses import replace

from planned_models import asked, model

from kvtool.levers import Alternative, alternatives
from kvtool.plan_query import PlanQuery
from kvtool.planning import cases_of


def others(name: str, query: PlanQuery) -> tuple[Alternative, ...]:
    case = next(cases_of(model(name), query, []))
    return alternatives(model(name), query, case, most=1)


def test_the_same_gpus_split_otherwise() -> None:
    # Each of 16 ranks keeps all latents, and a batch of 64 × 32k tokens takes 137 GiB; eight ranks that share
    # their tokens need 17. Fewest flags first, then the way with most tokens a second.
    query = asked("h100:16", "vllm", contexts=(32768,), users=(64,))
    found = others("deepseek-v3", query)
    assert [(one.change.flags, one.fits) for one in found[:2]] == [
        ("--tp 16 --dcp 8", True),
        ("--tp 2 --dp 8 --dcp 2 --ep", True),
    ]
    first, second = (one.plan for one in found[:2])
    assert first.holds.request_bytes == 32768 * 1152 * 61 // 8
    assert second.speed
    assert first.speed
    assert 8 * second.speed.output_tokens_per_s > first.speed.output_tokens_per_s
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
    wide = asked("l4:16", "vllm", contexts=(8192,), users=(32,))
    assert splits_of("llama-3-70b", wide) == [("--tp 16 --dcp 2", True)]
    # 627 GiB are too much in any way: the one that misses least.
    large = asked("h100:8", "vllm", dps=(8,), contexts=(32768,), users=(64,))
    assert splits_of("deepseek-v3", large) == [("--tp 8 --dp 1 --dcp 8", False)]
    assert splits_of("deepseek-v3", replace(large, dps=(1,), dcp=8, tps=(8,))) == []

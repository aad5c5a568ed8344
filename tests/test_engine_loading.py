"""Weights as vLLM holds them, against what its logs print as "Model loading took" (GiB of a rank)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import case_of, model_of

from kvtool import catalog
from kvtool.engine_memory.loading import left_behind
from kvtool.plan_query import PlanQuery, gpus_named
from kvtool.units import GIB

PRINTED = [
    ("gpt-oss-120b", "h100", 65.965, "vllm-project/vllm#23278"),
    ("gpt-oss-20b", "a100-80gb", 13.72, "a public log of vLLM 0.19"),
    ("deepseek-r1", "h200:8", 79.74, "ashishkamra/vllm-memory-estimator, 0.11 to 0.18"),
    ("llama-3.1-70b", "h200:4", 32.89, "the same"),
    ("qwen3-235b-a22b", "h200:4", 109.61, "the same"),
]
MI300X = [
    ("llama-3.1-70b", "mi300x", 131.62), ("deepseek-r1", "mi300x:8", 81.31),
    ("qwen3-235b-a22b", "mi300x:4", 112.6), ("llama-4-maverick", "mi300x:8", 126.7),
]  # fmt: skip
"""ashishkamra/vllm-memory-estimator, test_data/validation_db.json."""


def weights(model: str, gpus: str, engine: str = "vllm") -> tuple[int, int, int]:
    _, _, case = case_of(model, gpus, engine)
    found = next(one for one in case.memory.gives if one.name == "weights").range
    return found.low, found.best, found.high


@pytest.mark.parametrize(("model", "gpus", "printed", "_source"), PRINTED)
def test_weights_are_as_printed(model: str, gpus: str, printed: float, _source: str) -> None:
    low, best, high = weights(model, gpus)
    assert low == best == high
    assert best / GIB == pytest.approx(printed, rel=0.005)


@pytest.mark.parametrize(("model", "gpus", "printed"), MI300X)
def test_amd_keeps_what_loading_leaves(model: str, gpus: str, printed: float) -> None:
    low, best, high = weights(model, gpus)
    assert low < best < high
    assert low <= printed * GIB <= high


def test_other_engines_hold_them_as_stored() -> None:
    stored = weights("gpt-oss-120b", "h100", "ideal")
    assert stored[1] / GIB == pytest.approx(60.77, abs=0.01)
    assert weights("deepseek-r1", "h200:8", "ideal")[1] < weights("deepseek-r1", "h200:8")[1]


def test_padding_depends_on_the_gpu_and_on_what_cuts_the_experts() -> None:
    """360 columns of 8 ranks become 384, on FlashInfer's kernels 512; whole experts 2,944 of 2,880."""
    kept = {gpu: weights("gpt-oss-120b", f"{gpu}:8")[1] for gpu in ("h100", "b200")}
    assert kept["b200"] > 1.2 * kept["h100"]
    assert weights("mixtral-8x7b", "h100:8") == weights("mixtral-8x7b", "b200:8")


def test_only_latents_that_are_absorbed_are_copied() -> None:
    """vLLM runs MiniCPM3 as plain attention."""
    assert weights("minicpm3", "h100") == weights("minicpm3", "h100", "ideal")
    assert weights("kimi-linear", "h100:2")[1] > weights("kimi-linear", "h100:2", "ideal")[1]


def test_quantised_experts_do_not_come_in_one_tensor() -> None:
    gpu = catalog.gpu_preset("mi300x")
    query = PlanQuery(gpus=gpus_named("mi300x:8"))
    model = model_of("llama-4-maverick", query)
    assert model.stored is not None
    fp8 = replace(
        model.stored, parts=tuple(replace(one, storages=("fp8",)) for one in model.stored.parts)
    )
    most = [left_behind("vllm", gpu, 1000, one, "llama4_text").high for one in (model.stored, fp8)]
    assert most[0] > 10 * most[1] > 0  # 400 and 35
    assert left_behind("vllm", catalog.gpu_preset("h100"), 100, fp8, "llama4_text").high == 0

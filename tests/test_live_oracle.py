"""What kvtool predicts of transformers, against transformers itself: every model type, built tiny.

Each type is made from its class's own defaults, shrunk (live_types.py), with random weights; a
prompt and a few tokens are run through it, and every tensor of its cache is compared by layer and
kind with `parts`, the config read in three forms: the keyword arguments, to_dict(), and the diff
that a config.json holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from live_oracle import PROMPT, predicted, tiny_config, try_type
from live_types import TYPES, UNBUILT

from kvtool import catalog
from kvtool.errors import KvtoolError
from kvtool.model import read_model

NO_CACHE = {"openai-gpt"}
"""Classes that build and run, and have no cache to fill."""

NOT_STATIC = {
    **dict.fromkeys(("reformer", "xlnet", "minimax", "xlstm"), "a cache of its own class"),
    **dict.fromkeys(("kosmos-2", "kosmos_2_text_model", "prophetnet"), "its mask wants the tokens"),
    **dict.fromkeys(("blip", "moonshine", "nllb-moe", "xlm"), "run by generate() here"),
    "cpmant": "it updates the cache beyond its length: its learned prompt comes on top",
    "deepseek_v4": "transformers has no static layer for its pools",
}
"""Classes that cannot be given a static cache, or do not look at it."""

SAMPLE = [
    "llama", "qwen2", "qwen3_moe", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
    "gpt_oss", "llama4", "mistral", "phi3", "cohere2", "olmo3", "falcon", "gpt2", "bloom",
    "gpt_neo", "gpt_bigcode", "deepseek_v3", "deepseek_v32", "deepseek_v4", "minicpm3",
    "longcat_flash", "kimi_linear", "mamba", "mamba2", "jamba", "zamba2", "bamba", "falcon_h1",
    "nemotron_h", "granitemoehybrid", "qwen3_next", "qwen3_5", "lfm2", "minimax", "rwkv",
    "recurrent_gemma", "zaya", "bart", "t5", "whisper", "mllama", "qwen2_vl", "xlnet", "bert",
    "dory", "inkling_text", "unlimited_ocr",
]  # fmt: skip
"""What `make test` runs; `make test-full` runs all."""

GENERATING = [
    name for name, about in catalog.class_defaults()["types"].items() if about.get("generates")
]
BUILT = [name for name in GENERATING if name not in UNBUILT | dict.fromkeys(NO_CACHE)]
STATIC_LENGTH = 40
FP32_ONLY = {"reformer", "xlnet"}
"""Classes whose own forward mixes dtypes and fails in bf16 on a CPU."""


def marked(names: list[str]) -> list[Any]:
    """The sample as it is, the others marked slow."""
    return [
        name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in names
    ]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("model_type", marked(BUILT))
def test_a_dynamic_cache_in_fp32(model_type: str, table: dict[str, Any]) -> None:
    check(model_type, table, "float32")


@pytest.mark.parametrize("model_type", marked([n for n in BUILT if n not in FP32_ONLY]))
def test_a_dynamic_cache_in_bf16(model_type: str, table: dict[str, Any]) -> None:
    check(model_type, table, "bfloat16")


@pytest.mark.parametrize("model_type", marked([n for n in BUILT if n not in NOT_STATIC]))
def test_a_static_cache(model_type: str, table: dict[str, Any]) -> None:
    check(model_type, table, "float32", static=STATIC_LENGTH)


def check(model_type: str, table: dict[str, Any], dtype: str, static: int = 0) -> None:
    trial = try_type(model_type, dtype=dtype, static=static)
    cache = "static" if static else "dynamic"
    for sample in trial.samples:
        assert sample.real, "the cache is empty"
        for name, form in trial.forms.items():
            found = predicted(form, table, trial, sample, cache)
            assert found == sample.real, f"{name} form, {sample.context} tokens"


@pytest.mark.parametrize("model_type", sorted(NO_CACHE))
def test_a_class_without_a_cache_is_refused(model_type: str, table: dict[str, Any]) -> None:
    trial = try_type(model_type)
    for sample in trial.samples:
        assert sample.real == {}
        with pytest.raises(KvtoolError, match="cache"):
            predicted(trial.forms["full"], table, trial, sample, "dynamic")


def test_the_list_of_what_cannot_be_built_only_shrinks() -> None:
    assert len(UNBUILT) <= 10
    assert set(UNBUILT) <= set(GENERATING)
    assert len(BUILT) >= 280
    assert all(UNBUILT.values())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", UNBUILT)
def test_what_is_listed_as_unbuilt_cannot_be_built(model_type: str) -> None:
    assert not builds(model_type), "it can be built now: take it off the list"


def builds(model_type: str) -> bool:
    try:
        return bool(try_type(model_type).samples)
    except Exception:  # noqa: BLE001 - whatever the class says
        return False


def test_the_table_names_real_types() -> None:
    assert set(TYPES) <= set(GENERATING)
    assert set(SAMPLE) <= set(BUILT)
    assert set(NOT_STATIC) <= set(BUILT)


def test_a_wrong_prediction_is_seen(table: dict[str, Any]) -> None:
    trial = try_type("llama")
    raw = tiny_config("llama") | {"model_type": "llama", "num_key_value_heads": 4}
    assert read_model(raw, table).layers[0].kv_heads == 4
    sample = trial.samples[0]
    assert sample.context == PROMPT
    assert predicted(raw, table, trial, sample, "dynamic") != sample.real

"""Types outside transformers: no class is built, so totals are those that were published."""

from __future__ import annotations

from typing import Any

import pytest

from kvtool import catalog
from kvtool.errors import KvtoolError
from kvtool.model import read_model
from kvtool.weights.counting import parts_of
from kvtool.weights.parts import Part, total

TYPES = catalog.class_defaults()["types"]

TOTALS = {
    "baichuan2-7b": 7_505_973_248,
    "chatglm3-6b": 6_243_584_000,
    "deepseek-moe-16b": 16_375_728_128,
    "glm-4-9b-chat": 9_399_951_360,
    "internlm2-7b": 7_737_708_544,
    "minicpm-2b": 2_724_880_896,
    "openelm-1.1b": 1_079_891_456,
    "qwen-7b-chat": 7_721_324_544,
    "qwen-72b-chat": 72_287_920_128,
}


def counted(name: str, **changed: Any) -> tuple[Part, ...]:
    preset = catalog.model_preset(name)
    assert preset is not None
    config = {**preset.config, **changed}
    return parts_of(name, config, read_model(config, TYPES))


@pytest.mark.parametrize("name", TOTALS)
def test_totals_are_those_published(name: str) -> None:
    assert total(counted(name)).count == TOTALS[name]


def test_mimo_has_a_layer_that_predicts_a_further_token_and_multiplies_none() -> None:
    with_it, without = counted("mimo-7b"), counted("mimo-7b", num_nextn_predict_layers=0)
    assert f"{total(with_it).count / 1e9:.2f}" == "7.83"
    more = 2 * 4096**2 + 3 * 4096
    layer = sum(part.size.count for part in without if part.layer == 0)
    assert total(with_it).count - total(without).count == layer + more
    assert total(with_it).matrices == total(without).matrices


def test_switches_that_published_checkpoints_leave_alone() -> None:
    hidden, layers, width = 4096, 32, 11008
    qwen = total(counted("qwen-7b-chat", no_bias=False)).count - TOTALS["qwen-7b-chat"]
    assert qwen == layers * (2 * hidden + 2 * width)
    glm = TOTALS["chatglm3-6b"] - total(counted("chatglm3-6b", add_qkv_bias=False)).count
    assert glm == 28 * (hidden + 2 * 2 * 128)
    assert total(counted("chatglm3-6b", rmsnorm=False)).count - TOTALS["chatglm3-6b"] == 57 * hidden
    assert (
        TOTALS["chatglm3-6b"] - total(counted("chatglm3-6b", post_layer_norm=False)).count == hidden
    )
    internlm = total(counted("internlm2-7b", bias=True)).count - TOTALS["internlm2-7b"]
    assert internlm == layers * (hidden + 2 * 1024 + hidden)
    apart = total(counted("openelm-1.1b", share_input_output_layers=False)).count
    assert apart - TOTALS["openelm-1.1b"] == 32_000 * 2048
    bare = total(counted("openelm-1.1b", normalize_qk_projections=False)).count
    assert TOTALS["openelm-1.1b"] - bare == 28 * 2 * 64
    untied = total(counted("minicpm-2b", tie_word_embeddings=False)).count
    assert untied - TOTALS["minicpm-2b"] == 122_753 * 2304


def test_experts_of_minicpm_and_deepseek() -> None:
    one = 3 * 2304 * 5760
    sparse = counted("minicpm-2b", num_experts=8, num_experts_per_tok=2)
    assert total(sparse).count - TOTALS["minicpm-2b"] == 40 * (7 * one + 8 * 2304)
    routed = [
        part for part in counted("deepseek-moe-16b", moe_layer_freq=2) if part.role == "experts"
    ]
    assert [part.layer for part in routed] == list(range(2, 28, 2))
    assert (routed[0].experts, routed[0].chosen) == (64, 6)
    dense = counted("deepseek-moe-16b", n_routed_experts=None)
    assert not any(part.role in ("experts", "shared", "router") for part in dense)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("chatglm3-6b", {"ffn_hidden_size": None}),
        ("chatglm3-6b", {"padded_vocab_size": None}),
        ("chatglm3-6b", {"pre_seq_len": 128}),
        ("glm-4-9b-chat", {"vision_config": {"hidden_size": 8}}),
        ("qwen-7b-chat", {"visual": {"width": 8}}),
        ("qwen-7b-chat", {"intermediate_size": "wide"}),
        ("openelm-1.1b", {"ffn_multipliers": [0.5, 4.0]}),
        ("openelm-1.1b", {"ffn_multipliers": ["1"] * 28}),
        ("openelm-1.1b", {"ffn_dim_divisor": 0}),
        ("deepseek-moe-16b", {"moe_layer_freq": 0}),
        ("deepseek-moe-16b", {"num_experts_per_tok": 65}),
        ("mimo-7b", {"num_nextn_predict_layers": -1}),
    ],
)
def test_what_is_not_understood_is_refused(name: str, changed: dict[str, Any]) -> None:
    with pytest.raises(KvtoolError):
        counted(name, **changed)


@pytest.mark.parametrize(
    ("model", "count"),
    [  # as their model cards and safetensors headers say
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("gemma-2b", 2_506_172_416),
        ("phi-4", 14_659_507_200),
        ("pythia-160m", 162_322_944),
        ("pythia-12b", 11_846_072_320),
        ("gpt2", 124_439_808),
        ("opt-6.7b", 6_658_473_984),
    ],
)
def test_published_counts(model: str, count: int) -> None:
    assert total(counted(model)).count == count

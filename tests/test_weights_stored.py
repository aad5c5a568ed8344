"""Bytes of quantised checkpoints against those that were published, and lists of modules that stay."""

from __future__ import annotations

import contextlib
import copy
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool import catalog
from kvtool.cache import stages
from kvtool.dtypes import DTYPES
from kvtool.errors import KvtoolError
from kvtool.model import read_model
from kvtool.weights.counting import parts_of
from kvtool.weights.matching import NotUnderstoodError, compiled
from kvtool.weights.parts import Part, Size, matrix
from kvtool.weights.stored import Stored, scheme_of, stored

TYPES = catalog.class_defaults()["types"]
BF16 = DTYPES["bf16"]


def preset(name: str, **more: Any) -> dict[str, Any]:
    found = catalog.model_preset(name)
    assert found is not None
    return {**copy.deepcopy(found.config), **more}


def of(config: dict[str, Any]) -> Stored:
    return stored(parts_of("m", config, read_model(config, TYPES)), config, BF16)


AWQ = {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq",
       "version": "gemm", "zero_point": True}  # fmt: skip
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
       "weight_block_size": [128, 128]}  # fmt: skip
MXFP4 = {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
         "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"}  # fmt: skip
INT4_GROUP = {"group_0": {"input_activations": None, "targets": ["Linear"], "weights": {
    "group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int"}}}  # fmt: skip
KIMI = {"config_groups": INT4_GROUP, "format": "pack-quantized", "quant_method": "compressed-tensors",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                   r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]}  # fmt: skip
NVFP4_GROUP = {"group_0": {"targets": ["Linear"], "weights": {
    "dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}}  # fmt: skip


def test_unquantised_checkpoints() -> None:
    # total_size of meta-llama/Meta-Llama-3-8B, model.safetensors.index.json.
    found = of(preset("llama-3-8b"))
    assert found.bytes == 16_060_522_496
    assert found.basis == "8,030,261,248 parameters in bf16, counted from the config"


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {"model_type": "gpt_oss", "num_hidden_layers": layers, "num_local_experts": experts,
            "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201_088,
            "num_experts_per_tok": 4, "tie_word_embeddings": False, "attention_bias": True,
            "quantization_config": MXFP4}  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "experts", "total_size"),
    # total_size of model.safetensors.index.json of openai/gpt-oss-120b and openai/gpt-oss-20b.
    [(36, 128, 65_248_815_744), (24, 32, 13_761_264_768)],
)
def test_gpt_oss_to_the_byte(layers: int, experts: int, total_size: int) -> None:
    found = of(gpt_oss(layers, experts))
    assert found.bytes == total_size
    assert "experts in mxfp4 with an 8-bit scale per 32, by quantization_config;" in found.basis


def test_awq_to_the_byte() -> None:
    # total_size of hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4, model.safetensors.index.json.
    found = of(preset("llama-3.1-70b", quantization_config=AWQ))
    assert found.bytes == 39_767_785_472
    assert found.basis == (
        "70,553,706,496 parameters, counted from the config: int4 with an fp16 scale and zero per "
        "128, by quantization_config; norms, embeddings and head in bf16"
    )


def test_deepseek_r1_but_for_its_layer_that_predicts_a_further_token() -> None:
    """deepseek-ai/DeepSeek-R1, safetensors of the Hub's API: BF16 3,918,786,560, F8_E4M3
    680,571,043,840, F32 41,555,600, of which 256 × 59 are biases of routers and the rest scales.

    The class does not build layer 61: a layer like those before it, embeddings and a head of its own,
    eh_proj and three norms in bf16.
    """
    config = preset("deepseek-r1", quantization_config=FP8)
    parts = parts_of("m", config, read_model(config, TYPES))
    hidden = 7168
    last = [part for part in parts if part.layer == 60]
    own = Size(2 * 129_280 * hidden + 2 * hidden * hidden + 3 * hidden)
    whole = [*parts, *last, Part(role="beside", size=own)]
    found = stored(whole, config, BF16)
    matrices = sum(part.size.matrices for part in whole if part.quantised)
    assert matrices == 680_571_043_840
    # The biases of the routers are not of the classes' parameters.
    assert found.parameters - matrices == 3_918_786_560
    published = 2 * 3_918_786_560 + 680_571_043_840 + 4 * (41_555_600 - 256 * 59)
    # Blocks that are not full (kv_a_proj's 576 rows) have scales as well.
    assert 0 <= published - found.bytes == 6_944
    assert of(config).bytes == 673_150_545_584


def test_kimi_k2_5_leaves_all_but_the_experts() -> None:
    """384 experts a layer in int4; the files of moonshotai/Kimi-K2-Thinking have 594 GB on its page."""
    config = preset("kimi-k2", quantization_config=KIMI)
    found = of(config)
    experts = 60 * 384 * 3 * 7168 * 2048
    assert found.expert_bytes == experts * Fraction(9, 2) / 8
    assert found.bytes == found.expert_bytes + 2 * (found.parameters - experts)
    assert round(found.bytes / 1e9, 1) == 594.2


def test_nvfp4_with_globs_of_layers() -> None:
    """As nvidia/MiniMax-M2.7-NVFP4: attention, routers and the head as they are."""
    left = [f"model.layers.{i}.{name}" for i in range(62)
            for name in ("self_attn*", "block_sparse_moe.gate")]  # fmt: skip
    quantised = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": NVFP4_GROUP,
                 "ignore": ["lm_head", *left]}  # fmt: skip
    config = preset("minimax-m2.7", quantization_config=quantised)
    found = of(config)
    plain = of(preset("minimax-m2.7", quantization_config=None))
    assert found.by_role["attention"] == plain.by_role["attention"]
    assert found.expert_bytes == plain.expert_bytes * Fraction(9, 32)


def test_one_layer_left_alone_counts_once() -> None:
    config = preset("llama-3-8b", quantization_config={**FP8, "modules_to_not_convert": []})
    whole = of(config).bytes
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.1.mlp"]
    assert of(config).bytes - whole == 3 * 4096 * 14336 * (8 - Fraction(32, 128 * 128)) / 8
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.1.mlp.down_proj"]
    assert of(config).bytes - whole == 4096 * 14336 * (8 - Fraction(32, 128 * 128)) / 8
    config["quantization_config"]["modules_to_not_convert"] = ["down_proj"]
    assert of(config).bytes - whole == 32 * 4096 * 14336 * (8 - Fraction(32, 128 * 128)) / 8


def bits(
    quantised: dict[str, Any], role: str = "mlp", key: str = "quantization_config"
) -> Fraction:
    """A weight of the role in Llama 3 8B."""
    found = of(preset("llama-3-8b", **{key: quantised}))
    many = sum(one.bits for one in found.parts if one.part.role == role)
    return Fraction(many, sum(one.part.size.count for one in found.parts if one.part.role == role))


def group(targets: list[str] | None = None, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head"],
            "config_groups": {"g": {"targets": targets or ["Linear"], "weights": weights}}}  # fmt: skip


SCHEMES: list[tuple[dict[str, Any], Fraction]] = [
    ({}, Fraction(16)),
    ({"quant_method": "fp8", "activation_scheme": "static"}, Fraction(8)),
    (FP8, 8 + Fraction(32, 16384)),
    ({**FP8, "scale_fmt": "ue8m0"}, 8 + Fraction(8, 16384)),
    ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": []}, Fraction(8)),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 4 + Fraction(20, 128)),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, Fraction(8)),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + Fraction(20, 64)),
    ({"quant_method": "mxfp4"}, Fraction(16)),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, Fraction(9, 2)),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
      "bnb_4bit_use_double_quant": True}, 4 + Fraction(8, 64) + Fraction(32, 256 * 64)),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Fraction(8)),
    (group(num_bits=8, type="float", strategy="channel"), Fraction(8)),
    (group(num_bits=8, type="int", strategy="channel"), Fraction(8)),
    (group(num_bits=4, type="int", strategy="group", group_size=128, symmetric=False),
     4 + Fraction(20, 128)),
    (group(num_bits=4, type="float", strategy="tensor_group", group_size=16), Fraction(9, 2)),
    (group(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
     8 + Fraction(16, 16384)),
    (group(["re:.*mlp.*"], num_bits=4, type="int", group_size=32), Fraction(9, 2)),
    (group(["re:.*self_attn.*"], num_bits=4, type="int", group_size=32), Fraction(16)),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, Fraction(8)),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        f"model.layers.{i}.mlp": {"quant_algo": "NVFP4", "group_size": 16} for i in range(16)}},
     (16 + Fraction(9, 2)) / 2),
]  # fmt: skip


@pytest.mark.parametrize("quantised", SCHEMES, ids=str)
def test_bits_of_a_weight(quantised: tuple[dict[str, Any], Fraction]) -> None:
    config, expected = quantised
    assert bits(config) == expected
    assert bits(config, "norms") == bits(config, "head") == bits(config, "embedding") == 16


def test_where_the_scheme_may_stand() -> None:
    nvidia = {"producer": {"name": "modelopt"}, "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.0*"]}}  # fmt: skip
    assert bits(nvidia, key="hf_quant_config") == (31 * Fraction(9, 2) + 16) / 32
    assert bits(group(num_bits=8, type="float"), key="compression_config") == 8
    cache_alone = {"quantization": {"kv_cache_quant_algo": "FP8"}}
    assert bits(cache_alone, key="hf_quant_config") == 16
    assert not scheme_of(preset("llama-3-8b", hf_quant_config=cache_alone)).key


def test_heads_by_each_schemes_default() -> None:
    assert bits({"quant_method": "gptq", "bits": 8, "group_size": -1, "lm_head": True}, "head") == 8
    linear = {**group(num_bits=8, type="float"), "ignore": []}
    assert bits(linear, "head") == 8
    assert bits({"quant_method": "modelopt", "quant_algo": "FP8"}, "head") == 16
    named = {"lm_head": {"quant_algo": "FP8"}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": named}
    assert bits(mixed, "head") == 8
    tied = of(preset("llama-3.2-1b", quantization_config=linear))
    assert tied.tied
    assert tied.by_role["head"] == 2 * 128_256 * 2048


def test_towers_by_each_schemes_default() -> None:
    config = {
        "model_type": "qwen2_vl", "vision_config": {}, "text_config": {
            "model_type": "qwen2_vl_text", "hidden_size": 1536, "intermediate_size": 8960,
            "num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 2,
            "vocab_size": 1000},
    }  # fmt: skip
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    skipped = {**nf4, "llm_int8_skip_modules": ["lm_head", "visual"]}
    plain = of(config).by_role["vision"]
    sizes = {name: of({**config, "quantization_config": how}).by_role["vision"]
             for name, how in {"fp8": FP8, "awq": AWQ, "nf4": nf4, "skipped": skipped}.items()}  # fmt: skip
    assert sizes["fp8"] == sizes["awq"] == sizes["skipped"] == plain
    assert sizes["nf4"] < plain * 0.3
    inside = {**config, "text_config": {**config["text_config"], "quantization_config": nf4}}
    assert of(inside).by_role["vision"] == plain


def test_biases_of_a_quantised_matrix_stay() -> None:
    part = Part(role="attention", size=matrix(64, 32, True), layer=0, quantised=True)
    rest = Part(role="embedding", size=Size(1))
    found = stored([part, rest], preset("llama-3-8b", quantization_config=FP8), BF16)
    assert found.parts[0].bits == 64 * 32 * (8 + Fraction(32, 16384)) + 32 * 16


def test_ranks() -> None:
    config = preset("mixtral-8x7b")
    found = of(config)
    assert found.rank_bytes() == found.bytes
    norms = found.by_role["norms"] + found.by_role["router"]
    assert found.rank_bytes(8) == (found.bytes - norms) // 8 + norms
    cut = stages(32, 2)
    tables = 2 * 32000 * 4096
    halves = found.rank_bytes(1, cut)
    assert halves == (found.bytes - 2 * tables - 2 * 4096) // 2 + tables + 2 * 4096
    assert found.rank_bytes(2, ep=2) == found.rank_bytes(2)
    spread = found.rank_bytes(1, ep=3)
    assert spread == found.bytes - found.expert_bytes + found.expert_bytes * 3 // 8
    tied = of(preset("llama-3.2-1b"))
    layer = sum(one.bits for one in tied.parts if one.part.layer == 0) // 8
    assert tied.rank_bytes(1, stages(16, 2)) == 8 * layer + tied.by_role["head"] + 2 * 2048


def test_what_one_token_meets() -> None:
    found = of(preset("mixtral-8x7b"))
    table, experts = found.by_role["embedding"] // 2, found.expert_bytes // 2
    assert found.active_parameters == found.parameters - table - experts * 6 // 8


UNKNOWN: dict[str, dict[str, Any]] = {
    "'hqq'": {"quant_method": "hqq", "bits": 4},
    "'no method'": {"activation_scheme": "dynamic"},
    "dynamic is given": {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}},
    "9 bits": {"quant_method": "awq", "bits": 9},
    "the format 'marlin-24'": {**group(num_bits=4), "format": "marlin-24"},
    "the sparse format": {**group(num_bits=4), "sparsity_config": {"format": "sparse-24-bitmask"}},
    "the target 'Embedding'": group(["Embedding"], num_bits=8),
    "floats of 4 bits in groups of 128": group(num_bits=4, type="float", group_size=128),
    "the strategy": group(num_bits=4, strategy="token"),
    "quant_algo 'NF3'": {"quant_method": "modelopt", "quant_algo": "NF3"},
    "bnb_4bit_quant_type": {"load_in_4bit": True, "bnb_4bit_quant_type": "af4"},
    "neither load_in_4bit": {"quant_method": "bitsandbytes"},
    "scale_fmt": {**FP8, "scale_fmt": "e5m3"},
    "a group that is not a choice": {**KIMI, "ignore": ["re:(a+)+$"]},
    "run into each other": {**KIMI, "ignore": [r"re:\w+a\w+b"]},
    "'{'": {**KIMI, "ignore": ["re:a{3,9}"]},
    "more alternatives": {**KIMI, "ignore": ["re:" + "(a|b)" * 40]},
}


@pytest.mark.parametrize("word", UNKNOWN)
def test_unknown_schemes_are_refused_by_name(word: str) -> None:
    config = preset("llama-3-8b", quantization_config=UNKNOWN[word])
    with pytest.raises(KvtoolError) as caught:
        of(config)
    assert caught.value.code == "weights_not_counted"
    assert word in caught.value.message
    assert "--weights" in caught.value.hint


def test_what_a_list_may_cost_is_bounded() -> None:
    ignore = [f"re:.*{'x.*' * 60}y{i}" for i in range(19_000)]
    config = preset("llama-3.1-405b", quantization_config={**KIMI, "ignore": ignore[:1000]})
    began = time.monotonic()
    with pytest.raises(KvtoolError, match="1,000 patterns for all layers"):
        of(config)
    config["quantization_config"]["ignore"] = ["a"] * 20_001
    with pytest.raises(KvtoolError, match="more than 20,000 modules"):
        of(config)
    config["quantization_config"]["ignore"] = ignore[:40]
    of(config)
    assert time.monotonic() - began < 10


NAMES = "model.language_model.layers.12.mlp.experts.0.gate_proj"
MATCHING = [
    ("lm_head", False), ("mlp", True), ("gate", False), ("gate_proj", True), ("layers.1", False),
    ("model.layers.12", False), ("language_model.layers.12", True), ("model.*.mlp", True),
    ("*.mlp.experts*", True), ("*.mlp.shared*", False), ("*experts", True), ("*expert", False),
    ("model.language_model.layers.1*", True), ("layers.?2", True), ("re:mlp", False),
    ("re:.*mlp", True), ("re:.*gate$", False), ("re:.*gate_proj$", True),
    (r"re:.*mlp\.(gate|up)_proj.*", False), (r"re:.*\.(gate|up)_proj", True),
    (r"re:.*layers\.\d+\.mlp\.experts\.[0-9]+\..*proj$", True), (r"re:.*layers\.\d\.mlp", False),
    ("re:^model.language_model.layers.(12|13).mlp", True), ("re:a|.*experts", True),
    (r"re:.*experts\.\w+\.gate", True), (r"re:.*self_attn|.*mlp\.up", False),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "expected"), MATCHING)
def test_patterns(pattern: str, expected: bool) -> None:
    assert compiled(pattern).matches(NAMES) is expected


@pytest.mark.parametrize("pattern", ["re:(?!mlp).*", "re:(a", "re:a)", "re:[^a]", r"re:\1", "re:((a|b)c)*",
                                     "re:.?a", "re:[9-0]", "re:a**", "x" * 401, "", "re:[z-a]"])  # fmt: skip
def test_patterns_outside_are_refused(pattern: str) -> None:
    with pytest.raises(NotUnderstoodError):
        compiled(pattern)


@given(st.text(alphabet=r"ab.*+?()[]|\d^$re:x0-", max_size=12))
@settings(max_examples=300, deadline=None)
def test_any_pattern_is_compiled_or_refused(body: str) -> None:
    for text in (body, f"re:{body}"):
        with contextlib.suppress(NotUnderstoodError):
            compiled(text).matches("model.layers.0.self_attn.q_proj")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(
        ["fp8", "awq", "Linear", "int", "float", "group", "channel", "NVFP4", "re:.*", "nf4", "x" * 900]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
KEYS = [
    "quant_method", "bits", "group_size", "weight_block_size", "modules_to_not_convert", "ignore",
    "config_groups", "quant_algo", "quantized_layers", "quantization", "format", "load_in_4bit",
    "bnb_4bit_quant_type", "scale_fmt", "sparsity_config", "lm_head", "zero_point", "dynamic",
]  # fmt: skip
METHOD = st.sampled_from(
    ["fp8", "awq", "gptq", "mxfp4", "modelopt", "bitsandbytes", "compressed-tensors"]
)
GROUPS = st.dictionaries(st.text(max_size=2), st.dictionaries(
    st.sampled_from(["weights", "targets", "format"]), JSON | st.dictionaries(
        st.sampled_from(["num_bits", "type", "strategy", "group_size", "symmetric", "block_structure"]),
        JSON)), max_size=2)  # fmt: skip
SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip


@given(st.dictionaries(st.sampled_from(KEYS), JSON), METHOD | JSON, GROUPS | JSON)
@settings(max_examples=400, deadline=None)
def test_any_config_is_counted_or_refused(
    quantised: dict[str, Any], method: Any, groups: Any
) -> None:
    said = {**quantised, "quant_method": method, "config_groups": groups}
    for key in ("quantization_config", "hf_quant_config"):
        refused = None
        try:
            assert of({**SMALL, key: said}).bytes > 0
        except KvtoolError as error:
            refused = error
        if refused is not None:
            assert "\n" not in refused.message + refused.hint
            assert len(refused.message) < 400

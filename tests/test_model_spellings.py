"""Every spelling of heads, head sizes, windows and layer kinds, on small made configs."""

from __future__ import annotations

from typing import Any

import pytest

from kvtool.errors import KvtoolError
from kvtool.model import ModelShape, read_model

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def kinds(shape: ModelShape) -> str:
    """The layers' kinds as letters, in order: fsclLixm …"""
    return "".join(entry.kind[0] for entry in shape.layers)


def first(table: dict[str, Any], **config: Any) -> Any:
    """The first cache entry of a config."""
    return read_model(LLAMA | config, table).layers[0]


def test_grouped_multi_query_and_multi_head(table: dict[str, Any]) -> None:
    assert first(table).kv_heads == 2
    assert first(table, num_key_value_heads=1).kv_heads == 1
    assert first(table, num_key_value_heads=None).kv_heads == 8
    without = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert read_model(without, table).layers[0].kv_heads == 8


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, 64), ({"head_dim": 128}, 128), ({"head_dim": None}, 64), ({"head_dim": 0}, 64)],
)
def test_head_dim(table: dict[str, Any], config: dict[str, Any], expected: int) -> None:
    assert first(table, **config).k_head_dim == expected


def test_query_heads_never_enter_the_size(table: dict[str, Any]) -> None:
    few, many = (first(table, head_dim=64, num_attention_heads=n) for n in (2, 64))
    assert (few.kv_heads, few.k_head_dim) == (many.kv_heads, many.k_head_dim)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # words
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"] * 2,
          "sliding_window": 64, "use_sliding_window": True}, "fsfs"),
        # longer lists than layers are cut
        ({"model_type": "olmo3", "layer_types": ["full_attention"] * 9, "sliding_window": 8}, "ffff"),
        # use_sliding_window and max_window_layers
        ({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 3}, "ffff"),
        ({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 3,
          "use_sliding_window": True}, "fffs"),
        ({"model_type": "qwen3_moe", "sliding_window": 64, "use_sliding_window": True}, "ssss"),
        # one window for all, and null
        ({"model_type": "mistral", "sliding_window": 64}, "ssss"),
        ({"model_type": "mistral", "sliding_window": None}, "ffff"),
        # a class that has no window ignores the key
        ({"model_type": "llama", "sliding_window": 64}, "ffff"),
        # patterns and periods
        ({"model_type": "gemma2"}, "sfsf"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 2}, "sfsf"),
        ({"model_type": "gemma3_text", "_sliding_window_pattern": 4}, "sssf"),
        ({"model_type": "cohere2", "sliding_window_pattern": 2}, "sfsf"),
        ({"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": "LLG"}, "ssfs"),
        ({"model_type": "exaone4", "sliding_window": None}, "ffff"),
        ({"model_type": "afmoe", "global_attn_every_n_layers": 2}, "sfsf"),
        ({"model_type": "gpt_oss"}, "sfsf"),
        ({"model_type": "gpt_neo", "num_layers": 4,
          "attention_types": [[["global", "local"], 2]]}, "fsfs"),
        ({"model_type": "mimo_v2_flash"}, "fsss"),
        ({"model_type": "cwm"}, "fsss"),
        ({"model_type": "muse_glimmer_text"}, "sssf"),
        # NoPE lists and intervals
        ({"model_type": "llama4_text", "no_rope_layer_interval": 2}, "cfcf"),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 1, 0, 1]}, "ccfc"),
        ({"model_type": "llama4_text", "no_rope_layers": [], "no_rope_layer_interval": 4}, "cccf"),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, "ffff"),
        ({"model_type": "smollm3"}, "ffff"),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 64,
          "no_rope_layers": [1, 0, 1, 0]}, "fsfs"),
        # shared caches and layers without attention
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 2, "num_hidden_layers": 7}, "ssssf"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*-E"}, "lf"),
        # states
        ({"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1}, "lflf"),
        ({"model_type": "qwen3_next", "full_attention_interval": 2}, "lflf"),
        ({"model_type": "bamba", "attn_layer_indices": [2]}, "llfl"),
        ({"model_type": "lfm2", "full_attn_idxs": [0, 3]}, "fllf"),
        ({"model_type": "minimax", "attn_type_list": [0, 0, 0, 1]}, "lllf"),
        ({"model_type": "recurrent_gemma", "block_types": ["recurrent", "attention"]}, "lsls"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 2}, "lflf"),
        ({"model_type": "falcon_h1"}, "flflflfl"),
        # latents and indexers
        ({"model_type": "deepseek_v3"}, "llll"),
        ({"model_type": "deepseek_v32", "num_hidden_layers": 1}, "li"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "shared", "full"]},
         "lillli"),
        ({"model_type": "deepseek_v4", "compress_ratios": [0, 4, 128, 0], "head_dim": 64}, "ssciscs"),
    ],
)  # fmt: skip
def test_layer_kinds(table: dict[str, Any], config: dict[str, Any], expected: str) -> None:
    shape = read_model(LLAMA | config, table)
    assert kinds(shape) == expected


def test_block_configs(table: dict[str, Any]) -> None:
    blocks = [
        {"attention": {"no_op": True}},
        {"attention": {"n_heads_in_group": 8}},
        {"attention": {"n_heads_in_group": 4}},
        {"attention": {"replace_with_linear": True}},
    ]
    shape = read_model(
        LLAMA
        | {"model_type": "nemotron-nas", "num_key_value_heads": None, "block_configs": blocks},
        table,
    )
    assert [(e.layer, e.kv_heads) for e in shape.layers] == [(1, 1), (2, 2)]
    assert shape.num_layers == 4


def test_per_layer_config_and_lists(table: dict[str, Any]) -> None:
    shape = read_model(LLAMA | {"per_layer_config": {"2": {"head_dim": 32}}}, table)
    assert [e.k_head_dim for e in shape.layers] == [64, 64, 32, 64]
    shape = read_model(LLAMA | {"num_key_value_heads": [1, 2, 4, 8]}, table)
    assert [e.kv_heads for e in shape.layers] == [1, 2, 4, 8]


def test_nested_text_configs(table: dict[str, Any]) -> None:
    inner = {k: v for k, v in LLAMA.items() if k != "model_type"}
    for outer in (
        {"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": 7}},
        {"model_type": "gemma3", "text_config": inner},
        {"model_type": "internvl_chat", "llm_config": LLAMA},
        {"model_type": "qwen2_vl", **inner},  # an older, flat config
        {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": inner}},
    ):
        shape = read_model(outer, table)
        assert shape.num_layers == 4, outer["model_type"]
        assert shape.layers[0].kv_heads == 2


def test_a_nested_type_that_nobody_knows_takes_its_parents(table: dict[str, Any]) -> None:
    text = {k: v for k, v in LLAMA.items() if k != "model_type"} | {"model_type": "made_up"}
    shape = read_model({"model_type": "gemma3", "text_config": text}, table)
    assert shape.model_type == "gemma3_text"


def test_encoder_decoders(table: dict[str, Any]) -> None:
    t5 = {"model_type": "t5", "d_model": 64, "d_kv": 16, "num_heads": 3, "num_layers": 2}
    shape = read_model(t5, table)
    assert kinds(shape) == "fcfc"
    assert {(e.kv_heads, e.k_head_dim) for e in shape.layers} == {(3, 16)}
    bart = {"model_type": "bart", "d_model": 64, "decoder_layers": 3, "decoder_attention_heads": 4}
    assert kinds(read_model(bart, table)) == "fcfcfc"
    assert kinds(read_model(bart | {"is_encoder_decoder": False}, table)) == "fff"


def test_encoders_have_no_cache(table: dict[str, Any]) -> None:
    with pytest.raises(KvtoolError, match="encoder"):
        read_model({"model_type": "bert", "architectures": ["BertModel"]}, table)
    assert read_model({"model_type": "bert", "is_decoder": True}, table).num_layers == 12


def test_what_is_not_understood_is_refused_by_name(table: dict[str, Any]) -> None:
    for config, name in (
        (LLAMA | {"model_type": "llamma"}, "llamma"),
        (LLAMA | {"model_type": "olmo3", "layer_types": ["full_attention", "warp_attention"] * 2},
         "warp_attention"),
        (LLAMA | {"model_type": "olmo3", "layer_types": ["full_attention"]}, "1 entries for 4"),
        ({"model_type": "blt"}, "blt"),
        ({"model_type": "vit"}, "encoder"),
        ({k: v for k, v in LLAMA.items() if k != "model_type"}, "model_type"),
        (LLAMA | {"model_type": "deepseek_v4", "compress_ratios": [7] * 4}, "7"),
    ):  # fmt: skip
        with pytest.raises(KvtoolError, match=name):
            read_model(config, table)


def test_assume_full_overrides(table: dict[str, Any]) -> None:
    shape = read_model(LLAMA | {"model_type": "nobody-knows"}, table, assume="full")
    assert kinds(shape) == "ffff"
    assert shape.assumed == "full"
    other = {"n_layer": 3, "n_embd": 64, "n_head": 4}
    assert read_model(other, table, assume="full").num_layers == 3


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8}}}, "fp8"),
        ({"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
        ({"hf_quant_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}}, "fp8"),
        ({"compression_config": {"kv_cache_scheme": {"type": "int", "num_bits": 8}}}, "int8"),
        ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": None}}, None),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, None),
        ({"quantization_config": {"kv_cache_quant_algo": {}}}, None),
    ],
)
def test_kv_dtype_is_never_the_weights(
    table: dict[str, Any], config: dict[str, Any], expected: str | None
) -> None:
    assert read_model(LLAMA | config, table).kv_dtype == expected


def test_context_is_stated_by_the_config_or_only_by_its_class(table: dict[str, Any]) -> None:
    stated = read_model(LLAMA | {"max_position_embeddings": 4096}, table)
    assert (stated.max_context, stated.max_context_stated) == (4096, True)
    default = read_model({"model_type": "gemma3_text"}, table)
    assert (default.max_context, default.max_context_stated) == (131072, False)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    longer = read_model(LLAMA | {"max_position_embeddings": 4096, "rope_scaling": yarn}, table)
    assert longer.max_context == 16384

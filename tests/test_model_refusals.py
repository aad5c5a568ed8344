"""What must be refused by name, and what must not be taken for something else."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtool.cache import check_parallel, stages
from kvtool.errors import KvtoolError
from kvtool.model import read_model
from kvtool.model.keys import Keys

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"),
    [
        # encoders and towers, by any architecture that is not a decoder's
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, "encoder"),
        ({"model_type": "clip"}, "clip"),
        ({"model_type": "siglip"}, "siglip"),
        ({"model_type": "bert-generation", "architectures": ["BertGenerationEncoder"]}, "encoder"),
        # kinds of layer that the type cannot have
        ({"model_type": "olmo3", "layer_types": ["compressed_sparse_attention"] * 4}, "csa"),
        ({"model_type": "olmo3", "layer_types": ["minimax_m3_sparse"] * 4}, "sparse"),
        ({"model_type": "llama", "layer_types": ["mamba"] * 4}, "linear"),
        ({"model_type": "qwen3_next", "layer_types": ["conv"] * 4}, "conv"),
        ({"model_type": "deepseek_v4", "layer_types": ["full_attention"] * 4}, "full"),
        # words where a truth value is needed
        ({"model_type": "qwen2", "use_sliding_window": "false", "sliding_window": 64}, "true or false"),
        ({"model_type": "falcon", "multi_query": "no"}, "true or false"),
        # lengths and heads that make no sense
        ({"max_position_embeddings": "4096"}, "max_position_embeddings"),
        ({"max_position_embeddings": -5}, "max_position_embeddings"),
        ({"num_key_value_heads": 16}, "divisor"),
        ({"num_key_value_heads": 3}, "divisor"),
        ({"num_key_value_heads": [2, 2]}, "no layer 2"),
        # cross-attention that the type cannot have
        ({"add_cross_attention": True}, "cross-attention"),
        ({"is_encoder_decoder": True}, "cross-attention"),
        # loops that leave the layers
        ({"model_type": "dory", "num_hidden_layers": 8, "n_input_layers": 40, "n_output_layers": 4,
          "recurrent_kv_cache_mode": "per_loop", "n_recurrent_loops": 2}, "no part of"),
    ],
)  # fmt: skip
def test_it_is_refused_by_name(table: dict[str, Any], config: dict[str, Any], name: str) -> None:
    with pytest.raises(KvtoolError, match=name):
        read_model(LLAMA | config, table)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        # numbers without end, and other values where a number or a list is needed
        ({"model_type": "mamba", "expand": 10**400}, "expand is a huge number"),
        ({"model_type": "xlstm", "qk_dim_factor": 10**400}, "qk_dim_factor is a huge number"),
        ({"model_type": "gpt_neo", "attention_types": True}, "attention_types"),
        ({"per_layer_config": {"²": {}}}, "per_layer_config"),
        ({"per_layer_config": {"1" * 4400: {}}}, "per_layer_config"),
        ({"num_hidden_layers": 2_001}, "1 to 2,000"),
        ({"model_type": "mllama_text_model", "cross_attention_layers": 3}, "not a list"),
        ({"model_type": "glm_moe_dsa", "index_topk_pattern": 7}, "not a list"),
        ({"model_type": "mistral_large4_text", "kv_source_layers": "x"}, "not a list"),
    ],
)
def test_odd_values_are_refused_by_name(
    table: dict[str, Any], config: dict[str, Any], name: str
) -> None:
    with pytest.raises(KvtoolError, match=name) as error:
        read_model(LLAMA | config, table)
    assert len(error.value.message) < 200


@pytest.mark.parametrize(
    ("config", "width"),
    [
        # classes that divide, whatever head_dim says
        *(
            ({"model_type": kind}, 64)
            for kind in ("gpt2", "bloom", "gpt_neox", "gpt_bigcode", "opt")
        ),
        # classes that read it
        *(({"model_type": kind}, 32) for kind in ("cohere2", "recurrent_gemma")),
        ({"model_type": "zamba2", "layers_block_type": ["hybrid"] * 4}, 32),
        ({"model_type": "zamba2", "layers_block_type": ["hybrid"] * 4, "head_dim": None}, 128),
    ],
)
def test_head_dim_counts_where_the_class_reads_it(
    table: dict[str, Any], config: dict[str, Any], width: int
) -> None:
    """As measured: each class was run tiny with a head_dim that hidden / heads does not give."""
    layers = read_model(LLAMA | {"head_dim": 32} | config, table).layers
    assert {entry.k_head_dim for entry in layers if entry.k_head_dim} == {width}


def test_a_mamba_head_is_not_an_attention_head(table: dict[str, Any]) -> None:
    config = LLAMA | {"model_type": "nemotron_h", "hybrid_override_pattern": "M*", "head_dim": 16}
    state = dict(read_model(config, table).layers[0].trace)["state"]
    assert "class default of nemotron_h, mamba_head_dim = 64" in state


def test_an_explicit_null_is_false(table: dict[str, Any]) -> None:
    falcon = LLAMA | {"model_type": "falcon"}
    assert read_model(falcon, table).layers[0].kv_heads == 1
    assert read_model(falcon | {"multi_query": None}, table).layers[0].kv_heads == 8


def test_a_bidirectional_window_looks_half_as_far_back(table: dict[str, Any]) -> None:
    config = LLAMA | {"model_type": "gemma3_text", "sliding_window": 64}
    assert read_model(config, table).layers[0].window == 64
    both = config | {"use_bidirectional_attention": True}
    assert read_model(both, table).layers[0].window == 33


def test_a_stack_decides_the_layers_of_a_looped_model(table: dict[str, Any]) -> None:
    config = LLAMA | {"model_type": "hrm_text", "H_cycles": 2, "L_cycles": 2}
    assert len(read_model(config | {"num_hidden_layers": 2}, table).layers) == 12
    shape = read_model(config | {"num_hidden_layers": 16, "num_layers_per_stack": 2}, table)
    assert len(shape.layers) == 12
    assert shape.num_modules == 2


def test_no_type_without_a_decoder_is_sized(table: dict[str, Any]) -> None:
    sized = []
    for name, row in table.items():
        try:
            read_model({"model_type": name}, table)
        except KvtoolError:
            continue
        if not row.get("generates"):
            sized.append(name)
    # They generate, but by a head of their own or inside another model. May only shrink.
    assert sorted(sized) == [
        "csm", "jev", "nougat", "qwen2_5_omni_talker", "t5gemma2_encoder", "t5gemma2_text",
    ]  # fmt: skip


def test_gpt2_behind_an_encoder_has_cross_attention(table: dict[str, Any]) -> None:
    config = {"model_type": "vision-encoder-decoder", "encoder": {"model_type": "vit"},
              "decoder": {"model_type": "gpt2", "add_cross_attention": True}}  # fmt: skip
    kinds = [entry.kind for entry in read_model(config, table).layers]
    assert kinds == ["full", "cross"] * 12


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "whisper"}, 1500),
        ({"model_type": "led"}, 0),
        ({"model_type": "speech_to_text"}, 0),
        ({"model_type": "blip", "vision_config": {"image_size": 384, "patch_size": 16}}, 577),
        ({"model_type": "mllama", "text_config": {}, "vision_config": {
            "image_size": 560, "patch_size": 14, "max_num_tiles": 4}}, 6404),
    ],
)  # fmt: skip
def test_only_what_the_config_fixes_is_said_to_be_fixed(
    table: dict[str, Any], config: dict[str, Any], expected: int
) -> None:
    assert read_model(config, table).encoder_tokens == expected


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"kv_cache_scheme": {"type": "float", "num_bits": 4}}, "nvfp4"),
        ({"kv_cache_scheme": {"type": "float", "num_bits": [8]}}, None),
        ({"kv_cache_scheme": {"type": {}, "num_bits": None}}, None),
        ({"kv_cache_quant_algo": "NONE"}, None),
    ],
)
def test_odd_words_about_a_quantised_cache(
    table: dict[str, Any], section: dict[str, Any], expected: str | None
) -> None:
    assert read_model(LLAMA | {"quantization_config": section}, table).kv_dtype == expected


def test_weights_in_fp8_do_not_make_the_cache_fp8(table: dict[str, Any]) -> None:
    shape = read_model(LLAMA | {"torch_dtype": "float8_e4m3fn"}, table)
    assert shape.dtype is None
    assert any("weights" in note for note in shape.notes)


def test_stages_hold_whole_decoder_layers(table: dict[str, Any]) -> None:
    shape = read_model({"model_type": "longcat_flash"}, table)
    assert (shape.num_layers, shape.num_modules) == (56, 28)
    assert {entry.module for entry in shape.layers} == set(range(28))
    with pytest.raises(KvtoolError, match="28 layers"):
        check_parallel(shape, 1, 56)
    assert [len(stage) for stage in stages(28, 8)] == [3, 3, 3, 4, 4, 4, 4, 3]


def test_an_overridden_layer_says_what_is_its_own(table: dict[str, Any]) -> None:
    shape = read_model(LLAMA | {"per_layer_config": {"2": {"head_dim": 32}}}, table)
    trace = dict(shape.layers[2].trace)
    assert trace["k_head_dim"] == "per_layer_config[layer].head_dim = 32"
    assert trace["kv_heads"] == "num_key_value_heads = 2"


def test_assume_full_overrides_a_refused_type(table: dict[str, Any]) -> None:
    with pytest.raises(KvtoolError):
        read_model(LLAMA | {"model_type": "blt"}, table)
    assert len(read_model(LLAMA | {"model_type": "blt"}, table, assume="full").layers) == 4


def test_a_stray_key_of_another_class_does_not_count(table: dict[str, Any]) -> None:
    for kind in ("llama", "internlm2"):
        shape = read_model(LLAMA | {"model_type": kind, "sliding_window": 128}, table)
        assert {entry.kind for entry in shape.layers} == {"full"}, kind


def test_a_variant_without_a_latent_is_plain(table: dict[str, Any]) -> None:
    config = LLAMA | {"model_type": "deepseek_v2", "kv_lora_rank": None, "head_dim": 128}
    assert {entry.kind for entry in read_model(config, table).layers} == {"full"}


def test_no_limit_is_not_a_limit(table: dict[str, Any]) -> None:
    for endless in (-1, 1e30, None):
        shape = read_model(
            LLAMA | {"model_type": "xlnet", "max_position_embeddings": endless}, table
        )
        assert shape.max_context is None
    t5 = read_model({"model_type": "t5", "n_positions": 512}, table)
    assert (t5.max_context, t5.max_context_stated) == (512, False)


def test_every_key_that_is_read_is_in_the_generated_table(
    table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    path = Path(__file__).parents[1] / "scripts/class_defaults.py"
    spec = importlib.util.spec_from_file_location("class_defaults", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    asked: set[str] = set()
    find: Callable[..., Any] = Keys._find

    def spy(self: Keys, *names: str) -> Any:
        asked.update(names, (self.renamed[name] for name in names if name in self.renamed))
        return find(self, *names)

    monkeypatch.setattr(Keys, "_find", spy)
    for name in table:
        try:
            read_model({"model_type": name}, table)
        except KvtoolError:
            continue
    classes = [auto.CONFIG_MAPPING[name] for name in auto.CONFIG_MAPPING]
    fields = {field.name for config in classes for field in dataclasses.fields(config)}
    assert (asked & fields) - FILE_ONLY <= script.KEYS | script.DROPPED
    assert asked | NEVER_BY_CLASS >= script.KEYS, "keys that nothing reads"


FILE_ONLY = {"rope_scaling", "rope_parameters"} | {
    "encoder_layers", "encoder_attention_heads", "num_encoder_attention_heads",
}  # fmt: skip
"""Read from the file alone; and renamings to the encoder's side, which decoders never follow."""

NEVER_BY_CLASS = {"intermediate_size", "attn_config", "compress_rates"}
"""Keys that only the file leads to, or that are read as a nested section."""

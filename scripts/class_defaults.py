"""Generate presets/class_defaults.json and weight_defaults.json from the installed transformers.

    python scripts/class_defaults.py            writes the tables
    python scripts/class_defaults.py --check    exits 1 if a table differs

For every model_type: the class defaults of the keys that decide a KV cache, the attributes that the
class renames, and the types of its nested configs. For the types whose parameters kvtool counts, and what
is nested beside them: every other default, in a file that only counting reads.
tests/test_class_defaults.py holds the committed tables to the pinned transformers; the runtime never
imports transformers.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from kvtool.model.nested import NESTED
from kvtool.weights.table import RECIPES, TOWERS

PRESETS = Path(__file__).resolve().parents[1] / "presets"
TABLE, WEIGHTS = PRESETS / "class_defaults.json", PRESETS / "weight_defaults.json"

# What kvtool/model reads. A key read there and missing here is caught by the golden sizes.
NAMES = """
num_hidden_layers n_layer n_layers num_layers num_decoder_layers decoder_layers layers
decoder_num_hidden_layers num_blocks num_layers_per_stack H_cycles L_cycles hidden_size n_embd
d_model emb_dim embed_dim embedding_dim num_attention_heads n_head n_heads num_heads
decoder_attention_heads attention_heads decoder_num_attention_heads num_decoder_attention_heads
num_key_value_heads num_kv_heads decoder_num_key_value_heads multi_query
new_decoder_architecture head_dim d_kv attention_head_dim kv_channels v_head_dim cross_head_dim
cross_num_key_value_heads cross_num_attention_heads swa_head_dim swa_num_attention_heads
swa_num_key_value_heads swa_v_head_dim layer_types layers_block_type block_types attn_type_list
sliding_window sliding_window_size sliding_window_pattern attention_window_size window_size
local_attention attention_types attention_layers use_bidirectional_attention use_sliding_window
max_window_layers global_attn_every_n_layers prefix_dense_sliding_window_pattern first_k_dense_replace
attention_chunk_size no_rope_layers no_rope_layer_interval full_attention_interval kv_lora_rank
qk_nope_head_dim qk_rope_head_dim index_head_dim indexer_head_dim indexer_types compress_rates
num_kv_shared_layers kv_source_layers attention_k_eq_v n_input_layers n_output_layers
n_recurrent_loops recurrent_kv_cache_mode loop_layer_index_start loop_layer_index_end
loop_num_passes local_layer_ids attn_layer_indices attn_layer_period attn_layer_offset
full_attn_idxs layer_group_size hybrid_layer_ids cross_attention_layers mamba_d_state
mamba_d_conv mamba_expand mamba_d_head mamba_n_heads mamba_n_groups mamba_d_ssm mamba_headdim
mamba_ngroups n_mamba_heads mamba_num_heads mamba_head_dim ssm_state_size n_groups state_size
conv_kernel expand intermediate_size mamba_ssm_cache_dtype mamba_ssm_dtype
linear_num_value_heads linear_num_key_heads linear_key_head_dim linear_value_head_dim
linear_conv_kernel_dim linear_head_dim linear_num_heads short_conv_kernel_size conv_L_cache
conv1d_width conv_kernel_size lru_width attention_hidden_size cca_time0 cca_time1
max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions
max_sequence_length hybrid_override_pattern compress_ratios num_experts_per_tok qk_dim_factor
v_dim_factor inference_state_dtype dim_head prompt_length num_codebooks context_length
lsh_attn_chunk_length mem_len attn_layers num_hashes is_decoder is_encoder_decoder
add_cross_attention attn_config
"""
KEYS = frozenset(NAMES.split())
COMMON = {
    "architectures", "chunk_size_feed_forward", "id2label", "initializer_range", "label2id",
    "output_hidden_states", "problem_type", "return_dict", "transformers_version", "use_cache",
}  # fmt: skip
NOISE = ("_token_id", "_token_index", "dropout", "_eps", "_epsilon", "_std", "hidden_act", "_coef")
"""What decides no size."""
DROPPED = {"intermediate_size"}  # an MLP's width everywhere but in mamba, which declares no field


def plain(value: Any) -> bool:
    """True for what JSON holds as it is."""
    return value is None or isinstance(value, bool | int | float | str | list | dict)


def default_of(field: Any) -> Any:
    """A dataclass field's default; MISSING becomes None."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


def entry(cls: Any, generates: bool) -> dict[str, Any]:
    """One row of the table for a config class."""
    keys = set(KEYS) - DROPPED
    defaults = {}
    for field in dataclasses.fields(cls):
        value = default_of(field)
        value = list(value) if isinstance(value, tuple) else value
        if (
            field.name in keys
            and plain(value)
            and (field.name, value) != ("is_encoder_decoder", False)
        ):
            defaults[field.name] = value
    renamed = {old: new for old, new in cls.attribute_map.items() if old in keys or new in keys}
    nested = {
        key: {
            "model_type": spec.model_type,
            "init": {k: v for k, v in spec.init_kwargs.items() if k in keys and plain(v)},
        }
        for key, spec in cls.sub_configs_defaults.items()
    }
    row: dict[str, Any] = {"defaults": dict(sorted(defaults.items()))}
    for name, value in (("renamed", renamed), ("nested", nested)):
        if value:
            row[name] = dict(sorted(value.items()))
    if generates:
        row["generates"] = True
    return row


def generating_types() -> set[str]:
    """Model types that transformers gives a head that generates token by token."""
    from transformers.models.auto import modeling_auto

    mappings = (
        "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM",
    )  # fmt: skip
    found: set[str] = set()
    for name in mappings:
        found |= set(getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES"))
    return found


def build() -> dict[str, Any]:
    """The whole table."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig

    generates = generating_types()
    types = {
        name: entry(CONFIG_MAPPING[name], name in generates)
        for name in sorted(CONFIG_MAPPING.keys())
    }
    attention = entry(DbrxAttentionConfig, False)["defaults"]
    types["dbrx"]["defaults"]["attn_config"] = attention | {
        field.name: field.default
        for field in dataclasses.fields(DbrxAttentionConfig)
        if field.name == "kv_n_heads"
    }
    for name in generates:
        mark_language_parts(types, name)
    return {"transformers": transformers.__version__, "types": types}


def mark_language_parts(types: dict[str, Any], name: str) -> None:
    """A nested language model generates if its parent does."""
    for key, nested in types.get(name, {}).get("nested", {}).items():
        inner = nested["model_type"]
        if key in NESTED and inner in types and not types[inner].get("generates"):
            types[inner]["generates"] = True
            mark_language_parts(types, inner)


def weight_defaults(types: dict[str, Any]) -> dict[str, Any]:
    """Every plain default of the types that have a recipe, of models around them, and of their towers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    wanted = (set(RECIPES) | set(TOWERS)) & set(types)
    for _ in range(3):  # a model around a model around a decoder
        wanted |= {
            name
            for name, row in types.items()
            if row.get("generates")
            and any(
                k in NESTED and n["model_type"] in wanted for k, n in row.get("nested", {}).items()
            )
        }
    for _ in range(3):
        inner = [types[name].get("nested", {}).values() for name in wanted]
        wanted |= {one["model_type"] for nested in inner for one in nested} & set(types)
    return {name: all_defaults(CONFIG_MAPPING[name]) for name in sorted(wanted)}


def all_defaults(cls: Any) -> dict[str, Any]:
    """Of one class, but for what every class has and for ids of tokens."""
    found = {}
    for field in dataclasses.fields(cls):
        value = default_of(field)
        value = list(value) if isinstance(value, tuple) else value
        if (
            field.name not in COMMON
            and not field.name.endswith(NOISE)
            and plain(value)
            and value is not None
        ):
            found[field.name] = value
    for name, spec in cls.sub_configs_defaults.items():  # for a nested config that is left out
        init = {k: v for k, v in spec.init_kwargs.items() if not k.endswith(NOISE) and plain(v)}
        if init:
            found[name] = init
    return found


def written(table: dict[str, Any]) -> str:
    """The table as JSON with a type a line, so that a diff shows which class changed."""
    rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in table["types"].items()]
    head = json.dumps({"transformers": table["transformers"]})[:-1]
    return head + ', "types": {\n' + ",\n".join(rows) + "\n}}\n"


def main() -> int:
    """Write the tables, or compare them."""
    warnings.filterwarnings("ignore")
    table = build()
    rows = weight_defaults(table["types"])
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    texts = {TABLE: written(table), WEIGHTS: "{\n" + lines + "\n}\n"}
    if "--check" not in sys.argv:
        for path, text in texts.items():
            path.write_text(text)
            print(f"{path.name}: {len(text):,} bytes")
        return 0
    stale = [path.name for path, text in texts.items() if path.read_text() != text]
    for name in stale:
        print(f"{name} differs: run scripts/class_defaults.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""Small configs of each type with a recipe: every switch that decides a parameter, each way at least once."""

from __future__ import annotations

from typing import Any

from weights_cases_plain import CASES_PLAIN
from weights_cases_states import CASES_STATES
from weights_cases_towers import CASES_TOWERS

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50,
    "max_position_embeddings": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 56}
NEOX = {**SMALL, "intermediate_size": 72}

CASES: dict[str, list[dict[str, Any]]] = {
    **CASES_STATES,
    "llama": [GROUPED, {**GROUPED, "head_dim": 16, "attention_bias": True}, {**GROUPED, "mlp_bias": True},
              {**GROUPED, "tie_word_embeddings": True, "num_key_value_heads": 4}],
    "mistral": [{**GROUPED, "sliding_window": None}, {**GROUPED, "sliding_window": None, "head_dim": 16}],
    "phi3": [GROUPED, {**GROUPED, "tie_word_embeddings": True}],
    "qwen2": [GROUPED, {**GROUPED, "tie_word_embeddings": True}],
    "qwen3": [GROUPED, {**GROUPED, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}],
    "gemma": [{**GROUPED, "head_dim": 16}, {**GROUPED, "head_dim": 8, "attention_bias": True},
              {**GROUPED, "tie_word_embeddings": False}],
    "gpt_neox": [NEOX, {**NEOX, "attention_bias": False}, {**NEOX, "tie_word_embeddings": True}],
    "gpt2": [SMALL, {**SMALL, "n_inner": 40}, {**SMALL, "tie_word_embeddings": False},
             {**SMALL, "add_cross_attention": True}],
    "opt": [{**SMALL, "ffn_dim": 72}, {**SMALL, "ffn_dim": 72, "word_embed_proj_dim": 20},
            {**SMALL, "ffn_dim": 72, "do_layer_norm_before": False, "enable_bias": False},
            {**SMALL, "ffn_dim": 72, "layer_norm_elementwise_affine": False},
            {**SMALL, "ffn_dim": 72, "_remove_final_layer_norm": True, "tie_word_embeddings": False}],
    "falcon": [SMALL, {**SMALL, "bias": True, "multi_query": False, "parallel_attn": False},
               {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 40},
               {**SMALL, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": True},
               {**SMALL, "num_ln_in_parallel_attn": 2, "tie_word_embeddings": False}],
    "qwen3_moe": [{**GROUPED, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2},
                  {**GROUPED, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
                   "mlp_only_layers": [0], "head_dim": 16},
                  {**GROUPED, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
                   "decoder_sparse_step": 2, "attention_bias": True, "tie_word_embeddings": True}],
    **CASES_PLAIN,
}  # fmt: skip
CASES |= CASES_TOWERS

"""Small configs of latent attention and of recurrences: every switch that decides a parameter, each way."""

from __future__ import annotations

from typing import Any

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50,
    "max_position_embeddings": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 56}
MLA = {**SMALL, "num_key_value_heads": 4, "intermediate_size": 56, "q_lora_rank": 20, "kv_lora_rank": 12,
       "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}  # fmt: skip
MOE = {**MLA, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2,
       "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
TIED = {"tie_word_embeddings": True}
DSA = {**MOE, "index_n_heads": 6, "index_head_dim": 8, "index_topk": 4}
LONGCAT = {**{k: v for k, v in MLA.items() if k not in ("num_hidden_layers", "intermediate_size")},
           "num_layers": 2, "ffn_hidden_size": 56, "expert_ffn_hidden_size": 24, "n_routed_experts": 6,
           "moe_topk": 3, "zero_expert_num": 0, "head_dim": 4}  # fmt: skip
V4 = {**SMALL, "num_hidden_layers": 4, "moe_intermediate_size": 24, "head_dim": 16, "q_lora_rank": 20,
      "n_routed_experts": 6, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 12, "index_n_heads": 6,
      "index_head_dim": 8, "hc_mult": 3, "sliding_window": 8}  # fmt: skip
MIMO = {**GROUPED, "head_dim": 12, "v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "sliding_window": 9, "num_key_value_heads": 1}  # fmt: skip
M3 = {**GROUPED, "head_dim": 16, "dense_intermediate_size": 40, "shared_intermediate_size": 28,
      "num_local_experts": 6, "num_experts_per_tok": 2, "index_n_heads": 3, "index_head_dim": 8}  # fmt: skip

LATENT: dict[str, list[dict[str, Any]]] = {
    "deepseek_v2": [MOE, {**MOE, "q_lora_rank": None, "mlp_bias": True, "attention_bias": True},
                    {**MOE, "first_k_dense_replace": 0, **TIED}, {**MOE, "n_shared_experts": 0}],
    "deepseek_v3": [MOE, {**MOE, "q_lora_rank": None, "attention_bias": True, **TIED},
                    {**MOE, "first_k_dense_replace": 9, "num_nextn_predict_layers": 1}],
    "mistral4": [MOE, {**MOE, "q_lora_rank": None, "attention_bias": True, **TIED}],
    "glm4_moe_lite": [MOE, {**MOE, "first_k_dense_replace": 2, "attention_bias": True},
                      {**MOE, "mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None, **TIED}],
    "deepseek_v32": [DSA, {**DSA, "attention_bias": True, "num_experts": 4, **TIED},
                     {**DSA, "mlp_layer_types": ["sparse", "dense", "sparse"], "mlp_bias": True}],
    "glm_moe_dsa": [DSA, {**DSA, "indexer_types": ["full", "shared", "full"], "attention_bias": True},
                    {**DSA, "index_topk_freq": 2, "index_skip_topk_offset": 1, **TIED},
                    {**DSA, "index_topk_pattern": "FSS", "num_experts": 4,
                     "mlp_layer_types": ["sparse", "dense", "sparse"]}],
    "minicpm3": [MLA, {**MLA, "q_lora_rank": None, "attention_bias": True, "mlp_bias": True},
                 {**MLA, "v_head_dim": None, "tie_word_embeddings": False}],
    "longcat_flash": [LONGCAT, {**LONGCAT, "zero_expert_num": 2, "attention_bias": True},
                      {**LONGCAT, "router_bias": True, **TIED}],
    "deepseek_v4": [V4, {**V4, "mlp_bias": True, **TIED},
                    {**V4, "compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1},
                    {**V4, "layer_types": ["compressed_sparse_attention", "sliding_attention",
                                           "heavily_compressed_attention", "sliding_attention"],
                     "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5}}],
    "mimo_v2_flash": [MIMO, {**MIMO, "attention_bias": True, **TIED},
                      {**MIMO, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                       "mlp_layer_types": ["sparse", "dense", "sparse"]}],
    "minimax_m3_vl_text": [
        M3, {**M3, "moe_layer_freq": [0, 1, 1], **TIED},
        {**M3, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
         "mlp_layer_types": ["dense", "sparse", "dense"]},
        {**M3, "sparse_attention_config": {"sparse_attention_freq": [0, 1, 0], "sparse_num_index_heads": 2,
                                           "sparse_index_dim": 4}}],
}  # fmt: skip

CASES_STATES: dict[str, list[dict[str, Any]]] = {**LATENT}

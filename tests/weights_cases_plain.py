"""Small configs of decoders, dense and with experts, that stand in no composite."""

from __future__ import annotations

from typing import Any

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50,
    "max_position_embeddings": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 56}
BIASED = {**GROUPED, "attention_bias": True}
GEMMA = {**GROUPED, "head_dim": 16}
INPUTS = {"vocab_size_per_layer_input": 40, "hidden_size_per_layer_input": 6}
SHARING = {**GEMMA, **INPUTS, "num_hidden_layers": 6, "num_kv_shared_layers": 2}
GEMMA3N = {**SHARING, "layer_types": ["sliding_attention", "full_attention"] * 3, "laurel_rank": 5,
           "altup_num_inputs": 3, "activation_sparsity_pattern": [0.0] * 6}  # fmt: skip
GEMMA4 = {
    **SHARING,
    "global_head_dim": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
EXPERTS = {**GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2}
QWEN = {**GROUPED, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
QWEN2 = {**QWEN, "shared_expert_intermediate_size": 40}
GLM = {
    **GROUPED,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
}
LLAMA4 = {**EXPERTS, "intermediate_size_mlp": 72, "head_dim": 16}
ERNIE = {**GROUPED, "moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 2}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2,
          "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "out_hidden_size": 32}  # fmt: skip
DBRX = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 24, "vocab_size": 50, "pad_token_id": 0,
        "attn_config": {"kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2}}  # fmt: skip

CASES_PLAIN: dict[str, list[dict[str, Any]]] = {
    "cohere": [GROUPED, {**BIASED, "use_qk_norm": True, "head_dim": 16},
               {**GROUPED, "num_key_value_heads": None, "tie_word_embeddings": False, "use_qk_norm": True}],
    "cohere2": [GROUPED, {**BIASED, "tie_word_embeddings": False}, {**GROUPED, "num_key_value_heads": None}],
    "gemma2": [GEMMA, {**BIASED, "head_dim": 8, "tie_word_embeddings": False}],
    "gemma3_text": [GEMMA, {**BIASED, "head_dim": 8, "tie_word_embeddings": False},
                    {**GEMMA, "use_bidirectional_attention": True}],
    "gemma3n_text": [
        GEMMA3N, {**GEMMA3N, "num_kv_shared_layers": 0, "attention_bias": True, "tie_word_embeddings": False},
        {**GEMMA3N, "intermediate_size": [40, 48, 56, 64, 72, 80], "altup_num_inputs": 1, "head_dim": 8},
        {**GEMMA3N, "layer_types": None, "num_hidden_layers": 12, "activation_sparsity_pattern": None}],
    "gemma4_text": [
        GEMMA4, {**GEMMA4, "num_kv_shared_layers": 0, "attention_bias": True, "tie_word_embeddings": False},
        {**GEMMA4, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 0},
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0},
        {**GEMMA4, "attention_k_eq_v": True, "num_kv_shared_layers": 3, "use_bidirectional_attention": "all",
         "layer_types": ["full_attention", "sliding_attention"] * 3},
        {**GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
        {**GEMMA4, "layer_types": None, "num_hidden_layers": 14, "num_kv_shared_layers": 7}],
    "bloom": [{**SMALL, "n_layer": 3, "n_head": 4}, {**SMALL, "tie_word_embeddings": False}],
    "gptj": [{**SMALL, "rotary_dim": 4}, {**SMALL, "n_inner": 40, "rotary_dim": 4, "tie_word_embeddings": True}],
    "gpt_bigcode": [SMALL, {**SMALL, "multi_query": False, "n_inner": 40, "tie_word_embeddings": False},
                    {**SMALL, "multi_query": False, "add_cross_attention": True}],
    "mpt": [{"d_model": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 50},
            {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 50, "tie_word_embeddings": False,
             "learned_pos_emb": False, "no_bias": False, "expansion_ratio": 2}],
    "phi": [GROUPED, {**GROUPED, "qk_layernorm": True, "tie_word_embeddings": True},
            {**GROUPED, "num_key_value_heads": None}],
    "stablelm": [GROUPED, {**GROUPED, "use_qkv_bias": True, "use_parallel_residual": True},
                 {**GROUPED, "qk_layernorm": True, "tie_word_embeddings": True}],
    "starcoder2": [GROUPED, {**GROUPED, "use_bias": False, "tie_word_embeddings": False},
                   {**GROUPED, "sliding_window": 8, "head_dim": 16}],
    "olmo": [GROUPED, {**BIASED, "clip_qkv": 8.0, "tie_word_embeddings": True},
             {**GROUPED, "num_key_value_heads": None}],
    "olmo2": [GROUPED, {**BIASED, "head_dim": 16, "tie_word_embeddings": True},
              {**GROUPED, "num_key_value_heads": None}],
    "olmo3": [GROUPED, {**BIASED, "num_hidden_layers": 5, "tie_word_embeddings": True}],
    "exaone4": [GROUPED, {**GROUPED, "sliding_window": 8, "sliding_window_pattern": 2, "head_dim": 16,
                          "tie_word_embeddings": True}],
    "granite": [GROUPED, {**BIASED, "mlp_bias": True, "tie_word_embeddings": True}],
    "smollm3": [GROUPED, {**BIASED, "mlp_bias": True, "tie_word_embeddings": False},
                {**GROUPED, "use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 5}],
    "qwen2_moe": [QWEN2, {**QWEN2, "mlp_only_layers": [1], "qkv_bias": False, "tie_word_embeddings": True},
                  {**QWEN2, "decoder_sparse_step": 2}, {**QWEN2, "num_experts": 0}],
    "glm4_moe": [GLM, {**GLM, "use_qk_norm": True, "first_k_dense_replace": 0, "n_shared_experts": 2},
                 {**GLM, "attention_bias": True, "first_k_dense_replace": 2, "tie_word_embeddings": True,
                  "num_nextn_predict_layers": 0}],
    "gpt_oss": [{**EXPERTS, "head_dim": 16}, {**EXPERTS, "attention_bias": False, "tie_word_embeddings": True}],
    "granitemoe": [EXPERTS, {**EXPERTS, "attention_bias": True, "tie_word_embeddings": True}],
    "llama4_text": [LLAMA4, {**LLAMA4, "interleave_moe_layer_step": 2, "attention_bias": True},
                    {**LLAMA4, "moe_layers": [0], "tie_word_embeddings": True, "attention_chunk_size": None},
                    {**LLAMA4, "moe_layers": [], "use_qk_norm": False}],
    "minimax_m2": [{**EXPERTS, "head_dim": 16}, {**EXPERTS, "head_dim": 8, "tie_word_embeddings": True}],
    "mixtral": [EXPERTS, {**EXPERTS, "tie_word_embeddings": True, "head_dim": 16, "sliding_window": 8},
                {**GROUPED, "num_experts": 5, "num_experts_per_tok": 1}],
    "phimoe": [EXPERTS, {**EXPERTS, "attention_bias": True, "lm_head_bias": True},
               {**EXPERTS, "lm_head_bias": True, "tie_word_embeddings": True}],
    "dbrx": [DBRX, {**DBRX, "attn_config": {"kv_n_heads": 4}}],
    "ernie4_5_moe": [ERNIE, {**ERNIE, "use_bias": True, "moe_num_shared_experts": 0},
                     {**ERNIE, "use_bias": True, "moe_layer_interval": 2, "tie_word_embeddings": False},
                     {**ERNIE, "moe_layer_start_index": 0, "moe_layer_end_index": 1, "head_dim": 16}],
    "olmoe": [{**GROUPED, "num_experts": 6, "num_experts_per_tok": 2},
              {**EXPERTS, "num_key_value_heads": None, "attention_bias": True, "tie_word_embeddings": True}],
    "hunyuan_v1_moe": [{**QWEN, "head_dim": 16}, {**QWEN, "head_dim": 8, "moe_topk": [1, 2, 2], "attention_bias": True,
                        "tie_word_embeddings": True}],
}  # fmt: skip

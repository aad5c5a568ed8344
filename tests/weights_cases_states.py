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
STEP = {**GROUPED, "num_hidden_layers": 5, "head_dim": 16, "moe_intermediate_size": 24, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "share_expert_dim": 20, "sliding_window": 8}  # fmt: skip
SLIDES = [
    "full_attention",
    "sliding_attention",
    "sliding_attention",
    "full_attention",
    "sliding_attention",
]

LATENT: dict[str, list[dict[str, Any]]] = {
    "deepseek_v2": [MOE, {**MOE, "q_lora_rank": None, "mlp_bias": True, "attention_bias": True},
                    {**MOE, "first_k_dense_replace": 0, **TIED}, {**MOE, "n_shared_experts": 0},
                    {**MOE, "n_shared_experts": 0, "mlp_bias": True}],
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
                     "compress_rates": {"compressed_sparse_attention": 3,
                                        "heavily_compressed_attention": 5}}],
    "mimo_v2_flash": [MIMO, {**MIMO, "attention_bias": True, **TIED},
                      {**MIMO, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                       "mlp_layer_types": ["sparse", "dense", "sparse"]}],
    "minimax_m3_vl_text": [
        M3, {**M3, "moe_layer_freq": [0, 1, 1], **TIED},
        {**M3, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
         "mlp_layer_types": ["dense", "sparse", "dense"]},
        {**M3, "sparse_attention_config": {"sparse_attention_freq": [0, 1, 0], "sparse_num_index_heads": 2,
                                           "sparse_index_dim": 4}}],
    "step3p5": [
        STEP, {**STEP, "layer_types": SLIDES, "num_sliding_attention_heads": 6, "attention_bias": True},
        {**STEP, "layer_types": [*SLIDES, "sliding_attention"], "num_nextn_predict_layers": 1,
         "mlp_bias": True, "moe_layers_enum": "1,2, 4",
         "attention_other_setting": {"num_attention_heads": 8}},
        {**STEP, "mlp_layer_types": ["sparse", "dense"] * 2 + ["sparse"], "moe_num_experts": 4,
         "moe_top_k": 1},
        {**STEP, "moe_layers_enum": [0, 3], "num_local_experts": 9}],
}  # fmt: skip

MAMBA = {
    k: v for k, v in SMALL.items() if k not in ("num_attention_heads", "max_position_embeddings")
}
MAMBA = {**MAMBA, "state_size": 6, "conv_kernel": 3}
MAMBA2 = {**MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4}
HEADS = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 3,
    "mamba_d_head": 16,
}
GRANITE = {**GROUPED, **HEADS, "num_local_experts": 4, "shared_intermediate_size": 24,
           "layer_types": ["mamba", "attention", "mamba"]}  # fmt: skip
JAMBA = {**GROUPED, "num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
         "expert_layer_period": 3, "expert_layer_offset": 2, "mamba_d_state": 6}  # fmt: skip
LFM2 = {**GROUPED, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}
LFM2_MOE = {**GROUPED, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 4,
            "moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_dense_layers": 1}  # fmt: skip
NEMOTRON = {**{k: v for k, v in GROUPED.items() if k != "num_hidden_layers"}, "head_dim": 16,
            "mamba_num_heads": 4, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 6, "conv_kernel": 3,
            "n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20,
            "hybrid_override_pattern": "M-*EM"}  # fmt: skip
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
          "linear_value_head_dim": 10, "linear_conv_kernel_dim": 3}  # fmt: skip
QWEN = {**GROUPED, **LINEAR, "num_hidden_layers": 4, "head_dim": 16}
QWEN_MOE = {**QWEN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20}  # fmt: skip
KIMI = {**MLA, "q_lora_rank": None, "num_hidden_layers": 5, "moe_intermediate_size": 24, "num_experts": 4,
        "num_experts_per_token": 2, "num_shared_experts": 2, "linear_num_heads": 2, "linear_head_dim": 6,
        "linear_conv_kernel_dim": 3}  # fmt: skip
KDA = {"full_attn_layers": [2, 5], "kda_layers": [1, 3, 4], "num_heads": 3, "head_dim": 8,
       "short_conv_kernel_size": 4}  # fmt: skip
MINIMAX = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
RWKV = {
    k: v for k, v in SMALL.items() if k not in ("num_attention_heads", "max_position_embeddings")
}
ZAMBA = {**GROUPED, "num_hidden_layers": 6, "n_mamba_heads": 2, "mamba_d_state": 6, "mamba_d_conv": 3,
         "attn_layer_period": 2, "attn_layer_offset": 1}  # fmt: skip
HYBRID = ["hybrid", "mamba", "hybrid", "hybrid", "hybrid", "mamba"]
ZAMBA2 = {**GROUPED, "num_hidden_layers": 6, "n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 6,
          "adapter_rank": 5, "layers_block_type": HYBRID}  # fmt: skip
OWN_KDA = {"linear_attn_config": KDA, "first_k_dense_replace": 2}

HYBRIDS: dict[str, list[dict[str, Any]]] = {
    "mamba": [MAMBA, {**MAMBA, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False},
              {**MAMBA, "expand": 3, "time_step_rank": 5}, {**MAMBA, "intermediate_size": 40}],
    "falcon_mamba": [MAMBA, {**MAMBA, "use_bias": True, "use_conv_bias": False, "time_step_rank": 5},
                     {**MAMBA, "tie_word_embeddings": False}],
    "mamba2": [MAMBA2, {**MAMBA2, "use_bias": True, "use_conv_bias": False, **TIED}],
    "falcon_h1": [{**GROUPED, **HEADS, "mamba_d_ssm": 64},
                  {**GROUPED, **HEADS, "mamba_d_ssm": 48, "mamba_d_head": "auto", **TIED,
                   "mamba_rms_norm": True},
                  {**GROUPED, **HEADS, "mamba_d_ssm": None, "mamba_proj_bias": True, "head_dim": 16},
                  {**GROUPED, **HEADS, "mamba_d_ssm": 64, "projectors_bias": True, "mamba_conv_bias": False},
                  {**GROUPED, **HEADS, "mamba_d_ssm": 64, "attention_bias": True, "mlp_bias": True}],
    "granitemoehybrid": [GRANITE, {**GRANITE, "num_local_experts": 0, "attention_bias": True, **TIED},
                         {**GRANITE, "mamba_proj_bias": True, "mamba_conv_bias": False,
                          "mamba_d_head": "auto"}],
    "jamba": [JAMBA, {**JAMBA, "num_experts": 1, "mamba_proj_bias": True, **TIED},
              {**JAMBA, "mamba_conv_bias": False, "mamba_dt_rank": 5, "mamba_expand": 3}],
    "bamba": [{**GROUPED, **HEADS, "attn_layer_indices": [1]},
              {**GROUPED, **HEADS, "attn_layer_indices": [0, 2], "attention_bias": True, "mlp_bias": True},
              {**GROUPED, **HEADS, "mamba_proj_bias": True, "mamba_conv_bias": False, **TIED}],
    "lfm2": [LFM2, {**LFM2, "conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_embedding": False},
             {**LFM2, "block_ffn_dim_multiplier": 1.3, "block_ff_dim": 44, "tie_word_embeddings": False},
             {**GROUPED, "full_attn_idxs": [2], "conv_L_cache": 4}],
    "lfm2_moe": [LFM2_MOE, {**LFM2_MOE, "conv_bias": True, "num_dense_layers": 0, "tie_embedding": False}],
    "nemotron_h": [NEMOTRON, {**NEMOTRON, "use_bias": True, "mlp_bias": True, "use_conv_bias": False, **TIED},
                   {**NEMOTRON, "moe_latent_size": 12, "mlp_bias": True, "mamba_conv_bias": False},
                   {**NEMOTRON, "moe_latent_size": 12, "moe_shared_expert_intermediate_size": 0,
                    "hybrid_override_pattern": None,
                    "layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"]}],
    "qwen3_next": [QWEN_MOE, {**QWEN_MOE, "mlp_only_layers": [0, 2], "attention_bias": True, **TIED},
                   {**QWEN_MOE, "decoder_sparse_step": 2, "full_attention_interval": 2},
                   {**QWEN_MOE, "num_experts": 0,
                    "layer_types": ["full_attention"] + ["linear_attention"] * 3}],
    "qwen3_5_text": [QWEN, {**QWEN, "attention_bias": True, "full_attention_interval": 2, **TIED}],
    "qwen3_5_moe_text": [QWEN_MOE, {**QWEN_MOE, "attention_bias": True, "head_dim": 8, **TIED}],
    "olmo_hybrid": [GROUPED, {**GROUPED, "num_hidden_layers": 4},
                    {**GROUPED, **LINEAR, "num_hidden_layers": 4, "attention_bias": True, **TIED},
                    {**GROUPED, "linear_num_value_heads": 8,
                     "layer_types": ["linear_attention", "full_attention", "full_attention"]}],
    "kimi_linear": [KIMI, {**KIMI, **OWN_KDA}, {**KIMI, "q_lora_rank": 20, "attention_bias": True, **TIED},
                    {**KIMI, "mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse"]},
                    {k: v for k, v in KIMI.items() if not k.startswith("linear_")}],
    "minimax": [MINIMAX, {**MINIMAX, "head_dim": 16, **TIED},
                {**MINIMAX, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}],
    "recurrent_gemma": [GROUPED, {**GROUPED, "lru_width": 48, "attention_bias": True, "conv1d_width": 3},
                        {**GROUPED, "block_types": ["attention", "recurrent"], "tie_word_embeddings": False}],
    "rwkv": [RWKV, {**RWKV, "attention_hidden_size": 40, "intermediate_size": 56, **TIED}],
    "zamba": [ZAMBA, {**ZAMBA, "mamba_conv_bias": False, "mamba_proj_bias": True,
                      "tie_word_embeddings": False},
              {**ZAMBA, "attention_hidden_size": 64, "attention_head_dim": 8, "mamba_dt_rank": 5},
              {**ZAMBA, "num_hidden_layers": 3, "layers_block_type": ["hybrid", "mamba", "hybrid"]}],
    "zamba2": [ZAMBA2, {**ZAMBA2, "num_mem_blocks": 2, "add_bias_linear": True},
               {**ZAMBA2, "num_mem_blocks": 3, "use_shared_attention_adapter": True,
                "intermediate_size": None},
               {**ZAMBA2, "num_mem_blocks": 9, "use_conv_bias": False, "tie_word_embeddings": False},
               {**ZAMBA2, "num_mem_blocks": 3, "use_shared_attention_adapter": True, "num_key_value_heads": 4,
                "tie_word_embeddings": False}],
}  # fmt: skip

CASES_STATES: dict[str, list[dict[str, Any]]] = {**LATENT, **HYBRIDS}

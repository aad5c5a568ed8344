"""Small configs of composites and of encoder-decoders, every switch each way at least once."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 56, "vocab_size": 50, "max_position_embeddings": 24, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA: Config = {"model_type": "llama", **TEXT}
GEMMA: Config = {"model_type": "gemma", **TEXT, "head_dim": 8}
MISTRAL: Config = {"model_type": "mistral", **TEXT, "sliding_window": None}
MINISTRAL: Config = {"model_type": "ministral3", **TEXT, "head_dim": 8}
QWEN2: Config = {"model_type": "qwen2", **TEXT}
GEMMA3: Config = {"model_type": "gemma3_text", **TEXT, "head_dim": 8}
GEMMA4: Config = {
    "model_type": "gemma4_text",
    **TEXT,
    "head_dim": 8,
    "hidden_size_per_layer_input": 0,
}
DEEPSEEK: Config = {
    "model_type": "deepseek_v3", **TEXT, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
}  # fmt: skip
LLAMA4: Config = {
    "model_type": "llama4_text", **TEXT, "head_dim": 8, "intermediate_size_mlp": 40,
    "num_local_experts": 4, "interleave_moe_layer_step": 2,
}  # fmt: skip
MLLAMA: Config = {"model_type": "mllama_text_model", **TEXT, "cross_attention_layers": [1]}
QWEN3: Config = {"model_type": "qwen3_vl_text", **TEXT, "head_dim": 8}
QWEN3_MOE: Config = {
    "model_type": "qwen3_vl_moe_text", **TEXT, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}  # fmt: skip
LINEAR = {
    "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
QWEN3_5: Config = {"model_type": "qwen3_5_text", **TEXT, **LINEAR}
QWEN3_5_MOE: Config = {
    "model_type": "qwen3_5_moe_text", **TEXT, **LINEAR, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "shared_expert_intermediate_size": 16,
}  # fmt: skip
STEP3: Config = {
    "model_type": "step3p5", **TEXT, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "share_expert_dim": 16, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip

VIT = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
IMAGE = {"image_size": 12, "patch_size": 4}
SIGLIP: Config = {"model_type": "siglip_vision_model", **VIT, **IMAGE}
CLIP: Config = {"model_type": "clip_vision_model", **VIT, **IMAGE}
PIXTRAL: Config = {"model_type": "pixtral", **VIT, **IMAGE}
QWEN_VIT = {
    "depth": 2, "hidden_size": 24, "num_heads": 4, "intermediate_size": 40, "patch_size": 4,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 32,
}  # fmt: skip
QWEN3_VIT = {**QWEN_VIT, "num_position_embeddings": 16}
MERGED = {"spatial_merge_size": 3, "in_channels": 1, "temporal_patch_size": 1, "patch_size": 6}
TIED: Config = {"tie_word_embeddings": True}
UNTIED: Config = {"tie_word_embeddings": False}


def around(text: Config, vision: Config | None = None, **outer: Any) -> Config:
    """A composite's config, but for its type."""
    seen = {} if vision is None else {"vision_config": vision}
    return {"text_config": dict(text), **seen, **outer}


def llava(**outer: Any) -> list[Config]:
    """LLaVA and LLaVA-NeXT."""
    return [
        around(LLAMA, CLIP, **outer),
        around(LLAMA, {**CLIP, "num_channels": 1}, multimodal_projector_bias=False, vision_feature_layer=[-2, -1]),
        around({**MISTRAL, **TIED}, SIGLIP), around(MISTRAL, {**SIGLIP, "vision_use_head": False}),
        around({**GEMMA}, PIXTRAL), around({**GEMMA, **UNTIED}, CLIP), around(LLAMA),
        around(LLAMA, {k: v for k, v in CLIP.items() if k != "model_type"}, **TIED),
    ]  # fmt: skip


KIMI = {**VIT, "patch_size": 4, "pos_emb_height": 6, "pos_emb_width": 5}
LLAMA4_VIT = {
    **VIT,
    **IMAGE,
    "projector_input_dim": 20,
    "projector_output_dim": 20,
    "vision_output_dim": 20,
}
MLLAMA_VIT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4, **IMAGE,
    "intermediate_size": 40, "vision_output_dim": 48, "intermediate_layers_indices": [0],
}  # fmt: skip
GEMMA4_VIT = {
    **VIT,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "patch_size": 4,
    "position_embedding_size": 9,
}
GEMMA4_AUDIO = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "subsampling_conv_channels": [8, 6],
    "output_proj_dims": 28,
}  # fmt: skip
GLM_VIT = {**QWEN_VIT, "image_size": 8}
STEP3_VIT = {
    **IMAGE,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mlp_ratio": 2.6,
}

T5 = {
    "d_model": 32, "d_kv": 6, "d_ff": 56, "num_layers": 3, "num_heads": 4, "vocab_size": 50,
    "relative_attention_num_buckets": 8,
}  # fmt: skip
T5_CASES: list[Config] = [
    T5, {**T5, "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu"}, {**T5, **UNTIED},
    {**T5, "num_decoder_layers": None, "feed_forward_proj": "relu"},
    {**T5, "feed_forward_proj": "relu", "is_gated_act": True},
]  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 56,
    "encoder_attention_heads": 2, "decoder_attention_heads": 4, "vocab_size": 50, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
BART_CASES: list[Config] = [{**BART, "max_position_embeddings": 24}, {**BART, **UNTIED}]
WHISPER = {
    **BART, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 12,
    "begin_suppress_tokens": None,
}  # fmt: skip

CASES_TOWERS: dict[str, list[Config]] = {
    "gemma3": [around(GEMMA3, SIGLIP), around(GEMMA3, {**SIGLIP, "vision_use_head": False}, **UNTIED),
               around({**GEMMA3, **UNTIED}, CLIP | {"num_channels": 1}),
               around(GEMMA3, tie_word_embeddings=None)],
    "gemma4": [around(GEMMA4, GEMMA4_VIT, audio_config=GEMMA4_AUDIO), around(GEMMA4, **UNTIED),
               around(GEMMA4, {**GEMMA4_VIT, "use_clipped_linears": True, "standardize": True}),
               around(GEMMA4, None, audio_config={**GEMMA4_AUDIO, "conv_kernel_size": 3,
                                                  "subsampling_conv_channels": [7, 5]}),
               around(GEMMA4, {}, audio_config={}, vision_soft_tokens_per_image=4)],
    "glm4v": [around({"model_type": "glm4v_text", **TEXT}, GLM_VIT, **TIED),
              around({"model_type": "glm4v_text", **TEXT, **TIED}, {**GLM_VIT, **MERGED, "attention_bias": True}),
              around({"model_type": "glm4v_text", **TEXT, "num_key_value_heads": None})],
    "idefics3": [around(LLAMA, {**VIT, **IMAGE}, **TIED), around(LLAMA, {**VIT, **IMAGE, "num_channels": 1},
                                                                 scale_factor=3),
                 around({**MISTRAL, **TIED})],
    "internvl": [around(QWEN2, {**VIT, **IMAGE}),
                 around(QWEN2, {**VIT, "image_size": [12, 8], "patch_size": [4, 4], "attention_bias": True,
                                "use_qk_norm": True, "norm_type": "rms_norm"}, **UNTIED),
                 around(LLAMA, {**VIT, **IMAGE, "use_mask_token": True, "use_mean_pooling": False,
                                "use_absolute_position_embeddings": False, "num_channels": 1},
                        downsample_ratio=0.3), around(QWEN2)],
    "kimi_k25": [around(DEEPSEEK, KIMI, projection_hidden_size=24),
                 around(DEEPSEEK, {**KIMI, "merge_kernel_size": [1, 3]}, **UNTIED)],
    "llama4": [around(LLAMA4, LLAMA4_VIT), around({**LLAMA4, **TIED}, {**LLAMA4_VIT, "num_channels": 1}),
               around(LLAMA4, LLAMA4_VIT, **TIED)],
    "llava": llava(),
    "llava_next": llava(image_grid_pinpoints=[[24, 12]]),
    "ministral3": [TEXT, {**TEXT, "head_dim": 6, "num_key_value_heads": 4, **TIED}],
    "mistral3": [
        around({**MINISTRAL, **TIED}, PIXTRAL, **UNTIED),around(MISTRAL, PIXTRAL), around(MISTRAL, {**PIXTRAL, "patch_size": [4, 2]},
                        spatial_merge_size=3, multimodal_projector_bias=True, **UNTIED),
                 around(MISTRAL, SIGLIP, vision_feature_layer=[-1, -2, -3]), {}, around(LLAMA)],
    "mllama": [around(MLLAMA, MLLAMA_VIT), around({**MLLAMA, **TIED, "cross_attention_layers": []}, {
                   **MLLAMA_VIT, "max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2]]}, **TIED),
               around({**MLLAMA, "num_hidden_layers": 5, "cross_attention_layers": None})],
    "paligemma": [around(GEMMA, SIGLIP, projection_dim=32), around({**GEMMA, **UNTIED}), {},
                  around(GEMMA, {**SIGLIP, "vision_use_head": False}, projection_dim=32, **UNTIED)],
    "qwen2_5_vl": [around({"model_type": "qwen2_5_vl_text", **TEXT}, QWEN_VIT),
                   around({"model_type": "qwen2_5_vl_text", **TEXT, **TIED}, {**QWEN_VIT, **MERGED}),
                   around({"model_type": "qwen2_5_vl_text", **TEXT}, **TIED),
                   {**TEXT, "vision_config": {**QWEN_VIT, "model_type": "qwen2_5_vl"}}],
    "qwen2_vl": [around({"model_type": "qwen2_vl_text", **TEXT}, {
                     "depth": 2, "embed_dim": 24, "hidden_size": 32, "num_heads": 4, "patch_size": 4}),
                 around({"model_type": "qwen2_vl_text", **TEXT, **TIED}, {
                     "depth": 1, "embed_dim": 24, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 3, **MERGED}),
                 around({"model_type": "qwen2_vl_text", **TEXT}), {**TEXT, **TIED}],
    "qwen3_5": [around(QWEN3_5, QWEN3_VIT), around({**QWEN3_5, **TIED}, {**QWEN3_VIT, **MERGED}),
                around(QWEN3_5, **TIED)],
    "qwen3_5_moe": [around(QWEN3_5_MOE, QWEN3_VIT), around({**QWEN3_5_MOE, **TIED}, {**QWEN3_VIT, **MERGED}),
                    around(QWEN3_5_MOE, **TIED)],
    "qwen3_vl": [around(QWEN3, {**QWEN3_VIT, "deepstack_visual_indexes": [0]}),
                 around({**QWEN3, **TIED}, {**QWEN3_VIT, **MERGED, "deepstack_visual_indexes": []}),
                 around(QWEN3, **TIED)],
    "qwen3_vl_moe": [around(QWEN3_MOE, {**QWEN3_VIT, "deepstack_visual_indexes": [0, 1]}),
                     around({**QWEN3_MOE, **TIED}, {**QWEN3_VIT, **MERGED}), around(QWEN3_MOE, **TIED)],
    "smolvlm": [around(LLAMA, {**VIT, **IMAGE}), around({**LLAMA, **TIED}, {**VIT, **IMAGE, "num_channels": 1},
                                                        scale_factor=3, **TIED)],
    "step3p7": [around(STEP3, STEP3_VIT), around(STEP3, {**IMAGE, "width": 32, "layers": 1, "heads": 8,
                                                         "mlp_ratio": 1.7, "num_channels": 1},
                                                 projector_bias=True, **TIED)],
    "bart": BART_CASES,
    "m2m_100": BART_CASES,
    "mbart": BART_CASES,
    "mt5": T5_CASES,
    "pegasus": BART_CASES,
    "t5": T5_CASES,
    "umt5": T5_CASES,
    "whisper": [WHISPER, {**WHISPER, **UNTIED}],
}  # fmt: skip

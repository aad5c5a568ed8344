"""How each model type of transformers is made tiny: the table behind tests/test_live_oracle.py.

SMALL shrinks what a config class has under that name. A type that needs more has an entry in TYPES:
one line says what else its config or its call needs. `text_config__head_dim=16` sets head_dim in
text_config. A type that cannot be built is in UNBUILT, with the reason; that list only shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a type needs beyond SMALL."""

    config: dict[str, Any] = field(default_factory=dict)
    """Path → value."""
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Further inputs of the prompt, their shapes without the batch: numbers, or for …_ids ids."""
    drop: tuple[str, ...] = ()
    """Inputs that the class does not take."""
    cls: str = ""
    """The class to build, where the auto classes have none or another."""
    part: str = ""
    """Build the model of this part of the config: the part that keeps the cache."""
    image: tuple[int, int] = (0, 0)
    """(token, count): the prompt starts with that many placeholders of an image."""
    rows: int = 1
    """Rows of input for one sequence (musicgen: one for each codebook)."""
    trail: tuple[int, ...] = ()
    """Further axes of the input ids."""
    steps: int = 3
    """Tokens decoded after the prompt."""
    shift: int = 0
    """Tokens that the class takes off the prompt."""
    generate: bool = False
    """Run by generate(), for the class alone fills no cache or generate() adds a token to it."""


def at(
    inputs: dict[str, tuple[int, ...]] | None = None,
    drop: str = "",
    *,
    cls: str = "",
    part: str = "",
    image: tuple[int, int] = (0, 0),
    rows: int = 1,
    trail: tuple[int, ...] = (),
    steps: int = 3,
    shift: int = 0,
    generate: bool = False,
    **config: Any,
) -> Setting:
    """A setting, its config's paths written with two underscores."""
    return Setting(
        config={key.replace("__", "."): value for key, value in config.items()},
        inputs=inputs or {},
        drop=tuple(drop.split()),
        cls=cls,
        part=part,
        image=image,
        rows=rows,
        trail=trail,
        steps=steps,
        shift=shift,
        generate=generate,
    )


def each(types: str, setting: Setting) -> dict[str, Setting]:
    """The same setting for several types."""
    return dict.fromkeys(types.split(), setting)


def _sizes(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


SMALL = {
    **_sizes(160, "vocab_size vocab_size_per_layer_input"),
    **_sizes(
        64,
        "hidden_size n_embd d_model dim emb_dim embed_dim embedding_dim "
        "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions "
        "max_target_positions lru_width cross_hidden_size encoder_hidden_size "
        "decoder_hidden_size out_hidden_size",
    ),
    **_sizes(
        32,
        "intermediate_size moe_intermediate_size ffn_dim d_ff n_inner ffn_hidden_size "
        "encoder_ffn_dim decoder_ffn_dim dim_ff dff shared_expert_intermediate_size "
        "shared_intermediate_size expert_ffn_hidden_size intermediate_size_mlp "
        "dense_intermediate_size prefix_dense_intermediate_size share_expert_dim "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size image_size",
    ),
    **_sizes(28, "kv_lora_rank"),
    **_sizes(24, "q_lora_rank global_head_dim"),
    **_sizes(
        16,
        "head_dim d_kv d_head attention_head_size kv_channels local_attention "
        "index_head_dim mamba_d_head mamba_head_dim swa_head_dim num_mel_bins "
        "num_position_embeddings",
    ),
    **_sizes(12, "qk_nope_head_dim"),
    **_sizes(10, "v_head_dim linear_value_head_dim"),
    **_sizes(
        8,
        "sliding_window attention_chunk_size sliding_window_size attention_window_size "
        "window_size qk_rope_head_dim index_topk mamba_n_heads mamba_num_heads n_mamba_heads "
        "hidden_size_per_layer_input laurel_rank patch_size",
    ),
    **_sizes(6, "mamba_d_state state_size ssm_state_size linear_key_head_dim linear_head_dim"),
    **_sizes(
        4,
        "num_hidden_layers n_layer n_layers num_layers num_blocks num_attention_heads "
        "n_head n_heads num_heads attention_heads encoder_attention_heads "
        "decoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "encoder_num_attention_heads decoder_num_attention_heads t2u_encoder_attention_heads "
        "t2u_decoder_attention_heads speech_encoder_attention_heads n_routed_experts "
        "num_experts num_local_experts moe_num_experts mamba_d_conv conv_kernel "
        "mamba_chunk_size chunk_size linear_num_value_heads linear_num_heads "
        "swa_num_attention_heads num_sliding_attention_heads",
    ),
    **_sizes(
        3,
        "num_decoder_layers decoder_layers encoder_layers num_encoder_layers "
        "encoder_num_hidden_layers decoder_num_hidden_layers layers num_channels",
    ),
    **_sizes(
        2,
        "t2u_encoder_layers t2u_decoder_layers speech_encoder_layers "
        "num_key_value_heads encoder_num_key_value_heads decoder_num_key_value_heads "
        "index_n_heads num_experts_per_tok moe_topk top_k_experts moe_k mamba_n_groups n_groups "
        "mamba_ngroups linear_num_key_heads swa_num_key_value_heads type_vocab_size "
        "num_codebooks depth spatial_merge_size temporal_patch_size eos_token_id",
    ),
    **_sizes(
        1,
        "n_shared_experts n_group topk_group first_k_dense_replace bos_token_id "
        "decoder_start_token_id",
    ),
    **_sizes(0, "pad_token_id"),
}

DOTS3 = {
    "num_key_value_heads": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24, "swa_kv_lora_rank": 28, "swa_head_dim": 20, "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 10, "head_dim": 20,
}  # fmt: skip
QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8, "heads_per_ngram": 8,
}  # fmt: skip
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {**PLAIN_ROPE, "mrope_section": [2, 3, 3]}
TWO_ROPES = {"full_attention": PLAIN_ROPE, "sliding_attention": PLAIN_ROPE}
MIXED = ["full_attention", "sliding_attention", "full_attention", "full_attention"]

TYPES: dict[str, Setting] = {
    **each("axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa "
           "minicpm3 mistral4 sarvam_mla youtu", at(num_key_value_heads=4)),
    **each("glm46v glm4v glm4v_moe glm_ocr glmga paddleocr_vl qwen2_5_omni_thinker qwen2_5_vl "
           "qwen2_vl", at(text_config__rope_parameters={**MROPE, "partial_rotary_factor": 1.0})),
    **each("glm4v_moe_text glm4v_text glm_ocr_text paddleocr_vl_text qwen2_5_omni_text "
           "qwen2_5_vl_text qwen2_vl_text",
           at(rope_parameters={**MROPE, "partial_rotary_factor": 1.0})),
    **each("bert bert-generation big_bird camembert data2vec-text electra ernie "
           "megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta "
           "xlm-roberta-xl", at(is_decoder=True)),
    **each("canary cohere_asr", at({"input_features": (40, 16)}, drop="input_ids")),
    **each("codegen gptj", at(rotary_dim=8)),
    **each("fast_vlm inkling_mm_model llama4 perception_lm", at(part="text_config")),
    **each("hunyuan_v1_dense hunyuan_v1_moe ministral", at(head_dim=16)),
    **each("inkling2 inkling2_loop", at(vision_config__text_hidden_size=64)),
    **each("kimi_k25 mistral_large4", at(text_config__num_key_value_heads=4)),
    "qwen2_5_omni": at(part="thinker_config",
                       thinker_config__text_config__rope_parameters=MROPE),
    "qwen3_omni_moe": at(part="thinker_config"),
        "xlm": at(generate=True),
    "apertus1p5": at(audio_config__codebook_dim=64, audio_config__codebook_size=8,
                     vision_config__codebook_size=8, image_token_offset=130,
                     audio_token_offset=138),
    "bailing_hybrid": at(num_hidden_layers=6, layer_group_size=3, num_key_value_heads=4),
    "bamba": at(attn_layer_indices=[2]),
    "blip": at({"pixel_values": (3, 32, 32)}, generate=True, shift=-1),
    "blip-2": at({"pixel_values": (3, 32, 32)}, image=(9, 4), num_query_tokens=4,
                 image_token_index=9, steps=0),
    "chameleon": at(vocabulary_map={"<image>": 9}),
    "canary_decoder": at({"encoder_hidden_states": (11, 64)}, "decoder_input_ids"),
    "cohere_compass": at(text_config__layer_types=MIXED, text_config__rope_parameters=TWO_ROPES),
    "cohere_compass_text": at(layer_types=MIXED, rope_parameters=TWO_ROPES),
    "cosmos3_edge": at(text_config__rope_parameters=MROPE),
    "cosmos3_edge_text": at(rope_parameters=MROPE),
    "cpmant": at(steps=0),
    "dbrx": at(attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
               ffn_config={"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4,
                           "moe_top_k": 1, "ffn_act_fn": {"name": "silu"}}),
    "deepseek_ocr2": at(text_config__mlp_layer_types=["dense", "sparse", "sparse", "sparse"]),
    "deepseek_ocr2_text": at(mlp_layer_types=["dense", "sparse", "sparse", "sparse"]),
    "dia_decoder": at({"encoder_hidden_states": (11, 64)}, "decoder_input_ids", trail=(3,)),
    "dia": at(trail=(3,), delay_pattern=[0, 1, 2]),
    "dory": at(num_hidden_layers=8, n_input_layers=2, n_output_layers=2, n_recurrent_layers=4,
               n_recurrent_loops=2, layer_types=None),
    "dots3_note": at(vision_config__mlp_layer_types=["dense"] * 4,
                     vision_config__adapter_in_dim=64, vision_config__adapter_out_dim=64,
                     audio_config__adapter_input_size=64, audio_config__adapter_out_dim=64,
                     **{f"text_config__{k}": v for k, v in DOTS3.items()}),
    "dots3_note_text": at(**DOTS3),
    "emu3": at(vocabulary_map={"<image>": 9}),
    "ernie4_5_vl_moe": at(text_config__moe_intermediate_size=[32, 16],
                          text_config__rope_parameters={**PLAIN_ROPE, "mrope_section": [2, 2, 4]}),
    "ernie4_5_vl_moe_text": at(moe_intermediate_size=[32, 16],
                               rope_parameters={**PLAIN_ROPE, "mrope_section": [2, 2, 4]}),
    "evolla": at(cls="EvollaForProteinText2Text"),
    "falcon_h1": at(mamba_d_ssm=128),
    "fun_asr_nano": at(adaptor_config={"hidden_size": 64, "intermediate_size": 16,
                                       "num_attention_heads": 4}),
    "gemma3n": at(part="text_config", text_config__num_hidden_layers=10,
                  text_config__num_kv_shared_layers=4, text_config__layer_types=None),
    "gemma3n_text": at(num_hidden_layers=10, num_kv_shared_layers=4, layer_types=None),
    "glm5_next": at(text_config__num_key_value_heads=4, text_config__qk_rope_head_dim=0,
                    text_config__index_kpool=4),
    "glm5_next_text": at(num_key_value_heads=4, qk_rope_head_dim=0, index_kpool=4),
    "gpt_neo": at(attention_types=[[["global", "local"], 2]]),
    "granitemoehybrid": at(layer_types=["mamba", "attention", "mamba", "attention"]),
    "granite4_vision": at(image_grid_pinpoints=[[32, 32]], deepstack_layer_map=[],
                          downsample_rate="1/2"),
    "hunyuan_vl": at(text_config__head_dim=16,
                     text_config__rope_parameters={**PLAIN_ROPE, "mrope_section": [2, 2, 2, 2]}),
    "hunyuan_vl_text": at(head_dim=16,
                          rope_parameters={**PLAIN_ROPE, "mrope_section": [2, 2, 2, 2]}),
    "hy_v4_vl": at(text_config__rope_parameters={**PLAIN_ROPE, "mrope_section": [1, 1, 2]}),
    "hy_v4_vl_text": at(rope_parameters={**PLAIN_ROPE, "mrope_section": [1, 1, 2]}),
    "idefics": at({"pixel_values": (1, 3, 32, 32), "image_attention_mask": (21, 1)}, steps=0),
    "instructblip": at({"pixel_values": (3, 32, 32), "qformer_input_ids": (5,)}, image=(9, 4),
                       num_query_tokens=4, image_token_index=9, steps=0),
    "instructblipvideo": at({"pixel_values": (1, 3, 32, 32), "qformer_input_ids": (5,)},
                            image=(9, 4), num_query_tokens=4, video_token_index=9, steps=0),
    "jamba": at(attn_layer_period=2, attn_layer_offset=1, num_experts=2, expert_layer_period=2,
                expert_layer_offset=1),
    "kimi_linear": at(num_hidden_layers=5, num_key_value_heads=4),
    "kosmos-2": at(part="text_config", text_config__layers=3),
    "kyutai_speech_to_text": at(trail=(3,), audio_pad_token_id=5, audio_bos_token_id=6,
                                codebook_vocab_size=160, codec_config__upsample_groups=64),
    "lfm2_moe": at(layer_types=["conv", "full_attention", "conv", "conv"], num_dense_layers=1),
    "longcat_flash": at(num_key_value_heads=4, head_dim=8),
    "mamba2": at(num_heads=8, head_dim=16, expand=2),
    "mistral_large4_text": at(num_key_value_heads=4),
    "molmo2": at(vision_config__image_size=[32, 32], adapter_config__vision_feature_layer=[1, 0]),
    "moonshine": at({"input_values": (4000,)}, "input_ids", generate=True,
                    encoder_num_key_value_heads=4, decoder_num_key_value_heads=4),
    "moonshine_streaming": at({"input_values": (4000,)}, "input_ids", num_key_value_heads=4),
    **each("musicgen_decoder musicgen_melody_decoder", at(rows=2)),
    "nemo_speechlm": at(
        part="text_config", word_timestamp_config__blank_token_id=0,
        audio_config__diarization_config__head_config__audio_hidden_size=64,
    ),
    "musicgen": at(part="decoder", rows=2),
    "musicgen_melody": at(part="decoder", rows=2),
    "nemotron_h_omni": at(audio_config=None),
    "nllb-moe": at(generate=True),
    "pp_formulanet_text": at({"encoder_hidden_states": (11, 64)}, "decoder_input_ids"),
    "pix2struct": at({"flattened_patches": (11, 770)}, "input_ids"),
    "pp_formulanet": at({"pixel_values": (3, 32, 32)}, "input_ids"),
    "qwen4_exp": at(**{f"text_config__{k}": v for k, v in QWEN4.items()}),
    "qwen4_exp_text": at(**QWEN4),
    "reformer": at(is_decoder=True, attn_layers=["local", "lsh", "local", "lsh"],
                   axial_pos_embds_dim=[16, 48], axial_pos_shape=[8, 8],
                   local_attn_chunk_length=8, lsh_attn_chunk_length=8, num_buckets=4),
    "speech-encoder-decoder": at({"input_values": (4000,)}, "input_ids"),
    "speecht5": at({"input_values": (4000,)}, "input_ids"),
    "step3p5": at(sliding_window=8),
    "step3p7": at(text_config__sliding_window=8),
    "speech_to_text": at({"input_features": (40, 80)}, drop="input_ids"),
    "vision-encoder-decoder": at({"pixel_values": (3, 32, 32)}, drop="input_ids"),
    "udop": at({"bbox": (11, 4)}),
    "voxtral_realtime": at({"encoder_inputs_embeds": (84, 64)}, steps=0),
    "xlstm": at(hidden_size=128, embedding_dim=128),
    "whisper": at({"input_features": (16, 128)}, "input_ids"),
    "xmod": at(is_decoder=True, default_language="en_XX"),
    "zamba": at(num_hidden_layers=6, n_mamba_heads=2,
                layers_block_type=["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"]),
    "zamba2": at(layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], n_mamba_heads=8,
                 mamba_headdim=16),
    "zaya": at(num_experts_per_tok=1),
}  # fmt: skip

UNBUILT = {
    "blt": "BltForCausalLM fails by itself: it makes a DynamicCache from a config without layers",
    "blt_local_decoder": "a part of blt that wants the patches of the others",
    "dia_decoder": "a part of dia, which is built: its class alone wants dia's pair of caches",
    "gemma4_assistant": "it reads the cache of its target model, which has to be given",
    "gemma4_unified_assistant": "it reads the cache of its target model, which has to be given",
    "pi0": "a robot policy: it takes states and actions, not a prompt",
    "pix2struct_text_model": "a part of pix2struct, which is built: its config lacks a default",
    "t5_gemma_module": "a part of t5gemma, which is built: no class takes it alone",
    "t5gemma2_decoder": "a part of t5gemma2, which is built: its config lacks a default",
    "voxtral_realtime_text": "a part of voxtral_realtime, which is built: it wants the audio",
}
"""Types that generate and that this table cannot build. The list may only shrink."""

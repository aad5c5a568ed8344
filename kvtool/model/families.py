"""One small entry a model type: what differs from plain attention over every layer.

A type of transformers that is absent here is plain: GQA from num_key_value_heads, every layer full
or windowed by its class's own keys. Adding a family is adding a row (CONTRIBUTING.md, four steps).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from kvtool.model import attention as att
from kvtool.model import decoders as dec
from kvtool.model import fixes as fx
from kvtool.model import latent as lat
from kvtool.model import patterns as p
from kvtool.model import states as st
from kvtool.model import words as w
from kvtool.model.keys import Keys
from kvtool.model.shape import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a model type lays out its cache."""

    pattern: p.Pattern = p.window_or_full
    """The layers' kinds when the config does not list them."""
    fix: Callable[[fx.Slots, Keys], fx.Slots] | None = None
    """What the class does to the kinds afterwards: sharing, loops, a forced last layer."""
    attention: att.Reader = att.plain
    state: st.StateReader | None = None
    """Constant-state layers, and the state beside the attention of hybrid layers."""
    cross: Callable[[Keys, att.Place], LayerCache] | None = None
    """Cross-attention of every decoder layer, where the config is an encoder-decoder's."""
    words: frozenset[str] = frozenset({w.FULL, w.SLIDING, w.CHUNKED})
    """Kinds of layer that its attention understands; another is refused by name."""
    state_words: frozenset[str] = frozenset({w.LINEAR, w.HYBRID, w.HYBRID_SLIDING})
    """Kinds of layer that have its state."""
    encoder: Callable[[Keys, dec.Levels], int] = dec.no_fixed_encoder
    """Encoder tokens that the config fixes; 0 if it fixes none."""
    relative: bool = False
    """Relative positions: the stated length is what it was trained on, not a limit."""
    left_out: str = ""
    """Caches of the model beside this one that are not counted."""
    crosses: bool = False
    """True for decoders that have nothing but an encoder's tokens to speak of."""
    layers: tuple[str, ...] = ("num_hidden_layers",)
    lists: bool = True
    """False where the class ignores a list of layer kinds in the config."""
    encoder_only: bool = False
    """True for encoders that generate only with is_decoder."""
    refused: str = ""
    like: str = ""
    """For types outside transformers: the class whose defaults and family apply."""
    renamed: dict[str, str] = field(default_factory=dict)
    """For types outside transformers: key → the name this type gives it."""


def _row(types: str, **how: object) -> dict[str, Family]:
    family = Family(**how)  # type: ignore[arg-type]
    return dict.fromkeys(types.split(), family)


_MLA = {"attention": lat.latent}
_INDEXED = frozenset({w.FULL, w.SLIDING, w.CHUNKED, w.INDEXED})
_DSA = {"attention": lat.indexed_latent, "pattern": p.all_of(w.INDEXED), "words": _INDEXED}
_CONV = {"state": st.short_conv, "state_words": frozenset({w.CONV})}
_DELTA = {"state": st.gated_delta}
_THREE_LINEAR = p.every(4, other=w.LINEAR, key="full_attention_interval")
_TALKER = "the talker's cache is not counted"
_BART = {
    "attention": dec.bart,
    "cross": dec.bart_cross,
    "layers": ("decoder_layers",),
    "lists": False,
}
_T5 = {
    "attention": dec.t5, "cross": dec.t5_cross, "lists": False,
    "layers": ("num_decoder_layers", "num_layers"),
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    # windows in a pattern
    **_row("afmoe", pattern=p.every(4, key="global_attn_every_n_layers")),
    **_row("beam", pattern=p.last_full(p.every(6))),
    **_row("cohere2", pattern=p.every(4, key="sliding_window_pattern")),
    **_row("cohere2_moe", pattern=p.cohere2_moe),
    **_row("cwm", pattern=p.every(4, first=True)),
    **_row("gemma2 vaultgemma t5_gemma_module", pattern=p.every(2), cross=att.cross),
    **_row("gemma3_text", pattern=p.every(6, key="sliding_window_pattern")),
    **_row("gemma3n_text", pattern=p.every(5), fix=fx.shared_tail),
    **_row("gemma4_text gemma4_unified_text diffusion_gemma_text",
           pattern=p.every(6), fix=fx.gemma4, attention=att.gemma4),
    **_row("t5gemma2_decoder t5gemma2_text", pattern=p.every(6, key="sliding_window_pattern"),
           cross=att.cross),
    **_row("gpt_oss", pattern=p.every(2)),
    **_row("gpt_neo", pattern=p.attention_types, attention=att.derived),
    **_row("qwen2 qwen2_5_omni_talker qwen2_vl_text qwen2_5_vl_text qwen3",
           pattern=p.above_max_window_layers),
    **_row("qwen2_5_omni_text", pattern=p.above_max_window_layers, left_out=_TALKER),
    **_row("qwen3_omni_moe_text", pattern=p.all_slide_if_used, left_out=_TALKER),
    **_row("qwen2_moe", pattern=p.qwen2_moe),
    **_row("qwen3_moe", pattern=p.all_slide_if_used),
    **_row("qwen3_vl_moe_text iquestcoder", pattern=p.all_of(w.FULL)),
    **_row("dots1", pattern=p.dots1),
    **_row("exaone4 exaone_moe", pattern=p.exaone4),
    **_row("flint", pattern=p.where(lambda i, n: i < 2 or i % 4 == 1 or i == n - 1)),
    **_row("granite_swa granitemoe_swa", pattern=p.every(4, first=True)),
    **_row("kolibri1", pattern=p.every(5)),
    **_row("laguna mellum cohere_compass_text", pattern=p.all_of(w.FULL)),
    **_row("llama4_text", pattern=p.no_rope_chunks),
    **_row("smollm3", pattern=p.no_rope_windows),
    **_row("olmo3", pattern=p.every(4)),
    **_row("muse_glimmer_text muse_spark_text", pattern=p.where(lambda i, n: (n - 1 - i) % 4 == 0)),
    **_row("mimo_v2_flash", pattern=p.where(lambda i, n: i == 0 or not (i + 1) % 6),
           attention=att.mimo_v2),
    **_row("step3p5 step3p7", pattern=p.all_of(w.FULL), attention=att.step3p7),
    **_row("modernbert-decoder", pattern=p.every(3, key="global_attn_every_n_layers", first=True)),
    **_row("unlimited_ocr_text", pattern=p.reference_window, attention=dec.reference,
           words=frozenset({w.FULL, w.REFERENCE}),
           left_out="generated tokens beyond its window are dropped, counted here as kept"),
    **_row("dory", pattern=p.every(4), fix=fx.dory),
    # heads written elsewhere
    **_row("biogpt bloom codegen ctrl deepseek_ocr2_text git gpt-sw3 gpt_neox gptj opt xlm",
           attention=att.derived),
    **_row("falcon", attention=att.falcon, lists=False),
    **_row("gpt_bigcode", attention=att.gpt_bigcode, cross=att.gpt_bigcode_cross, lists=False),
    **_row("dbrx mpt", attention=att.attn_config, lists=False),
    **_row("hrm_text", fix=fx.hrm_text),
    **_row("jetmoe", attention=dec.jetmoe),
    **_row("minimax_m3_vl_text", pattern=p.sparse_frequency, attention=lat.indexed_plain,
           words=frozenset({w.FULL, w.SPARSE})),
    # latent attention
    **_row("deepseek_v2 deepseek_v3 axk1 minicpm3 glm4_moe_lite mistral4 sarvam_mla "
           "youtu", **_MLA),
    **_row("longcat_flash", fix=fx.twice, layers=("num_layers",), **_MLA),
    **_row("deepseek_v32 glm_moe_dsa axk2 hy_v4 hy_v4_vl_text", **_DSA),
    **_row("mistral_large4_text", pattern=p.all_of(w.INDEXED), attention=lat.shared_source_latent,
           words=_INDEXED),
    **_row("dots3_note_text", pattern=p.dots3_note, attention=lat.dots3_note, words=_INDEXED),
    **_row("deepseek_v4", pattern=p.compress_ratios, attention=lat.compressed,
           words=frozenset({w.SLIDING, w.CSA, w.HCA})),
    # constant states
    **_row("mamba falcon_mamba", pattern=p.all_of(w.LINEAR), state=st.mamba1, lists=False),
    **_row("mamba2", pattern=p.all_of(w.LINEAR), state=st.mamba2, lists=False),
    **_row("jamba", pattern=p.jamba, state=st.jamba, lists=False),
    **_row("bamba", pattern=p.indices("attn_layer_indices", absent=w.LINEAR), state=st.mamba2,
           lists=False),
    **_row("granitemoehybrid", pattern=p.all_of(w.LINEAR), state=st.mamba2),
    **_row("falcon_h1", pattern=p.all_of(w.HYBRID), state=st.mamba2, lists=False),
    **_row("nemotron_h", pattern=p.override_pattern, state=st.mamba2, layers=()),
    **_row("zamba2", pattern=p.zamba2, attention=dec.zamba2, state=st.mamba2),
    **_row("zamba", pattern=p.zamba, attention=dec.zamba, state=st.jamba),
    **_row("xlstm", pattern=p.all_of(w.LINEAR), state=st.xlstm, lists=False,
           layers=("num_hidden_layers", "num_blocks")),
    **_row("qwen3_next qwen3_5_text qwen3_5_moe_text", pattern=_THREE_LINEAR, **_DELTA),
    **_row("qwen4_exp_text", pattern=_THREE_LINEAR, fix=fx.full_is_indexed,
           attention=lat.indexed_plain, words=_INDEXED, **_DELTA),
    **_row("olmo_hybrid", pattern=p.where(lambda i, n: i % 4 == 3 or i == n - 1 < 3, no=w.LINEAR),
           **_DELTA),
    **_row("lara_mini", pattern=p.cycle(w.LINEAR, w.SLIDING, w.LINEAR, w.FULL, w.SLIDING), **_DELTA),
    **_row("kimi_linear", pattern=p.kimi_linear, attention=lat.latent, state=st.delta_attention),
    **_row("glm5_next_text", pattern=p.where(lambda i, n: i % 4 == 3, yes=w.INDEXED, no=w.LINEAR),
           fix=fx.full_is_indexed, attention=lat.indexed_latent, words=_INDEXED,
           state=st.delta_attention),
    **_row("bailing_hybrid", pattern=p.every(4, other=w.LINEAR, key="layer_group_size"),
           attention=lat.latent, state=st.delta_attention),
    **_row("minimax", pattern=p.minimax_types, state=st.lightning),
    **_row("lfm2 lfm2_moe", pattern=p.indices("full_attn_idxs", no=w.CONV, absent=w.FULL),
           **_CONV),
    **_row("lfm3", pattern=p.lfm3, **_CONV),
    **_row("recurrent_gemma", pattern=p.block_cycle, state=st.rg_lru, lists=False),
    **_row("rwkv", pattern=p.all_of(w.LINEAR), state=st.rwkv, lists=False),
    **_row("zaya", pattern=p.all_of(w.HYBRID), state=st.zaya_states),
    **_row("inkling_text", pattern=p.local_layer_ids, attention=dec.inkling,
           state=st.inkling_states),
    **_row("inkling2_text", pattern=p.every(6, full=w.HYBRID, other=w.HYBRID_SLIDING),
           attention=dec.inkling, state=st.inkling_states),
    **_row("inkling2_loop_text", pattern=p.every(6, full=w.HYBRID, other=w.HYBRID_SLIDING),
           fix=fx.inkling2_loop, attention=dec.inkling, state=st.inkling_states),
    # encoder-decoders and decoders with names of their own
    **_row("bart bigbird_pegasus blenderbot blenderbot-small fsmt led m2m_100 marian mbart mvp "
           "nllb-moe pegasus pegasus_x plbart speech_to_text speecht5 seamless_m4t "
           "seamless_m4t_v2 trocr pp_formulanet_text", **_BART),
    **_row("whisper", encoder=dec.source_positions, **_BART),
    **_row("gpt2", attention=att.derived, cross=att.derived_cross),
    **_row("blip_text_model", attention=att.derived, cross=att.derived_cross,
           encoder=dec.image_patches, crosses=True),
    **_row("t5 mt5 umt5 longt5 switch_transformers pop2piano udop", relative=True, **_T5),
    **_row("canary_decoder cohere_asr moonshine_streaming", cross=att.cross),
    **_row("dia_decoder", cross=dec.dia_cross),
    **_row("cpmant", attention=dec.cpmant),
    **_row("pix2struct_text_model", attention=dec.t5, cross=dec.t5_cross, layers=("num_layers",),
           lists=False),
    **_row("prophetnet", attention=dec.prophetnet, cross=dec.prophetnet_cross,
           layers=("num_decoder_layers",), lists=False),
    **_row("moonshine", attention=dec.moonshine, cross=dec.moonshine_cross,
           layers=("decoder_num_hidden_layers",), lists=False),
    **_row("musicgen_decoder musicgen_melody_decoder", attention=att.derived,
           cross=att.derived_cross),
    **_row("mllama_text_model", attention=dec.mllama, encoder=dec.image_tiles, lists=False),
    **_row("moshi csm", left_out="its depth decoder's cache is not counted"),
    **_row("idefics", left_out="its cross-attention to images is not counted"),
    **_row("kosmos_2_text_model kosmos_2_5_text_model xglm", attention=dec.attention_heads,
           layers=("layers", "num_layers"), lists=False),
    # encoders that can be run as decoders
    **_row("albert bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert "
           "rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod",
           attention=att.derived, cross=att.derived_cross, encoder_only=True, lists=False),
    # understood to be something else
    **_row("reformer", pattern=p.reformer, attention=dec.reformer, layers=(), lists=False),
    **_row("xlnet", attention=dec.xlnet, lists=False),
    **_row("pi0", refused="it is a robot policy around two models, each with its cache"),
    **_row("blt", refused="it runs four transformers over bytes and patches, each with its cache"),
    **_row("gemma4_assistant gemma4_unified_assistant muse_glimmer_assistant",
           refused="an assistant reads the cache of its target model and keeps none of its own"),
    **_row("encoder-decoder speech-encoder-decoder vision-encoder-decoder",
           attention=att.derived, cross=att.derived_cross),
    # outside transformers (remote code): sizes as their published code reads them
    **_row("kimi_k2 deepseek_vl_v2_text", like="deepseek_v3"),
    **_row("deepseek_ref", like="deepseek_v4"),
    **_row("minimax_m3", like="minimax_m3_vl_text"),
    **_row("minimax_m1 minimax_text_01", like="minimax"),
    **_row("mimo", like="qwen2"),
    **_row("internlm2 internlm minicpm deepseek baichuan xverse orion aquila", like="llama"),
    **_row("qwen", like="llama", attention=dec.multi_head, renamed={
        "num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions"}),
    **_row("chatglm", like="llama", attention=dec.chatglm,
           renamed={"num_hidden_layers": "num_layers", "max_position_embeddings": "seq_length"}),
    **_row("openelm", like="llama", attention=dec.openelm, layers=("num_transformer_layers",),
           renamed={"hidden_size": "model_dim", "max_position_embeddings": "max_context_length"}),
    **_row("nemotron-nas", like="llama", attention=dec.block_configs),
    **_row("minicpmv minicpmo", like="qwen2"),
}  # fmt: skip

PLAIN = Family()


def family_of(model_type: str) -> Family:
    """The family of a model type; plain where nothing is written.

    A type that is like another takes what it does not say from that family.
    """
    family = FAMILIES.get(model_type, PLAIN)
    if not family.like:
        return family
    own = {f.name: getattr(family, f.name) for f in fields(Family)}
    plain = {f.name: getattr(PLAIN, f.name) for f in fields(Family)}
    changed = {name: value for name, value in own.items() if value != plain[name]}
    return replace(FAMILIES.get(family.like, PLAIN), **changed)

"""Plain decoders: attention and a dense MLP in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvtool.weights.model import Layer, Model
from kvtool.weights.parts import Part, Size, matrix, vector
from kvtool.weights.pieces import (
    all_of,
    attention,
    last_norm,
    mlp,
    norm,
    norms,
    width_of,
    words,
)
from kvtool.weights.recipe import Recipe


def _falcon_norms(model: Model, layer: Layer) -> Iterator[Part]:
    """One where attention and MLP run in parallel, unless the new architecture asks for two."""
    keys = model.keys
    two = not keys.flag("parallel_attn", default=True)
    if not two:
        stated = keys.maybe("num_ln_in_parallel_attn")
        two = stated.value == 2 if stated else keys.flag("new_decoder_architecture")
    yield norm(layer, vector(model.hidden, True) * (1 + two))


def _opt_last_norm(model: Model) -> Iterator[Part]:
    """A final norm, but for OPT-350M, which normalises after each layer."""
    before = model.keys.flag("do_layer_norm_before", default=True)
    if before and not model.keys.flag("_remove_final_layer_norm"):
        yield from last_norm(bias=True, weight="layer_norm_elementwise_affine")(model)


def _opt_words(model: Model) -> Iterator[Part]:
    """OPT-350M's embeddings of word_embed_proj_dim, projected in and out; positions from 2 on."""
    hidden, known = model.hidden, model.size("vocab_size")
    width = model.number("word_embed_proj_dim") or hidden
    if not model.tied:
        yield Part(role="embedding", size=Size(known * width), pieces=known)
    yield Part(role="head", size=matrix(width, known), pieces=known)
    if width != hidden:
        yield Part(role="beside", size=matrix(width, hidden) + matrix(hidden, width))
    yield Part(role="beside", size=Size((model.size("max_position_embeddings") + 2) * hidden))


def _cross(model: Model, layer: Layer) -> Iterator[Part]:
    """GPT-2's attention to an encoder, and the norm before it."""
    entry = layer.entry("cross")
    if entry is None:
        return
    queries, kv = entry.query_heads * entry.k_head_dim, entry.kv_heads * entry.k_head_dim
    own = matrix(model.hidden, queries, True) + matrix(queries, model.hidden, True)
    here = Part(
        role="attention", size=own, layer=layer.index, pieces=entry.query_heads, quantised=True
    )
    yield here
    yield replace(here, size=matrix(model.hidden, kv, True) * 2, pieces=entry.kv_heads)
    yield norm(layer, vector(model.hidden, True))


def _stablelm_norms(model: Model, layer: Layer) -> Iterator[Part]:
    """One where attention and MLP run in parallel."""
    yield norm(layer, vector(model.hidden, True) * (2 - model.flag("use_parallel_residual")))


def _bloom_words(model: Model) -> Iterator[Part]:
    """Embeddings are normalised."""
    yield from words()(model)
    yield norm(None, vector(model.hidden, True))


def _four_times(model: Model, layer: Layer) -> int:
    """Classes that read no width of their MLP."""
    return 4 * model.hidden


_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_BIASED = attention(qkv_bias=True, out_bias=True)
_LAYER_NORMS: dict[str, Any] = {"norms": norms(2, bias=True), "last_norm": last_norm(bias=True)}
_OPT_NORM = "layer_norm_elementwise_affine"

DENSE: dict[str, Recipe] = {
    "llama": Recipe(mixer=attention(**_ATTENTION_BIAS), feed=mlp(bias="mlp_bias")),
    "mistral": Recipe(),
    "phi3": Recipe(),
    "qwen2": Recipe(mixer=attention(qkv_bias=True)),
    "qwen3": Recipe(mixer=attention(**_ATTENTION_BIAS, qk_norm="head")),
    "gemma": Recipe(mixer=attention(**_ATTENTION_BIAS)),
    "gpt_neox": Recipe(mixer=attention(**_ATTENTION_BIAS), feed=mlp(gated=False, bias=True), **_LAYER_NORMS),
    "gpt2": Recipe(mixer=all_of(_BIASED, _cross), feed=mlp(width=width_of("n_inner", times=4), gated=False, bias=True),
                   words=words(positions=0), **_LAYER_NORMS),
    "opt": Recipe(mixer=attention(qkv_bias="enable_bias", out_bias="enable_bias"),
                  feed=mlp(width=width_of("ffn_dim"), gated=False, bias="enable_bias"),
                  norms=norms(2, bias=True, weight=_OPT_NORM), last_norm=_opt_last_norm, words=_opt_words),
    "falcon": Recipe(mixer=attention(qkv_bias="bias", out_bias="bias"),
                     feed=mlp(width=width_of("ffn_hidden_size", times=4), gated=False, bias="bias"),
                     norms=_falcon_norms, last_norm=last_norm(bias=True)),
    "cohere": Recipe(mixer=attention(**_ATTENTION_BIAS, qk_norm="heads", qk_norm_if="use_qk_norm"), norms=norms(1)),
    "cohere2": Recipe(mixer=attention(**_ATTENTION_BIAS), norms=norms(1)),
    "gemma2": Recipe(mixer=attention(**_ATTENTION_BIAS), norms=norms(4)),
    "gemma3_text": Recipe(mixer=attention(**_ATTENTION_BIAS, qk_norm="head"), norms=norms(4)),
    "bloom": Recipe(mixer=_BIASED, feed=mlp(width=_four_times, gated=False, bias=True), words=_bloom_words,
                    **_LAYER_NORMS),
    "gptj": Recipe(feed=mlp(width=width_of("n_inner", times=4), gated=False, bias=True), norms=norms(1, bias=True),
                   last_norm=last_norm(bias=True), words=words(head_bias=True)),
    "gpt_bigcode": Recipe(mixer=all_of(_BIASED, _cross), feed=mlp(width=width_of("n_inner", times=4), gated=False,
                          bias=True), words=words(positions=0), **_LAYER_NORMS),
    "mpt": Recipe(feed=mlp(width=_four_times, gated=False)),
    "phi": Recipe(mixer=attention(qkv_bias=True, out_bias=True, qk_norm="head", qk_norm_if="qk_layernorm",
                                  qk_norm_bias=True), feed=mlp(gated=False, bias=True),
                  norms=norms(1, bias=True), last_norm=last_norm(bias=True), words=words(head_bias=True)),
    "stablelm": Recipe(mixer=attention(qkv_bias="use_qkv_bias", qk_norm="heads", qk_norm_if="qk_layernorm"),
                       norms=_stablelm_norms, last_norm=last_norm(bias=True)),
    "starcoder2": Recipe(mixer=attention(qkv_bias="use_bias", out_bias="use_bias"),
                         feed=mlp(gated=False, bias="use_bias"), **_LAYER_NORMS),
    "olmo": Recipe(mixer=attention(**_ATTENTION_BIAS), norms=norms(0), last_norm=last_norm(weight=False)),
    "olmo2": Recipe(mixer=attention(**_ATTENTION_BIAS, qk_norm="heads")),
    "olmo3": Recipe(mixer=attention(**_ATTENTION_BIAS, qk_norm="heads")),
    "exaone4": Recipe(mixer=attention(qk_norm="head")),
    "granite": Recipe(mixer=attention(**_ATTENTION_BIAS), feed=mlp(bias="mlp_bias")),
    "smollm3": Recipe(mixer=attention(**_ATTENTION_BIAS), feed=mlp(bias="mlp_bias")),
    "qwen3_vl_text": Recipe(mixer=attention(**_ATTENTION_BIAS, qk_norm="head")),
}  # fmt: skip

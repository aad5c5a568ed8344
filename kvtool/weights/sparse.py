"""Decoders with experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtool.model.keys import Keys
from kvtool.weights.model import Layer, Model
from kvtool.weights.parts import Part, vector
from kvtool.weights.pieces import (
    Number,
    Width,
    all_of,
    attention,
    either,
    experts,
    feed_forward,
    last_norm,
    mlp,
    norms,
    width_of,
    words,
)
from kvtool.weights.recipe import Recipe


def key(*names: str) -> Number:
    """A count that a key gives."""
    return lambda model: model.size(*names)


def shared_width(experts_key: str) -> Width:
    """So many experts together that every token meets; a key that may be 0, absent or null."""

    def width(model: Model, layer: Layer) -> int:
        return model.number(experts_key) * model.size("moe_intermediate_size")

    return width


def first_dense(model: Model, layer: Layer) -> bool:
    """DeepSeek's and GLM's: experts in all but the first layers."""
    return layer.index >= model.number("first_k_dense_replace")


def _qwen_sparse(model: Model, layer: Layer) -> bool:
    """Every decoder_sparse_step-th layer has experts, but for those of mlp_only_layers."""
    if layer.index in (model.keys.numbers("mlp_only_layers") or ()):
        return False
    if not model.number(*_NUMBER, absent=1):
        return False
    return (layer.index + 1) % model.size("decoder_sparse_step") == 0


def _llama4_sparse(model: Model, layer: Layer) -> bool:
    """The layers of moe_layers, or every interleave_moe_layer_step-th."""
    listed = model.keys.numbers("moe_layers")
    if listed is not None:
        return layer.index in listed
    return (layer.index + 1) % model.size("interleave_moe_layer_step") == 0


def _ernie_sparse(model: Model, layer: Layer) -> bool:
    """Every moe_layer_interval-th layer from one to another; −1 is the last."""
    last = model.keys.need("moe_layer_end_index", low=-1).value
    within = model.number("moe_layer_start_index") <= layer.index
    within = within and (last == -1 or layer.index <= last)
    return within and (layer.index + 1) % model.size("moe_layer_interval") == 0


def _ernie_shared(model: Model, layer: Layer) -> Iterator[Part]:
    """Experts that every token meets, with biases that the routed ones lack."""
    wide = shared_width("moe_num_shared_experts")(model, layer)
    if wide:
        size = feed_forward(model.hidden, wide, gated=True, bias=model.flag("use_bias"))
        yield Part(role="shared", size=size, layer=layer.index, pieces=wide, quantised=True)


def _sinks(model: Model, layer: Layer) -> Iterator[Part]:
    """gpt-oss: a logit a query head."""
    heads = sum(entry.query_heads for entry in layer.entries)
    yield Part(role="attention", size=vector(heads), layer=layer.index, pieces=heads)


def _hunyuan(model: Model, layer: Layer) -> Iterator[Part]:
    """moe_topk may be a list with an entry a layer."""
    many = isinstance(model.keys.get("moe_topk"), list)

    def chosen(model: Model) -> int:
        one = model.keys.item("moe_topk", layer.index) if many else None
        return one or model.size("moe_topk")

    wide = width_of("intermediate_size")
    yield from experts(width=wide, number=key(*_NUMBER), chosen=chosen, shared=wide)(model, layer)


def _dbrx(name: str) -> Number:
    """DBRX's MLP has a config of its own."""
    return lambda model: _ffn(model).need(name).value


def _ffn(model: Model) -> Keys:
    return model.keys.section("ffn_config")


_NUMBER = ("num_experts", "num_local_experts")
_CHOSEN = key("num_experts_per_tok")
_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_HEAD_NORM = attention(**_ATTENTION_BIAS, qk_norm="head")
_LAYER_NORMS: dict[str, Any] = {"norms": norms(2, bias=True), "last_norm": last_norm(bias=True)}
_MOE_WIDTH = width_of("moe_intermediate_size")
_MIXTRAL = experts(width=width_of("intermediate_size"), number=key(*_NUMBER), chosen=_CHOSEN)
_QWEN = either(_qwen_sparse, experts(width=_MOE_WIDTH, number=key(*_NUMBER), chosen=_CHOSEN), mlp())

SPARSE: dict[str, Recipe] = {
    "mixtral": Recipe(feed=_MIXTRAL),
    "minimax_m2": Recipe(mixer=attention(qk_norm="heads"), feed=_MIXTRAL),
    "granitemoe": Recipe(mixer=attention(**_ATTENTION_BIAS), feed=_MIXTRAL),
    "olmoe": Recipe(mixer=attention(**_ATTENTION_BIAS, qk_norm="heads"), feed=_MIXTRAL),
    "phimoe": Recipe(mixer=attention(**_ATTENTION_BIAS), feed=_MIXTRAL, words=words(head_bias="lm_head_bias"),
                     **_LAYER_NORMS),
    "qwen3_moe": Recipe(mixer=_HEAD_NORM, feed=_QWEN),
    "qwen3_vl_moe_text": Recipe(mixer=_HEAD_NORM, feed=_QWEN),
    "qwen2_moe": Recipe(
        mixer=attention(qkv_bias="qkv_bias"),
        feed=either(_qwen_sparse,
                    experts(width=_MOE_WIDTH, number=key(*_NUMBER), chosen=_CHOSEN, shared_gate=True,
                            shared=width_of("shared_expert_intermediate_size")), mlp())),
    "glm4_moe": Recipe(
        mixer=attention(qkv_bias="attention_bias", qk_norm="head", qk_norm_if="use_qk_norm"),
        feed=either(first_dense,
                    experts(width=_MOE_WIDTH, number=key("n_routed_experts", "num_local_experts"),
                            chosen=_CHOSEN, shared=shared_width("n_shared_experts")), mlp())),
    "gpt_oss": Recipe(
        mixer=all_of(attention(**_ATTENTION_BIAS), _sinks),
        feed=experts(width=width_of("intermediate_size"), number=key(*_NUMBER), chosen=_CHOSEN, bias=True,
                     router_bias=True)),
    "llama4_text": Recipe(
        mixer=attention(**_ATTENTION_BIAS),
        feed=either(_llama4_sparse,
                    experts(width=width_of("intermediate_size"), number=key("num_local_experts"), chosen=_CHOSEN,
                            shared=width_of("intermediate_size")), mlp(width=width_of("intermediate_size_mlp")))),
    "ernie4_5_moe": Recipe(
        mixer=attention(qkv_bias="use_bias", out_bias="use_bias"),
        feed=either(_ernie_sparse,
                    all_of(experts(width=_MOE_WIDTH, number=key("moe_num_experts", "num_experts"),
                                   chosen=key("moe_k", "num_experts_per_tok"), router_bias=True), _ernie_shared),
                    mlp(bias="use_bias")),
        words=words(head_bias="use_bias")),
    "hunyuan_v1_moe": Recipe(mixer=_HEAD_NORM, feed=_hunyuan),
    "dbrx": Recipe(feed=experts(width=lambda model, layer: _dbrx("ffn_hidden_size")(model),
                                number=_dbrx("moe_num_experts"), chosen=_dbrx("moe_top_k"))),
}  # fmt: skip

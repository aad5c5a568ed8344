"""Decoders with recurrences, alone or beside attention.

Layers for multi-token prediction are not counted: the classes of transformers do not build them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvtool.model.keys import refuse
from kvtool.model.shape import LayerCache
from kvtool.model.words import LISTS
from kvtool.weights.latent import latent, listed_sparse
from kvtool.weights.model import Layer, Model
from kvtool.weights.parts import Part, matrix, vector
from kvtool.weights.pieces import (
    all_of,
    attention,
    either,
    experts,
    feed_forward,
    last_norm,
    mlp,
    norm,
    norms,
    width_of,
    words,
)
from kvtool.weights.recipe import Recipe
from kvtool.weights.sparse import key
from kvtool.weights.states import (
    delta_attention,
    gated_delta,
    lightning,
    mamba1,
    mamba2,
    rg_lru,
    rwkv,
    short_conv,
)

_NOTHING = all_of()
_CHOSEN = key("num_experts_per_tok")
_EXPERTS = key("num_experts", "num_local_experts")
_ZAMBA_WIDTH = width_of("intermediate_size", times=4)
_ZAMBA_MLP = mlp(width=_ZAMBA_WIDTH, bias="add_bias_linear")


def _rwkv_feed(model: Model, layer: Layer) -> Iterator[Part]:
    """RWKV-4: channel mixing, whose receptance is a square matrix."""
    hidden = model.hidden
    wide = width_of("intermediate_size", times=4)(model, layer)
    size = feed_forward(hidden, wide, gated=False) + matrix(hidden, hidden)
    here = Part(role="mlp", size=size, layer=layer.index, pieces=wide, quantised=True)
    yield here
    yield replace(here, size=vector(2 * hidden), pieces=0, quantised=False)


def _rwkv_norms(model: Model, layer: Layer) -> Iterator[Part]:
    """One more before the first layer."""
    yield norm(layer, vector(model.hidden, True) * (2 + (layer.index == 0)))


def _jamba_sparse(model: Model, layer: Layer) -> bool:
    """Every expert_layer_period-th layer, where there are several experts."""
    here = layer.index % model.size("expert_layer_period") == model.number("expert_layer_offset")
    return here and _EXPERTS(model) > 1


def _next_sparse(model: Model, layer: Layer) -> bool:
    """Every decoder_sparse_step-th layer, but for those of mlp_only_layers."""
    if layer.index in (model.keys.numbers("mlp_only_layers") or ()):
        return False
    step = model.size("decoder_sparse_step")
    return model.number("num_experts") > 0 and (layer.index + 1) % step == 0


def _kimi_sparse(model: Model, layer: Layer) -> bool:
    """All layers but the first, or but the first first_k_dense_replace."""
    return layer.index >= model.number("first_k_dense_replace", absent=1)


def _kimi_shared(model: Model, layer: Layer) -> int:
    count = model.number("num_shared_experts", "n_shared_experts")
    return count * model.size("moe_intermediate_size")


def _lfm2_width(model: Model, layer: Layer) -> int:
    """Two thirds of the stated width, times a factor, rounded up, where block_auto_adjust_ff_dim says so."""
    wide = model.size("block_ff_dim", "intermediate_size")
    if not model.flag("block_auto_adjust_ff_dim"):
        return wide
    wide = 2 * wide // 3
    if model.keys.get("block_ffn_dim_multiplier") is None:
        return wide
    unit = model.size("block_multiple_of")
    return unit * -(-int(model.keys.factor("block_ffn_dim_multiplier")[0] * wide) // unit)


def _tie_embedding(model: Model) -> bool:
    """LFM2's own key, unless a model around it decides."""
    if model.level.above or "tie_embedding" not in model.keys.raw:
        return model.tied
    return model.keys.flag("tie_embedding")


def _is_moe(model: Model, layer: Layer) -> bool:
    """Nemotron-H: a layer without cache has experts or a plain MLP."""
    found = model.keys.words(*LISTS)
    pattern = model.keys.get("hybrid_override_pattern") or "ME*-"
    return (found[0] if found else pattern)[layer.index] in ("moe", "E")


def _nemotron_feed(model: Model, layer: Layer) -> Iterator[Part]:
    """Nemotron-H: a layer mixes tokens, or is an MLP, or has experts, which may work in a narrower width."""
    if layer.entries:
        return
    feed = _nemotron_experts if _is_moe(model, layer) else mlp(gated=False, bias="mlp_bias")
    yield from feed(model, layer)


def _nemotron_experts(model: Model, layer: Layer) -> Iterator[Part]:
    hidden, here, biased = model.hidden, layer.index, model.flag("mlp_bias")
    inner, wide = model.number("moe_latent_size"), model.size("moe_intermediate_size")
    count, chosen = model.size("n_routed_experts", "num_local_experts"), _CHOSEN(model)
    if chosen > count:
        raise refuse(f"{chosen} experts a token, and there are {count}")
    one = feed_forward(inner or hidden, wide, gated=False)
    yield Part(role="experts", size=one * count, layer=here, experts=count, chosen=chosen, pieces=wide,
               quantised=True)  # fmt: skip
    yield Part(role="router", size=matrix(hidden, count), layer=here)
    own = model.number("moe_shared_expert_intermediate_size")
    together = own or model.size("intermediate_size")
    shared = feed_forward(hidden, together, gated=False, bias=biased)
    yield Part(role="shared", size=shared, layer=here, pieces=together, quantised=True)
    if inner:  # every token passes through these on its way to the experts and back
        around = matrix(hidden, inner, biased) + matrix(inner, hidden, biased)
        yield Part(role="shared", size=around, layer=here, quantised=True)


def _zamba(model: Model, layer: Layer) -> Iterator[Part]:
    """Beside the Mamba of some layers runs a transformer whose weights those layers share.

    Zamba2 has num_mem_blocks of them, taken in turn; each layer projects what its block gives. The
    classes of transformers share nothing at all where tie_word_embeddings is false.
    """
    entry = layer.entry("full")
    if entry is None:
        return
    square = matrix(model.hidden, model.hidden)
    yield Part(role="attention", size=square, layer=layer.index, quantised=True)
    if not model.tied or _users(model).index(layer.index) < _blocks(model):
        yield from _shared_block(model, layer, entry)


def _users(model: Model) -> list[int]:
    """Layers that use a shared block."""
    return [one.module for one in model.shape.layers if one.kind == "full"]


def _blocks(model: Model) -> int:
    """How many blocks there are to share."""
    known = model.keys.maybe("num_mem_blocks")
    return known.value if known else 1


def _shared_block(model: Model, layer: Layer, entry: LayerCache) -> Iterator[Part]:
    """A transformer layer that reads the hidden state and the embedding side by side."""
    hidden, wide, heads, kv = model.hidden, _both(model), entry.query_heads, entry.kv_heads
    q, out = matrix(wide, heads * entry.k_head_dim), matrix(heads * entry.v_head_dim, hidden)
    here = Part(role="attention", size=q + out, layer=layer.index, pieces=heads, quantised=True)
    yield here
    yield replace(here, size=matrix(wide, kv * entry.k_head_dim) * 2, pieces=kv)
    yield norm(layer, vector(wide + hidden))
    yield from _ZAMBA_MLP(model, layer)


def _both(model: Model) -> int:
    """Width of the hidden state and the embedding together."""
    return model.number("attention_hidden_size") or 2 * model.hidden


def _adapters(model: Model, layer: Layer) -> Iterator[Part]:
    """Zamba2: what a layer adds of its own to its shared block, by way of adapter_rank.

    A block holds the adapters of all layers that use it, and so does each copy of one that is not shared.
    """
    entry = layer.entry("full")
    if entry is None:
        return
    users, blocks = _users(model), _blocks(model)
    times = 1 if model.tied else len(users[users.index(layer.index) % blocks :: blocks])
    rank, inner, wide = model.size("adapter_rank"), _ZAMBA_WIDTH(model, layer), _both(model)
    down = matrix(model.hidden, rank) * times
    here = Part(role="mlp", size=down, layer=layer.index, pieces=rank, quantised=True)
    yield here
    yield replace(here, size=matrix(rank, 2 * inner) * times, pieces=inner)
    if model.flag("use_shared_attention_adapter"):
        here = replace(here, role="attention", size=matrix(wide, rank) * 3 * times)
        yield here
        yield replace(here, size=matrix(rank, wide) * 3 * times, pieces=entry.query_heads)


_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_GATED = attention(**_BIASES, qk_norm="head", gate=True)
_MAMBA1 = mamba1("time_step_rank", bias="use_bias", conv_bias="use_conv_bias")
_MAMBA2 = mamba2(in_bias="mamba_proj_bias", out_bias="mamba_proj_bias", conv_bias="mamba_conv_bias")
_QWEN_EXPERTS = experts(
    width=width_of("moe_intermediate_size"), number=_EXPERTS, chosen=_CHOSEN,
    shared=width_of("shared_expert_intermediate_size"), shared_gate=True,
)  # fmt: skip
_MOE = experts(width=width_of("moe_intermediate_size"), number=_EXPERTS, chosen=_CHOSEN)
_WIDE_MOE = experts(width=width_of("intermediate_size"), number=_EXPERTS, chosen=_CHOSEN)
_LFM2: dict[str, Any] = {
    "mixer": all_of(attention(qk_norm="head"), short_conv), "words": words(tied=_tie_embedding),
}  # fmt: skip

HYBRIDS: dict[str, Recipe] = {
    "mamba": Recipe(mixer=_MAMBA1, feed=_NOTHING, norms=norms(1)),
    "falcon_mamba": Recipe(mixer=_MAMBA1, feed=_NOTHING, norms=norms(1)),
    "mamba2": Recipe(mixer=mamba2(in_bias="use_bias", out_bias="use_bias", conv_bias="use_conv_bias"),
                     feed=_NOTHING, norms=norms(1)),
    "falcon_h1": Recipe(mixer=all_of(attention(**_BIASES), mamba2(
        in_bias="mamba_proj_bias", out_bias="projectors_bias", conv_bias="mamba_conv_bias",
        gated_norm="mamba_rms_norm")), feed=mlp(bias="mlp_bias")),
    "granitemoehybrid": Recipe(
        mixer=all_of(attention(**_BIASES), _MAMBA2),
        feed=either(lambda model, layer: model.number("num_local_experts") > 0,
                    experts(width=width_of("intermediate_size"), number=key("num_local_experts"),
                            chosen=_CHOSEN, shared=width_of("shared_intermediate_size")),
                    mlp(width=width_of("shared_intermediate_size")))),
    "jamba": Recipe(mixer=all_of(attention(), mamba1("mamba_dt_rank", bias="mamba_proj_bias",
                                                     conv_bias="mamba_conv_bias", normed=True)),
                    feed=either(_jamba_sparse, _WIDE_MOE, mlp())),
    "bamba": Recipe(mixer=all_of(attention(**_BIASES), _MAMBA2), feed=mlp(bias="mlp_bias")),
    "lfm2": Recipe(feed=mlp(width=_lfm2_width), **_LFM2),
    "lfm2_moe": Recipe(feed=either(lambda model, layer: layer.index >= model.number("num_dense_layers"),
                                   _MOE, mlp()), **_LFM2),
    "nemotron_h": Recipe(
        mixer=all_of(attention(), mamba2(in_bias="use_bias", out_bias="use_bias",
                                         conv_bias=("mamba_conv_bias", "use_conv_bias"))),
        feed=_nemotron_feed, norms=norms(1), words=words(tied=lambda model: False)),
    "qwen3_next": Recipe(mixer=all_of(_GATED, gated_delta), feed=either(_next_sparse, _QWEN_EXPERTS, mlp())),
    "qwen3_5_text": Recipe(mixer=all_of(_GATED, gated_delta)),
    "qwen3_5_moe_text": Recipe(mixer=all_of(_GATED, gated_delta), feed=_QWEN_EXPERTS),
    "olmo_hybrid": Recipe(mixer=all_of(attention(**_BIASES, qk_norm="heads"), gated_delta)),
    "kimi_linear": Recipe(
        mixer=all_of(latent(), delta_attention), words=words(tied=lambda model: False),
        feed=either(listed_sparse(_kimi_sparse),
                    experts(width=width_of("moe_intermediate_size"), number=_EXPERTS, shared=_kimi_shared,
                            chosen=key("num_experts_per_token", "num_experts_per_tok")), mlp())),
    "minimax": Recipe(mixer=all_of(attention(), lightning), feed=_WIDE_MOE),
    "recurrent_gemma": Recipe(mixer=all_of(attention(qkv_bias="attention_bias", out_bias=True), rg_lru),
                              feed=mlp(width=lambda model, layer: model.size("intermediate_size") // 2,
                                       bias=True)),
    "rwkv": Recipe(mixer=rwkv, feed=_rwkv_feed, norms=_rwkv_norms, last_norm=last_norm(bias=True)),
    "zamba": Recipe(mixer=all_of(_zamba, mamba1("mamba_dt_rank", bias="mamba_proj_bias",
                                                conv_bias="mamba_conv_bias")),
                    feed=_NOTHING, norms=norms(1)),
    "zamba2": Recipe(
        mixer=all_of(_zamba, _adapters,
                     mamba2(in_bias="add_bias_linear", out_bias="add_bias_linear", conv_bias=True)),
        feed=_NOTHING, norms=norms(1)),
}  # fmt: skip

"""Decoders with experts."""

from __future__ import annotations

from kvtool.weights.model import Layer, Model
from kvtool.weights.pieces import Number, attention, either, experts, mlp, width_of
from kvtool.weights.recipe import Recipe


def key(*names: str) -> Number:
    """A count that a key gives."""
    return lambda model: model.size(*names)


def _qwen_sparse(model: Model, layer: Layer) -> bool:
    """Every decoder_sparse_step-th layer has experts, but for those of mlp_only_layers."""
    if layer.index in (model.keys.numbers("mlp_only_layers") or ()):
        return False
    return (layer.index + 1) % model.number("decoder_sparse_step", absent=1) == 0


SPARSE: dict[str, Recipe] = {
    "mixtral": Recipe(feed=experts(width=width_of("intermediate_size"), number=key("num_local_experts"),
                                   chosen=key("num_experts_per_tok"))),
    "qwen3_moe": Recipe(
        mixer=attention(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head"),
        feed=either(_qwen_sparse, experts(width=width_of("moe_intermediate_size"), number=key("num_experts"),
                                          chosen=key("num_experts_per_tok")), mlp())),
}  # fmt: skip

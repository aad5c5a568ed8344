"""Types outside transformers, counted as the code published with their weights builds them.

Only types that are equal, to the parameter, to a total that was published (tests/test_weights_published.py);
of MiMo-7B, whose 7.83 billion include a layer that predicts a further token, the digits that were. Left out,
since no total was found to hold them against: aquila, internlm, nemotron-nas, orion and xverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvtool.model.keys import Keys, refuse
from kvtool.weights.model import Layer, Model
from kvtool.weights.parts import Part, Size, matrix, total
from kvtool.weights.pieces import (
    Whole,
    attention,
    either,
    experts,
    last_norm,
    mlp,
    norms,
    width_of,
)
from kvtool.weights.recipe import Recipe
from kvtool.weights.sparse import first_dense, key, shared_width


def _tables(model: Model, known: int, *, tied: bool) -> Iterator[Part]:
    """Embeddings and head, where it is not the common keys that say how large they are or if tied."""
    if not tied:
        yield Part(role="embedding", size=Size(known * model.hidden), pieces=known)
    yield Part(role="head", size=matrix(model.hidden, known), pieces=known)


def _alone(model: Model, *names: str) -> None:
    """Refuse a model that has something beside its language model that is not counted here."""
    for name in names:
        if model.keys.raw.get(name):
            raise refuse(f"{model.keys.model_type}: what {name} describes is not counted")


def _qwen_mixer(model: Model, layer: Layer) -> Iterable[Part]:
    """Biased queries, keys and values; no_bias is of the other layers."""
    _alone(model, "visual")
    out = not model.keys.flag("no_bias", default=True)
    return attention(qkv_bias=True, out_bias=out)(model, layer)


def _qwen_feed(model: Model, layer: Layer) -> Iterable[Part]:
    """intermediate_size counts gate and up together."""
    bias = not model.keys.flag("no_bias", default=True)
    return mlp(width=lambda m, at: m.size("intermediate_size") // 2, bias=bias)(model, layer)


def _glm_mixer(model: Model, layer: Layer) -> Iterable[Part]:
    """All checkpoints have add_qkv_bias, so a config that leaves it out is taken to have it."""
    _alone(model, "vision_config", "pre_seq_len")
    bias = model.flag("add_bias_linear")
    qkv = bias or model.keys.flag("add_qkv_bias", default=True)
    return attention(qkv_bias=qkv, out_bias=bias)(model, layer)


def _glm_norms(model: Model, layer: Layer) -> Iterable[Part]:
    return norms(2, bias=not model.keys.flag("rmsnorm", default=True))(model, layer)


def _glm_last_norm(model: Model) -> Iterable[Part]:
    bias = not model.keys.flag("rmsnorm", default=True)
    return last_norm(bias=bias, weight=model.keys.flag("post_layer_norm", default=True))(model)


def _glm_words(model: Model) -> Iterable[Part]:
    return _tables(model, model.size("padded_vocab_size"), tied=False)


def _minicpm_words(model: Model) -> Iterable[Part]:
    tied = model.keys.flag("tie_word_embeddings", default=True)
    return _tables(model, model.size("vocab_size"), tied=tied)


def _minicpm_sparse(model: Model, layer: Layer) -> bool:
    return model.number("num_experts") > 0


def _deepseek_sparse(model: Model, layer: Layer) -> bool:
    """Every moe_layer_freq-th layer after the first ones."""
    if not model.number("n_routed_experts") or not first_dense(model, layer):
        return False
    step = model.keys.maybe("moe_layer_freq")
    return layer.index % (step.value if step else 1) == 0


def _openelm_mixer(model: Model, layer: Layer) -> Iterable[Part]:
    normed = model.keys.flag("normalize_qk_projections", default=True)
    return attention(qk_norm="head", qk_norm_if=normed)(model, layer)


def _openelm_feed(model: Model, layer: Layer) -> Iterable[Part]:
    """A multiple of ffn_dim_divisor near ffn_multipliers[layer] × model_dim, never 10 % below it."""
    found = model.keys.get("ffn_multipliers")
    if not isinstance(found, list) or len(found) != layer.count:
        raise refuse(
            f"ffn_multipliers is not a list with an entry for each of {layer.count} layers"
        )
    one = Keys(raw={"entry": found[layer.index]}, model_type="openelm", path="ffn_multipliers.")
    wanted = one.factor("entry")[0] * model.hidden
    step = model.size("ffn_dim_divisor")
    wide = max(step, int(wanted + step / 2) // step * step)
    wide += step * (wide < 0.9 * wanted)
    gated = model.keys.flag("ffn_with_glu", default=True)
    return mlp(width=lambda m, at: wide, gated=gated)(model, layer)


def _openelm_words(model: Model) -> Iterable[Part]:
    tied = model.keys.flag("share_input_output_layers", default=True)
    return _tables(model, model.size("vocab_size"), tied=tied)


def _mimo_mtp(model: Model) -> Iterator[Part]:
    """Layers that predict further tokens: a decoder layer, what joins two states, and three norms.

    No token of the model itself is multiplied by them.
    """
    hidden, first = model.hidden, next(model.layers())
    layer = total(part for piece in (_BIASED_QKV, mlp(), norms(2)) for part in piece(model, first))
    size = Size(layer.count + 2 * hidden * hidden + 3 * hidden)
    for _ in range(model.number("num_nextn_predict_layers")):
        yield Part(role="beside", size=size)


_BIASED_QKV = attention(qkv_bias=True)
_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_GLM_FEED = mlp(width=width_of("ffn_hidden_size"), bias="add_bias_linear")
_CHOSEN = key("num_experts_per_tok")
_MTP: tuple[Whole, ...] = (_mimo_mtp,)

PUBLISHED: dict[str, Recipe] = {
    "chatglm": Recipe(mixer=_glm_mixer, feed=_GLM_FEED, norms=_glm_norms, last_norm=_glm_last_norm,
                      words=_glm_words),
    "deepseek": Recipe(
        mixer=attention(**_ATTENTION_BIAS),
        feed=either(_deepseek_sparse,
                    experts(width=width_of("moe_intermediate_size"), number=key("n_routed_experts"),
                            chosen=_CHOSEN, shared=shared_width("n_shared_experts")), mlp())),
    "internlm2": Recipe(mixer=attention(qkv_bias="bias", out_bias="bias")),
    "mimo": Recipe(mixer=_BIASED_QKV, beside=_MTP),
    "minicpm": Recipe(
        mixer=attention(**_ATTENTION_BIAS),
        feed=either(_minicpm_sparse,
                    experts(width=width_of("intermediate_size"), number=key("num_experts"), chosen=_CHOSEN),
                    mlp()), words=_minicpm_words),
    "openelm": Recipe(mixer=_openelm_mixer, feed=_openelm_feed, words=_openelm_words),
    "qwen": Recipe(mixer=_qwen_mixer, feed=_qwen_feed),
}  # fmt: skip
"""InternLM2's code takes an absent `bias` for true, and every config of its checkpoints says false."""
PUBLISHED_LIKE: dict[str, str] = {"baichuan": "llama"}
"""Types whose code is that of another."""

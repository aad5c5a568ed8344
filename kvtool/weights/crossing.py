"""Decoders with cross-attention, and the encoders before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvtool.model.keys import refuse
from kvtool.weights.model import Layer, Model
from kvtool.weights.parts import Part, Size, matrix, vector
from kvtool.weights.pieces import (
    Piece,
    Whole,
    all_of,
    attention,
    feed_forward,
    mlp,
    norm,
    norms,
    stack,
    width_of,
)
from kvtool.weights.recipe import Recipe
from kvtool.weights.vision import heads_of


def _attend(
    *kinds: str, bias: bool = False, key_bias: bool = True, optional: bool = False
) -> Piece:
    """Attention to the text ("full", "sliding") or across to the encoder ("cross"). `key_bias`: keys have
    a bias where the others have one. `optional`: in some layers only."""

    def piece(model: Model, layer: Layer) -> Iterator[Part]:
        entry = layer.entry(*kinds)
        if entry is None and optional:
            return
        if entry is None:
            raise refuse(f"{model.keys.model_type}: its decoder without its encoder is not counted")
        hidden, queries = model.hidden, entry.query_heads
        inner, kv = queries * entry.k_head_dim, entry.kv_heads * entry.k_head_dim
        size = matrix(hidden, inner, bias) + matrix(inner, hidden, bias)
        here = Part(role="attention", size=size, layer=layer.index, pieces=queries, quantised=True)
        yield here
        size = matrix(hidden, kv, bias and key_bias) + matrix(hidden, kv, bias)
        yield replace(here, size=size, pieces=entry.kv_heads)

    return piece


def _both(*, bias: bool = False, key_bias: bool = True) -> Piece:
    """Attention to the text, then across."""
    return all_of(
        _attend("full", bias=bias, key_bias=key_bias),
        _attend("cross", bias=bias, key_bias=key_bias),
    )


def _positions(model: Model, name: str, more: int) -> Size:
    """Learned or fixed positions that are stored as a table."""
    return Size((model.size(name) + more) * model.hidden)


# BART and its kin, Whisper


def _bart_tables(positions: int | None) -> Whole:
    """The head, which is the table of encoder and decoder where it is tied. Where it is not, each has its
    own, and so has the whole, which nothing looks up in. `positions`: so many more than the maximum."""

    def whole(model: Model) -> Iterator[Part]:
        known, hidden = model.size("vocab_size"), model.hidden
        head = Part(role="head", size=matrix(hidden, known), pieces=known)
        yield head
        if not model.tied:
            for role in ("embedding", "encoder", "beside"):
                yield replace(head, role=role, size=Size(known * hidden))
        if positions is not None:
            yield Part(role="beside", size=_positions(model, "max_position_embeddings", positions))

    return whole


def _whisper_tables(model: Model) -> Iterator[Part]:
    """The encoder hears and has no table of words."""
    known, hidden = model.size("vocab_size"), model.hidden
    if not model.tied:
        yield Part(role="embedding", size=Size(known * hidden), pieces=known)
    yield Part(role="head", size=matrix(hidden, known), pieces=known)
    yield Part(role="beside", size=_positions(model, "max_target_positions", 0))


def _encoder_layers(model: Model, *, key_bias: bool = True) -> Iterator[Part]:
    """Layers of encoder_… keys, with biases and two norms."""
    hidden, width = model.hidden, model.size("encoder_ffn_dim")
    yield from stack(
        "encoder",
        model.size("encoder_layers"),
        mixing=matrix(hidden, hidden, True) * 3 + matrix(hidden, hidden, key_bias),
        heads=heads_of(model.keys, hidden, "encoder_attention_heads"),
        feeding=feed_forward(hidden, width, gated=False, bias=True),
        columns=width,
        vectors=4 * hidden,
        quantised=True,
    )


def _bart_encoder(positions: int | None, norms: int) -> Whole:
    """`norms` beside those of the layers."""

    def whole(model: Model) -> Iterator[Part]:
        yield from _encoder_layers(model)
        beside = vector(model.hidden, True) * norms
        if positions is not None:
            beside += _positions(model, "max_position_embeddings", positions)
        yield Part(role="encoder", size=beside)

    return whole


def _whisper_encoder(model: Model) -> Iterator[Part]:
    """Two convolutions of three taps over the spectrum, positions, layers, a norm."""
    yield from _encoder_layers(model, key_bias=False)
    hidden = model.hidden
    beside = vector(hidden, True) + _positions(model, "max_source_positions", 0)
    for inputs in (model.size("num_mel_bins"), hidden):
        beside += Size(3 * inputs * hidden + hidden)
    yield Part(role="encoder", size=beside)


def _more_norms(count: int) -> Whole:
    """Norms with bias before and after all layers of the decoder."""

    def whole(model: Model) -> Iterator[Part]:
        yield norm(None, vector(model.hidden, True) * count)

    return whole


def _bart(*, positions: int | None, norms_beside: int) -> Recipe:
    return Recipe(
        mixer=_both(bias=True),
        feed=mlp(width=width_of("decoder_ffn_dim"), gated=False, bias=True),
        norms=norms(3, bias=True),
        last_norm=_more_norms(norms_beside),
        words=_bart_tables(positions),
        beside=(_bart_encoder(positions, norms_beside),),
    )


# T5


def _t5_gated(model: Model) -> bool:
    """Whether feed_forward_proj is gated-…, unless the config says so itself."""
    if model.keys.stated("is_gated_act"):
        return model.flag("is_gated_act")
    return str(model.keys.get("feed_forward_proj")).split("-")[0] == "gated"


def _t5_feed(model: Model, layer: Layer) -> Iterator[Part]:
    yield from mlp(width=width_of("d_ff"), gated=_t5_gated(model))(model, layer)


def _t5_buckets(model: Model) -> Size:
    """Relative positions: a bias for each bucket and head."""
    return Size(model.size("relative_attention_num_buckets") * model.size("num_heads"))


def _t5_bias(every: bool) -> Piece:
    """In the first layer, or in every layer."""

    def piece(model: Model, layer: Layer) -> Iterator[Part]:
        if every or layer.index == 0:
            heads = model.size("num_heads")
            yield Part(role="attention", size=_t5_buckets(model), layer=layer.index, pieces=heads)

    return piece


def _t5_encoder(every: bool) -> Whole:
    def whole(model: Model) -> Iterator[Part]:
        hidden, heads, width = model.hidden, model.size("num_heads"), model.size("d_ff")
        inner, count = heads * model.size("d_kv"), model.size("num_layers")
        yield from stack(
            "encoder",
            count,
            mixing=matrix(hidden, 3 * inner) + matrix(inner, hidden),
            heads=heads,
            feeding=feed_forward(hidden, width, gated=_t5_gated(model)),
            columns=width,
            vectors=2 * hidden,
            quantised=True,
        )
        buckets = _t5_buckets(model) * (count if every else 1)
        yield Part(role="encoder", size=buckets, pieces=heads)
        yield Part(role="encoder", size=vector(hidden))

    return whole


def _t5(*, every: bool = False) -> Recipe:
    return Recipe(
        mixer=all_of(_both(), _t5_bias(every)),
        feed=_t5_feed,
        norms=norms(3),
        beside=(_t5_encoder(every),),
    )


# Llama 3.2 Vision


def _mllama_cross(model: Model, layer: Layer) -> Iterator[Part]:
    """Norms of queries and keys, and a gate on what attention and MLP add."""
    yield from _attend("cross", optional=True)(model, layer)
    entry = layer.entry("cross")
    if entry is not None:
        yield norm(layer, vector(2 * entry.k_head_dim))
        yield Part(role="attention", size=Size(2), layer=layer.index)


def _mllama_tables(model: Model) -> Iterator[Part]:
    """The table has eight rows more than the head, which is never tied."""
    known, hidden = model.size("vocab_size"), model.hidden
    yield Part(role="embedding", size=Size((known + 8) * hidden), pieces=known + 8)
    yield Part(role="head", size=matrix(hidden, known), pieces=known)


CROSSING: dict[str, Recipe] = {
    "bart": _bart(positions=2, norms_beside=1),
    "m2m_100": _bart(positions=None, norms_beside=1),
    "mbart": _bart(positions=2, norms_beside=2),
    "mllama_text_model": Recipe(mixer=all_of(attention(), _mllama_cross), words=_mllama_tables),
    "mt5": _t5(),
    "pegasus": _bart(positions=0, norms_beside=1),
    "t5": _t5(),
    "umt5": _t5(every=True),
    "whisper": Recipe(
        mixer=_both(bias=True, key_bias=False),
        feed=mlp(width=width_of("decoder_ffn_dim"), gated=False, bias=True),
        norms=norms(3, bias=True),
        last_norm=_more_norms(1),
        words=_whisper_tables,
        beside=(_whisper_encoder,),
    ),
}

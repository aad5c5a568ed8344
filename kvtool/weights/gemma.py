"""Gemma 3n and 4: layers that borrow keys and values, and embeddings that every layer reads anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvtool.model import attention as cached
from kvtool.model.keys import refuse
from kvtool.model.patterns import every
from kvtool.model.shape import LayerCache
from kvtool.model.words import FULL, listed
from kvtool.weights.model import Layer, Model
from kvtool.weights.parts import Part, Size, matrix, vector
from kvtool.weights.pieces import all_of, experts, mlp, norm, norms, width_of
from kvtool.weights.recipe import Recipe
from kvtool.weights.sparse import key


def _attention(model: Model, layer: Layer) -> Iterator[Part]:
    """Layers that borrow have queries only; K is V in full layers with Gemma 4's attention_k_eq_v."""
    own = layer.entry()
    heads = own or _would_cache(model, layer)
    hidden, biased, wide = model.hidden, model.flag("attention_bias"), heads.k_head_dim
    queries = heads.query_heads * wide
    size = matrix(hidden, queries, biased) + matrix(queries, hidden, biased)
    at = layer.index
    yield Part(role="attention", size=size, layer=at, pieces=heads.query_heads, quantised=True)
    yield norm(layer, vector(wide) * (1 if own is None else 2))
    if own is not None:
        same = own.kind == "full" and model.flag("attention_k_eq_v")
        kv = matrix(hidden, own.kv_heads * wide, biased) * (1 if same else 2)
        yield Part(role="attention", size=kv, layer=at, pieces=own.kv_heads, quantised=True)


def _would_cache(model: Model, layer: Layer) -> LayerCache:
    """The heads of a layer that borrows: in Gemma 4, full layers have larger ones."""
    keys = model.keys
    if keys.model_type != "gemma4_text":
        return cached.plain(keys, cached.Place(layer.index, FULL))[0]
    found = listed(keys, layer.count)
    kinds = found[0] if found else every(6)(keys, layer.count)
    word = FULL if layer.index == layer.count - 1 else kinds[layer.index]
    return cached.gemma4(keys, cached.Place(layer.index, word))[0]


def _width(model: Model, layer: Layer) -> int:
    """Gemma 3n's intermediate_size may be a list with an entry a layer."""
    stated = model.keys.get("intermediate_size")
    if not isinstance(stated, list):
        return model.size("intermediate_size")
    one = model.keys.item("intermediate_size", layer.index)
    if not one or len(stated) != layer.count:
        raise refuse(f"intermediate_size has {len(stated)} entries for {layer.count} layers")
    return one


def _wide(model: Model, layer: Layer) -> int:
    """Gemma 4's layers that borrow may have MLPs of twice the width."""
    doubled = layer.entry() is None and model.flag("use_double_wide_mlp")
    return model.size("intermediate_size") * (1 + doubled)


def _laurel(model: Model, layer: Layer) -> Iterator[Part]:
    """Gemma 3n's low-rank path around attention, and its predictions of hidden states (AltUp)."""
    hidden, rank, states = model.hidden, model.size("laurel_rank"), model.size("altup_num_inputs")
    size = matrix(hidden, rank) + matrix(rank, hidden)
    yield Part(role="mlp", size=size, layer=layer.index, pieces=rank, quantised=True)
    mixing = matrix(states, states) + matrix(states, states**2) + matrix(hidden, states)
    yield Part(role="mlp", size=mixing, layer=layer.index, quantised=True)
    yield norm(layer, vector(hidden) * 3)


def _layer_input(model: Model, layer: Layer) -> Iterator[Part]:
    """The gate and the projection of this layer's own embeddings."""
    hidden, wide = model.hidden, model.number("hidden_size_per_layer_input")
    if wide:
        size = matrix(hidden, wide) + matrix(wide, hidden)
        yield Part(role="mlp", size=size, layer=layer.index, quantised=True)


def _norms(model: Model, layer: Layer) -> Iterable[Part]:
    """One more behind the projection of a layer's own embeddings."""
    return norms(4 + (model.number("hidden_size_per_layer_input") > 0))(model, layer)


def _layer_inputs(model: Model) -> Iterator[Part]:
    """Embeddings for every layer in one table, and their projection from the hidden state."""
    wide = model.number("hidden_size_per_layer_input")
    if wide:
        known, together = model.size("vocab_size_per_layer_input"), wide * model.shape.num_modules
        yield Part(role="embedding", size=Size(known * together), pieces=known)
        yield Part(role="beside", size=matrix(model.hidden, together), pieces=together)
        yield norm(None, vector(wide))


def _states(model: Model) -> Iterator[Part]:
    """Gemma 3n: projections into its further hidden states, and back."""
    hidden, more = model.hidden, model.size("altup_num_inputs") - 1
    yield Part(role="beside", size=matrix(hidden, hidden) * (2 * more), pieces=hidden)


def _experts(model: Model, layer: Layer) -> Iterator[Part]:
    """Experts beside Gemma 4's MLP, a router that scales what it reads, and three norms more."""
    if not model.flag("enable_moe_block"):
        return
    number = key("num_experts")
    width = width_of("moe_intermediate_size")
    yield from experts(width=width, number=number, chosen=key("top_k_experts"))(model, layer)
    yield Part(role="router", size=vector(model.hidden + number(model)), layer=layer.index)
    yield norm(layer, vector(model.hidden) * 3)


GEMMA: dict[str, Recipe] = {
    "gemma3n_text": Recipe(
        mixer=_attention,
        feed=all_of(mlp(width=_width), _laurel, _layer_input),
        norms=norms(5),
        beside=(_layer_inputs, _states),
    ),
    "gemma4_text": Recipe(
        mixer=_attention,
        feed=all_of(mlp(width=_wide), _experts, _layer_input),
        norms=_norms,
        beside=(_layer_inputs,),
    ),
}

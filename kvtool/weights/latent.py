"""Latent attention (MLA) and what came after it: DeepSeek, GLM, Kimi K2, LongCat, MiMo, MiniMax-M3, Step-3.5.

Layers for multi-token prediction, which checkpoints of these families hold beside the others, are not
counted: the classes of transformers do not build them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kvtool.model.keys import MAX_LAYERS, refuse
from kvtool.model.shape import LayerCache
from kvtool.weights.model import Layer, Model
from kvtool.weights.parts import Part, matrix, vector
from kvtool.weights.pieces import (
    Number,
    Piece,
    all_of,
    attention,
    either,
    experts,
    feed_forward,
    mlp,
    norm,
    norms,
    width_of,
)
from kvtool.weights.recipe import Recipe
from kvtool.weights.sparse import key

Sparse = Callable[[Model, Layer], bool]
"""Whether a layer has experts."""


def latent(values: Number | None = None) -> Piece:
    """Multi-head latent attention: down-projections that every rank holds whole, and heads made of them.

    `values`: the size of a head's value, v_head_dim unless said otherwise. LongCat-Flash has two such
    attentions in a layer.
    """

    def piece(model: Model, layer: Layer) -> Iterator[Part]:
        for entry in layer.entries:
            if entry.kind == "latent":
                value = values(model) if values else model.size("v_head_dim")
                yield from _one_latent(model, layer, entry, value)
            elif entry.kind != "indexer" and entry.query_heads:
                raise refuse(f"layer {layer.index} has no latent: its class is built for one")

    return piece


def _one_latent(model: Model, layer: Layer, entry: LayerCache, value: int) -> Iterator[Part]:
    hidden, heads, biased = model.hidden, entry.query_heads, model.flag("attention_bias")
    rank, rope, wide = entry.k_head_dim, entry.v_head_dim, entry.mha_k_dim
    queries = _query_rank(model)
    down = matrix(hidden, rank + rope, biased)
    if queries:
        down += matrix(hidden, queries, biased)
    up = matrix(queries or hidden, heads * wide) + matrix(rank, heads * (wide - rope + value))
    out = matrix(heads * value, hidden, biased)
    yield Part(role="attention", size=down, layer=layer.index, quantised=True)
    yield Part(role="attention", size=up + out, layer=layer.index, pieces=heads, quantised=True)
    yield norm(layer, vector(rank + queries))


def _query_rank(model: Model) -> int:
    """0 where q_lora_rank is null: the queries are then projected at once."""
    if not model.keys.defaults and "q_lora_rank" not in model.keys.raw:
        return model.size("q_lora_rank")  # no class whose default it could be
    known = model.keys.maybe("q_lora_rank")
    return known.value if known else 0


def _indexer(model: Model, layer: Layer) -> Iterator[Part]:
    """The indexer of sparse attention (DSA), whole on every rank."""
    heads, width = model.size("index_n_heads"), model.size("index_head_dim")
    keys = matrix(model.size("q_lora_rank"), heads * width) + matrix(model.hidden, width)
    yield Part(role="attention", size=keys, layer=layer.index, quantised=True)
    yield Part(role="attention", size=matrix(model.hidden, heads), layer=layer.index)
    yield norm(layer, vector(width, True))


def _own_indexer(model: Model, layer: Layer) -> Iterator[Part]:
    """Layers that share another's choice of tokens have no indexer."""
    if layer.entry("indexer"):
        yield from _indexer(model, layer)


def listed_sparse(absent: Sparse) -> Sparse:
    """As mlp_layer_types says; without that list, as `absent` says."""

    def is_sparse(model: Model, layer: Layer) -> bool:
        found = model.keys.words("mlp_layer_types")
        if found is None:
            return absent(model, layer)
        kinds, by = found
        if layer.index >= len(kinds):
            raise refuse(f"{by} has {len(kinds)} entries and no layer {layer.index}")
        return kinds[layer.index] == "sparse"

    return is_sparse


def _after_dense(model: Model, layer: Layer) -> bool:
    """All layers but the first first_k_dense_replace."""
    return layer.index >= model.keys.need("first_k_dense_replace", low=0).value


def _after_first(model: Model, layer: Layer) -> bool:
    """All layers but the first."""
    return layer.index > 0


def _moe_layer_freq(model: Model, layer: Layer) -> bool:
    """MiniMax-M3: the layers that moe_layer_freq marks; all where it is absent."""
    marks = model.keys.numbers("moe_layer_freq", high=1)
    if marks is not None and layer.index >= len(marks):
        raise refuse(f"moe_layer_freq has {len(marks)} entries and no layer {layer.index}")
    return marks is None or bool(marks[layer.index])


def _shared_width(model: Model, layer: Layer) -> int:
    """Of n_shared_experts together."""
    return model.size("moe_intermediate_size") * model.number("n_shared_experts")


def _deepseek(is_sparse: Sparse, *names: str, mlp_bias: bool = False, **how: Any) -> Recipe:
    """MLA, then a dense MLP or experts with shared ones; `names` of the number of experts."""
    bias: Any = "mlp_bias" if mlp_bias else False
    sparse = experts(
        width=width_of("moe_intermediate_size"),
        number=key(*names, "n_routed_experts", "num_local_experts"),
        chosen=key("num_experts_per_tok"),
        shared=_shared_width,
        shared_bias=bias,
    )
    return Recipe(**{"mixer": latent(), "feed": either(is_sparse, sparse, mlp(bias=bias)), **how})


def _longcat_feed(model: Model, layer: Layer) -> Iterator[Part]:
    """Two dense MLPs beside the experts. The router also knows zero_expert_num experts that pass a token on.

    Those have no weights in checkpoints; the class of transformers allocates half of them, unused.
    A token may choose them: the active parameters here are those of a token that chooses none.
    """
    hidden, count = model.hidden, model.size("n_routed_experts", "num_local_experts")
    wide = model.size("ffn_hidden_size", "intermediate_size")
    size = feed_forward(hidden, wide, gated=True) * 2
    yield Part(role="mlp", size=size, layer=layer.index, pieces=wide, quantised=True)
    narrow = model.size("expert_ffn_hidden_size", "moe_intermediate_size")
    chosen = min(model.size("moe_topk", "num_experts_per_tok"), count)
    routed = feed_forward(hidden, narrow, gated=True) * count
    yield Part(role="experts", size=routed, layer=layer.index, experts=count, chosen=chosen,
               pieces=narrow, quantised=True)  # fmt: skip
    scores = matrix(hidden, count + model.number("zero_expert_num"), model.flag("router_bias"))
    yield Part(role="router", size=scores, layer=layer.index)


def _compressed(model: Model, layer: Layer) -> Iterator[Part]:
    """DeepSeek-V4: one vector a token is key and value; heads are projected out in o_groups groups."""
    hidden, heads, width = model.hidden, model.size("num_attention_heads"), model.size("head_dim")
    rank, groups, narrow = (
        model.size("q_lora_rank"),
        model.size("o_groups"),
        model.size("o_lora_rank"),
    )
    here = layer.index
    down = matrix(hidden, rank) + matrix(hidden, width)
    yield Part(role="attention", size=down, layer=here, quantised=True)
    up = matrix(rank, heads * width)
    yield Part(role="attention", size=up, layer=here, pieces=heads, quantised=True)
    if heads * width % groups:
        raise refuse(f"o_groups = {groups} does not divide {heads} heads of {width}")
    out = matrix(heads * width // groups, groups * narrow) + matrix(groups * narrow, hidden)
    yield Part(role="attention", size=out, layer=here, pieces=groups, quantised=True)
    yield Part(role="attention", size=vector(heads), layer=here, pieces=heads)  # sinks
    yield norm(layer, vector(rank + width))
    for entry in layer.entries:
        if entry.kind in ("compressed", "indexer"):
            yield from _compressor(model, layer, entry)


def _compressor(model: Model, layer: Layer, entry: LayerCache) -> Iterator[Part]:
    """Values and gates of a pool's entries, twice as wide where its windows overlap, and positions."""
    wide = entry.k_head_dim * (1 + entry.overlap)
    size = matrix(model.hidden, wide) * 2 + vector(entry.stride * wide)
    yield Part(role="attention", size=size, layer=layer.index)
    yield norm(layer, vector(entry.k_head_dim))
    if entry.kind == "indexer":
        heads = model.size("index_n_heads")
        queries = matrix(model.size("q_lora_rank"), heads * entry.k_head_dim)
        yield Part(role="attention", size=queries, layer=layer.index, quantised=True)
        yield Part(role="attention", size=matrix(model.hidden, heads), layer=layer.index)


def _streams(model: Model, layer: Layer) -> Iterator[Part]:
    """DeepSeek-V4: norms, and the hyper-connections that mix hc_mult streams before and after attention
    and experts. They stand with the norms: whole on every rank, never quantised."""
    streams = model.size("hc_mult")
    mixes = (2 + streams) * streams
    one = matrix(streams * model.hidden, mixes, True) + vector(3)
    yield norm(layer, one * 2 + vector(model.hidden) * 2)


def _merged_streams(model: Model) -> Iterator[Part]:
    """DeepSeek-V4: the streams become one before the head."""
    streams = model.size("hc_mult")
    size = matrix(streams * model.hidden, streams, True) + vector(1)
    yield Part(role="beside", size=size)


def _sinks(model: Model, layer: Layer) -> Iterator[Part]:
    """MiMo-V2-Flash: a logit a head in layers that slide."""
    entry = layer.entry("sliding")
    if entry is not None:
        heads = entry.query_heads
        yield Part(role="attention", size=vector(heads), layer=layer.index, pieces=heads)


def _block_indexer(model: Model, layer: Layer) -> Iterator[Part]:
    """MiniMax-M3: an indexer of blocks, whole on every rank."""
    entry = layer.entry("indexer")
    if entry is not None:
        stated = model.keys.section("sparse_attention_config").maybe("sparse_num_index_heads")
        heads = stated.value if stated else model.size("index_n_heads")
        size = matrix(model.hidden, (heads + 1) * entry.k_head_dim)
        yield Part(role="attention", size=size, layer=layer.index, quantised=True)
        yield norm(layer, vector(2 * entry.k_head_dim))


def _gated_heads(model: Model, layer: Layer) -> Iterator[Part]:
    """Step-3.5: a gate a head, and query heads of their own in layers that slide."""
    entry = layer.entry("full", "sliding")
    if entry is None:
        return
    if entry.kind == "sliding":
        other = model.keys.section("attention_other_setting").maybe("num_attention_heads")
        own = model.keys.maybe("num_sliding_attention_heads") or other
        entry = replace(entry, query_heads=own.value if own else model.size("num_attention_heads"))
    plain = attention(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head")
    yield from plain(model, replace(layer, entries=(entry,)))
    yield Part(role="attention", size=matrix(model.hidden, entry.query_heads), layer=layer.index,
               pieces=entry.query_heads, quantised=True)  # fmt: skip


def _moe_layers_enum(model: Model, layer: Layer) -> bool:
    """Step-3.5: the layers that moe_layers_enum lists, in a word or a list; else all but three."""
    found = model.keys.find("moe_layers_enum")
    if found is None:
        return layer.index >= 3
    value, by = found
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) > MAX_LAYERS:
        raise refuse(f"{by} is not a list of layers")
    return str(layer.index) in {str(one).strip() for one in listed}


def _split_values(model: Model) -> int:
    """MiniCPM3: hidden_size / num_attention_heads where v_head_dim is null."""
    return model.number("v_head_dim") or model.hidden // model.size("num_attention_heads")


_DSA: dict[str, Any] = {"mixer": all_of(latent(), _indexer)}
_M3_EXPERTS = experts(
    width=width_of("intermediate_size"),
    number=key("num_local_experts", "num_experts"),
    chosen=key("num_experts_per_tok"),
    shared=width_of("shared_intermediate_size"),
)

LATENT: dict[str, Recipe] = {
    "deepseek_v2": _deepseek(_after_dense, "num_experts", mlp_bias=True),
    "deepseek_v3": _deepseek(_after_dense),
    "mistral4": _deepseek(_after_dense),
    "glm4_moe_lite": _deepseek(listed_sparse(_after_first)),
    "deepseek_v32": _deepseek(listed_sparse(_after_dense), "num_experts", **_DSA),
    "glm_moe_dsa": _deepseek(listed_sparse(_after_dense), "num_experts",
                             mixer=all_of(latent(), _own_indexer)),
    "minicpm3": Recipe(mixer=latent(_split_values), feed=mlp(bias="mlp_bias")),
    "longcat_flash": Recipe(mixer=latent(), feed=_longcat_feed, norms=norms(4)),
    "deepseek_v4": Recipe(
        mixer=_compressed,
        feed=experts(width=width_of("moe_intermediate_size", "intermediate_size"),
                     number=key("n_routed_experts", "num_local_experts"), chosen=key("num_experts_per_tok"),
                     shared=width_of("moe_intermediate_size", "intermediate_size"), shared_bias="mlp_bias"),
        norms=_streams, beside=(_merged_streams,)),
    "mimo_v2_flash": Recipe(
        mixer=all_of(attention(qkv_bias="attention_bias"), _sinks),
        feed=either(listed_sparse(_after_first),
                    experts(width=width_of("moe_intermediate_size"), chosen=key("num_experts_per_tok"),
                            number=key("n_routed_experts", "num_local_experts")), mlp())),
    "minimax_m3_vl_text": Recipe(
        mixer=all_of(attention(qk_norm="head"), _block_indexer),
        feed=either(listed_sparse(_moe_layer_freq), _M3_EXPERTS,
                    mlp(width=width_of("dense_intermediate_size")))),
    "step3p5": Recipe(
        mixer=_gated_heads,
        feed=either(listed_sparse(_moe_layers_enum),
                    experts(width=width_of("moe_intermediate_size"),
                            number=key("moe_num_experts", "n_routed_experts"),
                            chosen=key("moe_top_k", "num_experts_per_tok"), shared_bias="mlp_bias",
                            shared=width_of("share_expert_dims", "share_expert_dim")), mlp(bias="mlp_bias"))),
}  # fmt: skip
LATENT_LIKE: dict[str, str] = {"kimi_k2": "deepseek_v3", "minimax_m3": "minimax_m3_vl_text"}

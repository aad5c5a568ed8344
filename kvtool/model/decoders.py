"""Decoders that name their sizes in their own way, and cross-attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvtool.model.attention import (
    MAX_HEADS,
    Place,
    cross,
    derived,
    entry,
    per_layer,
    plain,
    split,
    swa_named,
)
from kvtool.model.keys import MAX_TOKENS, Keys, Known, refuse
from kvtool.model.patterns import REFORMER
from kvtool.model.shape import LayerCache

Levels = tuple[Mapping[str, Any], ...]
"""The config's levels above the language model's, outermost first."""


def no_fixed_encoder(keys: Keys, above: Levels) -> int:
    """The encoder's length is the input's: the config fixes none."""
    return 0


def source_positions(keys: Keys, above: Levels) -> int:
    """Whisper pads every input to 30 seconds: max_source_positions after its convolutions."""
    return keys.need("max_source_positions", high=MAX_TOKENS).value


def image_patches(keys: Keys, above: Levels) -> int:
    """BLIP: the patches of one image, and the class token."""
    return _image(above, extra=1)


def image_tiles(keys: Keys, above: Levels) -> int:
    """Llama 3.2 Vision: max_num_tiles tiles an image, each its patches and a class token."""
    return _image(above, extra=1, tiles=4)


def _image(above: Levels, *, extra: int, tiles: int = 1) -> int:
    for level in above:
        vision = level.get("vision_config")
        if isinstance(vision, Mapping):
            inner = Keys(raw=vision, model_type="vision_config", path="vision_config.")
            size, patch = inner.maybe("image_size"), inner.maybe("patch_size")
            most = inner.maybe("max_num_tiles") if tiles > 1 else None
            if size is not None and patch is not None:
                count = most.value if most else tiles
                return count * ((size.value // patch.value) ** 2 + extra)
    return 0


def _split(keys: Keys, heads: Known) -> Known:
    return split(keys.need("hidden_size", "d_model", "embed_dim"), heads)


def _own(keys: Keys, place: Place, name: str) -> LayerCache:
    heads = keys.need(name, "num_attention_heads", high=MAX_HEADS)
    return entry(keys, place, heads=heads, k_dim=_split(keys, heads), queries=heads)


def _own_cross(keys: Keys, place: Place, name: str) -> LayerCache:
    return replace(_own(keys, Place(place.index, "full"), name), kind="cross", window=None)


def bart(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """BART and its kin: decoder_attention_heads of d_model / heads."""
    return (_own(keys, place, "decoder_attention_heads"),)


def bart_cross(keys: Keys, place: Place) -> LayerCache:
    """Cross-attention of the same heads over the encoder's output."""
    return _own_cross(keys, place, "decoder_attention_heads")


def prophetnet(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """num_decoder_attention_heads."""
    return (_own(keys, place, "num_decoder_attention_heads"),)


def prophetnet_cross(keys: Keys, place: Place) -> LayerCache:
    """Cross-attention of the same heads."""
    return _own_cross(keys, place, "num_decoder_attention_heads")


def attention_heads(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Kosmos-2 and XGLM: attention_heads."""
    return (_own(keys, place, "attention_heads"),)


def t5(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """T5: num_heads heads of d_kv, which need not make up d_model."""
    heads = keys.need("num_heads", "num_attention_heads", high=MAX_HEADS)
    dim = keys.maybe("d_kv") or _split(keys, heads)
    return (entry(keys, place, heads=heads, k_dim=dim, queries=heads),)


def t5_cross(keys: Keys, place: Place) -> LayerCache:
    """Cross-attention of the same heads."""
    return replace(t5(keys, Place(place.index, "full"))[0], kind="cross")


def moonshine(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """decoder_num_key_value_heads of hidden_size / decoder_num_attention_heads."""
    queries = keys.need("decoder_num_attention_heads", high=MAX_HEADS)
    heads = keys.maybe("decoder_num_key_value_heads", high=MAX_HEADS) or queries
    return (entry(keys, place, heads=heads, k_dim=_split(keys, queries), queries=queries),)


def moonshine_cross(keys: Keys, place: Place) -> LayerCache:
    """Cross-attention of the same heads."""
    return replace(moonshine(keys, Place(place.index, "full"))[0], kind="cross")


def mllama(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Llama 3.2 Vision: the listed layers attend to image tokens only, the others to the text."""
    listed = keys.get("cross_attention_layers")
    if listed is None:
        listed = range(3, 40, 5)
    elif not isinstance(listed, list):
        raise refuse("cross_attention_layers is not a list of layers")
    return (cross(keys, place),) if place.index in listed else plain(keys, place)


def dia_cross(keys: Keys, place: Place) -> LayerCache:
    """Dia: cross-attention has heads of its own."""
    heads = keys.need("cross_num_key_value_heads", high=MAX_HEADS)
    queries = keys.need("cross_num_attention_heads", high=MAX_HEADS)
    return cross(keys, place, heads=heads, dim=keys.need("cross_head_dim"), queries=queries)


def cpmant(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """CPM-Ant: heads of dim_head, and prompt_length tokens of its own before the text."""
    prompt = keys.need("prompt_length", low=0)
    own = entry(keys, place, k_dim=keys.need("dim_head"))
    return (replace(own, extra=prompt.value, trace=(*own.trace, ("extra tokens", prompt.by))),)


def reference(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Unlimited-OCR: prompt whole, generated tokens in a window."""
    own = derived(keys, place)[0]
    window = keys.maybe("sliding_window", high=MAX_TOKENS)
    return (replace(own, reference=window is not None, span=window.value if window else 0),)


def xlnet(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """XLNet caches hidden states (mems), at most mem_len of them, and no K and V."""
    width = keys.need("d_model", "hidden_size")
    most = keys.maybe("mem_len", high=MAX_TOKENS)
    return (_hidden(place, width, most.value if most else None),)


def reformer(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Reformer caches hidden states, and in LSH layers an int64 bucket a token, head and hash."""
    own = _hidden(place, keys.need("hidden_size"), None)
    found = keys.words("attn_layers")
    if (found[0] if found else REFORMER)[place.index] != "lsh":
        return (own,)
    heads, hashes = keys.need("num_attention_heads", high=MAX_HEADS), keys.need("num_hashes")
    chunk = keys.need("lsh_attn_chunk_length")
    buckets = 8 * heads.value * hashes.value
    return (replace(own, fixed_bytes=buckets, fixed_above=chunk.value),)


def _hidden(place: Place, width: Known, window: int | None) -> LayerCache:
    return LayerCache(
        layer=place.index,
        kind="hidden",
        kv_heads=1,
        k_head_dim=width.value,
        window=window,
        replicated=True,
        trace=(("k_head_dim", width.by),),
    )


def zamba(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Zamba: attention over twice the hidden size, so attention_head_dim is its own key."""
    dim = keys.maybe("attention_head_dim")
    if dim is None:
        queries = keys.need("num_attention_heads", high=MAX_HEADS)
        hidden = keys.need("hidden_size")
        dim = Known(2 * hidden.value // queries.value, f"2 × {hidden.by} / {queries.by}")
    return (entry(keys, place, k_dim=dim),)


def zamba2(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Zamba2: 2 × hidden_size / num_attention_heads, unless attention_head_dim is given."""
    stated = keys.maybe("attention_head_dim") if keys.stated("attention_head_dim") else None
    if stated is not None:
        return (entry(keys, place, k_dim=stated),)
    queries = keys.need("num_attention_heads", high=MAX_HEADS)
    hidden = keys.need("hidden_size")
    by = f"2 × {hidden.by} / {queries.by}"
    return (entry(keys, place, k_dim=Known(max(2 * hidden.value // queries.value, 1), by)),)


def jetmoe(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """JetMoE: kv_channels wide; each chosen expert brings its own query heads."""
    heads = keys.need("num_key_value_heads", high=MAX_HEADS)
    experts = keys.need("num_experts_per_tok")
    queries = Known(heads.value * experts.value, f"{heads.by} × {experts.by}")
    return (entry(keys, place, heads=heads, k_dim=keys.need("kv_channels"), queries=queries),)


def inkling(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Inkling's attention; its convolutions are a state of their own."""
    return (swa_named(keys, place),)


def multi_head(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Qwen-1: multi-head attention, kv_channels wide."""
    heads = keys.need("num_attention_heads", high=MAX_HEADS)
    dim = keys.maybe("kv_channels") or derived_dim(keys)
    return (entry(keys, place, heads=heads, k_dim=dim),)


def derived_dim(keys: Keys) -> Known:
    """hidden_size / num_attention_heads."""
    return _split(keys, keys.need("num_attention_heads", high=MAX_HEADS))


def chatglm(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """ChatGLM2, 3 and GLM-4: multi_query_group_num KV heads of kv_channels."""
    queries = keys.need("num_attention_heads", high=MAX_HEADS)
    grouped = keys.flag("multi_query_attention")
    heads = keys.need("multi_query_group_num", high=MAX_HEADS) if grouped else queries
    dim = keys.maybe("kv_channels") or derived_dim(keys)
    return (entry(keys, place, heads=heads, k_dim=dim),)


def openelm(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """OpenELM: num_kv_heads and num_query_heads are lists, an entry a layer."""
    heads = per_layer(keys, place, "num_kv_heads")
    queries = per_layer(keys, place, "num_query_heads")
    if heads is None or queries is None:
        raise refuse("openelm: the config has no num_kv_heads or num_query_heads list")
    return (entry(keys, place, heads=heads, k_dim=keys.need("head_dim"), queries=queries),)


def block_configs(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Nemotron-NAS (DeciLM): each block has no attention, a linear one, or grouped heads."""
    blocks = keys.raw.get("block_configs")
    if not isinstance(blocks, list) or place.index >= len(blocks):
        raise refuse(f"block_configs has no entry for layer {place.index}")
    block = blocks[place.index]
    attention = block.get("attention") if isinstance(block, dict) else None
    if not isinstance(attention, dict):
        raise refuse(f"block_configs[{place.index}].attention is not an object")
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return ()
    inner = Keys(
        raw=attention, model_type=keys.model_type, path=f"block_configs[{place.index}].attention."
    )
    group = inner.need("n_heads_in_group", high=MAX_HEADS)
    queries = keys.need("num_attention_heads", high=MAX_HEADS)
    if queries.value % group.value:
        raise refuse(f"{group.by} does not divide {queries.by}")
    by = f"{queries.by} / block_configs[layer].attention.n_heads_in_group"
    return (entry(keys, place, heads=Known(queries.value // group.value, by), queries=queries),)

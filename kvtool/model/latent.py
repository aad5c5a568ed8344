"""Latent (MLA), indexed and compressed attention: what one layer caches besides or instead of K and V."""

from __future__ import annotations

from dataclasses import replace

from kvtool.model import words
from kvtool.model.attention import Place, head_dim, plain, query_heads, window_of
from kvtool.model.keys import MAX_TOKENS, Keys, Known, refuse
from kvtool.model.shape import Kind, LayerCache, State


def latent(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """MLA: the compressed latent and one RoPE key a token, whatever the number of heads.

    DeepSeek-V2, arXiv 2405.04434, section 2.1; transformers stores the latent in the K slot and the
    RoPE key in the V slot.
    """
    if "kv_lora_rank" in keys.raw and keys.raw["kv_lora_rank"] is None:  # a variant without MLA
        return plain(keys, place)
    _, window = window_of(keys, place)
    rank = keys.need("kv_lora_rank")
    rope = keys.need("qk_rope_head_dim", low=0)
    nope = keys.need("qk_nope_head_dim", low=0)
    value = keys.maybe("v_head_dim") or head_dim(keys, place)
    trace = (
        ("kv_heads", "one latent for all heads"),
        ("k_head_dim", rank.by),
        ("v_head_dim", rope.by),
    )
    return (
        LayerCache(
            layer=place.index,
            kind="latent",
            kv_heads=1,
            k_head_dim=rank.value,
            v_head_dim=rope.value,
            window=window.value if window else None,
            query_heads=query_heads(keys, place).value,
            mha_k_dim=nope.value + rope.value,
            mha_v_dim=value.value,
            replicated=True,
            trace=(*trace, ("window", window.by)) if window else trace,
        ),
    )


def indexer(place: Place, width: Known) -> LayerCache:
    """The key of a sparse-attention indexer: one vector a token, whole on every rank."""
    return LayerCache(
        layer=place.index,
        kind="indexer",
        kv_heads=1,
        k_head_dim=width.value,
        replicated=True,
        trace=(("k_head_dim", width.by),),
    )


def indexed_latent(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """MLA with a DSA indexer (DeepSeek-V3.2). Layers whose indexer is shared keep no index keys."""
    entries = latent(keys, place)
    if place.word != words.INDEXED:
        return entries
    if _shares_indexer(keys, place.index):
        return entries
    return (*entries, indexer(place, keys.need("index_head_dim")))


def _shares_indexer(keys: Keys, layer: int) -> bool:
    """indexer_types or index_topk_pattern ('FSSF'), or an indexer every index_topk_freq layers."""
    kinds = keys.get("indexer_types") or keys.get("index_topk_pattern")
    if kinds is not None:
        if not isinstance(kinds, list | str):
            raise refuse("indexer_types or index_topk_pattern is not a list of words")
        return layer < len(kinds) and kinds[layer] in ("shared", "S")
    freq = keys.maybe("index_topk_freq", low=0)
    if freq is not None:  # GLM-5
        offset = keys.maybe("index_skip_topk_offset", low=0)
        start = offset.value if offset else 2
        return max(layer - start + 1, 0) % max(freq.value, 1) != 0
    # hy_v4's class has indexers in layers 0, 1, 5, 9, …
    return keys.model_type.startswith("hy_v4") and layer > 0 and (layer - 1) % 4 != 0


def shared_source_latent(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Mistral Large 4: kv_source_layers names the layer whose latent is read."""
    entries = indexed_latent(keys, place)
    rope = keys.item("no_rope_layers", place.index, high=1)
    if rope is None:
        step = keys.maybe("no_rope_layer_interval")
        rope = (place.index + 1) % (step.value if step else 4)
    if not rope:  # a NoPE layer has no RoPE key to store
        entries = (replace(entries[0], v_head_dim=0), *entries[1:])
    if keys.item("kv_source_layers", place.index) in (None, place.index):
        return entries
    return tuple(item for item in entries if item.kind == "indexer")


def indexed_plain(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Ordinary K and V with an indexer's keys beside them (Qwen4-Exp, MiniMax-M3)."""
    entries = plain(keys, place)
    if place.word not in (words.INDEXED, words.SPARSE):
        return entries
    section = keys.section("sparse_attention_config")
    width = section.maybe("sparse_index_dim") or keys.maybe("index_head_dim", "indexer_head_dim")
    if width is None and place.word == words.INDEXED:  # Qwen4-Exp without an indexer is plain
        return entries
    width = width or keys.need("index_head_dim")
    return (*entries, indexer(place, width))


def dots3_note(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Latent everywhere; sliding layers may have swa_kv_lora_rank and swa_… of their own."""
    if place.word != words.SLIDING or "per_layer_config" in keys.raw:
        return indexed_latent(keys, place)
    defaults = {
        "kv_lora_rank": 1024, "num_attention_heads": 64, "qk_nope_head_dim": 192, "v_head_dim": 128,
        "head_dim": 256,
    }  # fmt: skip
    swa = {name: keys.maybe(f"swa_{name}") for name in defaults}
    sizes = {name: own.value if own else defaults[name] for name, own in swa.items()}
    rope = keys.maybe("swa_qk_rope_head_dim", low=0)
    sizes["qk_rope_head_dim"] = (
        rope.value if rope else max(sizes["head_dim"] - sizes["qk_nope_head_dim"], 0)
    )
    return latent(keys.at(sizes, "swa_"), place)


def compressed(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """DeepSeek-V4: one K=V vector in a window, and a pool of one entry every 4 or 128 tokens.

    CSA layers add an indexer with a pool of its own. The compressor's pending tokens (values and
    gates of up to `ratio` tokens, and CSA's overlap) are a constant state. Read off
    transformers 5.24.0, models/deepseek_v4.
    """
    window = keys.need("sliding_window", high=MAX_TOKENS)
    width = keys.need("head_dim")
    near = LayerCache(
        layer=place.index,
        kind="sliding",
        kv_heads=1,
        k_head_dim=width.value,
        window=window.value,
        query_heads=query_heads(keys, place).value,
        mha_k_dim=width.value,
        mha_v_dim=width.value,
        replicated=True,
        trace=(("k_head_dim", f"{width.by}, K and V are one tensor"), ("window", window.by)),
    )
    if place.word == words.SLIDING:
        return (near,)
    csa = place.word == words.CSA
    ratio = _compress_rate(
        keys,
        "compressed_sparse_attention" if csa else "heavily_compressed_attention",
        4 if csa else 128,
    )
    pools: list[tuple[Kind, Known]] = [("compressed", width)]
    if csa:
        pools.append(("indexer", keys.need("index_head_dim")))
    return (near, *(_pool(place, kind, dim, ratio, overlap=csa) for kind, dim in pools))


def _pool(place: Place, kind: Kind, dim: Known, ratio: Known, *, overlap: bool) -> LayerCache:
    series = 2 if overlap else 1
    pending = 2 * (ratio.value - 1) * series * dim.value
    kept = 2 * ratio.value * dim.value if overlap else 0
    return LayerCache(
        layer=place.index,
        kind=kind,
        kv_heads=1,
        k_head_dim=dim.value,
        stride=ratio.value,
        overlap=overlap,
        replicated=True,
        states=(State(name="buffer", parts=((pending + kept, 1),), dtype="model"),),
        trace=(("k_head_dim", dim.by), ("stride", ratio.by)),
    )


def _compress_rate(keys: Keys, name: str, default: int) -> Known:
    short = "compress_rate_csa" if default == 4 else "compress_rate_hca"
    known = keys.maybe(short) or keys.section("compress_rates").maybe(name)
    return known or Known(default, f"{default} tokens an entry, the class default")

"""What one attention layer caches: heads and head sizes, with the key that decided each.

Every reader takes the config as that layer sees it and the layer's place, and returns cache entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvtool.model import words
from kvtool.model.keys import MAX_TOKENS, Keys, Known, refuse, whole
from kvtool.model.shape import Kind, LayerCache, State

MAX_HEADS = 65_536


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer stands: its index among the cache layers and its kind, a word of `words`."""

    index: int
    word: str


Reader = Callable[[Keys, Place], tuple[LayerCache, ...]]

WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size")
DEFAULT_WINDOWS = {"dots3_note_text": 512}
"""Windows that a class sets in code, not in a default that the table could hold."""
SLIDING_WORDS = {words.SLIDING, words.HYBRID_SLIDING}


def window_of(keys: Keys, place: Place) -> tuple[Kind, Known | None]:
    """The kind's name in the output and the most tokens it holds."""
    if place.word in SLIDING_WORDS:
        known = keys.maybe(*WINDOWS, high=MAX_TOKENS) or _other_window(keys)
        if known is None:
            raise refuse(f"layer {place.index} slides, and the config has no sliding_window")
        return "sliding", known
    if place.word == words.CHUNKED:
        return "chunked", keys.need("attention_chunk_size", high=MAX_TOKENS)
    return "full", None


def _other_window(keys: Keys) -> Known | None:
    """ModernBERT counts both sides in local_attention; some classes set a window in code."""
    both = keys.maybe("local_attention", low=2, high=MAX_TOKENS)
    if both is not None:
        return Known(both.value // 2, f"{both.by} / 2")
    fixed = DEFAULT_WINDOWS.get(keys.model_type)
    return Known(fixed, f"class default of {keys.model_type}") if fixed else None


def per_layer(keys: Keys, place: Place, *names: str) -> Known | None:
    """A head count that may be one number or a list with an entry a layer."""
    found = keys.find(*names)
    if found is None:
        return None
    value, by = found
    if isinstance(value, list):
        if place.index >= len(value):
            raise refuse(f"{by} has {len(value)} entries and no layer {place.index}")
        return Known(
            whole(value[place.index], f"{by}[{place.index}]", low=1, high=MAX_HEADS), f"{by}[layer]"
        )
    return Known(whole(value, by, low=1, high=MAX_HEADS), f"{by} = {value}")


def query_heads(keys: Keys, place: Place) -> Known:
    """Query heads; they decide a derived head size, never the cache itself."""
    known = per_layer(keys, place, "num_attention_heads", "num_query_heads")
    if known is None:
        raise refuse(
            f"{keys.model_type}: the config has no num_attention_heads", "add the key to the config"
        )
    return known


def kv_heads(keys: Keys, place: Place) -> Known:
    """KV heads; absent or null means one for each query head."""
    heads = query_heads(keys, place)
    names = [n for n in ("num_key_value_heads", "num_kv_heads") if keys.declares(n)]
    known = per_layer(keys, place, *names) if names else None
    return known or Known(heads.value, f"no num_key_value_heads, so {heads.by}")


def head_dim(keys: Keys, place: Place) -> Known:
    """An explicit head_dim, or hidden_size / num_attention_heads where it is absent, null or 0."""
    known = keys.maybe("head_dim", low=0)
    if known is not None and known.value > 0:
        return known
    hidden, heads = keys.need("hidden_size"), query_heads(keys, place)
    if hidden.value < heads.value:
        raise refuse(f"{hidden.by} is less than {heads.by}: no head size follows")
    return Known(hidden.value // heads.value, f"{hidden.by} / {heads.by}")


def entry(
    keys: Keys,
    place: Place,
    *,
    heads: Known | None = None,
    k_dim: Known | None = None,
    v_dim: Known | None = None,
    queries: Known | None = None,
) -> LayerCache:
    """A K/V entry of this layer; what is not given is read the common way."""
    kind, window = window_of(keys, place)
    heads = heads or kv_heads(keys, place)
    k_dim = k_dim or head_dim(keys, place)
    v_dim = v_dim or k_dim
    queries = queries or query_heads(keys, place)
    trace = (("kv_heads", heads.by), ("k_head_dim", k_dim.by), ("v_head_dim", v_dim.by))
    return LayerCache(
        layer=place.index,
        kind=kind,
        kv_heads=heads.value,
        k_head_dim=k_dim.value,
        v_head_dim=v_dim.value,
        window=window.value if window else None,
        query_heads=queries.value,
        mha_k_dim=k_dim.value,
        mha_v_dim=v_dim.value,
        trace=(*trace, ("window", window.by)) if window else trace,
    )


def plain(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """MHA, GQA or MQA as written in the config."""
    return (entry(keys, place),)


def derived(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Classes that always compute the head size as hidden_size / num_attention_heads."""
    hidden, queries = keys.need("hidden_size"), query_heads(keys, place)
    if hidden.value < queries.value:
        raise refuse(f"{hidden.by} is less than {queries.by}: no head size follows")
    k_dim = Known(hidden.value // queries.value, f"{hidden.by} / {queries.by}")
    return (entry(keys, place, k_dim=k_dim),)


def latent(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """MLA: the compressed latent and one RoPE key a token, whatever the number of heads.

    DeepSeek-V2, arXiv 2405.04434, section 2.1; transformers stores the latent in the K slot and the
    RoPE key in the V slot.
    """
    _, window = window_of(keys, place)
    rank = keys.need("kv_lora_rank")
    rope = keys.need("qk_rope_head_dim", low=0)
    nope = keys.need("qk_nope_head_dim", low=0)
    value = keys.maybe("v_head_dim") or head_dim(keys, place)
    trace = (("k_head_dim", rank.by), ("v_head_dim", rope.by))
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
    kinds = keys.words("indexer_types") or _indexer_schedule(keys, place)
    if kinds is not None and place.index < len(kinds[0]) and kinds[0][place.index] == "shared":
        return entries
    return (*entries, indexer(place, keys.need("index_head_dim")))


def _indexer_schedule(keys: Keys, place: Place) -> tuple[list[str], str] | None:
    """index_topk_pattern ('FSSF'), or a new indexer every index_topk_freq layers (GLM-5)."""
    pattern = keys.get("index_topk_pattern")
    if isinstance(pattern, str):
        return [{"F": "full", "S": "shared"}.get(letter, "full") for letter in pattern], "pattern"
    if isinstance(pattern, list):
        return [str(kind) for kind in pattern], "pattern"
    freq = keys.maybe("index_topk_freq", low=0)
    if freq is None:
        return None
    offset = keys.maybe("index_skip_topk_offset", low=0)
    start = offset.value if offset else 2
    step = max(freq.value, 1)
    layers = range(place.index + 1)
    return ["shared" if max(i - start + 1, 0) % step else "full" for i in layers], freq.by


def shared_source_latent(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Mistral Large 4: kv_source_layers names the layer whose latent is read."""
    entries = indexed_latent(keys, place)
    ropes = keys.numbers("no_rope_layers", high=1)
    step = keys.maybe("no_rope_layer_interval")
    interval = step.value if step else 4
    rope = (
        ropes[place.index] if ropes and place.index < len(ropes) else (place.index + 1) % interval
    )
    if not rope:  # a NoPE layer has no RoPE key to store
        entries = (replace(entries[0], v_head_dim=0), *entries[1:])
    sources = keys.numbers("kv_source_layers")
    if sources is None or place.index >= len(sources) or sources[place.index] == place.index:
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


def falcon(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """num_kv_heads counts only with new_decoder_architecture; multi_query is one KV head."""
    queries = query_heads(keys, place)
    if keys.flag("new_decoder_architecture"):
        heads = keys.maybe("num_kv_heads", "n_head_kv", high=MAX_HEADS) or queries
    elif keys.flag("multi_query", default=True):
        heads = Known(1, "multi_query = true")
    else:
        heads = Known(queries.value, f"multi_query = false, so {queries.by}")
    return (
        replace(derived(keys, place)[0], kv_heads=heads.value, trace=_with(keys, place, heads)),
    )


def _with(keys: Keys, place: Place, heads: Known) -> tuple[tuple[str, str], ...]:
    trace = dict(derived(keys, place)[0].trace)
    return tuple((trace | {"kv_heads": heads.by}).items())


def gpt_bigcode(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """multi_query is one KV head; otherwise one a query head."""
    queries = query_heads(keys, place)
    single = keys.flag("multi_query", default=True)
    heads = Known(1, "multi_query = true") if single else queries
    return (entry(keys, place, heads=heads),)


def attn_config(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """DBRX and MPT: KV heads stand in the nested attn_config."""
    heads = keys.section("attn_config").maybe("kv_n_heads", high=MAX_HEADS)
    return (entry(keys, place, heads=heads or query_heads(keys, place)),)


def gemma4(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Full layers have heads of global_head_dim, and fewer of them with attention_k_eq_v."""
    if place.word != words.FULL or "per_layer_config" in keys.raw:
        return plain(keys, place)
    k_dim = keys.maybe("global_head_dim") or Known(512, "class default, global_head_dim = 512")
    heads = None
    if keys.flag("attention_k_eq_v"):
        heads = keys.maybe("num_global_key_value_heads", high=MAX_HEADS)
    return (entry(keys, place, heads=heads, k_dim=k_dim),)


def mimo_v2(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """K and V of different widths; sliding layers have twice the KV heads, or swa_… of their own."""
    if place.word != words.SLIDING:
        return (entry(keys, place, v_dim=keys.maybe("v_head_dim")),)
    full = kv_heads(keys, place)
    doubled = Known(2 * full.value, f"twice {full.by} on sliding layers")
    return (
        entry(
            keys,
            place,
            heads=keys.maybe("swa_num_key_value_heads", high=MAX_HEADS) or doubled,
            k_dim=keys.maybe("swa_head_dim"),
            v_dim=keys.maybe("swa_v_head_dim", "v_head_dim"),
        ),
    )


def step3p7(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """num_attention_groups are KV heads; sliding layers may have query heads of their own."""
    heads = keys.maybe("num_attention_groups", high=MAX_HEADS)
    other = keys.section("attention_other_setting")
    if place.word != words.SLIDING or not other.raw:
        return (entry(keys, place, heads=heads),)
    return (
        entry(
            keys,
            place,
            heads=other.maybe("num_attention_groups", "num_key_value_heads", high=MAX_HEADS)
            or heads,
            k_dim=other.maybe("head_dim"),
            queries=other.maybe("num_attention_heads", high=MAX_HEADS),
        ),
    )


def swa_named(keys: Keys, place: Place) -> LayerCache:
    """Inkling: sliding layers have swa_num_key_value_heads heads of swa_head_dim."""
    if place.word not in SLIDING_WORDS:
        return entry(keys, place)
    return entry(
        keys,
        place,
        heads=keys.maybe("swa_num_key_value_heads", high=MAX_HEADS),
        k_dim=keys.maybe("swa_head_dim"),
        queries=keys.maybe("swa_num_attention_heads", high=MAX_HEADS),
    )


def dots3_note(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """Latent everywhere; sliding layers may have swa_kv_lora_rank and swa_… of their own."""
    if place.word != words.SLIDING or "per_layer_config" in keys.raw:
        return indexed_latent(keys, place)
    swa = {
        "kv_lora_rank": keys.get("swa_kv_lora_rank") or 1024,
        "num_attention_heads": keys.get("swa_num_attention_heads") or 64,
        "qk_nope_head_dim": keys.get("swa_qk_nope_head_dim") or 192,
        "v_head_dim": keys.get("swa_v_head_dim") or 128,
    }
    whole_head = keys.get("swa_head_dim") or 256
    swa["qk_rope_head_dim"] = keys.get("swa_qk_rope_head_dim") or whole_head - 192
    return latent(keys.at(swa, "swa_"), place)


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
    pools = [("compressed", width)]
    if csa:
        pools.append(("indexer", keys.need("index_head_dim")))
    return (near, *(_pool(place, kind, dim, ratio, overlap=csa) for kind, dim in pools))


def _pool(place: Place, kind: Any, dim: Known, ratio: Known, *, overlap: bool) -> LayerCache:
    series = 2 if overlap else 1
    pending = 2 * (ratio.value - 1) * series * dim.value
    kept = 2 * ratio.value * dim.value if overlap else 0
    return LayerCache(
        layer=place.index,
        kind=kind,
        kv_heads=1,
        k_head_dim=dim.value,
        stride=ratio.value,
        replicated=True,
        states=(State(name="buffer", parts=((pending + kept, 1),), dtype="model"),),
        trace=(("k_head_dim", dim.by), ("stride", ratio.by)),
    )


def _compress_rate(keys: Keys, name: str, default: int) -> Known:
    short = "compress_rate_csa" if default == 4 else "compress_rate_hca"
    known = keys.maybe(short) or keys.section("compress_rates").maybe(name)
    return known or Known(default, f"{default} tokens an entry, the class default")


def cross(
    keys: Keys, place: Place, *, heads: Known | None = None, dim: Known | None = None
) -> LayerCache:
    """Cross-attention: K and V of the encoder's tokens, fixed once the encoder has run."""
    full = Place(place.index, words.FULL)
    return replace(entry(keys, full, heads=heads, k_dim=dim), kind="cross")

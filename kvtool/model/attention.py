"""What one attention layer caches: heads and head sizes, with the key that decided each.

Every reader takes the config as that layer sees it and the layer's place, and returns cache entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtool.model import words
from kvtool.model.keys import MAX_TOKENS, Keys, Known, refuse, whole
from kvtool.model.shape import Kind, LayerCache

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
        if keys.get("use_bidirectional_attention") in (True, "all"):  # Gemma 3 and 4
            known = Known(known.value // 2 + 1, f"{known.by} / 2 + 1, bidirectional")
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
    return split(keys.need("hidden_size"), query_heads(keys, place))


def split(hidden: Known, heads: Known) -> Known:
    """The head size that follows from a width and its query heads."""
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
    if heads.value > queries.value or queries.value % heads.value:
        raise refuse(f"{heads.by}: not a divisor of the query heads ({queries.by})")
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
    """Classes that compute the head size as hidden_size / num_attention_heads, head_dim or not."""
    k_dim = split(keys.need("hidden_size"), query_heads(keys, place))
    return (entry(keys, place, k_dim=k_dim),)


def falcon(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """num_kv_heads counts only with new_decoder_architecture; multi_query is one KV head."""
    queries = query_heads(keys, place)
    if keys.flag("new_decoder_architecture"):
        heads = keys.maybe("num_kv_heads", "n_head_kv", high=MAX_HEADS) or queries
    elif keys.flag("multi_query", default=True):
        heads = Known(1, "multi_query = true")
    else:
        heads = Known(queries.value, f"multi_query = false, so {queries.by}")
    own = derived(keys, place)[0]
    return (
        replace(
            own,
            kv_heads=heads.value,
            expanded=keys.flag("new_decoder_architecture"),
            trace=tuple((dict(own.trace) | {"kv_heads": heads.by}).items()),
        ),
    )


def gpt_bigcode(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """multi_query is one KV head; otherwise one a query head."""
    queries = query_heads(keys, place)
    single = keys.flag("multi_query", default=True)
    heads = Known(1, "multi_query = true") if single else queries
    return (entry(keys, place, heads=heads, k_dim=split(keys.need("hidden_size"), queries)),)


def gpt_bigcode_cross(keys: Keys, place: Place) -> LayerCache:
    """Cross-attention has every head, multi_query or not."""
    queries = query_heads(keys, place)
    return cross(keys, place, heads=queries, dim=split(keys.need("hidden_size"), queries))


def attn_config(keys: Keys, place: Place) -> tuple[LayerCache, ...]:
    """DBRX and MPT: KV heads stand in the nested attn_config."""
    heads = keys.section("attn_config").maybe("kv_n_heads", high=MAX_HEADS)
    queries = query_heads(keys, place)
    k_dim = split(keys.need("hidden_size"), queries)
    return (entry(keys, place, heads=heads or queries, k_dim=k_dim),)


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
    """K and V of different widths; sliding layers have twice the KV heads, or swa_… of their own.

    sliding_window_size counts the tokens before the query (configuration_mimo_v2_flash.py).
    """
    if place.word != words.SLIDING:
        return (entry(keys, place, v_dim=keys.maybe("v_head_dim")),)
    full = kv_heads(keys, place)
    doubled = Known(2 * full.value, f"twice {full.by} on sliding layers")
    sliding = entry(
        keys,
        place,
        heads=keys.maybe("swa_num_key_value_heads", high=MAX_HEADS) or doubled,
        k_dim=keys.maybe("swa_head_dim"),
        v_dim=keys.maybe("swa_v_head_dim", "v_head_dim"),
    )
    before = keys.maybe("sliding_window_size", high=MAX_TOKENS)
    if before is None:
        return (sliding,)
    trace = tuple((k, before.by if k == "window" else by) for k, by in sliding.trace)
    return (replace(sliding, window=before.value, span=before.value + 1, trace=trace),)


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


def cross(
    keys: Keys,
    place: Place,
    *,
    heads: Known | None = None,
    dim: Known | None = None,
    queries: Known | None = None,
) -> LayerCache:
    """Cross-attention: K and V of the encoder's tokens, fixed once the encoder has run."""
    full = Place(place.index, words.FULL)
    return replace(entry(keys, full, heads=heads, k_dim=dim, queries=queries), kind="cross")


def derived_cross(keys: Keys, place: Place) -> LayerCache:
    """Cross-attention of classes that compute the head size."""
    return cross(keys, place, dim=split(keys.need("hidden_size"), query_heads(keys, place)))

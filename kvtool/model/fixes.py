"""What a class does to its layers' kinds afterwards: sharing, loops, a forced last layer."""

from __future__ import annotations

from kvtool.model.keys import MAX_LAYERS, Keys, Known, refuse
from kvtool.model.words import FULL, INDEXED, NONE, Words


def full_is_indexed(kinds: Words, keys: Keys) -> Words:
    """Checkpoints that write full_attention where an indexer picks the tokens."""
    return [INDEXED if kind == FULL else kind for kind in kinds]


def last_is_full(kinds: Words, keys: Keys) -> Words:
    """Gemma 4 forces its last layer to full attention."""
    return [*kinds[:-1], FULL]


def shared_tail(kinds: Words, keys: Keys) -> Words:
    """Gemma 3n and 4: the last num_kv_shared_layers layers read an earlier layer's cache."""
    shared = keys.maybe("num_kv_shared_layers", low=0, high=MAX_LAYERS)
    count = 0 if shared is None else min(shared.value, len(kinds))
    return kinds[: len(kinds) - count] + [NONE] * count


def gemma4(kinds: Words, keys: Keys) -> Words:
    """Last layer full, then the shared tail."""
    return shared_tail(last_is_full(kinds, keys), keys)


def hrm_text(kinds: Words, keys: Keys) -> Words:
    """HRM: num_hidden_layers is a stack's, run H × (L + 1) times, unless num_layers_per_stack is
    given and the product already stands in num_hidden_layers."""
    if keys.maybe("num_layers_per_stack") is not None:
        return kinds
    times = keys.need("H_cycles").value * (keys.need("L_cycles").value + 1)
    return _repeat(
        kinds,
        Known(0, ""),
        Known(len(kinds), "num_hidden_layers"),
        Known(times, "H_cycles × (L_cycles + 1)"),
    )


def twice(kinds: Words, keys: Keys) -> Words:
    """LongCat-Flash: two attention layers in each decoder layer."""
    return [kind for kind in kinds for _ in range(2)]


def dory(kinds: Words, keys: Keys) -> Words:
    """Released lists alternate attention and mlp; recurrent layers may keep a cache per loop."""
    halved = 2 if NONE in kinds else 1
    kinds = kinds[::halved]
    if keys.get("recurrent_kv_cache_mode") != "per_loop":
        return kinds
    head = keys.need("n_input_layers", low=0)
    tail = keys.need("n_output_layers", low=0)
    start = Known(head.value // halved, head.by)
    stop = Known(len(kinds) - tail.value // halved, tail.by)
    return _repeat(kinds, start, stop, keys.need("n_recurrent_loops"))


def inkling2_loop(kinds: Words, keys: Keys) -> Words:
    """Layers loop_layer_index_start … end run loop_num_passes times, each pass with its cache."""
    loop = keys.section("loop_config")
    start = loop.maybe("core_start", low=0) or keys.need("loop_layer_index_start", low=0)
    stop = loop.maybe("core_end", low=0) or keys.need("loop_layer_index_end", low=0)
    passes = loop.maybe("num_passes") or keys.need("loop_num_passes")
    return _repeat(kinds, start, stop, passes)


def _repeat(kinds: Words, start: Known, stop: Known, passes: Known) -> Words:
    if len(kinds) * passes.value > MAX_LAYERS:
        raise refuse(f"{passes.by} makes more than {MAX_LAYERS:,} cached layers")
    core = kinds[start.value : stop.value]
    return kinds[: start.value] + core * passes.value + kinds[stop.value :]

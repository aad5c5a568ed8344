"""What a class does to its layers' kinds afterwards: sharing, loops, a forced last layer."""

from __future__ import annotations

from typing import NamedTuple

from kvtool.model.keys import MAX_LAYERS, Keys, Known, refuse
from kvtool.model.words import FULL, INDEXED, NONE


class Slot(NamedTuple):
    """One entry of the cache's list of layers: its kind, and the decoder layer that fills it."""

    word: str
    module: int


Slots = list[Slot]


def full_is_indexed(slots: Slots, keys: Keys) -> Slots:
    """Checkpoints that write full_attention where an indexer picks the tokens."""
    return [slot._replace(word=INDEXED) if slot.word == FULL else slot for slot in slots]


def last_is_full(slots: Slots, keys: Keys) -> Slots:
    """Gemma 4 forces its last layer to full attention."""
    return [*slots[:-1], slots[-1]._replace(word=FULL)]


def shared_tail(slots: Slots, keys: Keys) -> Slots:
    """Gemma 3n and 4: the last num_kv_shared_layers layers read an earlier layer's cache."""
    shared = keys.maybe("num_kv_shared_layers", low=0, high=MAX_LAYERS)
    own = len(slots) - (0 if shared is None else min(shared.value, len(slots)))
    return slots[:own] + [slot._replace(word=NONE) for slot in slots[own:]]


def gemma4(slots: Slots, keys: Keys) -> Slots:
    """Last layer full, then the shared tail."""
    return shared_tail(last_is_full(slots, keys), keys)


def hrm_text(slots: Slots, keys: Keys) -> Slots:
    """HRM: a stack is run H × (L + 1) times.

    num_hidden_layers is the stack's own count, unless num_layers_per_stack is given.
    """
    stack = keys.maybe("num_layers_per_stack", high=MAX_LAYERS)
    if stack is not None:
        slots = [Slot(slots[0].word, index) for index in range(stack.value)]
    times = keys.need("H_cycles").value * (keys.need("L_cycles").value + 1)
    whole = Known(len(slots), "num_hidden_layers")
    return _repeat(slots, Known(0, "0"), whole, Known(times, "H_cycles × (L_cycles + 1)"))


def twice(slots: Slots, keys: Keys) -> Slots:
    """LongCat-Flash: two attention layers in each decoder layer."""
    return [slot for slot in slots for _ in range(2)]


def dory(slots: Slots, keys: Keys) -> Slots:
    """Released lists alternate attention and mlp; recurrent layers may keep a cache per loop."""
    halved = 2 if any(slot.word == NONE for slot in slots) else 1
    slots = slots[::halved]
    if keys.get("recurrent_kv_cache_mode") != "per_loop":
        return slots
    head = keys.need("n_input_layers", low=0)
    tail = keys.need("n_output_layers", low=0)
    start = Known(head.value // halved, head.by)
    stop = Known(len(slots) - tail.value // halved, f"the layers less {tail.by}")
    return _repeat(slots, start, stop, keys.need("n_recurrent_loops"))


def inkling2_loop(slots: Slots, keys: Keys) -> Slots:
    """Layers loop_layer_index_start … end run loop_num_passes times, each pass with its cache."""
    loop = keys.section("loop_config")
    start = loop.maybe("core_start", low=0) or keys.need("loop_layer_index_start", low=0)
    stop = loop.maybe("core_end", low=0) or keys.need("loop_layer_index_end", low=0)
    passes = loop.maybe("num_passes") or keys.need("loop_num_passes")
    last = len(slots)  # the class slices its layers: what lies beyond them is not run
    return _repeat(
        slots,
        Known(min(start.value, last), start.by),
        Known(min(stop.value, last), stop.by),
        passes,
    )


def _repeat(slots: Slots, start: Known, stop: Known, passes: Known) -> Slots:
    """The cache's list of layers: the first pass in its place, later ones behind all others."""
    if not 0 <= start.value <= stop.value <= len(slots):
        raise refuse(f"{start.by} to {stop.by} is no part of {len(slots)} layers")
    if len(slots) * passes.value > MAX_LAYERS:
        raise refuse(f"{passes.by} makes more than {MAX_LAYERS:,} cached layers")
    core = slots[start.value : stop.value]
    return slots + core * (passes.value - 1)

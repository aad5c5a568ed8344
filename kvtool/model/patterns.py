"""Which kind each layer is, where the config leaves it to a pattern of its class.

Written as the classes of transformers 5.24.0 derive them (models/*/configuration_*.py).
"""

from __future__ import annotations

from collections.abc import Callable

from kvtool.model.keys import MAX_LAYERS, Keys, refuse
from kvtool.model.words import (
    CHUNKED,
    CONV,
    CSA,
    FULL,
    HCA,
    HYBRID,
    HYBRID_SLIDING,
    INDEXED,
    LINEAR,
    NONE,
    REFERENCE,
    SLIDING,
    SPARSE,
    Words,
    meaning,
)

Pattern = Callable[[Keys, int], Words]


def all_of(kind: str) -> Pattern:
    """Every layer the same."""
    return lambda keys, count: [kind] * count


def every(
    period: int, *, full: str = FULL, other: str = SLIDING, key: str = "", first: bool = False
) -> Pattern:
    """`full` where (i + 1) is a multiple of the period (or i, with `first`), `other` elsewhere.

    `key` names the config key that states the period; `period` is its class default.
    """

    def pattern(keys: Keys, count: int) -> Words:
        step = period
        for name in [key, f"_{key}"] if key else []:
            known = keys.maybe(name, high=MAX_LAYERS)
            step = known.value if known else step
        shift = 0 if first else 1
        if keys.log is not None:
            keys.log.append(f"one {full} layer in {step}, {other} else")
        return [other if (i + shift) % step else full for i in range(count)]

    return pattern


def last_full(pattern: Pattern) -> Pattern:
    """The same, but the last layer is full attention whatever the pattern says."""
    return lambda keys, count: [*pattern(keys, count)[:-1], FULL]


def window_or_full(keys: Keys, count: int) -> Words:
    """transformers' rule for a class without patterns: a window, a chunk size, or neither."""
    if keys.declares("sliding_window") and keys.maybe("sliding_window", low=0, high=2**40):
        return [SLIDING] * count
    if keys.declares("attention_chunk_size") and keys.maybe("attention_chunk_size", high=2**40):
        return [CHUNKED] * count
    return [FULL] * count


def above_max_window_layers(keys: Keys, count: int) -> Words:
    """Qwen2 and Qwen3: with use_sliding_window, layers i ≥ max_window_layers slide."""
    if not keys.flag("use_sliding_window") or keys.get("sliding_window") is None:
        return [FULL] * count
    start = keys.need("max_window_layers", low=0).value
    return [SLIDING if i >= start else FULL for i in range(count)]


def dots1(keys: Keys, count: int) -> Words:
    """As Qwen2, but a window alone switches it on."""
    if keys.get("sliding_window") is None:
        return [FULL] * count
    start = keys.need("max_window_layers", low=0).value
    return [SLIDING if i >= start else FULL for i in range(count)]


def qwen2_moe(keys: Keys, count: int) -> Words:
    """Even layers below max_window_layers slide, if use_sliding_window."""
    if not keys.flag("use_sliding_window"):
        return [FULL] * count
    stop = keys.need("max_window_layers", low=0).value
    return [SLIDING if (i + 1) % 2 and i < stop else FULL for i in range(count)]


def all_slide_if_used(keys: Keys, count: int) -> Words:
    """Qwen3-MoE: with use_sliding_window every layer slides."""
    used = keys.flag("use_sliding_window") and keys.get("sliding_window") is not None
    return [SLIDING if used else FULL] * count


def exaone4(keys: Keys, count: int) -> Words:
    """sliding_window_pattern is a period or a word such as 'LLLG'."""
    found = keys.find("sliding_window_pattern")
    if keys.get("sliding_window") is None or found is None or found[0] == 0:
        return [FULL] * count
    if isinstance(found[0], str):
        word = found[0]
        if not word or set(word) - set("LG"):
            raise refuse(f"{found[1]} = {word[:40]!r} is not a pattern of L and G")
        return [FULL if word[i % len(word)] == "G" else SLIDING for i in range(count)]
    return every(4, key="sliding_window_pattern")(keys, count)


def cohere2_moe(keys: Keys, count: int) -> Words:
    """The dense prefix and the MoE layers count their periods apart."""
    dense = keys.maybe("first_k_dense_replace", low=0)
    prefix = min(count, dense.value if dense else 0)
    head = every(1, key="prefix_dense_sliding_window_pattern")(keys, prefix)
    return head + every(4, key="sliding_window_pattern")(keys, count - prefix)


def no_rope_chunks(keys: Keys, count: int) -> Words:
    """Llama 4: layers with RoPE are chunked, NoPE layers (0 in the list) are full."""
    ropes = keys.numbers("no_rope_layers", high=1)
    if not ropes:
        step = keys.need("no_rope_layer_interval").value
        ropes = [int((i + 1) % step != 0) for i in range(count)]
    chunked = keys.get("attention_chunk_size") is not None
    return [CHUNKED if rope and chunked else FULL for rope in _at_least(ropes, count)]


def no_rope_windows(keys: Keys, count: int) -> Words:
    """SmolLM3: NoPE layers slide, and only with use_sliding_window."""
    if not keys.flag("use_sliding_window") or keys.get("sliding_window") is None:
        return [FULL] * count
    ropes = keys.numbers("no_rope_layers", high=1)
    if ropes is None:
        step = keys.need("no_rope_layer_interval").value
        ropes = [int((i + 1) % step != 0) for i in range(count)]
    return [FULL if rope else SLIDING for rope in _at_least(ropes, count)]


def _at_least(items: list[int], count: int) -> list[int]:
    if len(items) < count:
        raise refuse(f"no_rope_layers has {len(items)} entries for {count} layers")
    return items[:count]


def where(condition: Callable[[int, int], bool], *, yes: str = FULL, no: str = SLIDING) -> Pattern:
    """`yes` where condition(i, count) holds."""
    return lambda keys, count: [yes if condition(i, count) else no for i in range(count)]


def cycle(*kinds: str) -> Pattern:
    """The kinds over and over."""
    return lambda keys, count: [kinds[i % len(kinds)] for i in range(count)]


def indices(name: str, *, yes: str = FULL, no: str = LINEAR, absent: str) -> Pattern:
    """`yes` on the layers that the key lists; `absent` everywhere if there is no list."""

    def pattern(keys: Keys, count: int) -> Words:
        chosen = keys.numbers(name)
        if chosen is None:
            return [absent] * count
        return [yes if i in set(chosen) else no for i in range(count)]

    return pattern


def jamba(keys: Keys, count: int) -> Words:
    """Attention where i % attn_layer_period == attn_layer_offset, mamba elsewhere."""
    period = keys.need("attn_layer_period").value
    offset = keys.need("attn_layer_offset", low=0).value
    return [FULL if i % period == offset else LINEAR for i in range(count)]


def zamba(keys: Keys, count: int) -> Words:
    """Zamba: a shared attention block beside the mamba layer at the third and then every period."""
    period = keys.need("attn_layer_period").value
    offset = keys.need("attn_layer_offset", low=0).value
    tail = [HYBRID if i % period == offset else LINEAR for i in range(max(count - 3, 0))]
    return [LINEAR, LINEAR, HYBRID, *tail][:count]


def zamba2(keys: Keys, count: int) -> Words:
    """Zamba2: hybrid_layer_ids, or the 54 layers of the released 2.7B model."""
    chosen = keys.numbers("hybrid_layer_ids")
    if chosen is None:
        chosen = [6, 12, 18, 24, 30, 36, 42, 47, 51]
        if count != 54:
            raise refuse(f"the config lists no kinds for its {count} layers (layers_block_type)")
    return [HYBRID if i in set(chosen) else LINEAR for i in range(count)]


REFORMER = ["local", "lsh"] * 3
"""ReformerConfig's attn_layers where a config has none."""


def reformer(keys: Keys, count: int) -> Words:
    """Reformer has as many layers as attn_layers has entries."""
    found = keys.words("attn_layers")
    return [FULL] * len(found[0] if found else REFORMER)


def block_cycle(keys: Keys, count: int) -> Words:
    """RecurrentGemma: block_types repeats; its attention is always local."""
    found = keys.words("block_types") or (["recurrent", "recurrent", "attention"], "its class")
    kinds = [SLIDING if word == FULL else word for word in meaning(*found)]
    return [kinds[i % len(kinds)] for i in range(count)] if kinds else []


def kimi_linear(keys: Keys, count: int) -> Words:
    """linear_attn_config lists its layers from 1; otherwise every fourth layer but the first."""
    section = keys.section("linear_attn_config")
    full, kda = section.numbers("full_attn_layers"), section.numbers("kda_layers")
    if full is None or kda is None:
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    kinds = {i: FULL for i in full} | {i: LINEAR for i in kda}
    missing = [i for i in range(1, count + 1) if i not in kinds]
    if missing:
        raise refuse(f"linear_attn_config names no kind for layer {missing[0]} (counted from 1)")
    return [kinds[i] for i in range(1, count + 1)]


def override_pattern(keys: Keys, count: int) -> Words:
    """Nemotron-H: a word with M for mamba, * for attention, - for MLP and E for MoE."""
    found = keys.find("hybrid_override_pattern")
    if found is None:
        return [LINEAR, NONE, FULL, NONE]
    if not isinstance(found[0], str) or len(found[0]) > MAX_LAYERS:
        raise refuse(f"{found[1]} is not a word")
    return meaning(list(found[0]), found[1])


def attention_types(keys: Keys, count: int) -> Words:
    """GPT-Neo: [[["global", "local"], 12]] repeats the kinds 12 times."""
    listed_kinds = keys.words("attention_layers")
    if listed_kinds is not None and listed_kinds[0]:
        return meaning(*listed_kinds)
    out: Words = []
    types = keys.get("attention_types") or [[["global", "local"], 12]]
    for item in types if isinstance(types, list) else [None]:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], list)):
            raise refuse("attention_types is not a list of [kinds, repeats]")
        repeats = item[1] if isinstance(item[1], int) and 0 < item[1] <= MAX_LAYERS else 0
        if len(item[0]) * repeats > MAX_LAYERS or not all(isinstance(w, str) for w in item[0]):
            raise refuse("attention_types is not a list of [kinds, repeats]")
        out += meaning(item[0], "attention_types") * repeats
    if len(out) != count:
        raise refuse(f"attention_types describes {len(out)} layers of {count}")
    return out


def minimax_types(keys: Keys, count: int) -> Words:
    """attn_type_list: 1 is attention, 0 is lightning attention; else they alternate."""
    types = keys.numbers("attn_type_list", high=1)
    if types is None:
        return [FULL if (i + 1) % 2 else LINEAR for i in range(count)]
    if len(types) < count:
        raise refuse(f"attn_type_list has {len(types)} entries for {count} layers")
    return [FULL if kind else LINEAR for kind in types[:count]]


def sparse_frequency(keys: Keys, count: int) -> Words:
    """MiniMax-M3: sparse_attention_config.sparse_attention_freq marks the indexed layers."""
    marks = keys.section("sparse_attention_config").numbers("sparse_attention_freq", high=1)
    if marks is None:
        return [FULL] * count
    if len(marks) < count:
        raise refuse(f"sparse_attention_freq has {len(marks)} entries for {count} layers")
    return [SPARSE if mark else FULL for mark in marks[:count]]


def compress_ratios(keys: Keys, count: int) -> Words:
    """DeepSeek-V4: 0 slides, 4 is compressed sparse, 128 heavily compressed attention."""
    ratios = keys.numbers("compress_ratios")
    if ratios is None:
        return [HCA] * min(count, 2) + [CSA if i % 2 else HCA for i in range(max(count - 2, 0))]
    if len(ratios) < count:
        raise refuse(f"compress_ratios has {len(ratios)} entries for {count} layers")
    kinds = {0: SLIDING, 4: CSA, 128: HCA}
    strange = [ratio for ratio in ratios[:count] if ratio not in kinds]
    if strange:
        raise refuse(f"compress_ratios: {strange[0]} is not 0, 4 or 128")
    return [kinds[ratio] for ratio in ratios[:count]]


def local_layer_ids(keys: Keys, count: int) -> Words:
    """Inkling: the listed layers slide; else all but every sixth."""
    local = keys.numbers("local_layer_ids")
    chosen = set(local) if local is not None else {i for i in range(count) if (i + 1) % 6}
    return [HYBRID_SLIDING if i in chosen else HYBRID for i in range(count)]


def reference_window(keys: Keys, count: int) -> Words:
    """Unlimited-OCR: the prompt is kept whole, only generated tokens slide."""
    return [REFERENCE if keys.get("sliding_window") is not None else FULL] * count


def lfm3(keys: Keys, count: int) -> Words:
    """LFM3: full at i % 4 == 2, sliding at multiples of four but the first, convolutions else."""
    kinds = {2: FULL, 0: SLIDING}
    return [kinds.get(i % 4, CONV) if i else CONV for i in range(count)]


def dots3_note(keys: Keys, count: int) -> Words:
    """Indexed latent attention on layers 0, 1 and every fourth (i % 4 == 1), sliding elsewhere."""
    sliding = keys.flag("use_sliding_window", default=True)
    return [INDEXED if not sliding or i < 2 or i % 4 == 1 else SLIDING for i in range(count)]

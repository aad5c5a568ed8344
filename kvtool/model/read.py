"""Read a config into a ModelShape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvtool.model import words as w
from kvtool.model.about import about_context, about_dtypes
from kvtool.model.attention import Place
from kvtool.model.families import FAMILIES, PLAIN, Family, family_of
from kvtool.model.fixes import Slot, Slots
from kvtool.model.keys import MAX_LAYERS, Keys, refuse
from kvtool.model.nested import Part, check_known, language_part
from kvtool.model.shape import LayerCache, ModelShape

HYBRID_WORDS = {w.HYBRID: w.FULL, w.HYBRID_SLIDING: w.SLIDING}


def read_model(
    raw: Mapping[str, Any], table: Mapping[str, Any], *, assume: str | None = None
) -> ModelShape:
    """A config as its cache sees it.

    `table` is presets/class_defaults.json's `types`. With assume='full', every layer is taken to be
    plain full attention, whatever the model type. Raises KvtoolError, naming what is not understood.
    """
    if assume == "full":
        part, family = _assumed(raw, table), PLAIN
        slots = [Slot(w.FULL, i) for i in range(_count(part.keys, family))]
        by = "--assume full"
    else:
        part = language_part(raw, table)
        check_known(part.keys.model_type, table)
        family = family_of(part.keys.model_type)
        _refuse_what_does_not_generate(part, family, table)
        slots, by = _slots(part.keys, family)
    layers = _entries(part, family, slots)
    if not layers:
        raise refuse(f"{part.keys.model_type}: no layer of this config keeps a cache")
    return _shape(part, family, slots, by, layers, assume)


def _shape(
    part: Part,
    family: Family,
    slots: Slots,
    by: str,
    layers: tuple[LayerCache, ...],
    assume: str | None,
) -> ModelShape:
    dtype, kv_dtype, notes = about_dtypes(part)
    context, stated = about_context(part)
    crosses = any(entry.kind == "cross" for entry in layers)
    return ModelShape(
        model_type=part.keys.model_type,
        num_layers=len(slots),
        num_modules=1 + max(slot.module for slot in slots),
        layers_by=by,
        layers=layers,
        query_heads=max(entry.query_heads for entry in layers),
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_context=context,
        max_context_stated=stated and not family.relative,
        positions_end=not family.relative and any(entry.kind != "linear" for entry in layers),
        encoder_tokens=family.encoder(part.keys, part.above) if crosses else None,
        rows_per_sequence=_codebooks(part),
        stated_kv_heads=_stated_kv_heads(part),
        notes=(*notes, family.left_out) if family.left_out else notes,
        assumed=assume,
    )


def _stated_kv_heads(part: Part) -> int | None:
    value = part.keys.get("num_key_value_heads")
    return value if isinstance(value, int) else None


def _assumed(raw: Mapping[str, Any], table: Mapping[str, Any]) -> Part:
    part = language_part({"model_type": "unknown", **raw}, table, refusing=False)
    known = Keys(
        raw=part.keys.raw,
        model_type=part.keys.model_type,
        renamed={**part.keys.renamed, **_SPELLINGS},
        path=part.keys.path,
    )
    return Part(known, part.above)


_SPELLINGS = {
    "n_layer": "num_hidden_layers", "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers", "n_embd": "hidden_size", "d_model": "hidden_size",
    "n_head": "num_attention_heads", "n_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}  # fmt: skip


def _refuse_what_does_not_generate(part: Part, family: Family, table: Mapping[str, Any]) -> None:
    """Encoders and vision towers keep no KV cache, unless they are run as decoders."""
    kind = part.keys.model_type
    names = part.anywhere("architectures")
    heads = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "GenerationDecoder")
    generates = isinstance(names, list) and any(
        isinstance(name, str) and name.endswith(heads) for name in names
    )
    known = kind in table and not family.encoder_only
    if part.keys.flag("is_decoder") or generates or (known and table[kind].get("generates")):
        return
    if kind not in table or (kind in FAMILIES and not family.encoder_only):
        return
    raise refuse(
        f"{kind} is an encoder: it keeps no KV cache",
        "if it is run as a decoder, its config says is_decoder: true",
    )


def _count(keys: Keys, family: Family) -> int:
    return keys.need(*family.layers, high=MAX_LAYERS).value


def _slots(keys: Keys, family: Family) -> tuple[Slots, str]:
    """Each layer's kind and module, and the keys that decided them."""
    log: list[str] = []
    watched = replace(keys, log=log)
    count = _count(watched, family) if family.layers else None
    found = w.listed(watched, count) if family.lists else None
    kinds = found[0] if found else family.pattern(watched, count or 0)
    slots = [Slot(kind, index) for index, kind in enumerate(kinds)]
    slots = family.fix(slots, watched) if family.fix else slots
    if not slots:
        raise refuse(f"{keys.model_type}: the config describes no layers")
    if not found and family.pattern is not PLAIN.pattern:
        log.append(f"the pattern of {keys.model_type}")
    return slots, "; ".join(dict.fromkeys(log))[:300]


def _entries(part: Part, family: Family, slots: Slots) -> tuple[LayerCache, ...]:
    overrides = _per_layer_config(part.keys)
    crossing = family.cross if _has_cross(part, family) else None
    path = f"{part.keys.path}per_layer_config[layer]."
    out: list[LayerCache] = []
    for index, slot in enumerate(slots):
        keys = part.keys.at(overrides.get(slot.module, {}), path)
        own = list(_layer(keys, family, Place(index, slot.word)))
        if crossing is not None:
            own.append(crossing(keys, Place(index, w.FULL)))
        out += [replace(entry, module=slot.module) for entry in own]
    return tuple(out)


def _layer(keys: Keys, family: Family, place: Place) -> tuple[LayerCache, ...]:
    if place.word == w.NONE:
        return ()
    stateful = place.word in (w.LINEAR, w.CONV) or place.word in HYBRID_WORDS
    attends = HYBRID_WORDS.get(place.word, place.word)
    if stateful and (family.state is None or place.word not in family.state_words):
        raise refuse(f"{keys.model_type}: {place.word} layers are not understood in this type")
    if attends not in (w.LINEAR, w.CONV) and attends not in family.words:
        raise refuse(f"{keys.model_type}: {place.word} layers are not understood in this type")
    entries: tuple[LayerCache, ...] = ()
    if attends not in (w.LINEAR, w.CONV):
        entries = family.attention(keys, place)
    if stateful and family.state is not None:
        entries = (*entries, family.state(keys, place))
    return entries


def _has_cross(part: Part, family: Family) -> bool:
    """Whether decoder layers attend to an encoder; a type that cannot be read so is refused."""
    flagged = part.keys.flag("add_cross_attention") or family.crosses
    crosses = flagged or _behind_an_encoder(part)
    if crosses and family.cross is None:
        raise refuse(f"{part.keys.model_type}: its cross-attention is not understood")
    return crosses


def _behind_an_encoder(part: Part) -> bool:
    """is_encoder_decoder at any level, in the file or by class; the file's word counts first."""
    stated = [level.get("is_encoder_decoder") for level in (part.keys.raw, *part.above)]
    given = [flag for flag in stated if isinstance(flag, bool)]
    if given:
        return any(given) or part.composite
    return part.composite or part.encoded or part.keys.flag("is_encoder_decoder")


def _codebooks(part: Part) -> int:
    """MusicGen decodes num_codebooks rows of input_ids for each sequence."""
    if not part.keys.model_type.startswith("musicgen"):
        return 1
    return part.keys.need("num_codebooks").value


def _per_layer_config(keys: Keys) -> dict[int, dict[str, Any]]:
    """Overrides by layer index, as transformers' heterogeneous configs write them."""
    raw = keys.raw.get("per_layer_config")
    if raw is None:
        return {}
    if not isinstance(raw, Mapping) or len(raw) > MAX_LAYERS:
        raise refuse("per_layer_config is not an object of layers")
    out = {}
    for index, override in raw.items():
        name = str(index)
        number = name.isascii() and name.isdigit() and len(name) <= 6
        if not number or not isinstance(override, Mapping):
            raise refuse(f"per_layer_config: {str(index)[:20]!r} is not a layer's overrides")
        if override.get("skip"):
            raise refuse(f"per_layer_config.{index}.skip is not understood")
        out[int(index)] = dict(override)
    return out

"""Read a config into a ModelShape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvtool.model import words as w
from kvtool.model.about import about_context, about_dtypes, encoder_tokens
from kvtool.model.attention import Place
from kvtool.model.families import PLAIN, Family, family_of
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
        part = _assumed(raw, table)
        family = PLAIN
    else:
        part = language_part(raw, table)
        check_known(part.keys.model_type, table)
        family = family_of(part.keys.model_type)
        family = _like(family)
        _refuse_what_is_not_a_decoder(part, family, table)
    keys = part.keys
    kinds, by = (
        _kinds(keys, family) if not assume else ([w.FULL] * _count(keys, family), "--assume")
    )
    layers = _entries(part, family, kinds)
    if not layers:
        raise refuse(f"{keys.model_type}: no layer of this config keeps a cache")
    dtype, kv_dtype, notes = about_dtypes(part)
    context, stated = about_context(part)
    return ModelShape(
        model_type=keys.model_type,
        num_layers=len(kinds),
        layers_by=by,
        layers=layers,
        query_heads=max(entry.query_heads for entry in layers),
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_context=context,
        max_context_stated=stated,
        encoder_tokens=encoder_tokens(part, layers),
        rows_per_sequence=_codebooks(part),
        notes=notes,
        assumed=assume,
    )


def _assumed(raw: Mapping[str, Any], table: Mapping[str, Any]) -> Part:
    part = language_part({"model_type": "unknown", **raw}, table)
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


def _like(family: Family) -> Family:
    """A remote-code type takes what it does not say from the family it is like."""
    if not family.like:
        return family
    model = family_of(family.like)
    if family.attention is not PLAIN.attention:
        model = replace(model, attention=family.attention)
    return replace(model, layers=family.layers) if family.layers != PLAIN.layers else model


def _refuse_what_is_not_a_decoder(part: Part, family: Family, table: Mapping[str, Any]) -> None:
    kind = part.keys.model_type
    names = part.anywhere("architectures")
    generates = isinstance(names, list) and any(
        isinstance(n, str)
        and ("CausalLM" in n or "LMHead" in n or "Generation" in n or "Decoder" in n)
        for n in names
    )
    if family.encoder_only and not (part.keys.flag("is_decoder") or generates):
        raise refuse(
            f"{kind} is an encoder: it keeps no KV cache",
            "if it is run as a decoder, its config says is_decoder: true",
        )


def _count(keys: Keys, family: Family) -> int:
    return keys.need(*family.layers, high=MAX_LAYERS).value


def _kinds(keys: Keys, family: Family) -> tuple[w.Words, str]:
    """Each layer's kind, and the keys that decided them."""
    log: list[str] = []
    watched = replace(keys, log=log)
    count = _count(watched, family) if family.layers else None
    found = w.listed(watched, count) if family.lists else None
    kinds = found[0] if found else family.pattern(watched, count or 0)
    kinds = family.fix(kinds, watched) if family.fix else kinds
    if not found and family.pattern is not PLAIN.pattern:
        log.append(f"the pattern of {keys.model_type}")
    return kinds, "; ".join(dict.fromkeys(log))[:300]


def _entries(part: Part, family: Family, kinds: w.Words) -> tuple[LayerCache, ...]:
    overrides = _per_layer_config(part.keys)
    crossing = family.cross if _has_cross(part, family) else None
    out: list[LayerCache] = []
    for index, kind in enumerate(kinds):
        keys = part.keys.at(overrides.get(index, {}), f"{part.keys.path}per_layer_config.{index}.")
        out += _layer(keys, family, Place(index, kind))
        if crossing is not None:
            out.append(crossing(keys, Place(index, w.FULL)))
    return tuple(out)


def _layer(keys: Keys, family: Family, place: Place) -> tuple[LayerCache, ...]:
    if place.word == w.NONE:
        return ()
    hybrid = place.word in HYBRID_WORDS
    entries: tuple[LayerCache, ...] = ()
    if place.word not in (w.LINEAR, w.CONV):
        entries = family.attention(keys, place)
    if hybrid or place.word in (w.LINEAR, w.CONV):
        if family.state is None:
            raise refuse(f"{keys.model_type}: its {place.word} layers are not understood")
        entries = (*entries, family.state(keys, place))
    return entries


def _has_cross(part: Part, family: Family) -> bool:
    if family.cross is None:
        return False
    if part.keys.flag("add_cross_attention"):
        return True
    stated = [level.get("is_encoder_decoder") for level in (part.keys.raw, *part.above)]
    given = [flag for flag in stated if isinstance(flag, bool)]
    composite = any(name in level for level in part.above for name in ("encoder", "text_encoder"))
    return any(given) or composite or (not given and part.keys.flag("is_encoder_decoder"))


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
        if not str(index).isdigit() or not isinstance(override, Mapping):
            raise refuse(f"per_layer_config: {str(index)[:20]!r} is not a layer's overrides")
        if override.get("skip"):
            raise refuse(f"per_layer_config.{index}.skip is not understood")
        out[int(index)] = dict(override)
    return out

"""Which part of a config is the language model, and which class's defaults stand behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtool.errors import did_you_mean
from kvtool.model.families import FAMILIES, family_of
from kvtool.model.keys import Keys, refuse

NESTED = (
    "text_config", "llm_config", "language_config", "language_model_config", "thinker_config",
    "decoder", "decoder_config", "generator", "llm", "text_model",
)  # fmt: skip
MARKS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "n_embd", "d_model")
MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Part:
    """The language model's keys, and the levels of the config above them, outermost first."""

    keys: Keys
    above: tuple[Mapping[str, Any], ...]
    composite: bool = False
    """True if a level above holds an encoder of its own beside the decoder."""
    encoded: bool = False
    """True if the class of a level above is an encoder-decoder."""

    def anywhere(self, *names: str) -> Any:
        """A key that may stand at the language model's level or above it, such as dtype."""
        for level in (self.keys.raw, *reversed(self.above)):
            for name in names:
                if level.get(name) is not None:
                    return level[name]
        return None


def language_part(
    raw: Mapping[str, Any], table: Mapping[str, Any], *, refusing: bool = True
) -> Part:
    """Follow text_config and its like down to the level that has layers and heads.

    A nested config without a model_type, or with one that transformers does not know, takes the
    type that its parent's class names.
    """
    model_type = type_of(raw, None)
    above: list[Mapping[str, Any]] = []
    path = ""
    composite = encoded = False
    for _ in range(MAX_DEPTH):
        refused = family_of(model_type).refused
        if refused and refusing:
            raise refuse(
                f"{model_type}: {refused}", "kvtool sizes caches of keys, values and states"
            )
        found = _step(raw, table.get(model_type, {}))
        if found is None:
            break
        name, inner, default_type = found
        above.append(raw)
        row = table.get(model_type, {})
        beside = {*raw, *row.get("nested", {})} & {"encoder", "text_encoder"}
        composite = composite or bool(beside)
        encoded = encoded or bool(row.get("defaults", {}).get("is_encoder_decoder"))
        path += f"{name}."
        raw, model_type = inner, type_of(inner, default_type, table)
    return Part(_keys(raw, model_type, table, path), tuple(above), composite, encoded)


def type_of(
    raw: Mapping[str, Any], default: str | None, table: Mapping[str, Any] | None = None
) -> str:
    """The model_type of a level."""
    stated = raw.get("model_type")
    if stated is None or stated == "":
        if default is None:
            raise refuse(
                "the config has no model_type",
                "add it, or size the config as plain attention with --assume full",
            )
        return default
    if not isinstance(stated, str) or len(stated) > 200:
        raise refuse("model_type is not a word")
    if default is not None and table is not None and stated not in table and stated not in FAMILIES:
        return default
    return stated


def _step(
    raw: Mapping[str, Any], row: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any], str | None] | None:
    nested = row.get("nested", {})
    for name in NESTED:
        inner = raw.get(name)
        if isinstance(inner, Mapping) and (name in nested or _has_marks(inner)):
            return name, inner, nested.get(name, {}).get("model_type")
        if inner is not None and name in nested:
            raise refuse(f"{name} is not an object")
    for name in NESTED:
        if name in nested and not _has_marks(raw):
            return name, nested[name].get("init", {}), nested[name]["model_type"]
        if name in nested:  # an older config keeps the language model's keys at the top
            return "", {**raw, "model_type": nested[name]["model_type"]}, None
    return None


def _has_marks(raw: Mapping[str, Any]) -> bool:
    return any(mark in raw for mark in MARKS) or any(name in raw for name in NESTED)


def _keys(raw: Mapping[str, Any], model_type: str, table: Mapping[str, Any], path: str) -> Keys:
    family = FAMILIES.get(model_type)
    like = family.like if family else ""
    row = table.get(like or model_type, {})
    renamed = dict(family.renamed) if family and like else dict(row.get("renamed", {}))
    declared = frozenset(row.get("defaults", {}))
    return Keys(
        raw=raw,
        model_type=model_type,
        defaults={} if like else row.get("defaults", {}),
        declared=declared | frozenset(renamed.values()) if declared else declared,
        renamed=renamed,
        path=path.replace("..", ".").lstrip("."),
    )


def check_known(model_type: str, table: Mapping[str, Any]) -> None:
    """Refuse a type that neither transformers nor kvtool knows."""
    if model_type in table or model_type in FAMILIES:
        return
    shown = model_type[:60]
    raise refuse(
        f"model_type '{shown}' is not known: its cache layout is not understood."
        + did_you_mean(shown, [*table, *FAMILIES]),
        "size it as plain attention over every layer with --assume full",
    )

"""A config as recipes read it: the language model's keys with all defaults of its class, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvtool import catalog
from kvtool.model.keys import Keys, refuse
from kvtool.model.nested import Part as Level
from kvtool.model.nested import language_part, type_of
from kvtool.model.shape import LayerCache, ModelShape

Flag = bool | str
"""Yes, no, or the key that says so."""

FIXED = {"mllama": False, "mllama_text_model": False, "mt5": True, "t5": True, "umt5": True}
"""Types that tie the head, or do not, whatever the config says."""
HEAD_INSIDE = frozenset({"llama4"})
"""Outer types whose language model brings its own head, and ties it as its own config says."""
TIED_BY_EITHER = frozenset({"glm4v", "llava", "qwen2_5_vl", "qwen2_vl"})
"""Outer types that take tie_word_embeddings from the language model's config if it is set there. All other
outer types look at their own level alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer: where it stands, and what it caches."""

    index: int
    count: int
    entries: tuple[LayerCache, ...]

    def entry(self, *kinds: str) -> LayerCache | None:
        """The first thing of these kinds that it caches; of any kind where none is named."""
        return next((one for one in self.entries if not kinds or one.kind in kinds), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A config and what it caches."""

    level: Level
    keys: Keys
    shape: ModelShape

    @property
    def hidden(self) -> int:
        """Width of the hidden state."""
        return self.size("hidden_size")

    def size(self, *names: str) -> int:
        """A size of the language model; its absence is an error that names the key."""
        return self.keys.need(*names).value

    def number(self, *names: str, absent: int = 0) -> int:
        """A size or a count that may be 0, absent or null."""
        known = self.keys.maybe(*names, low=0)
        return absent if known is None else known.value

    def flag(self, flag: Flag) -> bool:
        """Whether a row's switch is on."""
        return flag if isinstance(flag, bool) else self.keys.flag(flag)

    @property
    def outermost(self) -> Keys:
        """The keys of the whole model, with the defaults of its class."""
        return _with_defaults(self.level.above[0]) if self.level.above else self.keys

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding table."""
        whole = self.outermost
        if whole.model_type in FIXED:
            return FIXED[whole.model_type]
        own = self.keys.flag("tie_word_embeddings")
        if not self.level.above or whole.model_type in HEAD_INSIDE:
            return own
        passed_on = whole.model_type in TIED_BY_EITHER and own
        return whole.flag("tie_word_embeddings") or passed_on

    def layers(self) -> Iterator[Layer]:
        """Decoder layers in order; one that caches nothing has no entries."""
        by_module: dict[int, list[LayerCache]] = {}
        for one in self.shape.layers:
            by_module.setdefault(one.module, []).append(one)
        count = max(self.shape.num_modules, max(by_module, default=-1) + 1)
        for index in range(count):
            yield Layer(index=index, count=count, entries=tuple(by_module.get(index, ())))


def model_of(config: Mapping[str, Any], shape: ModelShape) -> Model:
    """`shape` is read from the same config."""
    level = language_part(config, catalog.class_defaults()["types"])
    own = level.keys
    more = catalog.weight_defaults().get(own.model_type, {})
    return Model(
        level=level,
        keys=replace(own, raw=_stated(level), defaults={**more, **own.defaults}),
        shape=shape,
    )


def _stated(level: Level) -> Mapping[str, Any]:
    """The language model's keys; what the class around it sets, where the config leaves it out."""
    name = level.keys.path.rpartition(".")[0].rpartition(".")[2]
    if not level.above or not name or level.above[-1].get(name) is not None:
        return level.keys.raw
    return _set_by_class(level.above[-1], name) or level.keys.raw


def nested(model: Model, name: str) -> Mapping[str, Any] | None:
    """A nested config such as vision_config as the file has it; None if it is absent or null."""
    found = next((raw[name] for raw in model.level.above if raw.get(name) is not None), None)
    if found is not None and not isinstance(found, Mapping):
        raise refuse(f"{name} is not an object")
    return found


def nested_keys(model: Model, name: str, kind: str, *, any_type: bool = False) -> Keys:
    """A nested config with the defaults of its class: that of `kind`, whatever type the config names,
    unless the class of the whole model allows `any_type`. An absent one is what that class sets."""
    raw = nested(model, name)
    if raw is None:
        raw = _set_by_class(model.outermost.raw, name)
    elif any_type:
        kind = type_of(raw, kind)
    return _with_defaults(raw, kind, f"{name}.")


def _set_by_class(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What a class gives a nested config that is left out."""
    given = catalog.weight_defaults().get(type_of(raw, ""), {}).get(name, {})
    return given if isinstance(given, Mapping) else {}


def _with_defaults(raw: Mapping[str, Any], kind: str | None = None, path: str = "") -> Keys:
    kind = kind or type_of(raw, None)
    return Keys(
        raw=raw,
        model_type=kind,
        defaults=catalog.weight_defaults().get(kind, {}),
        renamed=catalog.class_defaults()["types"].get(kind, {}).get("renamed", {}),
        path=path,
    )

"""A config as recipes read it: the language model's keys with all defaults of its class, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvtool import catalog
from kvtool.model.keys import Keys
from kvtool.model.nested import Part as Level
from kvtool.model.nested import language_part
from kvtool.model.shape import LayerCache, ModelShape

Flag = bool | str
"""Yes, no, or the key that says so."""


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
    def tied(self) -> bool:
        """Whether the head is the embedding table: the outermost config says so, or its class."""
        outer = self.level.above[0] if self.level.above else self.keys.raw
        stated = outer.get("tie_word_embeddings", self.keys.raw.get("tie_word_embeddings"))
        if stated is not None:
            return bool(stated)
        kind = str(outer.get("model_type", self.keys.model_type))
        rows = catalog.weight_defaults()
        return bool(rows.get(kind, rows.get(self.keys.model_type, {})).get("tie_word_embeddings"))

    def layers(self) -> Iterator[Layer]:
        """Decoder layers in order; one that caches nothing has no entries."""
        by_module: dict[int, list[LayerCache]] = {}
        for one in self.shape.layers:
            by_module.setdefault(one.module, []).append(one)
        count = max(self.shape.num_modules, max(by_module, default=-1) + 1)
        for index in range(count):
            yield Layer(index=index, count=count, entries=tuple(by_module.get(index, ())))

    def outer(self, *names: str) -> Any:
        """A key of the whole model: of the outermost level first."""
        for raw in (*self.level.above, self.keys.raw):
            for name in names:
                if raw.get(name) is not None:
                    return raw[name]
        return None


def model_of(config: Mapping[str, Any], shape: ModelShape) -> Model:
    """`shape` is read from the same config."""
    level = language_part(config, catalog.class_defaults()["types"])
    own = level.keys
    more = catalog.weight_defaults().get(own.model_type, {})
    return Model(level=level, keys=replace(own, defaults={**more, **own.defaults}), shape=shape)


def nested_keys(model: Model, name: str, default_type: str) -> Keys:
    """A nested config, such as vision_config, with the defaults of its class; `default_type` is the class
    that transformers gives it where it names none. An absent one is all defaults."""
    raw = next((raw[name] for raw in model.level.above if isinstance(raw.get(name), Mapping)), {})
    stated = raw.get("model_type")
    kind = stated if isinstance(stated, str) and stated in catalog.weight_defaults() else default_type
    return Keys(
        raw=raw,
        model_type=kind,
        defaults=catalog.weight_defaults().get(kind, {}),
        path=f"{name}.",
    )

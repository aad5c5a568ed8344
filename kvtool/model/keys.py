"""A config read key by key: the file first, then the defaults of its class, each with its origin.

config.json is a difference against the defaults of a class in transformers, so an absent key is
not an absent fact. presets/class_defaults.json holds, for each model_type, the keys that decide the
cache, the renamed attributes (`n_layer` for `num_hidden_layers`) and the types of nested configs.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtool.errors import KvtoolError

MAX_LAYERS = 2_000
MAX_SIZE = 2**20
MAX_TOKENS = 2**40


@dataclass(frozen=True, slots=True)
class Known:
    """A whole number and the key that decided it."""

    value: int
    by: str


def refuse(message: str, hint: str = "") -> KvtoolError:
    """The error for a config that says something kvtool cannot size."""
    return KvtoolError(
        message,
        hint or "correct the config, or size it as plain attention with --assume full",
        code="config_not_understood",
    )


@dataclass(frozen=True, slots=True)
class Keys:
    """One level of a config with its class defaults. Reads check types and ranges."""

    raw: Mapping[str, Any]
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    origin: str = "class default"
    declared: frozenset[str] = frozenset()
    """Keys that the class knows; empty where there is no class to ask."""
    own: frozenset[str] = frozenset()
    """Keys of `raw` that one layer sets for itself, and how their origin is written."""
    own_path: str = ""
    log: list[str] | None = None
    """Where `find` writes what it found, for numbers that no single key decides."""

    def spellings(self, name: str) -> list[str]:
        """The key itself and what its class renames it to or from."""
        names = [name]
        if name in self.renamed:
            names.append(self.renamed[name])
        names += [old for old, new in self.renamed.items() if new == name and old not in names]
        return names

    def find(self, *names: str) -> tuple[Any, str] | None:
        """(value, origin) of the first key present; an explicit null ends the search with None."""
        found = self._find(*names)
        if found is not None and self.log is not None:
            value, by = found
            self.log.append(by if isinstance(value, list | Mapping) else f"{by} = {value}")
        return found

    def _find(self, *names: str) -> tuple[Any, str] | None:
        spelled = [s for name in names for s in self.spellings(name)]
        given = [s for s in spelled if s in self.raw]
        for s in given:
            if self.raw[s] is not None:
                return self.raw[s], f"{self.own_path if s in self.own else self.path}{s}"
        if given:
            return None
        for s in spelled:
            if self.defaults.get(s) is not None:
                return self.defaults[s], f"{self.origin} of {self.model_type}, {s}"
        return None

    def get(self, *names: str) -> Any:
        """The value alone, or None."""
        found = self.find(*names)
        return None if found is None else found[0]

    def stated(self, name: str) -> bool:
        """True if the file itself gives the key a value."""
        return any(self.raw.get(s) is not None for s in self.spellings(name))

    def declares(self, name: str) -> bool:
        """True if the class knows the key at all; every key counts where there is no class."""
        return not self.declared or any(s in self.declared for s in self.spellings(name))

    def maybe(self, *names: str, low: int = 1, high: int = MAX_SIZE) -> Known | None:
        """A whole number in range, or None if absent or null."""
        found = self.find(*names)
        if found is None:
            return None
        value, by = found
        return Known(whole(value, by, low=low, high=high), f"{by} = {value}")

    def need(self, *names: str, low: int = 1, high: int = MAX_SIZE) -> Known:
        """A whole number in range; its absence is an error that names the key."""
        known = self.maybe(*names, low=low, high=high)
        if known is None:
            raise refuse(
                f"{self.model_type}: the config has no {' or '.join(names)}",
                "add the key to the config; kvtool does not guess sizes",
            )
        return known

    def words(self, *names: str) -> tuple[list[str], str] | None:
        """A list of words, such as layer_types, and its origin."""
        found = self.find(*names)
        if found is None:
            return None
        value, by = found
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise refuse(f"{by} is not a list of words")
        if len(value) > MAX_LAYERS:
            raise refuse(f"{by} has {len(value):,} entries")
        return value, by

    def numbers(self, *names: str, low: int = 0, high: int = MAX_SIZE) -> list[int] | None:
        """A list of whole numbers, or None if absent or null."""
        found = self.find(*names)
        if found is None:
            return None
        value, by = found
        if not isinstance(value, list) or len(value) > MAX_LAYERS:
            raise refuse(f"{by} is not a list of whole numbers")
        return [whole(item, by, low=low, high=high) for item in value]

    def item(self, name: str, index: int, *, high: int = MAX_SIZE) -> int | None:
        """One layer's entry of a list of whole numbers; None if there is no list or it is shorter."""
        found = self.find(name)
        if found is None:
            return None
        value, by = found
        if not isinstance(value, list):
            raise refuse(f"{by} is not a list of whole numbers")
        return (
            whole(value[index], f"{by}[{index}]", low=0, high=high) if index < len(value) else None
        )

    def factor(self, name: str, default: float | None = None) -> tuple[float, str]:
        """A positive finite number such as `expand`."""
        found = self.find(name)
        if found is None:
            if default is None:
                raise refuse(f"{self.model_type}: the config has no {name}")
            return default, f"{name} = {default} (assumed by its class)"
        value, by = found
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not 0 < value <= MAX_SIZE:
            raise refuse(f"{by} is {shown(value)}: a positive number is needed")
        return float(value), f"{by} = {value}"

    def flag(self, name: str, default: bool = False) -> bool:
        """A true or false key; words such as "false" are refused, since Python takes them for true.

        An explicit null is false, as it is to the class.
        """
        found = self.find(name)
        if found is None:
            return default and not any(s in self.raw for s in self.spellings(name))
        value, by = found
        if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
            return bool(value)
        raise refuse(f"{by} is {str(value)[:40]!r}: true or false is needed")

    def at(self, overrides: Mapping[str, Any], path: str) -> Keys:
        """The same level with some keys set otherwise, as one layer sees it."""
        if not overrides:
            return self
        own = frozenset(overrides)
        raw = ChainMap(dict(overrides), self.raw)  # type: ignore[arg-type]  # read, never written
        return replace(self, raw=raw, own=own, own_path=path)

    def section(self, name: str) -> Keys:
        """A nested table of this class, such as dbrx's attn_config; empty if absent."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise refuse(f"{self.path}{spelled(name)} is not an object")
        inner = self.defaults.get(name)
        return Keys(
            raw=value or {},
            model_type=self.model_type,
            defaults=inner if isinstance(inner, Mapping) else {},
            path=f"{self.path}{spelled(name)}.",
            origin=self.origin,
            log=self.log,
        )


def whole(value: Any, by: str, *, low: int, high: int) -> int:
    """`value` as an int in [low, high]; strings, booleans, NaN and fractions are refused by name."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise refuse(f"{by} is {shown(value)}: a whole number is needed")
    if not low <= value <= high:
        raise refuse(f"{by} is {shown(value)}: {low:,} to {high:,} makes sense")
    return value


def spelled(name: str) -> str:
    """A key of the file as an error names it: on one line, and short."""
    return name[:60] if name.isprintable() else repr(name[:60])


def shown(value: Any) -> str:
    """A value of the file as an error names it, cut to a line."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) < 10**18 else "a huge number"
    text = repr(value[:40] if isinstance(value, str | list) else value)
    return text if len(text) <= 40 else text[:37] + "…"

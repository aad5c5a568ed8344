"""What kvtool knows beforehand: models, GPUs, workloads, claims, class defaults.

tomllib is pure Python: one preset is found by scanning the text for its name and only its own table
is parsed; a whole kind is parsed, and validated (by pydantic, imported only then), when it is listed.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from kvtool.errors import KvtoolError, did_you_mean, usage_error
from kvtool.preset_types import (
    ClaimPreset,
    GpuPreset,
    ModelPreset,
    PrefixPreset,
    WorkloadPreset,
)

__all__ = ["ClaimPreset", "GpuPreset", "ModelPreset", "PrefixPreset", "WorkloadPreset"]

KINDS = (
    "models",
    "gpus",
    "workloads",
    "prefixes",
    "claims",
)  # the order in which a name is looked for

_ROOT = Path(__file__).with_name("presets")
# A table of the first level: [h100-sxm] or ["qwen2.5-7b"], but not ["qwen2.5-7b".config].
_HEADER = re.compile(r'^\[(?:"([^"]+)"|([A-Za-z0-9_-]+))\][ \t]*(?:#.*)?$', re.MULTILINE)
_TRAILING_COMMENTS = re.compile(r"(?:\n[ \t]*(?:#[^\n]*)?)*\Z")


_Preset = TypeVar("_Preset", ModelPreset, GpuPreset, WorkloadPreset, PrefixPreset, ClaimPreset)
_ToFields = Callable[[str, dict[str, Any]], dict[str, Any]]


def model_preset(name: str) -> ModelPreset | None:
    """The preset of that name, alias or Hub id in any case, or None."""
    found = _find("models", name)
    return ModelPreset(**_model_fields(*found)) if found else None


def gpu_preset(name: str) -> GpuPreset:
    """The preset of that id or alias in any case; blanks and underscores count as hyphens."""
    return GpuPreset(**_named("gpus", "GPU", name))


DEVICES = {"mi250x": "mi250x-gcd"}
"""Packages that are several devices to software, none of which has the memory of another, and a device."""


def one_device(name: str) -> GpuPreset:
    """The GPU of that name, refused where it is several to software."""
    preset = gpu_preset(name)
    if preset.id in DEVICES:
        raise usage_error(
            f"{preset.id} is two devices to software, and neither has the memory of both",
            f"name its devices, {DEVICES[preset.id]}, two for each {preset.id}",
        )
    return preset


def workload_preset(name: str) -> WorkloadPreset:
    """The preset of that id or alias in any case; blanks and underscores count as hyphens."""
    return WorkloadPreset(**_named("workloads", "workload", name))


def prefix_preset(name: str) -> PrefixPreset:
    """The preset of that id or alias in any case; blanks and underscores count as hyphens."""
    return PrefixPreset(**_named("prefixes", "workload with shared prefixes", name))


def claim_preset(name: str) -> ClaimPreset:
    """The preset of that id or alias in any case; blanks and underscores count as hyphens."""
    return ClaimPreset(**_named("claims", "claim", name))


@cache
def model_presets() -> tuple[ModelPreset, ...]:
    """Every model preset, validated, in the order of the files."""
    return validate(ModelPreset, _rows("models", _model_fields))


@cache
def gpu_presets() -> tuple[GpuPreset, ...]:
    """Every GPU preset, validated, in the order of the files."""
    return validate(GpuPreset, _rows("gpus", _fields_with_id))


@cache
def workload_presets() -> tuple[WorkloadPreset, ...]:
    """Every workload preset, validated, in the order of the files."""
    return validate(WorkloadPreset, _rows("workloads", _fields_with_id))


@cache
def prefix_presets() -> tuple[PrefixPreset, ...]:
    """Every prefix preset, validated, in the order of the files."""
    return validate(PrefixPreset, _rows("prefixes", _fields_with_id))


@cache
def claim_presets() -> tuple[ClaimPreset, ...]:
    """Every published claim, validated, in the order of the files."""
    return validate(ClaimPreset, _rows("claims", _fields_with_id))


@cache
def class_defaults() -> dict[str, Any]:
    """What a config.json may leave to the class of its model type in transformers."""
    return dict(json.loads((_ROOT / "class_defaults.json").read_text("utf-8")))


@cache
def weight_defaults() -> dict[str, Any]:
    """The same for the types whose parameters are counted, and what is nested in them: every key."""
    return dict(json.loads((_ROOT / "weight_defaults.json").read_text("utf-8")))


def preset_ids(kind: str) -> tuple[str, ...]:
    """The names of a kind's tables, without parsing one: for counts and shell completion."""
    return tuple(_tables(kind))


def preset_text(name: str, kinds: tuple[str, ...] = KINDS) -> tuple[str, str]:
    """The kind of the preset of that name, and its table as it stands in the file."""
    for kind in kinds:
        found = _find(kind, name)
        if found is not None:
            # What follows the last key is a comment on the next table.
            return kind, _TRAILING_COMMENTS.sub("\n", _tables(kind)[found[0]], count=1)
    raise _unknown("preset", name, kinds)


def validate(cls: type[_Preset], rows: Iterable[dict[str, Any]]) -> tuple[_Preset, ...]:
    """The rows as presets; a misspelt, missing or mistyped key is an error that names it."""
    from pydantic import TypeAdapter, ValidationError

    adapter: TypeAdapter[_Preset] = TypeAdapter(cls)
    presets = []
    for row in rows:
        try:
            # Through JSON, because a strict validate_python would want an instance of the class.
            adapter.validate_json(json.dumps(row, default=str), strict=True)
            presets.append(cls(**row))  # as a lookup has it: 3350 stays 3350, not 3350.0
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
            )
            raise KvtoolError(
                f"preset {row.get('id', row.get('name'))}: {wrong}",
                f"the keys of a {cls.__name__} are {', '.join(one.name for one in fields(cls))}",
                code="preset",
            ) from error
    return tuple(presets)


def _rows(kind: str, to_fields: _ToFields) -> Iterator[dict[str, Any]]:
    for key, text in _tables(kind).items():
        yield to_fields(key, tomllib.loads(text)[key])


def _model_fields(key: str, table: dict[str, Any]) -> dict[str, Any]:
    row = {"name": key, **_tuples(table)}
    for dotted in row.pop("null_keys", ()):
        _insert_null(row["config"], dotted, key)
    return row


def _named(kind: str, what: str, name: str) -> dict[str, Any]:
    found = _find(kind, name)
    if found is None:
        raise _unknown(what, name, (kind,))
    return _fields_with_id(*found)


def _fields_with_id(key: str, table: dict[str, Any]) -> dict[str, Any]:
    return {"id": key, **_tuples(table)}


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def _insert_null(config: dict[str, Any], dotted: str, preset: str) -> None:
    """TOML has no null, and a key that is null is not a key that is absent."""
    *path, last = dotted.split(".")
    for part in path:
        config = config.setdefault(part, {})
    if last in config:
        raise KvtoolError(
            f"preset {preset}: {dotted} has a value and is in null_keys",
            "take it out of one of the two",
            code="preset",
        )
    config[last] = None


def _find(kind: str, name: str) -> tuple[str, dict[str, Any]] | None:
    wanted = name.strip().lower()
    if kind != "models":  # the driver and the shops write blanks: "RTX 4090"
        wanted = re.sub(r"[\s_]+", "-", wanted)
    for key, text in _tables(kind).items():
        lower = text.lower()
        if key.lower() != wanted and f'"{wanted}"' not in lower and f"'{wanted}'" not in lower:
            continue
        table: dict[str, Any] = tomllib.loads(text)[key]
        if wanted in _names(key, table):
            return key, table
    return None


def _names(key: str, table: dict[str, Any]) -> set[str]:
    """Everything a preset answers to; the text may quote a name for another reason."""
    return {one.lower() for one in (key, table.get("hub_id", key), *table.get("aliases", ()))}


@cache
def _tables(kind: str) -> dict[str, str]:
    """The text of each table of the first level with its sub-tables, by its key."""
    tables: dict[str, str] = {}
    for path in sorted((_ROOT / kind).glob("*.toml")):
        text = path.read_text("utf-8")
        headers = list(_HEADER.finditer(text))
        ends = [header.start() for header in headers[1:]] + [len(text)]
        for header, end in zip(headers, ends, strict=True):
            key = header[1] or header[2]
            if key in tables:
                raise KvtoolError(
                    f"preset {key} is there twice", f"rename one in {path}", code="preset"
                )
            tables[key] = text[header.start() : end]
    return tables


def _unknown(what: str, name: str, kinds: tuple[str, ...]) -> KvtoolError:
    known = [
        one
        for kind in kinds
        for key, text in _tables(kind).items()
        for one in _names(key, tomllib.loads(text)[key])
    ]
    near, listing = did_you_mean(name, known), f"kvtool presets {'|'.join(kinds)} lists them"
    return usage_error(f"no {what} is called '{name}'", f"{near} {listing}".strip())

"""Where a config comes from: the Hub, a folder, a file, standard input or a preset."""

from __future__ import annotations

import copy
import json
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvtool.errors import KvtoolError, did_you_mean

if TYPE_CHECKING:
    from kvtool.catalog import ModelPreset

CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
"""Where NVIDIA's ModelOpt says how the cache is quantised, if config.json does not."""
MAX_BYTES = 8 * 2**20
"""The longest config.json known has 60 KB. Anything near this bound is some other file."""

_KINDS = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
_NO_PRESET_FOR = ("revision_not_found", "bad_revision", "bad_id", "too_large")
"""What was typed, or what is there, is wrong: a preset would answer another question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A model's config.json as it is written, and where it comes from."""

    config: dict[str, Any]
    name: str
    source: str
    """hub, folder, file, stdin or preset."""
    where: str
    notes: tuple[str, ...] = ()


def load_config(
    model: str, *, revision: str | None = None, stdin: TextIO | None = None
) -> LoadedConfig:
    """The config of MODEL: `-`, a file, a folder, a preset, or else a Hub id, in that order."""
    if not model.isprintable() or not model:
        raise KvtoolError(
            "MODEL is empty or holds characters that cannot be shown",
            "give a Hub id, a folder, a config.json, a preset or -",
            code="not_found",
        )
    local = _local(model, stdin)
    if local is None and "/" in model:
        return _from_hub(model, revision)
    loaded = local or _bare_name(model)
    if revision is None:
        return loaded
    ignored = f"--revision {revision} is ignored: it belongs to Hub ids, not to a {loaded.source}"
    return replace(loaded, notes=(*loaded.notes, ignored))


def read_json(data: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in a text that strangers wrote."""
    config = read_json_value(data, where)
    if not isinstance(config, dict):
        kind = _KINDS.get(type(config), "a number")
        raise KvtoolError(
            f"{where} holds {kind}, not a JSON object",
            "a config.json starts with { and names the model_type",
            code="not_object",
        )
    return config


def read_json_value(data: str | bytes, where: str) -> Any:
    """Any JSON that strangers wrote; the last of two equal keys counts.

    NaN and Infinity pass, for Mamba-2 configs hold them (time_step_limit); where a size is read,
    the reader of the model refuses them.
    """
    if len(data) > MAX_BYTES:
        raise _too_large(where)
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data.removeprefix("\ufeff")
        if not text.strip():
            raise KvtoolError(f"{where} is empty", "it should hold a config.json", code="empty")
        config = json.loads(text)
        if "\\u" in text:  # half a surrogate pair is valid JSON that nothing can print
            json.dumps(config, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        why = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise _not_json(where, why) from error
    except UnicodeError as error:
        raise _not_json(where, "its text is not valid UTF-8") from error
    except RecursionError as error:
        raise _not_json(where, "it is nested too deeply", code="too_deep") from error
    except ValueError as error:
        # json.loads has no other reason left: int() refuses more than 4300 digits.
        raise _not_json(where, "it holds a number of thousands of digits") from error
    return config


def _not_json(where: str, why: str, *, code: str = "not_json") -> KvtoolError:
    hint = "MODEL takes the config.json of a model, in UTF-8, not its weights or its card"
    return KvtoolError(f"{where} is not JSON that can be read: {why}", hint, code=code)


def _too_large(where: str) -> KvtoolError:
    return KvtoolError(
        f"{where} is larger than {MAX_BYTES // 2**20} MiB",
        "MODEL takes the config.json of a model (a few KB), not its weights",
        code="too_large",
    )


def _local(model: str, stdin: TextIO | None) -> LoadedConfig | None:
    """What `-` or the file system holds under that name, or None if it is for presets or the Hub."""
    if model == "-":
        return _from_stdin(sys.stdin if stdin is None else stdin)
    path = Path(model).expanduser() if model.startswith("~/") else Path(model)
    mode = _mode(path)
    is_folder = mode is not None and stat.S_ISDIR(mode)
    if is_folder and _mode(path / CONFIG) is not None:
        return _from_file(path / CONFIG, name=_folder_name(path), source="folder")
    if mode is not None and not is_folder:
        name = _folder_name(path.parent) if path.name == CONFIG else path.stem
        return _from_file(path, name=name, source="file")
    if is_folder and ("/" in model or _preset(model) is None):
        raise KvtoolError(
            f"the folder {model} has no {CONFIG}",
            "point at the folder (or file) that holds it; for the Hub's repository of that name,"
            " run from another folder",
            code="no_config",
        )
    if _looks_like_path(model) and not is_folder:
        raise KvtoolError(
            f"no such file or folder: {model}",
            "check the path; a Hub id is written org/name, and `kvtool presets` lists the presets",
            code="not_found",
        )
    return None


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith((".", "/", "~"))
        or model.endswith((".json", "/"))
        or (model.count("/") > 1 and "://" not in model)
    )


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except PermissionError as error:
        raise _unreadable(path, error) from error
    except (OSError, ValueError):
        return None


def _unreadable(where: Path | str, error: Exception) -> KvtoolError:
    return KvtoolError(
        f"{where} cannot be read: {getattr(error, 'strerror', None) or error}",
        "check the permissions, or pipe a config.json: kvtool size - < config.json",
        code="unreadable",
    )


def _from_stdin(stream: TextIO | None) -> LoadedConfig:
    if stream is None:
        raise _unreadable("standard input", ValueError("it is closed"))
    try:
        data = getattr(stream, "buffer", stream).read(MAX_BYTES + 1)
    except UnicodeError as error:
        raise _not_json("standard input", "its text is not valid UTF-8") from error
    except (OSError, ValueError) as error:  # ValueError: it is closed
        raise _unreadable("standard input", error) from error
    return LoadedConfig(
        config=read_json(data, "standard input"), name="stdin", source="stdin", where="-"
    )


def _from_file(path: Path, *, name: str, source: str) -> LoadedConfig:
    config = _read_file(path)
    beside = path.with_name(QUANT_CONFIG)
    if path.name == CONFIG and _mode(beside) is not None:
        config.setdefault("hf_quant_config", _read_file(beside))
    return LoadedConfig(config=config, name=name, source=source, where=str(path))


def _read_file(path: Path) -> dict[str, Any]:
    return read_json(read_bounded(path), str(path))


def read_bounded(path: Path) -> bytes:
    """The bytes of a regular file, at most one more than is allowed."""
    try:
        # A FIFO would wait for its writer, and /dev/zero never ends.
        if not stat.S_ISREG(path.stat().st_mode):
            raise KvtoolError(
                f"{path} is not a regular file",
                "MODEL takes a folder or a file; what comes from a pipe or a device is read by"
                " kvtool size -",
                code="unreadable",
            )
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error


def _folder_name(folder: Path) -> str:
    """The folder's name, or the Hub id if it is a snapshot in the Hub's cache."""
    folder = folder.absolute()
    repo = folder.parents[1].name if len(folder.parents) > 1 else ""
    if folder.parent.name == "snapshots" and repo.startswith("models--"):
        return repo.removeprefix("models--").replace("--", "/")
    return "".join(c if c.isprintable() else "?" for c in folder.resolve().name) or "/"


def _preset(name: str) -> ModelPreset | None:
    from kvtool.catalog import model_preset

    return model_preset(name)


def _near(name: str, *, hub_ids: bool) -> str:
    from kvtool.catalog import model_presets

    known: Iterable[str] = (p.hub_id if hub_ids else p.name for p in model_presets())
    return did_you_mean(name, known)


def _bare_name(model: str) -> LoadedConfig:
    preset = _preset(model)
    if preset is None:
        raise KvtoolError(
            f"no file, folder or preset is called '{model}'",
            "write a Hub id as org/name; `kvtool presets` lists the presets."
            + _near(model, hub_ids=False),
            code="not_found",
        )
    return _from_preset(preset, name=preset.name)


def _from_preset(preset: ModelPreset, *, name: str, notes: tuple[str, ...] = ()) -> LoadedConfig:
    return LoadedConfig(
        config=copy.deepcopy(preset.config),
        name=name,
        source="preset",
        where=f"preset {preset.name} ({preset.source})",
        notes=(*notes, preset.note) if preset.note else notes,
    )


def _from_hub(model: str, revision: str | None) -> LoadedConfig:
    from kvtool import hub

    try:
        file = hub.fetch(model, CONFIG, revision=revision, max_bytes=MAX_BYTES)
    except KvtoolError as error:
        preset = None if error.code in _NO_PRESET_FOR else _preset(model)
        if preset is not None:
            return _instead(preset, model, revision, error)
        if error.code == "not_found":
            error.hint += _near(model, hub_ids=True)
        raise
    config = _read_file(file.path)
    notes = [] if file.stale is None else [f"{file.stale}; {CONFIG} is the local cache's copy"]
    if "quantization_config" not in config:
        try:
            beside = hub.fetch_beside(file, model, QUANT_CONFIG)
            if beside is not None:
                config.setdefault("hf_quant_config", _read_file(beside.path))
        except KvtoolError as error:
            notes.append(f"{QUANT_CONFIG} was not read: {error.message}")
    return LoadedConfig(
        config=config,
        name=model,
        source="hub",
        where=f"{model}@{revision or 'main'} (commit {file.commit[:12]})",
        notes=tuple(notes),
    )


def _instead(
    preset: ModelPreset, typed: str, revision: str | None, error: KvtoolError
) -> LoadedConfig:
    """The preset that goes by the Hub id, quantised as the id says where it is another checkpoint's."""
    from kvtool.weights.usual import SCHEMES, WORDS, by_name

    notes = [f"{error.message}; preset {preset.name} is used instead"]
    if revision is not None:
        notes.append(f"--revision {revision} is ignored: the preset knows one revision")
    scheme = by_name(typed, preset.config) if typed.lower() != preset.hub_id.lower() else ""
    if not scheme:
        return _from_preset(preset, name=preset.hub_id, notes=tuple(notes))
    notes.append(
        f"its weights are taken as {WORDS[scheme]}, by its name, an estimate: it may leave more in 16 bits; its KV dtype is not known"
    )
    found = _from_preset(preset, name=typed, notes=tuple(notes))
    return replace(found, config={**found.config, "quantization_config": SCHEMES[scheme]})

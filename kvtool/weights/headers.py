"""The exact bytes and parameters of a checkpoint, from the headers of its safetensors files alone.

The format: eight bytes with the header's length (little-endian), the header as JSON, then the tensors
without holes (https://huggingface.co/docs/safetensors, "Format"). No tensor is read.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool import hub
from kvtool.errors import KvtoolError
from kvtool.hub_errors import bad_header, no_safetensors

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_INDEX_BYTES = 100_000_000
MAX_FILES = 10_000
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
"""A checkpoint's file: of what, which, of how many."""
MAX_BYTES = 2**50
"""More than any checkpoint: a shape or an offset beyond it is no size."""
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of an element: safetensors/src/tensor.rs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """A checkpoint's tensors, summed."""

    bytes: int
    """Of the tensors, without the headers."""
    parameters: int
    """Elements as stored: packed weights count as the words that hold them, scales count too."""
    by_dtype: Mapping[str, int]
    """Elements of each dtype."""
    num_files: int
    num_tensors: int
    source: str
    """In words, where they were read."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a header."""

    dtype: str
    elements: int
    begin: int
    end: int


def headers_of(where: str | Path, *, revision: str | None = None) -> Headers:
    """Of a folder, of one file, or else of a Hub id."""
    path = Path(where)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return _of_hub(str(where), revision)
    if stat.S_ISDIR(mode):
        files = _files_in(path)
    elif path.suffix == SUFFIX:
        files = [path]
    else:
        raise no_safetensors(str(where))
    count = f"{len(files):,} safetensors file{'s' * (len(files) != 1)}"
    return _summed(map(_tensors_in, files), f"the headers of {count} in {where}")


def _of_hub(repo_id: str, revision: str | None) -> Headers:
    found = hub.fetch_headers(repo_id, revision=revision)
    tensors = (read_header(held, f"{file} of {repo_id}") for file, held in found.items())
    count = f"{len(found):,} safetensors file{'s' * (len(found) != 1)}"
    return _summed(tensors, f"the headers of {count} of {repo_id}@{revision or 'main'}")


def _summed(files: Iterable[Iterator[Tensor]], source: str) -> Headers:
    """One file's tensors at a time: there may be millions."""
    by_dtype: dict[str, int] = {}
    num_bytes = num_files = num_tensors = 0
    for file in files:
        num_files += 1
        for one in file:
            by_dtype[one.dtype] = by_dtype.get(one.dtype, 0) + one.elements
            num_bytes += one.end - one.begin
            num_tensors += 1
    return Headers(
        bytes=num_bytes,
        parameters=sum(by_dtype.values()),
        by_dtype=dict(sorted(by_dtype.items())),
        num_files=num_files,
        num_tensors=num_tensors,
        source=source,
    )


def _files_in(folder: Path) -> list[Path]:
    """Those that the index names; without one, all but Mistral's second copy (consolidated…)."""
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in _named_by(index)]
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    except OSError as error:
        raise _unreadable(folder, error) from error
    found = [path for path in found if not path.name.startswith("adapter")]  # LoRA's
    files = [path for path in found if not path.name.startswith("consolidated")] or found
    if not files:
        raise no_safetensors(f"the folder {folder}")
    _check_whole(files, folder)
    if len(files) > MAX_FILES:
        raise bad_header(str(folder), f"it has {len(files):,} safetensors files")
    return files


def _check_whole(files: list[Path], folder: Path) -> None:
    """Refuse what is left of a download: `model-00001-of-00004.safetensors` has three brothers."""
    for path in files:
        part = PART.fullmatch(path.stem)
        if part is not None:
            of = int(part[3])
            there = sum(
                (m := PART.fullmatch(one.stem)) is not None and m[1] == part[1] for one in files
            )
            if there < of:
                raise bad_header(str(folder), f"it has {there:,} of the {of:,} files of {part[1]}")


def _named_by(index: Path) -> list[str]:
    """Names of files, each of which must lie beside the index."""
    where = str(index)
    found = _json(_read(index, MAX_INDEX_BYTES, where), where)
    named = found.get("weight_map")
    if not isinstance(named, dict) or not named:
        raise bad_header(where, "it has no weight_map")
    names = set()
    for name in named.values():
        beside = isinstance(name, str) and name.endswith(SUFFIX) and Path(name).name == name
        if not beside or len(name) > 255 or not name.isprintable():
            raise bad_header(where, "it names something else than a safetensors file beside it")
        names.add(name)
    if len(names) > MAX_FILES:
        raise bad_header(where, f"it names {len(names):,} files")
    return sorted(names)


def _read(path: Path, most: int, where: str) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise bad_header(where, "it is not a regular file")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(data) > most:
        raise bad_header(where, f"it has more than {most:,} bytes")
    return data


def _unreadable(path: Path, error: OSError) -> KvtoolError:
    missing = isinstance(error, FileNotFoundError)
    return KvtoolError(
        f"{path} {'is missing' if missing else f'cannot be read: {error.strerror}'}",
        "download the whole checkpoint, check the permissions, or give --weights 16GiB",
        code="unreadable",
    )


def _json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object that a stranger wrote."""
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except RecursionError as error:
        raise bad_header(where, "its JSON is nested too deeply") from error
    except ValueError as error:  # JSON, UTF-8, thousands of digits, a key twice
        raise bad_header(where, "its header is not JSON") from error
    if not isinstance(found, dict):
        raise bad_header(where, "its header is not a JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _tensors_in(path: Path) -> Iterator[Tensor]:
    """The tensors of a file, which must fill it."""
    where = str(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise bad_header(where, "it is not a regular file")
        with path.open("rb") as file:
            start = file.read(8)
            size = int.from_bytes(start, "little")
            if len(start) < 8 or size > found.st_size - 8:
                raise bad_header(where, "it ends within its header")
            if size > MAX_HEADER_BYTES:
                raise bad_header(where, f"its header has {size:,} bytes")
            header = file.read(size)
    except OSError as error:
        raise _unreadable(path, error) from error
    return read_header(_json(header, where), where, held=found.st_size - 8 - size)


def read_header(
    header: Mapping[str, Any], where: str, *, held: int | None = None
) -> Iterator[Tensor]:
    """A header's tensors, in the order of their bytes; `held` is how many the file has for them."""
    tensors = [_tensor(one, where) for name, one in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda one: (one.begin, one.end))
    at = 0
    for one in tensors:
        if one.begin != at:
            raise bad_header(where, "its tensors overlap or leave holes")
        at = one.end
    if held is not None and at != held:
        why = "ends before its last tensor does" if at > held else "goes on after its last tensor"
        raise bad_header(where, f"it {why}")
    return iter(tensors)


def _tensor(one: Any, where: str) -> Tensor:
    if not isinstance(one, Mapping):
        raise bad_header(where, "a tensor is not an object")
    dtype, shape, offsets = one.get("dtype"), one.get("shape"), one.get("data_offsets")
    if not isinstance(dtype, str) or not dtype.isascii() or not 0 < len(dtype) <= 20:
        raise bad_header(where, "a tensor has no dtype")
    elements = 1
    for side in _sizes(shape, where, "shape"):
        elements *= side
        if elements > MAX_BYTES * 8:
            raise bad_header(where, "a tensor is larger than any")
    ends = _sizes(offsets, where, "data_offsets")
    if len(ends) != 2 or ends[0] > ends[1]:
        raise bad_header(where, "a tensor's data_offsets are no begin and end")
    bits = BITS.get(dtype)
    if bits is None or bits * elements != 8 * (ends[1] - ends[0]):
        why = f"{elements:,} elements of {dtype} do not take the bytes that its data_offsets say"
        raise bad_header(where, "a tensor's dtype is not known" if bits is None else why)
    return Tensor(dtype, elements, ends[0], ends[1])


def _sizes(found: Any, where: str, name: str) -> list[int]:
    good = isinstance(found, list) and len(found) <= 64
    if not good or not all(type(one) is int and 0 <= one <= MAX_BYTES for one in found):
        raise bad_header(where, f"a tensor's {name} are no sizes")
    return list(found)

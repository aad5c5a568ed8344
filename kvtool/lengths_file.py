"""Token counts that were measured: the file behind `empirical:FILE`, which strangers wrote."""

from __future__ import annotations

import io
import json
import stat
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.errors import KvtoolError
from kvtool.units import MAX_COUNT, MIB

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_BYTES = 64 * MIB

_FORMATS = (
    "it takes a CSV of one or two columns of token counts (prompt, output), or a JSON list of"
    " [tokens, cumulative probability]"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # == of arrays is no truth value
class Measured:
    """Columns of token counts, a request a row; or the points of one cumulative distribution.

    `columns` are one or two: of two the first is the prompt, the second the output. With
    `cumulative` the one column holds rising token counts from 0, and `cumulative` the share of
    requests that have at most as many.
    """

    columns: tuple[NDArray[np.int64], ...] = field(repr=False)
    cumulative: NDArray[np.float64] | None = field(default=None, repr=False)


def read_lengths(path: str, *, name: str) -> Measured:
    """What the file holds; `name` is the option that named it, for errors."""
    text = _text(path, name)
    if not text.strip():
        raise KvtoolError(f"{name}: {path} is empty", _FORMATS, code="empty")
    where = f"{name}: {path}"
    return _points(text, where) if text.lstrip()[0] in "[{" else _columns(text, where)


def _text(path: str, name: str) -> str:
    """The text of a regular file; a pipe or a device may never end."""
    file = Path(path)
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise KvtoolError(
                f"{name}: {path} is not a regular file", "point at a CSV or JSON", code="unreadable"
            )
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise KvtoolError(
                f"{name}: {path} is larger than {MAX_BYTES // MIB} MiB",
                "draw a sample of its lines, or give its cumulative distribution as JSON",
                code="too_large",
            )
        return data.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise KvtoolError(
            f"{name}: no such file: {path}", f"check the path; {_FORMATS}", code="not_found"
        ) from error
    except UnicodeDecodeError as error:
        raise _wrong(f"{name}: {path}", "its text is not valid UTF-8") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte in it
        why = getattr(error, "strerror", None) or error
        raise _wrong(f"{name}: {path}", str(why)) from error


def _columns(text: str, where: str) -> Measured:
    import numpy as np

    flat, lines = array("q"), array("q")
    width = 0
    header = False
    for number, line in enumerate(io.StringIO(text), 1):
        if line.isspace():
            continue
        try:
            flat.extend(map(int, line.split(",")))
        except (ValueError, OverflowError) as error:
            if not flat and not header and _is_header(line):
                header = True
                continue
            raise _wrong(where, f"line {number} holds '{line.strip()[:40]}'") from error
        lines.append(number)
        width = width or len(flat)
        if len(flat) != width * len(lines) or width > 2:
            columns = "as many columns as the one above" if len(lines) > 1 else "1 or 2 columns"
            raise _wrong(where, f"line {number} does not have {columns}")
    if not lines:
        raise _wrong(where, "no line below the header")
    table = np.array(flat, dtype=np.int64).reshape(-1, width)
    odd = ((table < 1) | (table > MAX_COUNT)).any(axis=1)
    if odd.any():
        number = lines[int(odd.argmax())]
        raise _wrong(where, f"line {number}: tokens are counted from 1 to {MAX_COUNT:,}")
    return Measured(columns=tuple(np.ascontiguousarray(column) for column in table.T))


def _is_header(line: str) -> bool:
    return not any(cell.strip()[:1] in "0123456789+-." for cell in line.split(","))


def _points(text: str, where: str) -> Measured:
    import numpy as np

    try:
        points = json.loads(text)
    except json.JSONDecodeError as error:
        raise _wrong(where, f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise _wrong(where, "it is nested too deeply") from error
    except ValueError as error:  # int() refuses more than 4300 digits
        raise _wrong(where, "it holds a number of thousands of digits") from error
    if not isinstance(points, list) or not points:
        raise _wrong(where, "it is not a list of pairs")
    tokens, share = 0, 0.0
    for number, point in enumerate(points, 1):
        if not _is_pair(point) or not 1 <= point[0] <= MAX_COUNT or point[0] != int(point[0]):
            raise _wrong(where, f"entry {number} is not [tokens, cumulative probability]")
        if not point[0] > tokens or not share <= point[1] <= 1:
            raise _wrong(where, f"entry {number} does not rise: tokens go up, shares up to 1")
        tokens, share = point
    if share < 1 - 1e-6:
        raise _wrong(where, f"the last share is {share:g}, not 1")
    table = np.array([[0, 0.0], *points], dtype=np.float64)
    return Measured(columns=(table[:, 0].astype(np.int64),), cumulative=table[:, 1] / share)


def _is_pair(point: Any) -> bool:
    return (
        isinstance(point, list)
        and len(point) == 2
        and all(type(number) in (int, float) for number in point)
    )


def _wrong(where: str, why: str) -> KvtoolError:
    return KvtoolError(f"{where} cannot be read: {why}", _FORMATS, code="unreadable")

"""The file of a sweep: rows as they are done, a line each, so that a run can go on where another ended.

A line is a row with its key before it. While a sweep runs, whole lines are appended in the order in which they
are done; in the end the file is written anew, in the order of the cases.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kvtool import __version__
from kvtool.errors import KvtoolError, usage_error
from kvtool.output import check_writable, write_error, write_file
from kvtool.run import SCHEMA, Row, spell_controls

KEY = "sweep_key"
"""The field of a line that is no field of a row: `schema/version/hash`."""
PREFIX = f"{SCHEMA}/{__version__}/"
LONGEST_LINE = 1 << 24
_START = f'{{"{KEY}": "'.encode()


@dataclass(slots=True)
class SweepFile:
    """What was there, and where more is written. Without a path nothing is kept."""

    path: Path | None
    rows: dict[str, Row] = field(default_factory=dict)
    """By key: of this version of kvtool."""
    lines: dict[str, bytes] = field(default_factory=dict)
    """The same as they stand in the file."""
    notes: list[str] = field(default_factory=list)
    stream: IO[bytes] | None = None

    def append(self, rows: Mapping[str, Row]) -> None:
        """Whole lines, in one piece: they are in the file when this returns."""
        self.rows.update(rows)
        if self.stream is not None:
            lines = {key: line(key, row) for key, row in rows.items()}
            self.lines |= lines
            try:
                self.stream.write(b"".join(lines.values()))
                self.stream.flush()
            except OSError as error:
                raise write_error(error, str(self.path)) from error

    def finish(self, keys: Iterable[str]) -> None:
        """The rows of these keys in this order, then what else was there: a file beside it, then a rename."""
        if self.path is not None:
            first = dict.fromkeys(keys)
            others = (key for key in self.lines if key not in first)
            write_file(self.path, (self.lines[key] for key in (*first, *others)))


def is_sweep(path: Path) -> bool:
    """Whether a file begins as a sweep's does."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(_START)) == _START
    except OSError:
        return False


def line(key: str, row: Row) -> bytes:
    """The key first: a line that was cut is known by its beginning."""
    text = json.dumps({KEY: key, **row}, ensure_ascii=False, allow_nan=False)
    return spell_controls(text).encode("utf-8", "backslashreplace") + b"\n"


@contextmanager
def sweep_file(path: Path | None, whole: Callable[[Row], bool] = bool) -> Iterator[SweepFile]:
    """Read what is there and open it for more; KvtoolError if it is no sweep's, or another run's. Rows that are
    not `whole` are left out: a file may have been in other hands."""
    if path is None:
        yield SweepFile(None)
        return
    check_writable(path)
    try:
        stream = path.open("a+b")
    except OSError as error:
        raise write_error(error, str(path)) from error
    with stream:
        _lock(stream, path)
        found = SweepFile(path, stream=stream)
        _read(found, stream, path, whole)
        yield found


def _lock(stream: IO[bytes], path: Path) -> None:
    """One run at a time, where the system can say so; the lock goes with the process."""
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KvtoolError(
                f"{path}: another run is writing it", "wait for that run, or name another file"
            ) from None
        except OSError:  # a file system without locks
            return


def _read(found: SweepFile, stream: IO[bytes], path: Path, accepted: Callable[[Row], bool]) -> None:
    stream.seek(0)
    others: Counter[str] = Counter()
    whole = unread = 0
    torn = b""
    for text in iter(lambda: stream.readline(LONGEST_LINE), b""):
        if len(text) == LONGEST_LINE:
            raise usage_error(
                f"{path}: it has a line of more than {LONGEST_LINE:,} bytes, which no sweep writes",
                "name another file, or delete this one",
            )
        if not text.endswith(b"\n"):
            torn = text
            break
        whole += len(text)
        row = _parsed(text)
        key = row.pop(KEY, None) if row is not None else None
        if (
            row is None
            or not isinstance(key, str)
            or (key.startswith(PREFIX) and not accepted(row))
        ):
            unread += 1
        elif key.startswith(PREFIX):
            found.rows[key], found.lines[key] = row, text
        else:
            others[key.rpartition("/")[0]] += 1
    ours = found.rows or others or _is_start(torn)
    if (unread or torn) and not ours:
        raise usage_error(
            f"{path}: it is there already, and no sweep wrote it",
            "name another file, or delete this one",
        )
    if torn:
        stream.truncate(whole)
    found.notes += _notes(path.name, others, unread, bool(torn))


def _is_start(text: bytes) -> bool:
    return bool(text) and (text.startswith(_START) or _START.startswith(text))


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON's")


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _notes(name: str, others: Counter[str], unread: int, torn: bool) -> Iterator[str]:
    if torn:
        yield f"{name}: its last line was cut short, and is left out"
    if unread:
        yield f"{name}: {unread:,} of its lines are no rows of a sweep, and are left out"
    for which, count in others.items():
        schema, _, version = which.partition("/")
        yield (
            f"{name}: {count:,} rows are of kvtool {version[:20]} (schema {schema[:20]}) and are not used:"
            f" this is {__version__} ({SCHEMA})"
        )

"""The rows of a trace, read line by line: a file or standard input, plain or gzip, CSV or JSONL."""

from __future__ import annotations

import csv
import gzip
import io
import json
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from kvtool.errors import KvtoolError
from kvtool.trace_formats import listed, shown, trace_error

MAX_LINE = 16 * 2**20
"""Bytes of a line, and of a row of several lines: what is held in memory at once."""
MAX_LINES = 100_000_000
MAX_COLUMNS = 1000
BUFFER = 2**17

Row = tuple[int, Any]
"""Its line, and its cells: a list (CSV) or a dict (JSONL)."""


@contextmanager
def opened(place: str, stdin: BinaryIO | None) -> Iterator[io.BufferedReader]:
    """The bytes at a path, or at `-` of standard input, unpacked if they are gzip."""
    where = printable(place)
    file = _stdin(stdin) if place == "-" else _file(place, where)
    try:
        try:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
        except (OSError, ValueError) as error:
            raise _unreadable(where, error) from error
        if packed:
            yield io.BufferedReader(_Unpacked(file), BUFFER)
        else:
            yield file
    finally:
        if place == "-":
            file.detach()  # standard input is the caller's to close
        else:
            file.close()


class _Unpacked(io.RawIOBase):
    """gzip data that gives all that it can before it fails: GzipFile.read() drops the last part."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._gzip = gzip.GzipFile(fileobj=file, mode="rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._gzip.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def printable(place: str) -> str:
    """A path for people."""
    if place == "-":
        return "standard input"
    return "".join(c if c.isprintable() else "?" for c in place)


def _stdin(stream: BinaryIO | None) -> io.BufferedReader:
    stream = stream or getattr(sys.stdin, "buffer", None)
    try:
        return io.BufferedReader(cast(io.RawIOBase, stream), BUFFER)
    except (AttributeError, OSError, ValueError) as error:  # there is none, or it is closed
        raise _unreadable("standard input", ValueError("it is closed")) from error


def _file(place: str, where: str) -> io.BufferedReader:
    path = Path(place)
    try:
        mode = path.stat().st_mode
        # A FIFO would wait for its writer.
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            hint = "a trace is a file; what comes from a pipe is read from standard input with -"
            raise trace_error(f"{where or 'the path'} is {kind}", hint)
        return cast(io.BufferedReader, path.open("rb", BUFFER))
    except FileNotFoundError as error:
        hint = "check the path; - reads a trace from standard input"
        raise trace_error(f"no such file: {where}", hint) from error
    except (OSError, ValueError) as error:
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception) -> KvtoolError:
    why = getattr(error, "strerror", None) or error
    return trace_error(
        f"{where} cannot be read: {why}", "check the path and its permissions, or pipe the trace in"
    )


class Lines:
    """The lines of a file as text, each within bounds, with what there is to say about them."""

    def __init__(self, file: io.BufferedReader, where: str) -> None:
        self.file = file
        self.where = where
        self.number = 0
        """The line that was read last, from 1."""
        self.row_bytes = 0
        """Read since the reader of the rows last set it to 0."""
        self.bytes = 0
        """Read in all, unpacked."""
        self.columns: dict[str, int] = {}
        """The columns of the rows, each with its first line."""
        self._waiting: str | None = None
        self._notes: dict[str, list[int]] = {}

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._waiting is not None:
            text, self._waiting = self._waiting, None
            self.number += 1
            return text
        data = self._read()
        if not data:
            raise StopIteration
        self.number += 1
        self.row_bytes += len(data)
        self.bytes += len(data)
        if self.row_bytes > MAX_LINE:
            what = f"the row is longer than {MAX_LINE // 2**20} MiB"
            self.fail(what, "a trace has a request a line; is a quote left open?")
        if self.number > MAX_LINES:
            self.fail(f"there are more than {MAX_LINES:,} lines", "cut the trace into parts")
        try:
            text = data.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError:
            self.fail("its text is not valid UTF-8", "a trace is text, plain or gzip, in UTF-8")
        if "\0" in text:
            self.fail("it holds a NUL byte", "a trace is text, plain or gzip, in UTF-8")
        return text

    def _read(self) -> bytes:
        try:
            return self.file.readline(MAX_LINE + 1)
        except EOFError:
            what = f"{self.where} ends in the middle: its gzip data is cut off after line"
            hint = "fetch or copy the file again"
            raise trace_error(f"{what} {self.number:,}", hint) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            what = f"{self.where} is damaged: its gzip data cannot be unpacked after line"
            hint = "fetch or copy the file again"
            raise trace_error(f"{what} {self.number:,}", hint) from error
        except (OSError, ValueError) as error:
            raise _unreadable(self.where, error) from error

    def first(self) -> str:
        """The first character that is not blank, which is read again; '' in an empty file."""
        for text in self:
            if text.strip():
                self._waiting = text
                self.number -= 1
                return text.lstrip()[0]
            self.note("blank lines, skipped", self.number)
        return ""

    def fail(self, what: str, hint: str, *, line: int | None = None) -> NoReturn:
        """Refuse the line that was read last, or another one."""
        raise trace_error(f"{self.where}, line {line or self.number:,}: {what}", hint)

    def note(self, what: str, line: int) -> None:
        """Count something that is to be told."""
        self._notes.setdefault(what, [0, line])[0] += 1

    def notes(self) -> list[str]:
        """All that was counted."""
        return [f"{what}: {n:,} (first: line {line:,})" for what, (n, line) in self._notes.items()]


def rows_of(lines: Lines, *, is_json: bool) -> Iterator[Row]:
    """The rows, those of CSV with the header first; `lines.columns` fills on the way."""
    return _json_rows(lines) if is_json else _csv_rows(lines)


@contextmanager
def long_cells() -> Iterator[None]:
    """Let the bound on a row be the bound on a cell: csv's own is 128 KiB, and for all threads."""
    before = csv.field_size_limit(max(MAX_LINE, csv.field_size_limit()))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv_rows(lines: Lines) -> Iterator[Row]:
    reader = csv.reader(lines, strict=True)
    width = 0
    while True:
        lines.row_bytes = 0
        line = lines.number + 1  # a quoted cell may go on over several lines
        try:
            row = next(reader, None)
        except csv.Error as error:
            why = str(error).split(" - ")[0]  # the rest is for programmers
            lines.fail(f"it is not CSV: {why}", "look for a quote that is not closed", line=line)
        if row is None:
            return
        if len(row) < 2 and not "".join(row).strip():
            lines.note("blank lines, skipped", line)
            continue
        if not width:
            width = len(row)
            lines.columns = dict.fromkeys(row, line)
        elif len(row) != width:
            what = f"cells: {len(row):,}, where the header has {width:,}"
            lines.fail(what, "correct that line or take it out", line=line)
        yield line, row


def _json_rows(lines: Lines) -> Iterator[Row]:
    decoder = json.JSONDecoder(parse_float=Decimal, parse_constant=_no_constant)
    for text in lines:
        lines.row_bytes = 0
        if text.isspace():
            lines.note("blank lines, skipped", lines.number)
            continue
        row = _object(lines, decoder, text)
        if not row.keys() <= lines.columns.keys():
            for key in list(row)[: MAX_COLUMNS - len(lines.columns)]:
                lines.columns.setdefault(key, lines.number)
        yield lines.number, row


def _object(lines: Lines, decoder: json.JSONDecoder, text: str) -> dict[str, Any]:
    hint = "JSONL has one whole JSON object a line, a request each; other JSON is no trace"
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        near = shown(text[error.pos :].strip() or text.strip())
        lines.fail(f"it is not JSON: {near} ({error.msg}, column {error.colno:,})", hint)
    except RecursionError:
        lines.fail("its JSON is nested too deeply", hint)
    except (ArithmeticError, ValueError):  # more digits than int() or Decimal() takes
        lines.fail("it holds NaN, Infinity or a number of too many digits", hint)
    if not isinstance(value, dict):
        lines.fail(f"it is not a JSON object: {shown(value)}", hint)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def not_read(lines: Lines, used: set[str]) -> list[str]:
    """A note on the columns that nobody reads."""
    unread = {name: line for name, line in lines.columns.items() if name not in used and name}
    return [f"columns that are not read: {listed(unread)}"] if unread else []

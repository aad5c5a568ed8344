"""Request traces: public ones in six formats, and kvtool's own, as columns of integers."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from kvtool.errors import KvtoolError, did_you_mean, usage_error
from kvtool.requests import Requests
from kvtool.trace_contents import HashColumn, SegmentColumns
from kvtool.trace_formats import (
    FORMATS,
    KVTOOL,
    MAX_CLOCK_NS,
    CellError,
    Field,
    Format,
    fields_of,
    listed,
    match,
    shown,
    trace_error,
)
from kvtool.trace_lines import Lines, Row, long_cells, not_read, opened, printable, rows_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtool.contents import Contents
    from kvtool.requests import Column

__all__ = ["FORMATS", "Format", "Trace", "read_trace"]

SEGMENTS = ("segments", "out_stream")
"""Columns of kvtool's own format that are read if what prompts consist of is asked for."""
MAX_SPAN_NS = 2**59
"""18 years from the first arrival: more is a slip of the pen, and would not leave room to add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The requests of a trace, and what had to be done to them."""

    name: str
    """The file's name, or "standard input"."""
    format: str
    """A key of FORMATS."""
    requests: Requests
    has_arrivals: bool
    """False if the trace gives lengths alone: `arrival_ns` are all 0."""
    notes: tuple[str, ...]
    """What was left out, changed or not read, with counts and the first line."""
    contents: Contents | None = None
    """What the prompts consist of, if that was asked for and the trace says it."""


def read_trace(
    place: str,
    *,
    format: str | None = None,
    stdin: BinaryIO | None = None,
    with_contents: bool = False,
) -> Trace:
    """The trace at a path, or at `-` of standard input; KvtoolError `trace` if it is none.

    Arrivals are ns from the earliest one, in order; in the format `kvtool` all stays as written.
    Without a format the columns tell it. With contents, what prompts consist of is read too: hash_ids
    of formats whose blocks have a size, segments of kvtool's own.
    """
    check_format(format)
    where = printable(place)
    with opened(place, stdin) as file, long_cells():
        lines = Lines(file, where)
        first = lines.first()
        if not first:
            raise trace_error(f"{where} is empty", "give a trace: a request a line")
        is_json = first in "{[" if format is None else FORMATS[format].is_json
        rows = rows_of(lines, is_json=is_json)
        head = next(rows, None)
        assert head is not None, "the first line is not blank"
        columns = list(head[1])
        name, found = known_format(where, columns, format, is_json)
        if is_json:
            rows = itertools.chain([head], rows)
        asked, contents, used = _read(lines, rows, name, found, columns, with_contents)
        notes = (*lines.notes(), *not_read(lines, used))
    return Trace(
        name=where if place == "-" else Path(where).name,
        format=name,
        requests=asked,
        has_arrivals="arrival" in found,
        notes=notes,
        contents=contents,
    )


def _read(
    lines: Lines, rows: Iterator[Row], name: str, found: dict[str, str], columns: list[str],
    with_contents: bool,
) -> tuple[Requests, Contents | None, set[str]]:  # fmt: skip
    """The requests, what they consist of, and the columns that were read for it."""
    form = FORMATS[name]
    if name == "kvtool":
        wanted = with_contents and "segments" in columns
        segments = SegmentColumns(lines=lines) if wanted else None
        asked, contents = _read_kvtool(lines, rows, segments)
        return asked, contents, {*KVTOOL, *(SEGMENTS if wanted else ())}
    hashes = None
    if with_contents and form.block_size and form.hashes in columns:
        hashes = HashColumn(lines=lines, column=form.hashes, size=form.block_size)
    fields = fields_of(form, found, columns)
    asked, contents = _read_lengths(lines, rows, fields, hashes)
    return asked, contents, {*found.values(), *([form.hashes] if hashes else [])}


def check_format(format: str | None) -> None:
    """Refuse a name that no format has."""
    if format is not None and format not in FORMATS:
        raise usage_error(
            f"no format of traces is called {shown(format)}",
            f"the formats are {', '.join(FORMATS)}.{did_you_mean(format, FORMATS)}",
        )


def known_format(
    where: str, columns: list[str], name: str | None, is_json: bool
) -> tuple[str, dict[str, str]]:
    """The format of these columns, and which of them are its prompt, output and arrival."""
    candidates = (
        [name] if name else [one for one, form in FORMATS.items() if form.is_json == is_json]
    )
    for candidate in candidates:
        form = FORMATS[candidate]
        found, missing = match(form, columns)
        if missing and name:
            raise trace_error(
                f"{where} has no column {missing[0]}: its columns are {listed(columns)}",
                f"the format {name} needs {form.needs()}; without a format it is found out",
            )
        if missing or (name is None and form.mark and form.mark not in columns):
            continue
        for role, names in found.items():
            if len(names) > 1:
                raise trace_error(
                    f"{where} has {len(names)} columns for the {role}: {listed(names)}",
                    "leave or rename all but one of them",
                )
        return candidate, {role: names[0] for role, names in found.items() if names}
    raise _unknown(where, columns, candidates, is_json)


def _unknown(where: str, columns: list[str], tried: list[str], is_json: bool) -> KvtoolError:
    if columns and columns[0].startswith("version https://git-lfs"):
        return trace_error(
            f"{where} is not the trace but a pointer of Git LFS to it",
            "fetch the file itself: git lfs pull",
        )
    needs = "; ".join(f"{name} has {FORMATS[name].needs()}" for name in tried)
    kind = "JSONL" if is_json else "CSV with a header"
    return trace_error(
        f"{where} is in no known format: its columns are {listed(columns) or '(none)'}",
        f"of the formats in {kind}, {needs}",
    )


def _read_lengths(
    lines: Lines, rows: Iterator[Row], fields: dict[str, Field], hashes: HashColumn | None
) -> tuple[Requests, Contents | None]:
    """The requests of any format but kvtool's: in order of arrival, none without tokens."""
    prompt, output, arrival = fields["prompt"], fields["output"], fields.get("arrival")
    if arrival is None:
        arrival = replace(prompt, read=lambda _: 0)
    arrivals, prompts, outputs = array("q"), array("q"), array("q")
    start: int | None = None
    line, last = 0, -MAX_CLOCK_NS
    for line, row in rows:
        try:
            prompt_tokens = prompt.read(row[prompt.key])
            output_tokens = output.read(row[output.key])
            time = arrival.read(row[arrival.key])
        except (CellError, LookupError):
            refuse(lines, line, row, fields.values())
        if start is None:
            start = time
        if not -MAX_SPAN_NS <= time - start <= MAX_SPAN_NS:
            what = f"{shown(row[arrival.key])} is more than 18 years from the first arrival"
            lines.fail(f"{arrival.column}: {what}", "correct that line or take it out", line=line)
        if not prompt_tokens or not output_tokens:
            what = "output" if prompt_tokens else "prompt"
            lines.note(f"requests with 0 {what} tokens, left out", line)
            continue
        if time < last:
            lines.note("requests earlier than the one before, sorted by arrival", line)
        last = time
        arrivals.append(time)
        prompts.append(prompt_tokens)
        outputs.append(output_tokens)
        if hashes is not None:
            hashes.add(line, row.get(hashes.column), prompt_tokens)
            hashes.check_size(line)
    if not arrivals:
        raise _nothing(lines, line)
    return _sorted(_numpy(arrivals), _numpy(prompts), _numpy(outputs), hashes)


def _nothing(lines: Lines, line: int) -> KvtoolError:
    if not line:
        return trace_error(
            f"{lines.where} has a header and no requests", "give a trace: a request a line"
        )
    why = "; ".join(lines.notes())
    return trace_error(
        f"{lines.where} has no request with both prompt and output tokens ({why})",
        "is it the right file, and are its columns named right?",
    )


def _sorted(
    arrival_ns: Column, prompt_tokens: Column, output_tokens: Column, hashes: HashColumn | None
) -> tuple[Requests, Contents | None]:
    import numpy as np

    requests = Requests(
        arrival_ns=arrival_ns - arrival_ns.min(),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    order = np.argsort(requests.arrival_ns, kind="stable")
    contents = None
    if hashes is not None:
        contents = hashes.contents(prompt_tokens, output_tokens).take(order)
    return requests.take(order), contents


def _numpy(column: array[int]) -> Column:
    import numpy as np

    return np.frombuffer(column, dtype=np.int64)


def refuse(lines: Lines, line: int, row: Any, fields: Iterable[Field]) -> NoReturn:
    """Say which of the cells of a row cannot be read."""
    for field in fields:
        try:
            value = row[field.key]
        except LookupError:
            if field.default is not None:
                continue
            hint = "each line needs it: correct that line or take it out"
            lines.fail(f"{field.column} is missing", hint, line=line)
        try:
            field.read(value)
        except CellError as error:
            hint = f"correct that line or take it out: {field.column} takes {field.takes}"
            lines.fail(f"{field.column}: {shown(value)} {error}", hint, line=line)
    raise AssertionError("every cell can be read")


def _read_kvtool(
    lines: Lines, rows: Iterator[Row], segments: SegmentColumns | None
) -> tuple[Requests, Contents | None]:
    """The requests of kvtool's own format, each at its index, with its arrival as written."""
    columns = {name: array("q") for name in KVTOOL}
    plan = [(name, field.read, field.default, columns[name]) for name, field in KVTOOL.items()]
    numbers = array("q")
    timed: bool | None = None
    for line, row in rows:
        try:
            for name, read, default, column in plan:
                value = default if name not in row else None
                column.append(read(row[name]) if value is None else value)
        except (CellError, LookupError):
            refuse(lines, line, row, KVTOOL.values())
        if timed is None:
            timed = "arrival_ns" in row
        if timed != ("arrival_ns" in row):
            what = f"arrival_ns is {'missing' if timed else 'there'}, unlike in the lines before it"
            lines.fail(what, "give every line an arrival_ns, or none", line=line)
        waits, parent = columns["arrival_ns"][-1] == -1, columns["parent"][-1]
        if waits and parent == -1:
            what = "arrival_ns is -1 without a parent to wait for"
            lines.fail(what, "give the line a parent, or a time from 0", line=line)
        if not timed and parent != -1:
            what = "there is a parent without an arrival_ns"
            lines.fail(what, "give arrival_ns: -1 to wait for the parent", line=line)
        if segments is not None:
            segments.add(line, row)
        numbers.append(line)
    done = {name: _numpy(column) for name, column in columns.items()}
    _check_parents(lines, done["parent"], done["arrival_ns"] == -1, numbers)
    if not done["priority"].any():
        del done["priority"]
    if (done["parent"] == -1).all():
        del done["parent"], done["think_ns"]
    contents = None
    if segments is not None:
        contents = segments.contents(done["prompt_tokens"], numbers)
    return Requests(**done), contents


def _check_parents(
    lines: Lines, parent: Column, waits: NDArray[np.bool_], numbers: array[int]
) -> None:
    import numpy as np

    count = len(parent)
    index = np.arange(count)
    wrong = (parent >= count) | (parent == index)
    if wrong.any():
        at = int(wrong.argmax())
        what = "the request itself" if parent[at] == at else f"no request: there are {count:,}"
        hint = "a parent is the index of another line, the first being 0"
        lines.fail(f"parent: {parent[at]} is {what}", hint, line=numbers[at])
    # After k rounds each stands 2^k steps up its line of parents: who is not out then goes round.
    ahead = np.where(waits, parent, -1)
    for _ in range(count.bit_length()):
        if (ahead < 0).all():
            return
        ahead = np.where(ahead < 0, -1, ahead[ahead])
    if (ahead >= 0).any():
        what = "parent: the request waits, by its parents, for itself"
        hint = "one request of the chain needs an arrival_ns of its own"
        lines.fail(what, hint, line=numbers[int(ahead[ahead >= 0].min())])

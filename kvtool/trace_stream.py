"""Traces whose requests name the blocks of their prompts, a chunk at a time: a file of any length."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kvtool.errors import did_you_mean, usage_error
from kvtool.trace import check_format, known_format, refuse
from kvtool.trace_blocks import HashedRequests
from kvtool.trace_contents import HashColumn
from kvtool.trace_formats import FORMATS, CellError, Field, Format, fields_of, shown, trace_error
from kvtool.trace_lines import Lines, Row, long_cells, not_read, opened, printable, rows_of

REQUESTS_AT_ONCE = 1 << 16
BLOCKS_AT_ONCE = 1 << 21
"""What a chunk has at most: 16 MiB of hashes, and those of one more request."""
MOST_TENANTS, MOST_LETTERS = 256, 30
MOST_TOKENS = 1 << 26
"""Of a request: more than any model reads."""
Progress = Callable[[int], None]
"""Told how many bytes have been read since it was last told."""


@dataclass(slots=True, kw_only=True)
class HashedTrace:
    """A trace to go through once. What there is to say of it, `notes` has at the end."""

    name: str
    """The file's name, or "standard input"."""
    num_bytes: int | None
    """Of the file, packed or not; None for standard input."""
    chunks: Generator[HashedRequests, None, None] = field(init=False)
    format: str = ""
    block_size: int = 0
    """Tokens of a block; like the format, known once the first chunk is there."""
    notes: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    """By number, as far as they are known: complete at the end."""

    def __iter__(self) -> Iterator[HashedRequests]:
        return self.chunks


def stream_trace(
    place: str,
    *,
    format: str | None = None,
    block_size: int | None = None,
    tenant: str | None = None,
    stdin: BinaryIO | None = None,
    progress: Progress = lambda read: None,
) -> HashedTrace:
    """The requests at a path, or at `-` of standard input, in the order of the file.

    `block_size` is the trace's, where its format says none or another one; `tenant` the column that
    says whose a request is. Requests without output stay: their prompts are cached too. KvtoolError
    `trace` if it is no such trace, on the way too.
    """
    check_format(format)
    if block_size is not None and block_size < 1:
        raise usage_error(
            f"a block of {block_size} tokens is none", "give the size of the trace's blocks"
        )
    where = printable(place)
    trace = HashedTrace(
        name=where if place == "-" else printable(Path(place).name), num_bytes=_size_of(place)
    )
    trace.chunks = _chunks(trace, place, format, block_size, tenant, stdin, progress)
    return trace


def _size_of(place: str) -> int | None:
    """Of a file; what cannot be looked at is refused when it is opened."""
    with suppress(OSError, ValueError):
        if place != "-" and Path(place).is_file():
            return Path(place).stat().st_size
    return None


def _chunks(
    trace: HashedTrace, place: str, name: str | None, block_size: int | None,
    tenant: str | None, stdin: BinaryIO | None, progress: Progress,
) -> Generator[HashedRequests, None, None]:  # fmt: skip
    where = printable(place)
    with opened(place, stdin) as file, long_cells():
        lines = Lines(file, where)
        first = lines.first()
        if not first:
            raise trace_error(f"{where} is empty", "give a trace: a request a line")
        is_json = first in "{[" if name is None else FORMATS[name].is_json
        rows = rows_of(lines, is_json=is_json)
        head = next(rows, None)
        assert head is not None, "the first line is not blank"
        columns = list(head[1])
        trace.format, found = known_format(where, columns, name, is_json)
        form = FORMATS[trace.format]
        trace.block_size = _block_size(where, form, columns, trace.format, block_size)
        fields = fields_of(form, found, columns)
        if tenant is not None and tenant not in columns:
            raise trace_error(
                f"{trace.name} has no column '{tenant[:40]}'",
                f"its columns are {', '.join(columns)[:200]}.{did_you_mean(tenant, columns)}",
            )
        reader = _Reader(
            lines=lines, fields=fields, column=form.hashes, size=trace.block_size, tenant=tenant
        )
        told = 0
        for chunk in reader.chunks(itertools.chain([head], rows)):
            progress(lines.bytes - told)
            told = lines.bytes
            trace.tenants = _shown(reader.tenants)
            yield chunk
        read = {*found.values(), form.hashes, *([tenant] if tenant else [])}
        trace.notes = (*lines.notes(), *not_read(lines, read))


def _block_size(where: str, form: Format, columns: list[str], name: str, asked: int | None) -> int:
    with_hashes = [one for one, other in FORMATS.items() if other.hashes]
    if not form.hashes or form.hashes not in columns:
        raise trace_error(
            f"{where} does not name the blocks of its prompts, so what they share is not known",
            f"formats that do are {', '.join(with_hashes)}, with a column hash_ids; "
            "other traces have lengths for kvtool fragment and simulate",
        )
    if asked is None and form.block_size is None:
        raise usage_error(
            f"{where}: the format {name} does not say how many tokens a block has",
            "give --trace-block-size",
        )
    return asked or form.block_size or 0


def _shown(tenants: Mapping[str | int, int]) -> tuple[str, ...]:
    """Short names for people, no two alike."""
    names = [(printable(str(name)).strip() or "(blank)")[:MOST_LETTERS] for name in tenants]
    counts = Counter(names)
    return tuple(
        f"{name} #{number}" if counts[name] > 1 else name for number, name in enumerate(names)
    )


@dataclass(slots=True, kw_only=True)
class _Reader:
    """The rows of one file as chunks."""

    lines: Lines
    fields: dict[str, Field]
    column: str
    size: int
    tenant: str | None = None
    tenants: dict[str | int, int] = field(default_factory=dict)
    owners: array[int] = field(default_factory=lambda: array("q"))
    arrivals: array[int] = field(default_factory=lambda: array("q"))
    prompts: array[int] = field(default_factory=lambda: array("q"))
    outputs: array[int] = field(default_factory=lambda: array("q"))
    blocks: HashColumn = field(init=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.blocks = HashColumn(lines=self.lines, column=self.column, size=self.size)

    def chunks(self, rows: Iterator[Row]) -> Iterator[HashedRequests]:
        """Each with as many requests as fit into its bounds."""
        prompt, output, arrival = (self.fields.get(one) for one in ("prompt", "output", "arrival"))
        assert prompt is not None, "every format has it"
        assert output is not None, "every format has it"
        last, line, anything = 0, 0, False
        for line, row in rows:
            try:
                tokens = prompt.read(row[prompt.key])
                self.outputs.append(output.read(row[output.key]))
                time = arrival.read(row[arrival.key]) if arrival else 0
            except (CellError, LookupError):
                refuse(self.lines, line, row, self.fields.values())
            if tokens + self.outputs[-1] > MOST_TOKENS:
                what = f"a request of {tokens + self.outputs[-1]:,} tokens"
                self.lines.fail(what, f"at most {MOST_TOKENS:,} are one", line=line)
            if tokens == 0:
                self.lines.note("requests with 0 prompt tokens, left out", line)
                self.outputs.pop()
                continue
            if time < last:
                what = "requests earlier than the one before, kept in the order of the file"
                self.lines.note(what, line)
            last, anything = time, True
            self.prompts.append(tokens)
            self.arrivals.append(time)
            self.blocks.add(line, row.get(self.column), tokens)
            if self.tenant is not None:
                self.owners.append(self._number_of(line, row.get(self.tenant)))
            if len(self.prompts) >= REQUESTS_AT_ONCE or len(self.blocks.hashes) >= BLOCKS_AT_ONCE:
                yield self._flush()
        if self.prompts:
            yield self._flush()
        if not anything:
            raise trace_error(
                f"{self.lines.where} has no request with a prompt",
                "is it the right file, and are its columns named right?",
            )

    def _number_of(self, line: int, value: Any) -> int:
        """The tenant of a request, counted in the order in which they come."""
        if type(value) not in (str, int) or (type(value) is int and value.bit_length() > 64):
            what = "is missing" if value is None else f"{shown(value)} names nobody"
            hint = f"{self.tenant} takes a name or a whole number"
            self.lines.fail(f"{self.tenant}: {what}", hint, line=line)
        number = self.tenants.setdefault(value, len(self.tenants))
        if len(self.tenants) > MOST_TENANTS:
            what = f"{self.tenant}: more than {MOST_TENANTS} different tenants"
            hint = "choose a column that tells fewer apart, such as a team, a model or a type"
            self.lines.fail(what, hint, line=line)
        return number

    def _flush(self) -> HashedRequests:
        import numpy as np

        columns = [
            self.arrivals,
            self.prompts,
            self.outputs,
            self.blocks.hashes,
            self.blocks.starts,
        ]
        arrivals, prompts, outputs, hashes, starts = (
            np.frombuffer(column, np.int64) if column else np.zeros(0, np.int64)
            for column in columns
        )
        self.arrivals, self.prompts, self.outputs = array("q"), array("q"), array("q")
        self._begin()
        owners, self.owners = self.owners, array("q")
        return HashedRequests(
            arrival_ns=arrivals,
            prompt_tokens=prompts,
            output_tokens=outputs,
            hash_ids=hashes,
            starts=starts,
            block_size=self.size,
            tenant=np.frombuffer(owners, np.int64) if owners else None,
        )

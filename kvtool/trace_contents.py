"""What a trace says its prompts consist of: hashes of blocks, or segments of streams of tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtool.contents import Contents, of_blocks, of_segments
from kvtool.trace_blocks import HashedRequests
from kvtool.trace_formats import MAX_TOKENS, CellError, Read, json_whole, shown
from kvtool.trace_lines import Lines

if TYPE_CHECKING:
    from kvtool.requests import Column

MAX_STREAM = 2**30
MAX_NUMBERS = 2**27
"""Numbers of all segments, or hashes of all blocks, that are held in memory: 1 GiB."""
_stream: Read = partial(json_whole, low=0, high=MAX_STREAM)


@dataclass(slots=True, kw_only=True)
class HashColumn:
    """The column that names the blocks of each prompt, row by row."""

    lines: Lines
    column: str
    size: int
    """Tokens of a block."""
    hashes: array[int] = field(default_factory=lambda: array("q"))
    starts: array[int] = field(default_factory=lambda: array("q", [0]))

    def add(self, line: int, value: Any, tokens: int) -> None:
        """The blocks of one request; a last one that is not full may be left out."""
        blocks, full = -(-tokens // self.size), tokens // self.size
        if type(value) is not list:
            hint = f"{self.column} takes a list of whole numbers, a block each"
            what = "is missing" if value is None else f"{shown(value)} is not a list"
            self.lines.fail(f"{self.column}: {what}", hint, line=line)
        if len(value) not in (full, blocks):
            what = f"{len(value):,} blocks of {self.size} tokens for {tokens:,} prompt tokens"
            hint = "give --trace-block-size if its blocks have another size, or correct that line"
            self.lines.fail(f"{self.column}: {what}", hint, line=line)
        try:
            if bool in set(map(type, value)):  # to Python they are 0 and 1
                raise TypeError
            self.hashes.extend(value)
        except (TypeError, OverflowError):
            del self.hashes[self.starts[-1] :]
            self.hashes.extend(self._whole(line, one) for one in value)
        if len(value) < blocks:
            self.lines.note("last blocks without a hash, taken for shared with nobody", line)
            self.hashes.append(_nobody_s(line))
        self.starts.append(len(self.hashes))

    def _whole(self, line: int, value: Any) -> int:
        """A hash as 64 bits with a sign: those without one wrap."""
        if type(value) is not int or not -(2**63) <= value < 2**64:
            hint = f"{self.column} takes whole numbers of 64 bits"
            what = f"{shown(value)} is no whole number of 64 bits"
            self.lines.fail(f"{self.column}: {what}", hint, line=line)
        return value - 2**64 if value >= 2**63 else value

    def check_size(self, line: int) -> None:
        """For who keeps all of them."""
        _check_size(self.lines, len(self.hashes), "blocks", line)

    def contents(self, prompts: Column, outputs: Column) -> Contents:
        """What all requests consist of."""
        import numpy as np

        return of_blocks(
            HashedRequests(
                arrival_ns=np.zeros_like(prompts),
                prompt_tokens=prompts,
                output_tokens=outputs,
                hash_ids=np.frombuffer(self.hashes, np.int64)
                if self.hashes
                else np.zeros(0, np.int64),
                starts=np.frombuffer(self.starts, np.int64),
                block_size=self.size,
            )
        )


def _nobody_s(line: int) -> int:
    """A name that no other block has: 64 bits well mixed (Steele et al., SplitMix, OOPSLA 2014)."""
    mixed = (line * 0x9E3779B97F4A7C15) % 2**64
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) % 2**64
    return (mixed ^ mixed >> 31) - 2**63


@dataclass(slots=True, kw_only=True)
class SegmentColumns:
    """kvtool's own columns `segments` and `out_stream`, row by row.

    A prompt is its segments [stream, first token, length, …] after each other; generated token j is
    token j of the stream `out_stream`. Token p of stream s is the number s × 2^20 + p.
    """

    lines: Lines
    sizes: array[int] = field(default_factory=lambda: array("q"))
    numbers: array[int] = field(default_factory=lambda: array("q"))
    streams: array[int] = field(default_factory=lambda: array("q"))

    def add(self, line: int, row: dict[str, Any]) -> None:
        """The segments of one request, whose sum is looked at in the end."""
        value = row.get("segments")
        hint = "segments takes a list [stream, first token, length, …] of whole numbers"
        if type(value) is not list or len(value) % 3:
            what = "is missing" if value is None else f"{shown(value)} is not a list of threes"
            self.lines.fail(f"segments: {what}", hint, line=line)
        if not {int}.issuperset(map(type, value)):
            wrong = next(one for one in value if type(one) is not int)
            self.lines.fail(f"segments: {shown(wrong)} is not a whole number", hint, line=line)
        try:
            self.numbers.extend(value)
            self.streams.append(_stream(row["out_stream"]))
        except OverflowError:
            self.lines.fail("segments: a number is above 2^63", hint, line=line)
        except (CellError, LookupError) as error:
            what = str(error) if isinstance(error, CellError) else "is missing"
            hint = "out_stream takes a whole number from 0 to 2^30, the stream of what is generated"
            self.lines.fail(f"out_stream: {what}", hint, line=line)
        self.sizes.append(len(value) // 3)
        _check_size(self.lines, len(self.numbers), "numbers of segments", line)

    def contents(self, prompts: Column, numbers: array[int]) -> Contents:
        """What all requests consist of, if it adds up; `numbers` are their lines."""
        import numpy as np

        flat = np.array(self.numbers, np.int64)
        sizes = np.array(self.sizes, np.int64)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        stream, first, length = flat.reshape(-1, 3).T
        for name, column, high in (
            ("stream", stream, MAX_STREAM), ("first token", first, MAX_TOKENS),
            ("length", length, MAX_TOKENS),
        ):  # fmt: skip
            wrong = (column < 0) | (column > high)
            if wrong.any():
                at = int(wrong.argmax())
                what = (
                    f"segments: the {name} {column[at]} is not from 0 to 2^{high.bit_length() - 1}"
                )
                hint = "correct that line or take it out"
                self.lines.fail(what, hint, line=numbers[int(owner[at])])
        tokens = np.zeros(len(sizes), np.int64)
        np.add.at(tokens, owner, length)  # of one line's 16 MiB: far below 2^63
        wrong = tokens != prompts
        if wrong.any():
            at = int(wrong.argmax())
            what = f"segments: {tokens[at]:,} tokens, where prompt_tokens is {prompts[at]:,}"
            self.lines.fail(what, "the lengths of the segments add up to it", line=numbers[at])
        return of_segments(sizes, flat, np.array(self.streams, np.int64))


def _check_size(lines: Lines, count: int, what: str, line: int) -> None:
    if count > MAX_NUMBERS:
        lines.fail(f"there are more than {MAX_NUMBERS:,} {what}", "cut the trace", line=line)

"""The formats of request traces: what their columns are called, and how a cell is an integer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_HALF_EVEN, Context, Decimal
from functools import partial
from typing import Any

from kvtool.errors import KvtoolError

MAX_TOKENS = 2**40
MAX_NS = 2**60
"""36 years: times and pauses below it can be added without a thought of 64 bits."""
MAX_CLOCK_NS = 2**62
"""146 years to each side of 1970, for what a trace calls time zero."""
MAX_SHOWN = 40

Read = Callable[[Any], int]

_SCALE = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_DATE = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?"
    r" ?(Z|[+-][0-9]{2}:?[0-9]{2})?"
)
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")
_EPOCH = datetime(1970, 1, 1)
_SECOND = timedelta(seconds=1)
_EXACT = Context(prec=100)  # the default of 28 digits would round a long decimal twice


class CellError(ValueError):
    """What is wrong with a cell, worded to follow its value: '12x' …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What a format calls its columns, and the public project that has traces in it.

    Of several names for a column the first is the one to recommend. `arrival` has the unit of each
    name: s, ms, us or ns (numbers), or date (date-times).
    """

    source: str
    prompt: tuple[str, ...]
    output: tuple[str, ...]
    arrival: Mapping[str, str]
    needs_arrival: bool = True
    is_json: bool = False
    mark: str = ""
    """A column that is not read: it tells this format from the next one with the same names."""
    hashes: str = ""
    """The column that names the blocks of the prompt, if the format has one: `kvtool.trace_stream`."""
    block_size: int | None = None
    """Tokens of these blocks, if the format says so."""

    def needs(self) -> str:
        """Its columns, for people."""
        time, prompt, output = map(_first, (tuple(self.arrival), self.prompt, self.output))
        if self.needs_arrival:
            return f"{time}, {prompt}, {output}"
        return f"{prompt}, {output}, and for arrivals {time}"


def _first(names: tuple[str, ...]) -> str:
    return names[0] + (f" (or {names[1]}, …)" if len(names) > 1 else "")


# The order is that in which a file is tried.
FORMATS: dict[str, Format] = {
    "azure": Format(
        source="Azure/AzurePublicDataset: data/AzureLLMInferenceTrace_{code,conv}.csv, and those of 2024",
        prompt=("ContextTokens",),
        output=("GeneratedTokens",),
        arrival={"TIMESTAMP": "date"},
    ),
    "burstgpt": Format(
        source="HPMLL/BurstGPT: BurstGPT_1.csv and the others",
        prompt=("Request tokens",),
        output=("Response tokens",),
        arrival={"Timestamp": "s"},
    ),
    "lengths": Format(
        source="many, such as microsoft/vidur: data/processed_traces/*.csv",
        prompt=(
            "prompt_tokens", "prompt_len", "prompt_length", "num_prompt_tokens",
            "num_prefill_tokens", "prefill_tokens", "input_tokens", "input_len", "input_length",
            "num_input_tokens", "context_tokens", "request_tokens",
        ),
        output=(
            "output_tokens", "output_len", "output_length", "num_output_tokens",
            "num_decode_tokens", "decode_tokens", "completion_tokens", "completion_len",
            "generated_tokens", "response_tokens",
        ),
        arrival={
            "arrival_s": "s", "arrival_time_s": "s", "arrived_at": "s", "timestamp_s": "s",
            "arrival_ms": "ms", "arrival_time_ms": "ms", "timestamp_ms": "ms",
            "arrival_us": "us", "arrival_time_us": "us", "timestamp_us": "us",
            "arrival_ns": "ns", "arrival_time_ns": "ns", "timestamp_ns": "ns",
            # No unit in the name: a number would be a guess, a date-time is not.
            "timestamp": "date", "arrival_time": "date", "arrival": "date",
        },
        needs_arrival=False,
    ),
    "bailian": Format(
        source="alibaba-edu/qwen-bailian-usagetraces-anon: qwen_*_blksz_16.jsonl",
        prompt=("input_length",),
        output=("output_length",),
        arrival={"timestamp": "s"},
        is_json=True,
        mark="chat_id",
        hashes="hash_ids",
        block_size=16,
    ),
    "mooncake": Format(
        source="kvcache-ai/Mooncake: FAST25-release/traces/*.jsonl",
        prompt=("input_length",),
        output=("output_length",),
        arrival={"timestamp": "ms"},
        is_json=True,
        hashes="hash_ids",
        block_size=512,
    ),
    "kvtool": Format(
        source="kvtool itself",
        prompt=("prompt_tokens",),
        output=("output_tokens",),
        arrival={"arrival_ns": "ns"},
        needs_arrival=False,
        is_json=True,
        hashes="hash_ids",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One value of each row: its place there, its reader, and what the reader takes in words."""

    column: str
    key: Any
    read: Read
    takes: str
    default: int | None = None
    """What an absent key stands for; None: it must be there."""


def trace_error(message: str, hint: str) -> KvtoolError:
    """An error of a trace."""
    return KvtoolError(message, hint, code="trace")


def shown(value: object) -> str:
    """What stood in a file, as an error shows it: on one line, at most 40 characters."""
    if isinstance(value, Decimal):
        text = str(value)
    elif value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def listed(names: Iterable[str]) -> str:
    """The names of columns for people, cut if they are many."""
    names = list(names)
    text = ", ".join(name if re.fullmatch(r"\w[\w .-]{0,39}", name) else shown(name)
                     for name in names[:8])  # fmt: skip
    return text + (f" and {len(names) - 8:,} more" if len(names) > 8 else "")


def match(form: Format, columns: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Which columns are the format's prompt, output and arrival, and what is missing.

    JSON keys are taken as they are; the headers of CSV without case, blanks and underscores.
    """
    plain = str if form.is_json else _plain
    found: dict[str, list[str]] = {}
    missing = []
    for role, names in _roles(form).items():
        wanted = {plain(name) for name in names}
        found[role] = [column for column in columns if plain(column) in wanted]
        if not found[role] and (role != "arrival" or form.needs_arrival):
            missing.append(names[0])
    return found, missing


def _roles(form: Format) -> dict[str, tuple[str, ...]]:
    return {"arrival": tuple(form.arrival), "prompt": form.prompt, "output": form.output}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def fields_of(form: Format, found: Mapping[str, str], columns: list[str]) -> dict[str, Field]:
    """The readers of the columns that were found, by role."""
    fields = {}
    for role, column in found.items():
        key: Any = column if form.is_json else columns.index(column)
        if role == "arrival":
            units = {_plain(name): unit for name, unit in form.arrival.items()}
            read, takes = _clock(units[_plain(column)], form)
        else:
            read = json_tokens if form.is_json else cell_tokens
            takes = "a whole number from 0 to 2^40"
        fields[role] = Field(column=column, key=key, read=read, takes=takes)
    return fields


def _clock(unit: str, form: Format) -> tuple[Read, str]:
    """The reader of a column of times, in ns, and what it takes."""
    if unit != "date":
        number = json_number if form.is_json else cell_number
        read = partial(_nanoseconds, number=number, scale=_SCALE[unit])
        return read, f"{_WORDS[unit]}, a number from 0"
    takes = "date-times such as 2023-11-16 18:17:03.9799600, all with a zone or all without"
    if len(form.arrival) > 1:
        takes += "; for numbers, put their unit into its name: timestamp_s or timestamp_ms"
    return dates(), takes


def cell_number(cell: str) -> int | Decimal:
    """The number in a cell of CSV."""
    text = cell.strip()
    if not text:
        raise CellError("is empty")
    if len(text) > 100 or not _NUMBER.fullmatch(text):
        raise CellError("is not a number")
    return Decimal(text)


def json_number(value: object) -> int | Decimal:
    """The number in a JSON value; a boolean and a string are none."""
    if type(value) is int or isinstance(value, Decimal):
        return value
    raise CellError("is not a number")


def cell_tokens(cell: str) -> int:
    """Tokens in a cell of CSV."""
    if len(cell) <= 12 and cell.isdigit() and cell.isascii():  # 12 digits are below 2^40
        return int(cell)
    return whole(cell_number(cell), low=0, high=MAX_TOKENS)


def json_tokens(value: object) -> int:
    """Tokens in a JSON value."""
    return whole(json_number(value), low=0, high=MAX_TOKENS)


def json_whole(value: object, *, low: int, high: int) -> int:
    """A whole number in a JSON value, from low to high."""
    return whole(json_number(value), low=low, high=high)


def whole(number: int | Decimal, *, low: int, high: int) -> int:
    """The number as an integer: 12.0 is 12, 12.5 is refused."""
    # The exponent first: 1e999999999 as an integer would fill the memory.
    if isinstance(number, Decimal) and number.adjusted() < 30:
        if number != number.to_integral_value():
            raise CellError("is not a whole number")
        number = int(number)
    if number < low:
        raise CellError("is negative" if number < 0 and low in (0, 1) else f"is less than {low}")
    if number > high:
        power = high.bit_length() - 1
        raise CellError(f"is above {f'2^{power}' if high == 2**power else f'{high:,}'}")
    return int(number)


def _nanoseconds(value: Any, *, number: Callable[[Any], int | Decimal], scale: int) -> int:
    time = number(value)
    if time < 0:
        raise CellError("is negative")
    if isinstance(time, Decimal):
        if time.adjusted() > 30:
            raise CellError("is out of range")
        time = _EXACT.multiply(time, scale).to_integral_value(ROUND_HALF_EVEN)
    else:
        time *= scale
    if time > MAX_CLOCK_NS:
        raise CellError("is out of range")
    return int(time)


def dates() -> Read:
    """A reader of date-times, in ns since 1970, that takes all with a zone or all without one."""
    zoned: bool | None = None

    def read(cell: str) -> int:
        nonlocal zoned
        parts = _DATE.fullmatch(cell.strip())
        if parts is None:
            raise CellError("is not a date-time" if cell.strip() else "is empty")
        text, fraction, zone = parts.groups()
        try:
            seconds = (datetime.fromisoformat(text) - _EPOCH) // _SECOND
        except ValueError as error:
            raise CellError("is not a date-time that exists") from error
        if zoned is None:
            zoned = zone is not None
        if zoned != (zone is not None):
            raise CellError(f"has {'no' if zoned else 'a'} time zone, unlike the lines before it")
        if zone and zone != "Z":
            if int(zone[1:3]) > 14 or int(zone[-2:]) > 59:
                raise CellError("has a time zone that does not exist")
            sign = -1 if zone[0] == "+" else 1
            seconds += sign * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
        time = seconds * 10**9 + (int(fraction.ljust(9, "0")) if fraction else 0)
        if abs(time) > MAX_CLOCK_NS:
            raise CellError("is out of range")
        return time

    return read


# kvtool's own format: -1 is "none" for arrival_ns and parent, as in kvtool.requests.
KVTOOL = {
    name: Field(
        column=name, key=name, read=partial(json_whole, low=low, high=high),
        takes=f"a whole number from {low} to 2^{high.bit_length() - 1}", default=default,
    )
    for name, low, high, default in (
        ("arrival_ns", -1, MAX_NS, 0),
        ("prompt_tokens", 0, MAX_TOKENS, None),
        ("output_tokens", 1, MAX_TOKENS, None),
        ("priority", -(2**30), 2**30, 0),
        ("parent", -1, 2**30, -1),
        ("think_ns", 0, MAX_NS, 0),
    )
}  # fmt: skip

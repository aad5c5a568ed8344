"""Traces: what is read to the integer, what is told, and what is refused with its line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtool.errors import USAGE, KvtoolError
from kvtool.trace import FORMATS, Trace, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319601,3180,8
2023-11-16 18:17:05,110,27
"""
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,s1,2,ChatGPT,472,18,490,Conversation log
45.25,s2,3,GPT-4,1087,230,1317,API log
45.25,s2,3,GPT-4,20,0,20,API log
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 1000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 2]}
{"timestamp": 4000.5, "input_length": 7236.0, "output_length": 794, "hash_ids": [0, 3]}
"""
BAILIAN = """{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 2, \
"output_length": 3, "type": "text", "turn": 1, "hash_ids": [1]}
{"chat_id": 8, "parent_chat_id": 7, "timestamp": 62.000000001, "input_length": 4, \
"output_length": 5, "type": "text", "turn": 2, "hash_ids": [1]}
"""
LENGTHS = """arrived_at,num_prefill_tokens,num_decode_tokens,pd_ratio
0.0,374,44,8.5
4.314579,396,109,3.6
5.8926549999999995,91,16,5.7
"""
KVTOOL = """{"arrival_ns": 7, "prompt_tokens": 0, "output_tokens": 1, "priority": -2}
{"arrival_ns": -1, "prompt_tokens": 5, "output_tokens": 6, "parent": 2, "think_ns": 9}
{"arrival_ns": 3, "prompt_tokens": 8, "output_tokens": 9, "segments": [0, 0, 8], "out_stream": 1}
"""
EXAMPLES = {
    "azure": AZURE, "burstgpt": BURSTGPT, "mooncake": MOONCAKE, "bailian": BAILIAN,
    "lengths": LENGTHS, "kvtool": KVTOOL,
}  # fmt: skip
COLUMNS = {
    "azure": [[0, 52_000_100, 1_020_040_000], [4808, 3180, 110], [10, 8, 27]],
    "burstgpt": [[0, 40_250_000_000], [472, 1087], [18, 230]],
    "mooncake": [[0, 0, 3_000_500_000], [6758, 7322, 7236], [500, 490, 794]],
    "bailian": [[0, 886_000_001], [2, 4], [3, 5]],
    "lengths": [[0, 4_314_579_000, 5_892_655_000], [374, 396, 91], [44, 109, 16]],
    "kvtool": [[7, -1, 3], [0, 5, 8], [1, 6, 9]],
}


def read(text: str | bytes, format: str | None = None) -> Trace:
    data = text.encode() if isinstance(text, str) else text
    return read_trace("-", format=format, stdin=io.BytesIO(data))


def refused(text: str | bytes, format: str | None = None) -> KvtoolError:
    with pytest.raises(KvtoolError) as caught:
        read(text, format)
    return checked(caught.value)


def checked(error: KvtoolError) -> KvtoolError:
    assert error.code == "trace"
    assert error.message
    assert error.hint
    assert (error.message + error.hint).isprintable()
    return error


def lists(trace: Trace) -> list[list[int]]:
    requests = trace.requests
    columns = (requests.arrival_ns, requests.prompt_tokens, requests.output_tokens)
    assert {column.dtype for column in requests.columns().values()} == {np.dtype(np.int64)}
    return [column.tolist() for column in columns]


def csv_of(header: str, *rows: str) -> str:
    return "\n".join([header, *rows, ""])


def jsonl(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def line(arrival: int | None = 0, **more: Any) -> dict[str, Any]:
    time = {} if arrival is None else {"arrival_ns": arrival}
    return {**time, "prompt_tokens": 1, "output_tokens": 1, **more}


# What is read


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_to_the_integer(name: str, named: bool) -> None:
    trace = read(EXAMPLES[name], name if named else None)
    assert (trace.name, trace.format, trace.has_arrivals) == ("standard input", name, True)
    assert lists(trace) == COLUMNS[name]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data.rstrip(b"\n"),
        gzip.compress,
        lambda data: gzip.compress(data[:90]) + gzip.compress(data[90:]),
        lambda data: b"\n \r\n" + data + b"\n\n",
    ],
    ids=["bom", "crlf", "no last line end", "gzip", "gzip of two members", "blank lines"],
)
def test_a_file_may_be_written_in_several_ways(name: str, change: Any, tmp_path: Path) -> None:
    data = change(EXAMPLES[name].encode())
    path = tmp_path / "requests.txt"
    path.write_bytes(data)
    trace = read_trace(str(path))
    assert (trace.name, trace.format) == ("requests.txt", name)
    assert lists(trace) == COLUMNS[name] == lists(read(data))


def test_the_kvtool_format_keeps_its_order_and_its_other_columns() -> None:
    trace = read(KVTOOL)
    requests = trace.requests
    assert requests.priority is not None
    assert requests.parent is not None
    assert requests.think_ns is not None
    assert requests.priority.tolist() == [-2, 0, 0]
    assert requests.parent.tolist() == [-1, 2, -1]
    assert requests.think_ns.tolist() == [0, 9, 0]
    assert trace.notes == ("columns that are not read: segments, out_stream",)
    plain = read(jsonl(line(5), line(4))).requests
    assert plain.columns().keys() == {"arrival_ns", "prompt_tokens", "output_tokens"}


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        (csv_of("prompt_len,output_len", "3,4", "5,6"), [3, 5]),
        (csv_of("ContextTokens,GeneratedTokens", "3,4", "5,6"), [3, 5]),
        (jsonl(line(None, prompt_tokens=3), line(None, prompt_tokens=0)), [3, 0]),
    ],
)
def test_lengths_alone_have_no_arrivals(text: str, prompts: list[int]) -> None:
    trace = read(text)
    assert trace.has_arrivals is False
    assert lists(trace)[:2] == [[0, 0], prompts]
    assert trace.notes == ()


@pytest.mark.parametrize(
    ("header", "cell", "ns"),
    [
        ("arrival_time_s", "0.046927", 46_927_000),
        ("arrived_at", "4.314579", 4_314_579_000),
        ("arrival_s", "1e-05", 10_000),
        ("Arrival S", " +2. ", 2_000_000_000),
        ("timestamp_s", "0.0000000005", 0),
        ("timestamp_s", "0.0000000015", 2),
        ("timestamp_s", "0.00000000249999999999999999999999999999999999", 2),
        ("timestamp_ms", "6011", 6_011_000_000),
        ("timestamp_us", "6.011", 6_011),
        ("arrival_ns", "12345678901234567", 12_345_678_901_234_567),
        ("timestamp", "1970-01-01T00:00:00.000000001", 1),
        ("arrival", "1970-01-01 00:00:01.5", 1_500_000_000),
    ],
)
def test_arrivals_are_converted_exactly(header: str, cell: str, ns: int) -> None:
    zero = "0" if ":" not in cell else "1970-01-01 00:00:00"
    text = csv_of(f"{header},input_tokens,completion_tokens", f"{zero},1,2", f"{cell},3,4")
    assert lists(read(text)) == [[0, ns], [1, 3], [2, 4]]


def test_seconds_of_today_keep_their_nanoseconds() -> None:
    row = '{{"chat_id": 1, "timestamp": {}, "input_length": 1, "output_length": 1}}\n'
    text = row.format("1763312345.123456789") + row.format("1763312345.123456790")
    assert lists(read(text))[0] == [0, 1]


@pytest.mark.parametrize(
    ("first", "second", "ns"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:00.017335+00:00", 7_405_000),
        ("2024-05-10 00:00:00Z", "2024-05-10 02:00:00.5+02:00", 500_000_000),
        ("2024-05-10 00:00:00 -0130", "2024-05-10 01:30:01+00:00", 1_000_000_000),
        ("2023-12-31 23:59:59.9999999", "2024-01-01 00:00:00", 100),
        ("1969-12-31 23:59:59.75", "1970-01-01 00:00:00.25", 500_000_000),
    ],
)
def test_date_times_are_differences_of_integers(first: str, second: str, ns: int) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    assert lists(read(csv_of(header, f"{first},1,1", f'"{second}",1,1')))[0] == [0, ns]


def test_cells_may_be_quoted_and_hold_line_ends() -> None:
    text = 'prompt,prompt_len,output_len\n"a ""b"",\n\nc","3","4"\nd,5,x\n'
    error = refused(text)
    assert error.message == "standard input, line 5: output_len: 'x' is not a number"
    trace = read(text.replace("x", "6.0"))
    assert lists(trace) == [[0, 0], [3, 5], [4, 6]]
    assert trace.notes == ("columns that are not read: prompt",)


def test_standard_input_stays_open_and_csv_keeps_its_limit() -> None:
    limit = csv.field_size_limit()
    stream = io.BytesIO(AZURE.encode())
    read_trace("-", stdin=stream)
    assert not stream.closed
    long = "x" * (limit + 1)
    assert lists(read(f"text,prompt_len,output_len\n{long},1,2\n")) == [[0], [1], [2]]
    refused("a,b\n1,2\n")
    assert csv.field_size_limit() == limit


# What is told


def test_rows_out_of_order_are_sorted_stably_and_counted() -> None:
    text = csv_of(
        "arrival_s,prompt_len,output_len", "5,1,1", "3,2,1", "5,3,1", "", "3,4,1", "9,5,1"
    )
    trace = read(text)
    assert lists(trace)[:2] == [[0, 0, 2 * 10**9, 2 * 10**9, 6 * 10**9], [2, 4, 1, 3, 5]]
    assert trace.notes == (
        "requests earlier than the one before, sorted by arrival: 2 (first: line 3)",
        "blank lines, skipped: 1 (first: line 5)",
    )


def test_requests_without_tokens_are_left_out_and_counted() -> None:
    text = csv_of("arrival_s,prompt_len,output_len", "1,4,0", "2,4,5", "3,0,5", "4,7,0", "5,1,1")
    trace = read(text)
    assert lists(trace) == [[0, 3 * 10**9], [4, 1], [5, 1]]
    assert trace.notes == (
        "requests with 0 output tokens, left out: 2 (first: line 2)",
        "requests with 0 prompt tokens, left out: 1 (first: line 4)",
    )
    assert read(BURSTGPT).notes == (
        "requests with 0 output tokens, left out: 1 (first: line 4)",
        "columns that are not read: Session ID, Elapsed time, Model, Total tokens, Log Type",
    )


def test_keys_of_any_line_that_are_not_read_are_named() -> None:
    more = {f"k{i}": 0 for i in range(9)}
    assert read(jsonl(line(), line(prio=1))).notes == ("columns that are not read: prio",)
    assert read(jsonl(line(), line(**more))).notes == (
        "columns that are not read: k0, k1, k2, k3, k4, k5, k6, k7 and 1 more",
    )
    assert read(jsonl(line(**{"\ud800\n": 1}))).notes[0].endswith(r"read: '\ud800\n'")
    # More names than are kept do not hide one that is read.
    crowd = {f"k{i}": 0 for i in range(2000)}
    priority = read(jsonl(line(**crowd, priority=4))).requests.priority
    assert priority is not None
    assert priority.tolist() == [4]


# What is refused

LEN = "prompt_len,output_len"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "standard input is empty"),
        ("\n \n", "standard input is empty"),
        (LEN, "standard input has a header and no requests"),
        (csv_of(LEN, "0,1", "1,0"), "has no request with both prompt and output tokens (req"),
        (csv_of(LEN, "1,2", "x1,2"), "line 3: prompt_len: 'x1' is not a number"),
        (csv_of(LEN, "1,2", "1.5,2"), "line 3: prompt_len: '1.5' is not a whole number"),
        (csv_of(LEN, "1,-2"), "line 2: output_len: '-2' is negative"),
        (csv_of(LEN, ",2"), "line 2: prompt_len: '' is empty"),
        (csv_of(LEN, "1, "), "line 2: output_len: ' ' is empty"),
        (csv_of(LEN, "1_0,2"), "line 2: prompt_len: '1_0' is not a number"),
        (csv_of(LEN, "１,2"), "line 2: prompt_len: '１' is not a number"),
        (csv_of(LEN, "nan,2"), "line 2: prompt_len: 'nan' is not a number"),
        (csv_of(LEN, f"{2**40 + 1},2"), "line 2: prompt_len: '1099511627777' is above 2^40"),
        (csv_of(LEN, "1e999,2"), "line 2: prompt_len: '1e999' is above 2^40"),
        (csv_of(LEN, "9" * 99 + ",2"), f"line 2: prompt_len: '{'9' * 38}… is above 2^40"),
        (csv_of(LEN, "1,2", "1"), "line 3: cells: 1, where the header has 2"),
        (csv_of(LEN, "1,2,3"), "line 2: cells: 3, where the header has 2"),
        (csv_of(LEN, "1,2", '1,"2', "1,2"), "line 3: it is not CSV: unexpected end of data"),
        (csv_of(LEN, '"1"0,2'), "line 2: it is not CSV: ',' expected after '\"'"),
        (csv_of(LEN, "1,2\r3,4"), "line 2: it is not CSV: new-line character seen in unquoted"),
        (csv_of(LEN, "1,2\0"), "line 2: it holds a NUL byte"),
        (LEN.encode() + b"\n1,2\n\xff,1\n", "line 3: its text is not valid UTF-8"),
        (LEN.encode("utf-16"), "line 1: its text is not valid UTF-8"),
        (csv_of("prompt_len,input_len,output_len", "1,1,1"), "has 2 columns for the prompt: p"),
        (csv_of("prompt_len,prompt_len,output_len"), "has 2 columns for the prompt: prompt_len,"),
        (csv_of("a,b", "1,2"), "is in no known format: its columns are a, b"),
        (csv_of("6011,178,8"), "is in no known format: its columns are 6011, 178, 8"),
        (csv_of("prompt_len;output_len"), "its columns are 'prompt_len;output_len'"),
        ("version https://git-lfs.github.com/spec/v1\noid", "is not the trace but a pointer of"),
        ('{"cdf": [[1, 0.5]]}', "is in no known format: its columns are cdf"),
        ("{}", "is in no known format: its columns are (none)"),
        ('{\n  "cdf": []\n}', "line 1: it is not JSON: '{' (Expecting property name enclosed"),
        ("[\n 1]", "line 1: it is not JSON: '[' (Expecting value, column 1)"),
        ("[1, 2]\n", "line 1: it is not a JSON object: [1, 2]"),
        (MOONCAKE + "17\n", "line 4: it is not a JSON object: 17"),
        (MOONCAKE[:-9], "line 3: it is not JSON: "),
        (MOONCAKE + '{"timestamp": NaN}', "line 4: it holds NaN, Infinity or a number of too"),
        (MOONCAKE + '{"a": ' + "1" * 5000 + "}", "line 4: it holds NaN, Infinity or a number"),
        (MOONCAKE + '{"a": 1e' + "9" * 30 + "}", "line 4: it holds NaN, Infinity or a number"),
        (MOONCAKE + '{"a":' * 99999, "line 4: its JSON is nested too deeply"),
        (MOONCAKE + '{"timestamp": 1}', "line 4: input_length is missing"),
        (MOONCAKE.replace("7322", "true"), "line 2: input_length: true is not a number"),
        (MOONCAKE.replace("7322", "null"), "line 2: input_length: null is not a number"),
        (MOONCAKE.replace("7322", '"7"'), "line 2: input_length: '7' is not a number"),
        (MOONCAKE.replace("7322", "[7]"), "line 2: input_length: [7] is not a number"),
        (MOONCAKE.replace("7322", "7.5"), "line 2: input_length: 7.5 is not a whole number"),
        (MOONCAKE.replace("7322", "1e99999999"), "line 2: input_length: 1E+99999999 is above 2^40"),
        (MOONCAKE.replace("4000.5", "-1"), "line 3: timestamp: -1 is negative"),
        (MOONCAKE.replace("4000.5", "1e99"), "line 3: timestamp: 1E+99 is out of range"),
        (MOONCAKE.replace("4000.5", "1e14"), "line 3: timestamp: 1E+14 is out of range"),
        (MOONCAKE.replace("4000.5", "1e12"), "line 3: timestamp: 1E+12 is more than 18 years"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_its_line_and_what_stood_there(
    text: str | bytes, message: str
) -> None:
    error = refused(text)
    assert message in error.message
    assert error.message.startswith("standard input")


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("", "'' is empty"),
        ("12.5", "'12.5' is not a date-time"),
        ("2023-11-16", "'2023-11-16' is not a date-time"),
        ("2023-02-30 10:00:00", "'2023-02-30 10:00:00' is not a date-time that exists"),
        ("2023-11-16 18:17:04.0Z", "'2023-11-16 18:17:04.0Z' has a time zone, unlike the lines"),
        ("2023-11-16 18:17:04.0123456789", "'2023-11-16 18:17:04.0123456789' is not a date-time"),
        ("1023-11-16 18:17:04", "'1023-11-16 18:17:04' is out of range"),
        ("1970-01-01 00:00:00", "'1970-01-01 00:00:00' is more than 18 years from the first"),
    ],
)
def test_time_stamps_that_do_not_go_together_are_refused(cell: str, why: str) -> None:
    error = refused(AZURE.replace("2023-11-16 18:17:05", cell))
    assert f"line 4: TIMESTAMP: {why}" in error.message


def test_a_missing_zone_is_refused_after_lines_with_one() -> None:
    text = AZURE.replace("00,4808", "00Z,4808")
    assert "line 3: TIMESTAMP: " in refused(text).message
    assert "has no time zone, unlike" in refused(text).message


def test_a_number_in_a_column_without_a_unit_is_not_guessed() -> None:
    error = refused(csv_of("timestamp,prompt_len,output_len", "6011,1,1"))
    assert "line 2: timestamp: '6011' is not a date-time" in error.message
    assert "put their unit into its name: timestamp_s or timestamp_ms" in error.hint


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([line(output_tokens=0)], "line 1: output_tokens: 0 is less than 1"),
        ([line(), line(prompt_tokens=-1)], "line 2: prompt_tokens: -1 is negative"),
        ([line(-2)], "line 1: arrival_ns: -2 is less than -1"),
        ([line(2**60 + 1)], "line 1: arrival_ns: 1152921504606846977 is above 2^60"),
        ([line(0.5)], "line 1: arrival_ns: 0.5 is not a whole number"),
        ([line(priority=None)], "line 1: priority: null is not a number"),
        ([line(think_ns=-1)], "line 1: think_ns: -1 is negative"),
        ([line(), line(-1)], "line 2: arrival_ns is -1 without a parent to wait for"),
        ([line(), line(None)], "line 2: arrival_ns is missing, unlike in the lines before it"),
        ([line(None), line()], "line 2: arrival_ns is there, unlike in the lines before it"),
        ([line(None), line(None, parent=0)], "line 2: there is a parent without an arrival_ns"),
        ([line(), line(-1, parent=2)], "line 2: parent: 2 is no request: there are 2"),
        ([line(), line(-1, parent=1)], "line 2: parent: 1 is the request itself"),
        ([line(), line(-1, parent=-2)], "line 2: parent: -2 is less than -1"),
        (
            [line(), line(-1, parent=3), line(-1, parent=1), line(-1, parent=2), line()],
            "line 2: parent: the request waits, by its parents, for itself",
        ),
        (
            [line(-1, parent=2), line(-1, parent=2), line(-1, parent=1)],
            "line 2: parent: the request waits, by its parents, for itself",
        ),
        ([{"prompt_tokens": 1, "output_tokens": 2}, {"prompt_tokens": 1}],
         "line 2: output_tokens is missing"),
    ],
)  # fmt: skip
def test_the_kvtool_format_is_checked(rows: list[dict[str, Any]], message: str) -> None:
    assert message in refused(jsonl(*rows)).message
    # A blank line before moves the lines and not the indices.
    moved = message.replace("line 1:", "line 2:") if "line 1:" in message else None
    if moved:
        assert moved in refused("\n" + jsonl(*rows)).message


def test_a_parent_may_come_later_and_chains_may_be_long() -> None:
    count = 3000
    rows = [line(-1, parent=index + 1) for index in range(count - 1)] + [line(5)]
    assert len(read(jsonl(*rows)).requests) == count
    # Who has an arrival of its own waits for nobody: no cycle.
    assert len(read(jsonl(line(0, parent=1), line(-1, parent=0))).requests) == 2


def test_a_named_format_is_kept_to() -> None:
    error = refused(LENGTHS, "azure")
    assert error.message.startswith("standard input has no column TIMESTAMP: its columns are arr")
    assert "needs TIMESTAMP, ContextTokens, GeneratedTokens" in error.hint
    assert "no column TIMESTAMP" in refused(MOONCAKE, "azure").message
    assert "line 1: it is not JSON: 'TIMESTAMP," in refused(AZURE, "mooncake").message
    # The name decides where two formats have the same columns.
    assert lists(read(BAILIAN, "mooncake"))[0] == [0, 886_000]
    assert lists(read(AZURE, "lengths")) == COLUMNS["azure"]


def test_a_time_zone_exists() -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46{},374,44\n"
    assert len(read(text.format("+05:30")).requests) == 1
    for zone in ("+99:99", "-15:00", "+05:60"):
        assert "a time zone that does not exist" in refused(text.format(zone)).message


def test_an_unknown_format_is_answered_with_the_near_ones() -> None:
    with pytest.raises(KvtoolError) as caught:
        read(AZURE, "mooncake2")
    error = caught.value
    assert error.exit_code == USAGE
    assert error.message == "no format of traces is called 'mooncake2'"
    assert error.hint.endswith("kvtool. Did you mean mooncake?")


def test_what_each_format_needs_is_told() -> None:
    hint = refused("a,b\n1,2\n").hint
    assert "azure has TIMESTAMP, ContextTokens, GeneratedTokens; burstgpt has " in hint
    assert "lengths has prompt_tokens (or prompt_len, …), output_tokens (or" in hint
    assert "mooncake has timestamp, input_length, output_length; kvtool" in refused('{"a": 1}').hint


def test_gzip_that_ends_early_or_is_damaged_is_refused() -> None:
    rng = random.Random(0)
    rows = [f"{rng.randrange(1, 9999)},{rng.randrange(1, 9999)}" for _ in range(20_000)]
    data = gzip.compress(csv_of(LEN, *rows).encode())
    error = refused(data[: len(data) // 2])
    cut = "standard input ends in the middle: its gzip data is cut off after line "
    assert error.message.startswith(cut)
    assert 1000 < int(error.message.removeprefix(cut).replace(",", "")) < 20_000
    assert "ends in the middle" in refused(data[:5]).message
    assert "ends in the middle" in refused(data[:-4]).message
    damaged = data[:10] + b"\xff" * 10 + data[20:]
    assert "is damaged: its gzip data cannot be unpacked after line 0" in refused(damaged).message
    assert "is damaged" in refused(data[:-8] + bytes(8)).message
    assert "after line 20,001" in refused(data + b"more").message


def test_lines_and_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.trace_lines.MAX_LINE", 2**20)
    monkeypatch.setattr("kvtool.trace_lines.MAX_LINES", 50)
    bomb = gzip.compress(LEN.encode() + b"\n1," + b"1" * 2**22)
    assert "line 2: the row is longer than 1 MiB" in refused(bomb).message
    # A row of many lines is one row.
    quotes = csv_of(LEN) + '"\n' + ("x" * 2**16 + '","\n') * 40
    assert "line 18: the row is longer than 1 MiB" in refused(quotes).message
    assert "line 51: there are more than 50 lines" in refused(csv_of(LEN, *["1,1"] * 50)).message
    assert len(read(csv_of(LEN, *["1,1"] * 49)).requests) == 49
    assert "line 51: there are more than 50 lines" in refused(b"\n" * 99).message


def test_a_place_that_holds_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why(place: str) -> str:
        with pytest.raises(KvtoolError) as caught:
            read_trace(place)
        return checked(caught.value).message

    assert why(str(tmp_path)) == f"{tmp_path} is a folder"
    assert why(str(tmp_path / "no\n.csv")) == f"no such file: {tmp_path}/no?.csv"
    assert why("a\0b") == "a?b cannot be read: embedded null byte"
    assert why("/dev/null") == "/dev/null is not a regular file"
    assert "cannot be read: " in why("x" * 5000)
    monkeypatch.setattr("sys.stdin", None)
    assert why("-") == "standard input cannot be read: it is closed"
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    monkeypatch.setattr("sys.stdin", closed)
    assert why("-") == "standard input cannot be read: it is closed"

    def no(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "secret.csv"
    path.write_text(AZURE)
    monkeypatch.setattr(Path, "open", no)
    assert why(str(path)) == f"{path} cannot be read: Permission denied"


def test_a_stream_that_fails_is_refused() -> None:
    class Broken(io.RawIOBase):
        left = 2

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            self.left -= 1
            if self.left < 0:
                raise OSError(5, "Input/output error")
            data = AZURE[:60].encode()
            buffer[: len(data)] = data
            return len(data)

    for left in (0, 1):
        broken = Broken()
        broken.left = left
        with pytest.raises(KvtoolError, match="standard input cannot be read: Input/output error"):
            read_trace("-", stdin=broken)  # type: ignore[arg-type]


# Properties

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def only_kvtool_errors(data: bytes, format: str | None = None) -> None:
    try:
        trace = read(data, format)
    except KvtoolError as error:
        checked(error)
    else:
        assert len(trace.requests) > 0
        assert all(note.isprintable() for note in trace.notes)
        assert trace.requests.output_tokens.min() > 0


@QUICK
@given(st.binary(max_size=400), st.sampled_from([None, *FORMATS]))
def test_random_bytes_never_raise_anything_else(data: bytes, format: str | None) -> None:
    only_kvtool_errors(data, format)


@QUICK
@given(
    st.sampled_from(list(EXAMPLES.values())),
    st.lists(
        st.tuples(
            st.integers(0, 400),
            st.integers(0, 12),
            st.one_of(
                st.binary(max_size=4),
                st.sampled_from([b'"', b"\n", b"\r", b",", b"-1", b"1e99", b"null", b"{", b"\0"]),
                st.integers().map(lambda number: str(number).encode()),
            ),
        ),
        max_size=4,
    ),
    st.booleans(),
    st.integers(0, 400),
)
def test_mutations_of_a_trace_never_raise_anything_else(
    text: str, edits: list[tuple[int, int, bytes]], packed: bool, cut: int
) -> None:
    data = text.encode()
    for at, length, new in edits:
        data = data[:at] + new + data[at + length :]
    only_kvtool_errors(data)
    if packed:
        only_kvtool_errors(gzip.compress(data)[: cut or None])


TOKENS = st.integers(1, 2**40)
REQUESTS = st.lists(st.tuples(st.integers(0, 10**16), TOKENS, TOKENS), min_size=1, max_size=8)


def decimal(ns: int, digits: int) -> str:
    """ns in units of 10^digits ns, in digits alone: no float."""
    text = str(ns).rjust(digits + 1, "0")
    return (f"{text[:-digits]}.{text[-digits:]}").rstrip("0").rstrip(".")


def date_time(ns: int) -> str:
    seconds, rest = divmod(ns, 10**9)
    return f"{datetime(2023, 11, 16) + timedelta(seconds=seconds)}.{rest // 100:07d}"


def written(name: str, requests: Iterable[tuple[int, int, int]]) -> str:
    """The requests in a format."""
    if name == "azure":
        rows = [f"{date_time(t)},{p},{o}" for t, p, o in requests]
        return csv_of("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)
    if name == "burstgpt":
        rows = [f"{decimal(t, 9)},GPT-4,{p},{o},{p + o},API log" for t, p, o in requests]
        return csv_of("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", *rows)
    if name == "lengths":
        return csv_of(f"{LEN},arrival_ns", *[f"{p},{o},{t}" for t, p, o in requests])
    if name == "kvtool":
        return jsonl(*[line(t, prompt_tokens=p, output_tokens=o) for t, p, o in requests])
    mark, digits = ('"chat_id": 1, ', 9) if name == "bailian" else ("", 6)
    return "".join(
        f'{{{mark}"timestamp": {decimal(t, digits)}, "input_length": {p}, "output_length": {o}}}\n'
        for t, p, o in requests
    )


@settings(QUICK, max_examples=60)
@given(REQUESTS)
def test_requests_come_back_from_every_format(requests: list[tuple[int, int, int]]) -> None:
    for name in FORMATS:
        tick = 100 if name == "azure" else 1  # its date-times have 7 digits
        whole = [(t - t % tick, p, o) for t, p, o in requests]
        expected = list(map(list, zip(*whole, strict=True)))
        if name != "kvtool":
            whole_sorted = sorted(whole, key=lambda request: request[0])
            expected = list(map(list, zip(*whole_sorted, strict=True)))
            expected[0] = [t - expected[0][0] for t in expected[0]]
        trace = read(written(name, whole))
        assert trace.format == name
        assert lists(trace) == expected

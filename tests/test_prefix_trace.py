"""Traces that name their blocks: read by the chunk, in the order of the file."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvtool import trace_stream
from kvtool.errors import KvtoolError
from kvtool.trace import read_trace
from kvtool.trace_stream import HashedTrace, stream_trace


def mooncake(*rows: tuple[int, int, int, Any]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


TWO = mooncake((0, 600, 5, [0, 1]), (7, 512, 0, [0]))
BAILIAN = '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 17, \
"output_length": 3, "type": "text", "turn": 1, "hash_ids": [11, 12]}\n'
KVTOOL = '{"prompt_tokens": 5, "output_tokens": 2, "hash_ids": [1, 2, 3]}\n'


def stream(text: str | bytes, **more: Any) -> HashedTrace:
    data = text.encode() if isinstance(text, str) else text
    return stream_trace("-", stdin=io.BytesIO(data), **more)


def refused(text: str | bytes, **more: Any) -> KvtoolError:
    with pytest.raises(KvtoolError) as caught:
        list(stream(text, **more))
    assert caught.value.code in ("trace", "usage")
    assert (caught.value.message + caught.value.hint).isprintable()
    return caught.value


def test_blocks_are_columns() -> None:
    trace = stream(TWO)
    (chunk,) = trace
    assert (trace.name, trace.format, trace.block_size) == ("standard input", "mooncake", 512)
    assert (trace.notes, trace.num_bytes) == ((), None)
    assert chunk.prompt_tokens.tolist() == [600, 512]
    assert chunk.output_tokens.tolist() == [5, 0]
    assert chunk.arrival_ns.tolist() == [0, 7_000_000]
    assert chunk.hash_ids.tolist() == [0, 1, 0]
    assert chunk.starts.tolist() == [0, 2, 3]
    assert chunk.first(1).hash_ids.tolist() == [0, 1]
    assert len(chunk.first(9)) == 2


def test_each_format_knows_its_block_size() -> None:
    assert [(len(one), one.block_size) for one in stream(BAILIAN)] == [(1, 16)]
    assert [one.block_size for one in stream(KVTOOL, block_size=2)] == [2]
    assert [one.block_size for one in stream(TWO, block_size=512)] == [512]
    assert "does not say how many tokens" in refused(KVTOOL).message


def test_other_readers_are_told_that_blocks_are_not_read() -> None:
    trace = read_trace("-", stdin=io.BytesIO(TWO.encode()))
    assert "columns that are not read: hash_ids" in trace.notes
    notes = stream(BAILIAN)
    list(notes)
    assert notes.notes == ("columns that are not read: chat_id, parent_chat_id, type, turn",)


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_chunks_are_bounded_and_lose_nothing(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(i, 512 * (i % 5 + 1), 1, list(range(i % 5 + 1))) for i in range(50)]
    monkeypatch.setattr(trace_stream, "REQUESTS_AT_ONCE", most)
    chunks = list(stream(mooncake(*rows)))
    assert all(len(chunk) <= most for chunk in chunks)
    assert [int(n) for chunk in chunks for n in chunk.prompt_tokens] == [row[1] for row in rows]
    assert [int(n) for chunk in chunks for n in chunk.hash_ids] == [
        n for row in rows for n in row[3]
    ]
    monkeypatch.setattr(trace_stream, "BLOCKS_AT_ONCE", 4)
    assert all(len(chunk.hash_ids) <= 4 + 5 for chunk in stream(mooncake(*rows)))


def test_a_file_tells_its_size_and_progress(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(TWO.encode()))
    told: list[int] = []
    trace = stream_trace(str(path), progress=told.append)
    assert trace.num_bytes == path.stat().st_size
    assert len(list(trace)) == 1
    assert (trace.name, sum(told)) == ("trace.jsonl.gz", len(TWO))


def test_what_is_done_to_requests_is_told() -> None:
    trace = stream(mooncake((5, 0, 1, []), (5, 600, 1, [8]), (3, 512, 1, [8])))
    (chunk,) = trace
    one, nobody_s, other = chunk.hash_ids.tolist()
    assert (one, other) == (8, 8)
    assert abs(nobody_s) > 2**40  # no small number that another block may have
    assert trace.notes == (
        "requests with 0 prompt tokens, left out: 1 (first: line 1)",
        "last blocks without a hash, taken for shared with nobody: 1 (first: line 2)",
        "requests earlier than the one before, kept in the order of the file: 1 (first: line 3)",
    )


def test_hashes_of_64_bits_without_a_sign_wrap() -> None:
    (chunk,) = stream(mooncake((0, 1024, 1, [2**64 - 1, 3])))
    assert chunk.hash_ids.tolist() == [-1, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "standard input is empty"),
        (mooncake((0, 0, 1, [])), "has no request with a prompt"),
        (mooncake((0, 600, 1, [1, 2, 3])), "line 1: hash_ids: 3 blocks of 512 tokens for 600 p"),
        (TWO + mooncake((9, 600, 1, [])), "line 3: hash_ids: 0 blocks of 512 tokens for 600 p"),
        (TWO + mooncake((9, 600, 1, 5)), "line 3: hash_ids: 5 is not a list"),
        (TWO + mooncake((9, 600, 1, [1, "a"])), "line 3: hash_ids: 'a' is no whole number of 64"),
        (TWO + mooncake((9, 600, 1, [1, 2**64])), "is no whole number of 64 bits"),
        (TWO + mooncake((9, 600, 1, [1, 1.5])), "line 3: hash_ids: 1.5 is no whole number"),
        (TWO + mooncake((9, 600, 1, [1, True])), "line 3: hash_ids: true is no whole number"),
        (TWO + mooncake((9, 2**40, 1, [1])), "line 3: a request of 1,099,511,627,777 tokens"),
        (TWO + '{"timestamp": 1, "input_length": 5, "output_length": 1}\n', "hash_ids: is missing"),
        (TWO + '{"timestamp": 1, "input_length": -5, "output_length": 1}\n', "-5 is negative"),
        ("prompt_len,output_len\n1,2\n", "does not name the blocks of its prompts"),
        (KVTOOL.replace("hash_ids", "x"), "does not name the blocks of its prompts"),
        (TWO[:-9], "line 2: it is not JSON"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    assert message in refused(text).message


def test_options_that_cannot_be_are_refused() -> None:
    assert "no format of traces is called 'moon'" in refused(TWO, format="moon").message
    assert "a block of 0 tokens" in refused(TWO, block_size=0).message
    with pytest.raises(KvtoolError, match="no such file: nowhere"):
        list(stream_trace("nowhere.jsonl"))

"""What a trace says its prompts consist of: read, checked, and refused with its line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool import trace_contents
from kvtool.contents import Contents
from kvtool.errors import KvtoolError
from kvtool.trace import Trace, read_trace

TWO = [
    {"prompt_tokens": 5, "output_tokens": 1, "segments": [3, 0, 4, 9, 7, 1], "out_stream": 2},
    {"prompt_tokens": 0, "output_tokens": 1, "segments": [], "out_stream": 0},
    {"prompt_tokens": 2, "output_tokens": 1, "segments": [3, 0, 0, 1, 5, 2], "out_stream": 2},
]


def read(rows: list[dict[str, Any]], **more: Any) -> Trace:
    """The requests of these lines."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return read_trace("-", stdin=io.BytesIO(text.encode()), with_contents=True, **more)


def tokens(contents: Contents | None, index: int) -> list[int]:
    """Offsets of a prompt's tokens; their values are 0."""
    assert contents is not None
    own = slice(int(contents.starts[index]), int(contents.starts[index + 1]))
    assert not contents.value[own].any()
    runs = zip(contents.offset[own].tolist(), contents.length[own].tolist(), strict=True)
    return [first + k for first, length in runs for k in range(length)]


def test_segments_are_tokens_of_streams() -> None:
    trace = read(TWO)
    s = 1 << 20
    assert tokens(trace.contents, 0) == [3 * s, 3 * s + 1, 3 * s + 2, 3 * s + 3, 9 * s + 7]
    assert tokens(trace.contents, 1) == []
    assert tokens(trace.contents, 2) == [s + 5, s + 6]
    assert trace.contents is not None
    assert trace.contents.out_offset.tolist() == [2 * s, 0, 2 * s]
    assert (trace.contents.length > 0).all()
    assert trace.notes == ()


def test_segments_are_read_only_for_who_asks() -> None:
    text = "".join(json.dumps(row) + "\n" for row in TWO)
    trace = read_trace("-", stdin=io.BytesIO(text.encode()))
    assert trace.contents is None
    assert trace.notes == ("columns that are not read: segments, out_stream",)
    assert read([{"prompt_tokens": 1, "output_tokens": 1}]).contents is None


def test_the_blocks_of_a_trace_follow_its_requests() -> None:
    rows = [
        {"timestamp": t, "input_length": n, "output_length": out, "hash_ids": ids}
        for t, n, out, ids in (
            (50, 600, 3, [7, 8]), (20, 512, 1, [7]), (30, 5, 0, [1]), (40, 513, 2, [2, 3]),
        )
    ]  # fmt: skip
    trace = read(rows)
    assert trace.requests.prompt_tokens.tolist() == [512, 513, 600]
    found = trace.contents
    assert found is not None
    assert found.starts.tolist() == [0, 1, 3, 5]
    assert found.value.tolist() == [7, 2, 3, 7, 8]
    assert found.length.tolist() == [512, 512, 1, 512, 88]
    assert len(set(found.out_value.tolist())) == 3
    assert not any("hash_ids" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"segments": None}, "line 2: segments: is missing"),
        ({"segments": "3"}, "line 2: segments: '3' is not a list of threes"),
        ({"segments": [1, 2]}, r"line 2: segments: \[1, 2\] is not a list of threes"),
        ({"segments": [1, 0, 2.5]}, "line 2: segments: 2.5 is not a whole number"),
        ({"segments": [1, 0, True]}, "line 2: segments: true is not a whole number"),
        ({"segments": [2**70, 0, 5]}, r"line 2: segments: a number is above 2\^63"),
        ({"segments": [-1, 0, 5]}, r"line 2: segments: the stream -1 is not from 0 to 2\^30"),
        ({"segments": [1, -5, 5]}, r"line 2: segments: the first token -5 is not from 0 to 2\^40"),
        ({"segments": [1, 0, -5]}, r"line 2: segments: the length -5 is not from 0 to 2\^40"),
        ({"segments": [1, 0, 2**41]}, "line 2: segments: the length 2199023255552 is not"),
        ({"segments": [1, 0, 4]}, "line 2: segments: 4 tokens, where prompt_tokens is 5"),
        ({"segments": []}, "line 2: segments: 0 tokens, where prompt_tokens is 5"),
        ({"out_stream": None}, "line 2: out_stream: is not a number"),
        ({"out_stream": -1}, "line 2: out_stream: is negative"),
        ({"out_stream": 2**31}, r"line 2: out_stream: is above 2\^30"),
    ],
)
def test_what_does_not_add_up_is_refused_with_its_line(change: dict[str, Any], says: str) -> None:
    with pytest.raises(KvtoolError, match=says) as caught:
        read([TWO[0], {**TWO[0], **change}])
    assert caught.value.code == "trace"
    assert caught.value.hint


@pytest.mark.parametrize("name", ["segments", "out_stream"])
def test_a_column_that_stops_is_missed(name: str) -> None:
    later = {key: value for key, value in TWO[0].items() if key != name}
    with pytest.raises(KvtoolError, match=f"line 2: {name}: is missing"):
        read([TWO[0], later])


def test_blocks_that_do_not_cover_the_prompt_are_refused() -> None:
    row = {"timestamp": 1, "input_length": 2000, "output_length": 1, "hash_ids": [1, 2]}
    with pytest.raises(KvtoolError, match="line 1: hash_ids: 2 blocks of 512 tokens for 2,000"):
        read([row])


def test_a_file_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_contents, "MAX_NUMBERS", 8)
    with pytest.raises(KvtoolError, match="line 3: there are more than 8 numbers of segments"):
        read(TWO)
    row = {"timestamp": 1, "input_length": 2560, "output_length": 1, "hash_ids": [1, 2, 3, 4, 5]}
    with pytest.raises(KvtoolError, match="line 2: there are more than 8 blocks"):
        read([row, row])


@settings(max_examples=100, deadline=None)
@given(value=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6), max_leaves=10,
), name=st.sampled_from(["segments", "out_stream"]))  # fmt: skip
def test_any_value_is_read_or_refused_in_two_lines(value: Any, name: str) -> None:
    said = ""
    try:
        trace = read([TWO[0], {**TWO[0], name: value}])
        assert len(tokens(trace.contents, 1)) == 5
    except KvtoolError as error:
        said = error.message
    assert "\n" not in said
    assert len(said) < 200


def test_a_request_a_line_costs_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps(TWO[0]) + "\n" for _ in range(1000)))
    trace = read_trace(str(path), with_contents=True)
    assert trace.contents is not None
    assert (len(trace.contents), len(trace.contents.value)) == (1000, 2000)

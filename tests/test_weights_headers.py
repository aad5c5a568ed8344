"""Headers of safetensors files: made by hand, made by the library, broken, and from a Hub on 127.0.0.1."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, running_hub
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtool.errors import KvtoolError
from kvtool.weights.headers import BITS, MAX_HEADER_BYTES, headers_of

A = {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]}
B = {"dtype": "F32", "shape": [], "data_offsets": [64, 68]}
GOOD: dict[str, Any] = {"__metadata__": {"format": "pt"}, "a": A, "b": B}


def raw(header: Any, data: int | None = None, size: int | None = None) -> bytes:
    """A file: the length (or `size`), the header, so many bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if data is None:
        data = max(one["data_offsets"][1] for one in header.values() if "data_offsets" in one)
    return struct.pack("<Q", len(text) if size is None else size) + text + bytes(data)


def written(folder: Path, **files: bytes) -> Path:
    for name, data in files.items():
        (folder / f"{name}.safetensors").write_bytes(data)
    return folder


def test_a_folder_without_an_index(tmp_path: Path) -> None:
    found = headers_of(written(tmp_path, model=raw(GOOD), consolidated=raw(GOOD)))
    assert (found.bytes, found.parameters, found.num_tensors, found.num_files) == (68, 33, 2, 1)
    assert found.by_dtype == {"BF16": 32, "F32": 1}
    assert found.source == f"the headers of 1 safetensors file in {tmp_path}"
    assert headers_of(tmp_path / "consolidated.safetensors").bytes == 68
    (tmp_path / "model.safetensors").unlink()
    assert headers_of(str(tmp_path)).bytes == 68


def indexed(folder: Path, index: Any) -> Path:
    (folder / "model.safetensors.index.json").write_text(
        index if isinstance(index, str) else json.dumps(index)
    )
    return folder


def test_the_index_names_the_files(tmp_path: Path) -> None:
    written(tmp_path, one=raw(GOOD), two=raw({"c": A}), other=raw(GOOD))
    names = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    found = headers_of(indexed(tmp_path, {"metadata": {"total_size": 132}, "weight_map": names}))
    assert (found.bytes, found.num_files, found.num_tensors) == (132, 2, 3)


@pytest.mark.parametrize(
    ("index", "word"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ({}, "no weight_map"),
        ({"weight_map": []}, "no weight_map"),
        ({"weight_map": {"a": 1}}, "something else"),
        ({"weight_map": {"a": "../x.safetensors"}}, "something else"),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, "something else"),
        ({"weight_map": {"a": "model.bin"}}, "something else"),
        ({"weight_map": {"a": "gone.safetensors"}}, "is missing"),
        ({"weight_map": {f"{i}": f"{i}.safetensors" for i in range(10_001)}}, "10,001 files"),
    ],
)
def test_indexes_that_are_none(tmp_path: Path, index: Any, word: str) -> None:
    with pytest.raises(KvtoolError, match=word) as caught:
        headers_of(indexed(tmp_path, index))
    two_lines(caught.value)


def two_lines(error: KvtoolError) -> None:
    assert error.hint
    assert "\n" not in error.message + error.hint


def with_a(**keys: Any) -> dict[str, Any]:
    return {"a": {**A, **keys}}


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "ends within its header"),
    "no length": (b"\x01\x00", "ends within its header"),
    "cut in the header": (raw(GOOD)[:40], "ends within its header"),
    "cut in a tensor": (raw(GOOD)[:-1], "ends before its last tensor"),
    "more behind": (raw(GOOD) + b"x", "goes on after"),
    "huge header": (raw(GOOD, size=2**63), "ends within its header"),
    "not JSON": (raw(b"{'a': 1}", 0), "not JSON"),
    "not UTF-8": (raw(b'{"\xff": 1}', 0), "not JSON"),
    "a list": (raw(b"[]", 0), "not a JSON object"),
    "deep": (raw(b'{"a":' * 50_000, 0), "nested too deeply"),
    "a long number": (raw(b'{"a": ' + b"9" * 5_000 + b"}", 0), "not JSON"),
    "twice": (raw(b'{"a": {}, "a": {}}', 0), "not JSON"),
    "pickle": (b"\x80\x04\x95" + bytes(200), "header"),
    "no object": (raw(b'{"a": 3}', 0), "not an object"),
    "no dtype": (raw(with_a(dtype=None), 64), "no dtype"),
    "a dtype of lines": (raw(with_a(dtype="x" * 99), 64), "no dtype"),
    "another dtype": (raw(with_a(dtype="Q4_K"), 64), "not known"),
    "a wrong dtype": (raw(with_a(dtype="F32"), 64), "32 elements of F32"),
    "negative": (raw(with_a(data_offsets=[-64, 0]), 64), "data_offsets"),
    "backwards": (raw(with_a(data_offsets=[64, 0]), 64), "begin and end"),
    "three": (raw(with_a(data_offsets=[0, 1, 2]), 64), "begin and end"),
    "true": (raw(with_a(data_offsets=[False, 64]), 64), "data_offsets"),
    "a fraction": (raw(with_a(data_offsets=[0, 64.0]), 64), "data_offsets"),
    "a negative shape": (raw(with_a(shape=[-4, -8]), 64), "shape"),
    "a shape of words": (raw(with_a(shape="48"), 64), "shape"),
    "a huge shape": (raw(with_a(shape=[2**49] * 9), 64), "larger than any"),
    "a huge side": (raw(with_a(shape=[10**30]), 64), "shape"),
    "overlapping": (raw({"a": A, "b": {**B, "data_offsets": [60, 64]}}, 64), "overlap or leave holes"),
    "a hole": (raw({"a": A, "b": {**B, "data_offsets": [68, 72]}}, 72), "overlap or leave holes"),
    "a late start": (raw({"b": B}, 68), "overlap or leave holes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_headers_that_are_none(tmp_path: Path, name: str) -> None:
    data, word = BROKEN[name]
    with pytest.raises(KvtoolError, match=word) as caught:
        headers_of(written(tmp_path, model=data))
    two_lines(caught.value)
    assert caught.value.code == "bad_safetensors"


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(2 * MAX_HEADER_BYTES)
    with pytest.raises(KvtoolError, match="100,000,001 bytes"):
        headers_of(tmp_path)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(KvtoolError, match="not a regular file"):
        headers_of(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "config.json"])
def test_other_formats_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    for where in (tmp_path, tmp_path / name):
        with pytest.raises(KvtoolError, match="has no safetensors files") as caught:
            headers_of(where)
        assert "--weights" in caught.value.hint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries({"dtype": st.sampled_from([*BITS, "X"]) | JSON, "shape": JSON,
                               "data_offsets": st.lists(st.integers(0, 64)) | JSON})  # fmt: skip


@given(st.dictionaries(st.text(max_size=3), ENTRY | JSON) | JSON, st.integers(0, 70))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_header_is_read_or_refused(tmp_path: Path, header: Any, data: int) -> None:
    try:
        assert (
            headers_of(written(tmp_path, model=raw(json.dumps(header).encode(), data))).bytes >= 0
        )
    except KvtoolError as error:
        two_lines(error)


def test_files_of_the_library(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    import numpy as np

    tensors = {"x": np.zeros((3, 5), np.float16), "y": np.zeros(7, np.int32), "z": np.zeros((0, 4))}
    numpy.save_file(tensors, str(tmp_path / "model.safetensors"))
    found = headers_of(tmp_path)
    assert found.by_dtype == {"F16": 15, "F64": 0, "I32": 7}
    assert found.bytes == 58


PROBE = """
import json, sys
from dataclasses import asdict
from kvtool.errors import KvtoolError
from kvtool.weights.headers import headers_of
for name in sys.argv[1:]:
    try:
        print(json.dumps(asdict(headers_of(name))))
    except KvtoolError as error:
        print(json.dumps({"code": error.code, "message": error.message, "hint": error.hint}))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


def asked(hub: Hub, home: Path, *names: str, **env: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *names],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "HOME": str(home),
            "HF_HOME": str(home / "hf"),
            "HF_ENDPOINT": hub.url,
            **env,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    names = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    hub.files = {
        "model.safetensors.index.json": json.dumps({"weight_map": names}).encode(),
        "1.safetensors": raw(GOOD),
        # Longer than what is fetched first.
        "2.safetensors": raw({"__metadata__": {"x": "y" * 200_000}, "c": A}),
    }
    (found,) = asked(hub, tmp_path, "acme/weights")
    assert (found["bytes"], found["parameters"], found["num_files"]) == (132, 65, 2)
    assert found["source"] == "the headers of 2 safetensors files of acme/weights@main"
    hub.files = {"model.safetensors": raw(GOOD)}
    (found,) = asked(hub, tmp_path, "acme/weights")
    assert (found["bytes"], found["num_files"]) == (68, 1)


def test_what_goes_wrong_at_the_hub(hub: Hub, tmp_path: Path) -> None:
    names = ("acme/weights", "acme/typo", "acme/gated-401", "acme/limited", "a b/c", "nowhere")
    found = asked(hub, tmp_path, *names)
    codes = ["no_safetensors", "not_found", "gated", "rate_limited", "bad_id", "bad_id"]
    assert [one["code"] for one in found] == codes
    hub.files = {"model.safetensors": raw(b"{'", 0)}
    assert asked(hub, tmp_path, "acme/weights")[0]["code"] == "bad_safetensors"
    hub.files = {"model.safetensors": raw({"a": A, "b": {**B, "data_offsets": [0, 4]}})}
    assert asked(hub, tmp_path, "acme/weights")[0]["code"] == "bad_safetensors"
    hub.files = {"model.safetensors": raw({"a": {**A, "shape": "x"}})}
    found = asked(hub, tmp_path, "acme/weights")
    assert found[0]["code"] in ("bad_safetensors", "hub_error")
    found = asked(hub, tmp_path, "acme/weights", HF_HUB_OFFLINE="1")
    assert found[0]["code"] == "offline"

"""Configs from standard input, files, folders and presets: no network, and no half-read file."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtool.config import MAX_BYTES, load_config, read_json
from kvtool.errors import KvtoolError

CONFIG = {"model_type": "llama", "num_hidden_layers": 4}
PRESETS = (
    SimpleNamespace(
        name="llama-3.1-8b",
        hub_id="meta-llama/Llama-3.1-8B",
        config={"model_type": "llama", "nested": {"a": 1}},
        source="the card",
        note="as of July 2024",
    ),
    SimpleNamespace(name="gpt2", hub_id="gpt2", config={"n": 1}, source="it", note=""),
)


@pytest.fixture(autouse=True)
def _presets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def model_preset(name: str) -> SimpleNamespace | None:
        return next((p for p in PRESETS if name.lower() in (p.name, p.hub_id.lower())), None)

    monkeypatch.setattr("kvtool.catalog.model_preset", model_preset)
    monkeypatch.setattr("kvtool.catalog.model_presets", lambda: PRESETS)

    def no_hub(*args: object, **kwargs: object) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("kvtool.hub.fetch", no_hub)
    monkeypatch.chdir(tmp_path)


def write(path: str, config: object = CONFIG) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return file


def refused(model: str, **options: Any) -> KvtoolError:
    with pytest.raises(KvtoolError) as caught:
        load_config(model, **options)
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


# Where it comes from


def test_a_file_is_named_after_itself_or_its_folder() -> None:
    write("tiny/config.json")
    write("other.json")
    loaded = load_config("tiny/config.json")
    assert (loaded.config, loaded.name, loaded.source) == (CONFIG, "tiny", "file")
    assert loaded.where == "tiny/config.json"
    assert load_config("other.json").name == "other"


@pytest.mark.parametrize("typed", ["tiny", "tiny/", "./tiny", "."])
def test_a_folder(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write("tiny/config.json")
    if typed == ".":
        monkeypatch.chdir("tiny")
    loaded = load_config(typed)
    assert (loaded.config, loaded.name, loaded.source) == (CONFIG, "tiny", "folder")
    assert loaded.notes == ()


def test_a_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write("tiny/config.json")
    assert load_config("~/tiny").config == CONFIG


def test_a_snapshot_in_the_hubs_cache_is_called_by_its_hub_id() -> None:
    write("models--acme--tiny/snapshots/0123abc/config.json")
    assert load_config("models--acme--tiny/snapshots/0123abc").name == "acme/tiny"


@pytest.mark.parametrize("typed", ["tiny", "tiny/config.json"])
def test_modelopts_file_beside_the_config_is_merged(typed: str) -> None:
    write("tiny/config.json")
    quant = {"quantization": {"kv_cache_quant_algo": "FP8"}}
    write("tiny/hf_quant_config.json", quant)
    assert load_config(typed).config == {**CONFIG, "hf_quant_config": quant}


def test_a_broken_file_of_modelopt_is_not_passed_over() -> None:
    write("tiny/config.json")
    write("tiny/hf_quant_config.json", "{")
    error = refused("tiny")
    assert error.code == "not_json"
    assert "hf_quant_config.json" in error.message


def test_a_file_before_a_preset_and_a_preset_before_a_folder_without_config() -> None:
    assert load_config("gpt2").source == "preset"
    Path("gpt2").mkdir()
    assert load_config("gpt2").source == "preset"
    write("gpt2/config.json")
    assert load_config("gpt2").source == "folder"
    write("llama-3.1-8b")
    assert load_config("llama-3.1-8b").source == "file"


def test_a_preset_is_a_copy_with_its_note() -> None:
    loaded = load_config("LLAMA-3.1-8B")
    assert (loaded.name, loaded.source) == ("llama-3.1-8b", "preset")
    assert loaded.where == "preset llama-3.1-8b (the card)"
    assert loaded.notes == ("as of July 2024",)
    loaded.config["nested"]["a"] = 2
    assert load_config("llama-3.1-8b").config["nested"] == {"a": 1}


def test_a_revision_that_means_nothing_is_said_to_be_ignored() -> None:
    write("tiny/config.json")
    assert load_config("tiny").notes == ()
    (note,) = load_config("tiny", revision="v2").notes
    assert note == "--revision v2 is ignored: it belongs to Hub ids, not to a folder"
    assert "not to a preset" in load_config("gpt2", revision="v2").notes[-1]


@pytest.mark.parametrize("stdin", [io.StringIO, lambda text: io.TextIOWrapper(_bytes(text))])
def test_standard_input(stdin: Any) -> None:
    write("-")  # a file of that name is ./-
    loaded = load_config("-", stdin=stdin('\ufeff{"model_type": "from stdin"}'))
    assert loaded.config == {"model_type": "from stdin"}
    assert (loaded.name, loaded.source, loaded.where) == ("stdin", "stdin", "-")


def _bytes(text: str) -> io.BytesIO:
    return io.BytesIO(text.encode())


def test_standard_input_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    assert refused("-", stdin=closed).code == "unreadable"
    assert refused("-", stdin=io.TextIOWrapper(io.BytesIO(b'{"a": "\xff"}'))).code == "not_json"
    assert refused("-", stdin=io.StringIO("")).code == "empty"
    monkeypatch.setattr(sys, "stdin", None)
    assert refused("-").code == "unreadable"


class Endless(io.RawIOBase):
    """A stream that never ends, and counts what is taken from it."""

    taken = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.taken += len(buffer)
        buffer[:] = b" " * len(buffer)
        return len(buffer)


def test_standard_input_is_bounded() -> None:
    endless = Endless()
    assert refused("-", stdin=io.TextIOWrapper(io.BufferedReader(endless))).code == "too_large"
    assert endless.taken < 2 * MAX_BYTES


# What is not there


@pytest.mark.parametrize(
    "model", ["./x", "/no/such", "~/no-such", "org/name.json", "config.json", "a/b/c", "org/x/"]
)
def test_what_looks_like_a_path_never_goes_to_the_hub(model: str) -> None:
    error = refused(model)
    assert error.code == "not_found"
    assert error.message == f"no such file or folder: {model}"


def test_an_unknown_name_is_refused_with_the_nearest_presets() -> None:
    error = refused("llama-3-8b")
    assert error.code == "not_found"
    assert "org/name" in error.hint
    assert "Did you mean llama-3.1-8b?" in error.hint
    assert "Did you mean" not in refused("zzzzzz").hint
    assert refused("x" * 5000).code == "not_found"


@pytest.mark.parametrize("model", ["", "two\nlines", "\x1b[31mred", "\udce9"])
def test_what_cannot_be_shown_is_refused_and_not_shown(model: str) -> None:
    error = refused(model)
    assert error.code == "not_found"
    assert (error.message + error.hint).isprintable()


def test_a_folder_without_config() -> None:
    Path("org/name").mkdir(parents=True)
    for model in ("org", "org/name", "."):
        error = refused(model)
        assert error.code == "no_config"
        assert f"the folder {model} has no config.json" == error.message


def test_what_is_no_regular_file() -> None:
    os.mkfifo("fifo.json")
    Path("tiny/config.json").mkdir(parents=True)
    for model in ("fifo.json", "/dev/null", "tiny"):
        error = refused(model)
        assert error.code == "unreadable"
        assert "not a regular file" in error.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission() -> None:
    write("secret.json").chmod(0)
    assert "Permission denied" in refused("secret.json").message


def test_a_failing_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    write("tiny.json")

    def fail(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    error = refused("tiny.json")
    assert (error.code, error.message) == (
        "unreadable",
        "tiny.json cannot be read: Permission denied",
    )


# What is in it


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (b"", "empty", "is empty"),
        (b" \n\t", "empty", "is empty"),
        (b"\xef\xbb\xbf", "empty", "is empty"),
        (b"{'a': 1}", "not_json", "line 1, column 2"),
        (b'{"a": 1', "not_json", "line 1, column 8"),
        (b"PK\x03\x04\xff\xfe", "not_json", "not valid UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not_json", "not valid UTF-8"),
        (b'{"a": "\\ud800"}', "not_json", "not valid UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not_json", "thousands of digits"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "too_deep", "nested"),
        (b"[" * 100_000, "too_deep", "nested"),
        (b'[{"a": 1}]', "not_object", "an array"),
        (b'"text"', "not_object", "a string"),
        (b"17", "not_object", "a number"),
        (b"true", "not_object", "a boolean"),
        (b"null", "not_object", "null"),
    ],
)
def test_what_is_no_json_object_is_refused(text: bytes, code: str, message: str) -> None:
    Path("x.json").write_bytes(text)
    error = refused("x.json")
    assert (error.code, message in error.message) == (code, True), error.message
    assert error.message.startswith("x.json")


def test_what_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("model.safetensors").open("wb") as file:
        file.truncate(2**40)  # a sparse file: reading it would take all memory
    error = refused("model.safetensors")
    assert (error.code, "8 MiB" in error.message) == ("too_large", True)
    just_fits = b'{"a": 1}'.ljust(MAX_BYTES)
    assert read_json(just_fits, "x") == {"a": 1}
    with pytest.raises(KvtoolError, match="larger than 8 MiB"):
        read_json(just_fits + b" ", "x")


def test_what_python_reads_more_than_json_is_let_through() -> None:
    text = b'\xef\xbb\xbf{"a": 1, "a": 2, "time_step_limit": [0.0, Infinity], "n": NaN, "e": "\xc3\xa9"}'
    config = read_json(text, "x")
    assert (config["a"], config["e"]) == (2, "é")
    assert config["time_step_limit"] == [0.0, math.inf]
    assert math.isnan(config["n"])
    assert read_json('{"emoji": "\\ud83d\\ude00"}', "x") == {"emoji": "😀"}


def test_local_configs_do_not_import_the_hubs_library() -> None:
    write("tiny/config.json")
    probe = (
        "import sys\nfrom kvtool.config import load_config\n"
        "names = [load_config(m).name for m in ('tiny', 'tiny/config.json', '-')]\n"
        "heavy = {'huggingface_hub', 'httpx', 'httpx2', 'asyncio', 'pydantic', 'numpy'}\n"
        "sys.stdout.write(repr((names, sorted(heavy & set(sys.modules)))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe],
        input="{}",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        timeout=30,
    )
    assert done.stdout == repr((["tiny", "tiny", "stdin"], [])), done.stderr

from __future__ import annotations

import csv
import errno
import io
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtool.cli.options import output_from, wants_json
from kvtool.errors import USAGE, KvtoolError
from kvtool.output import Output, write_file
from kvtool.run import Run
from kvtool.view import Chart, Line, Table, View

LONG = "meta-llama/" + "x" * 200
ROWS = (
    {"model": LONG, "total_bytes": 2**31, "kinds": [{"kind": "full", "layers": 32}], "mha": None},
    {"model": 'b,"|<é', "total_bytes": 7, "share": 0.5, "fits": True},
)
RUN = Run(command="size", params={"batch": [1]}, rows=ROWS, notes=("the dtype is a guess",))
VIEW = View(
    tables=(
        Table(
            columns=("model", "total"),
            rows=((LONG, "2.00 GiB"), ('b,"|<é', "7 B")),
            title="KV cache",
            right=frozenset({"total"}),
        ),
    ),
    sentences=("All of it fits.",),
    chart=Chart(
        title="t", x_label="tokens", y_label="bytes", lines=(Line(name="a", x=(1, 2), y=(3, 4)),)
    ),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Ascii(io.StringIO):
    encoding = "ascii"  # type: ignore[assignment]


def output(**options: Any) -> tuple[Output, io.StringIO, io.StringIO]:
    out, err = options.pop("stdout", io.StringIO()), options.pop("stderr", io.StringIO())
    return Output(stdout=out, stderr=err, **options), out, err


def emitted(format: str, **options: Any) -> tuple[str, str]:
    mouth, out, err = output(format=format, **options)
    mouth.emit(RUN, VIEW)
    return out.getvalue(), err.getvalue()


def test_a_piped_table_is_whole_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    out, _ = emitted("table")
    title, header, rule, first, second, empty, sentence = out.splitlines()
    assert title == "KV cache"
    assert header.split() == ["model", "total"]
    assert set(rule.strip()) <= set("─ ")
    assert first.split() == [LONG, "2.00", "GiB"]
    assert second.endswith("7 B")
    assert len(second) == len(first)  # numbers are aligned on the right
    assert empty == ""
    assert sentence == "All of it fits."
    assert "\x1b" not in out


def test_a_piped_table_is_whole_even_with_forced_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")  # rich gives such a terminal 80 columns
    assert LONG in emitted("table")[0]


def test_a_terminal_has_its_width_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, _ = emitted("table", stdout=Terminal())
    assert "\x1b[1m" in out
    assert out.count("x") == LONG.count("x")
    assert "…" not in out


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    mouth, _, err = output(stderr=Terminal())
    mouth.error(KvtoolError("bad", "good"))
    assert err.getvalue() == "Error: bad\nHint: good\n"
    monkeypatch.delenv("NO_COLOR")
    mouth, _, err = output(stderr=Terminal())
    mouth.error(KvtoolError("bad", "good"))
    assert err.getvalue() == "\x1b[31mError:\x1b[0m bad\n\x1b[36mHint:\x1b[0m good\n"


def test_names_from_strangers_cannot_steer_the_terminal() -> None:
    table = Table(columns=("model",), rows=(("a\x1b[2Jb\nc",),))
    mouth, out, err = output()
    mouth.emit(Run(command="size", params={}), View(tables=(table,)))
    mouth.note("x\x1b[2J")
    assert "a\\x1b[2Jb c" in out.getvalue()
    assert err.getvalue() == "Note: x\\x1b[2J\n"


def test_markup_in_cells_is_text() -> None:
    table = Table(columns=("a",), rows=(("[red]x[/red] :smile:",),))
    mouth, out, _ = output()
    mouth.emit(Run(command="size", params={}), View(tables=(table,), sentences=("[b]y[/b]",)))
    assert "[red]x[/red] :smile:" in out.getvalue()
    assert "[b]y[/b]" in out.getvalue()


def test_markdown_is_a_github_table_then_sentences() -> None:
    out, _ = emitted("md")
    lines = out.splitlines()
    assert lines[0] == "**KV cache**"
    assert lines[2].split() == ["|", "model", "|", "total", "|"]
    assert lines[3].startswith("| ---")
    assert lines[3].endswith("---: |")
    assert lines[5].startswith('| b,"\\|\\<é ')
    assert lines[-1] == "All of it fits."


def test_json_is_the_run_and_has_the_notes() -> None:
    out, err = emitted("json")
    data = json.loads(out)
    assert next(iter(data)) == "schema"
    assert data["rows"] == list(ROWS)
    assert data["notes"] == ["the dtype is a guess"]
    assert "error" not in data
    assert err == ""


def test_csv_has_every_column_once() -> None:
    out, _ = emitted("csv")
    header, first, second = csv.reader(io.StringIO(out))
    assert header == ["model", "total_bytes", "kinds", "mha", "share", "fits"]
    assert first == [LONG, "2147483648", '[{"kind":"full","layers":32}]', "", "", ""]
    assert second == ['b,"|<é', "7", "", "", "0.5", "true"]
    assert "\r" not in out


def test_csv_of_no_rows_is_empty() -> None:
    mouth, out, _ = output(format="csv")
    mouth.emit(Run(command="size", params={}), View(tables=()))
    assert out.getvalue() == ""


@pytest.mark.parametrize("format", ["table", "csv", "md"])
def test_notes_go_to_stderr_unless_quiet(format: str) -> None:
    assert emitted(format)[1] == "Note: the dtype is a guess\n"
    assert emitted(format, quiet=True)[1] == ""


def test_a_note_is_said_once_and_kept_for_the_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    mouth, _, err = output(path=path)
    mouth.note("first")
    assert err.getvalue() == "Note: first\n"  # at once, not at the end
    mouth.note("first")
    mouth.emit(RUN, VIEW)
    assert err.getvalue().count("first") == 1
    assert json.loads(path.read_text())["notes"] == ["first", "the dtype is a guess"]


def test_details_are_for_verbose() -> None:
    for verbose, expected in ((False, ""), (True, "Note: key num_key_value_heads\n")):
        mouth, _, err = output(verbose=verbose)
        mouth.detail("key num_key_value_heads")
        assert err.getvalue() == expected


def test_progress_is_silent_without_a_terminal() -> None:
    for options in ({}, {"stderr": Terminal(), "quiet": True}):
        mouth, out, err = output(**options)
        with mouth.progress("working", total=2) as advance:
            advance(1)
        assert out.getvalue() + err.getvalue() == ""


def test_progress_on_a_terminal_goes_to_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    mouth, out, err = output(stderr=Terminal())
    with mouth.progress("working", total=2) as advance:
        advance(2)
    assert "working" in err.getvalue()
    assert out.getvalue() == ""


def test_an_error_is_two_lines_even_if_quiet() -> None:
    mouth, out, err = output(quiet=True)
    mouth.error(KvtoolError("no such\nmodel", "try  another"))
    assert err.getvalue() == "Error: no such model\nHint: try another\n"
    assert out.getvalue() == ""


def test_an_error_is_an_object_too_with_json() -> None:
    mouth, out, err = output(format="json")
    mouth.error(KvtoolError("what", "do", code="not_found"), command="size")
    data = json.loads(out.getvalue())
    assert (data["schema"], data["command"], data["rows"], data["notes"]) == (1, "size", [], [])
    assert data["error"] == {"code": "not_found", "message": "what", "hint": "do"}
    assert err.getvalue() == "Error: what\nHint: do\n"


def test_a_gate_not_met_leaves_one_object_with_rows_and_error() -> None:
    mouth, out, err = output(format="json")
    gate = KvtoolError("2 GiB is more than 1 GiB", "use fp8", code="gate")
    with pytest.raises(KvtoolError) as caught:
        mouth.emit(RUN, VIEW, failed=gate)
    mouth.error(caught.value)
    data = json.loads(out.getvalue())  # one object: two would not parse
    assert len(data["rows"]) == 2
    assert data["error"]["code"] == "gate"
    assert err.getvalue() == "Error: 2 GiB is more than 1 GiB\nHint: use fp8\n"


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "md", "png", "svg"])
def test_the_suffix_chooses_the_file_format(tmp_path: Path, suffix: str) -> None:
    if suffix in ("png", "svg"):
        pytest.importorskip("matplotlib")
    path = tmp_path / f"result.{suffix.upper()}"
    mouth, out, err = output(path=path, print_result=False)
    mouth.emit(RUN, VIEW)
    start = {
        "json": b'{\n "schema": 1',
        "jsonl": b'{"model": "meta',
        "csv": b"model,total_bytes,",
        "md": b"**KV cache**",
        "png": b"\x89PNG",
        "svg": b"<?xml",
    }
    assert path.read_bytes().startswith(start[suffix])
    assert out.getvalue() == ""
    assert err.getvalue().splitlines()[-1] == f"Note: written to {path}"
    assert list(tmp_path.iterdir()) == [path]


def test_jsonl_is_a_row_a_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    mouth, _, _ = output(path=path)
    mouth.emit(RUN, VIEW)
    assert [json.loads(line) for line in path.read_text().splitlines()] == list(ROWS)


def test_a_picture_of_a_result_without_chart_is_refused(tmp_path: Path) -> None:
    mouth, _, _ = output(path=tmp_path / "x.png")
    with pytest.raises(KvtoolError, match="no chart") as caught:
        mouth.emit(RUN, View(tables=()))
    assert ".csv" in caught.value.hint


def test_a_failing_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")

    def no_space() -> Iterator[bytes]:
        yield b"new"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(KvtoolError, match="no space left") as caught:
        write_file(path, no_space())
    assert caught.value.hint
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_file_keeps_the_mode_and_the_link(tmp_path: Path) -> None:
    path, link = tmp_path / "x.json", tmp_path / "latest.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_file(link, b"new")
    assert path.read_text() == "new"
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_an_unwritable_folder_is_said_in_words(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(KvtoolError, match="permission denied"):
        write_file(tmp_path / "x.json", b"")


def test_a_reader_that_went_away_is_no_error() -> None:
    mouth, _, _ = output(format="json", stdout=Gone())
    mouth.emit(RUN, VIEW)


def test_a_gate_is_kept_when_the_reader_went_away() -> None:
    mouth, _, _ = output(stdout=Gone())
    with pytest.raises(KvtoolError, match="too big"):
        mouth.emit(RUN, VIEW, failed=KvtoolError("too big", "use fp8"))


def test_a_full_disk_behind_stdout_is_an_error() -> None:
    mouth, _, _ = output(format="csv", stdout=Full())
    with pytest.raises(KvtoolError, match="cannot write standard output: no space left"):
        mouth.emit(RUN, VIEW)


def test_json_survives_a_narrow_encoding() -> None:
    row = {"model": "é-\U0001f600-\udcff"}  # the last: a file name that is no UTF-8
    mouth, out, _ = output(format="json", stdout=Ascii())
    mouth.emit(Run(command="size", params={}, rows=(row,)), VIEW)
    assert out.getvalue().isascii()
    assert json.loads(out.getvalue())["rows"] == [row]


def options(**given: Any) -> Output:
    asked = {"format": None, "json": False, "output": None, "quiet": False, "verbose": False}
    environ = given.pop("environ", {})
    return output_from(**{**asked, **given}, environ=environ)


def test_flag_before_environment_before_default() -> None:
    assert options().format == "table"
    assert options(environ={"KVTOOL_FORMAT": "csv"}).format == "csv"
    assert options(format="md", environ={"KVTOOL_FORMAT": "csv"}).format == "md"
    assert options(json=True, environ={"KVTOOL_FORMAT": "csv"}).format == "json"


def test_with_a_file_stdout_is_only_for_a_format_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    assert not options(output=path).print_result
    assert not options(output=path, environ={"KVTOOL_FORMAT": "json"}).print_result
    assert options(output=path, json=True).print_result
    assert options(output=path, format="table").print_result
    assert options().print_result


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"format": "jsn"}, "--format: unknown format 'jsn'", "Did you mean json?"),
        ({"environ": {"KVTOOL_FORMAT": "xml"}}, "KVTOOL_FORMAT: unknown format 'xml'", "csv"),
        ({"json": True, "format": "csv"}, "contradict", "one of them"),
        ({"quiet": True, "verbose": True}, "contradict", "one of them"),
        ({"output": Path("x.html")}, "HTML files are not available yet", ".svg"),
        ({"output": Path("x.jsn")}, "'.jsn' is not known", "Did you mean .json"),
        ({"output": Path("x")}, "no suffix", ".json"),
    ],
)
def test_wrong_output_options_are_usage_errors(
    given: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(KvtoolError) as caught:
        options(**given)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == USAGE


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.csv").mkdir()
    for name, message in (
        ("none/x.csv", "the folder does not exist"),
        ("file/x.csv", "not a folder"),
        ("folder.csv", "it is a folder"),
    ):
        with pytest.raises(KvtoolError, match=message):
            options(output=tmp_path / name)


def test_a_picture_without_matplotlib_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KvtoolError, match="matplotlib") as caught:
        options(output=tmp_path / "x.svg")
    assert caught.value.hint == "pip install 'kvtool[plot]'"


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ("size x --json", "", True),
        ("size x -f json", "", True),
        ("size x -fjson", "", True),
        ("size x -qf json", "", True),
        ("size x --format json", "", True),
        ("size x --format=json", "", True),
        ("size x", "json", True),
        ("size x -f csv", "json", False),
        ("size x -f", "", False),
        ("size json", "", False),
        ("size -- --json", "", False),
        ("size -c 4 -o x.json", "", False),
    ],
)
def test_json_is_seen_in_argv(argv: str, environ: str, expected: bool) -> None:
    assert wants_json(argv.split(), {"KVTOOL_FORMAT": environ} if environ else {}) is expected


def test_json_and_csv_never_load_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    for format in ("json", "csv", "md"):
        assert emitted(format)[0]
    with pytest.raises(ImportError):
        emitted("table")

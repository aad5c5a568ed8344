"""The edge, with a temporary command: its exit codes, its two lines, its one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
import typer

from kvtool.cli import main as cli
from kvtool.cli.options import (
    FormatOpt,
    JsonOpt,
    OutputOpt,
    QuietOpt,
    SeedOpt,
    VerboseOpt,
    output_from,
)
from kvtool.errors import KvtoolError
from kvtool.run import Run
from kvtool.view import Table, View

TROUBLES: dict[str, BaseException] = {
    "known": KvtoolError("no such model: x", "try another", code="not_found"),
    "bug": ZeroDivisionError("division by zero"),
    "ctrl-c": KeyboardInterrupt(),
    "exit": typer.Exit(1),
    "abort": typer.Abort(),
}


def probe(
    what: Annotated[str, typer.Argument(metavar="WHAT")],
    seed: SeedOpt = 0,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: OutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:
    """Do what is asked."""
    if what in TROUBLES:
        raise TROUBLES[what]
    out = output_from(format, json, output, quiet, verbose)
    failed = KvtoolError("the gate", "is closed", code="gate") if what == "gate" else None
    run = Run(command="probe", params={"what": what}, rows=({"seed": seed},), notes=("a note",))
    table = Table(columns=("seed",), rows=((str(seed),),))
    out.emit(run, View(tables=(table,)), failed=failed)


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    module = ModuleType("kvtool_probe")
    module.__dict__.update(probe=probe, EPILOG="Examples: kvtool probe fine")
    monkeypatch.setitem(sys.modules, "kvtool_probe", module)
    entry = cli.Entry("kvtool_probe", cli.ANALYSE, "Do what is asked.")
    monkeypatch.setitem(cli.COMMANDS, "probe", entry)
    for name in ("KVTOOL_FORMAT", "KVTOOL_DEBUG", "FORCE_COLOR", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)

    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.run(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_result_goes_to_stdout_and_notes_to_stderr(call: Call) -> None:
    assert call("probe", "fine", "--seed", "7") == (
        0,
        "seed\n────\n7\n",
        "Note: a note\n",
    )


def test_quiet(call: Call) -> None:
    assert call("probe", "fine", "-q")[2] == ""


def test_a_known_error_is_two_lines(call: Call) -> None:
    assert call("probe", "known") == (1, "", "Error: no such model: x\nHint: try another\n")


def test_an_unexpected_error_is_two_lines(call: Call) -> None:
    code, out, err = call("probe", "bug")
    assert (code, out) == (1, "")
    assert err == (
        "Error: internal: ZeroDivisionError: division by zero\n"
        "Hint: run again with KVTOOL_DEBUG=1 for the traceback and report it\n"
    )


def test_the_traceback_is_for_debugging(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_DEBUG", "1")
    err = call("probe", "bug")[2]
    assert "Traceback" in err
    assert "in probe" in err
    assert err.splitlines()[-2].startswith("Error: internal: ZeroDivisionError")


@pytest.mark.parametrize("flags", [("--json",), ("-f", "json"), ("-qf", "json")])
@pytest.mark.parametrize(
    ("what", "code", "name"),
    [("known", 1, "not_found"), ("bug", 1, "internal"), ("ctrl-c", 130, "interrupted")],
)
def test_with_json_an_error_is_an_object_too(
    call: Call, flags: tuple[str, ...], what: str, code: int, name: str
) -> None:
    got, out, err = call("probe", what, *flags)
    data = json.loads(out)
    assert got == code
    assert (data["schema"], data["command"], data["rows"]) == (1, "probe", [])
    assert data["error"]["code"] == name
    assert err == f"Error: {data['error']['message']}\nHint: {data['error']['hint']}\n"


def test_json_by_environment(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_FORMAT", "json")
    assert json.loads(call("probe", "known")[1])["error"]["code"] == "not_found"
    assert json.loads(call("probe", "fine")[1])["rows"] == [{"seed": 0}]
    assert call("probe", "known", "-f", "csv")[1] == ""


def test_a_gate_prints_its_rows_once(call: Call) -> None:
    code, out, err = call("probe", "gate", "--json")
    data = json.loads(out)
    assert (code, data["rows"], data["error"]["code"]) == (1, [{"seed": 0}], "gate")
    assert err == "Error: the gate\nHint: is closed\n"


def test_interrupts_and_exits(call: Call) -> None:
    assert call("probe", "ctrl-c")[0] == 130
    assert call("probe", "abort")[0] == 130
    assert call("probe", "exit") == (1, "", "")


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        (
            "prob fine",
            "no such command: prob",
            "kvtool --help lists the commands. Did you mean probe?",
        ),
        ("zzz", "no such command: zzz", "kvtool --help lists the commands."),
        ("probe", "missing argument 'WHAT'", "see kvtool probe --help"),
        ("probe fine --jsn", "no such option: --jsn", "did you mean --json?"),
        ("probe fine --zzz", "no such option: --zzz", "see kvtool probe --help"),
        ("probe fine -x", "no such option: -x", "see kvtool probe --help"),
        ("probe fine more", "got unexpected extra argument(s) (more)", "see kvtool probe --help"),
        ("probe fine --seed", "option '--seed' requires an argument", "see kvtool probe --help"),
        ("probe fine -f jsn", "--format: unknown format 'jsn'", "Did you mean json?"),
        ("--jsn", "no such option: --jsn", "see kvtool --help"),
        ("probe fine --seed x", "'--seed'", "see kvtool probe --help"),
        ("probe fine --seed -1", "'--seed'", "see kvtool probe --help"),
        ("probe fine -o x.html", "-o x.html: HTML files are not available yet", ".png .svg"),
    ],
)
def test_usage_errors_are_two_lines_and_2(call: Call, argv: str, error: str, hint: str) -> None:
    code, out, err = call(*argv.split())
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"Error: {error}")
    assert lines[1].startswith("Hint: ")
    assert lines[1].endswith(hint)


@pytest.mark.parametrize("argv", ["probe --json", "prob --json", "probe fine --zzz -f json"])
def test_usage_errors_are_objects_too(call: Call, argv: str) -> None:
    code, out, err = call(*argv.split())
    assert code == 2
    assert json.loads(out)["error"]["code"] == "usage"
    assert err.count("\n") == 2


def test_version(call: Call) -> None:
    assert call("--version") == (0, "kvtool 0.1.0\n", "")


def test_help_lists_the_commands_in_panels(call: Call) -> None:
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    assert "Analyse" in out
    for name, entry in cli.COMMANDS.items():
        assert name in out
        assert entry.summary[:30] in out


def test_no_arguments_is_help_on_stderr_and_2(call: Call) -> None:
    code, out, err = call()
    assert (code, out) == (2, "")
    assert "Usage: kvtool" in err


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_a_command_has_its_options_in_panels(call: Call, flag: str) -> None:
    code, out, _ = call("probe", flag)
    assert code == 0
    for text in (
        "Usage: kvtool probe",
        "Output",
        "--format",
        "KVTOOL_FORMAT",
        "fine",
    ):
        assert text in out


def test_a_file_takes_the_result(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    code, out, err = call("probe", "fine", "-o", str(path))
    assert (code, out) == (0, "")
    assert err.endswith(f"Note: written to {path}\n")
    assert path.read_text() == "seed\n0\n"
    assert call("probe", "fine", "-o", str(path), "--json")[1].startswith("{")


def test_summaries_are_what_the_commands_say_of_themselves() -> None:
    for name, entry in cli.COMMANDS.items():
        command = cli.LazyCommand(name, entry).load()
        assert command.help.splitlines()[0] == entry.summary


def shell(command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run in bash with pipefail; `$KVTOOL` is the command line as users start it."""
    env = {**os.environ, "KVTOOL": f"{sys.executable} -m kvtool", **environ}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_closed_pipe_is_quiet() -> None:
    # The reader is gone before the first byte: `| head -1` without the race.
    done = shell("$KVTOOL presets gpus --json | { exec <&-; sleep 1; }")
    assert done.stderr == ""
    assert done.returncode == 0


def test_help_whose_reader_went_away_is_no_failure() -> None:
    done = shell("$KVTOOL --help | { exec <&-; sleep 1; }")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stdout_is_quiet() -> None:
    done = shell("$KVTOOL --version >&-")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_two_lines() -> None:
    for words in ("presets gpus --json", "--help"):
        done = shell(f"$KVTOOL {words} >/dev/full")
        assert done.returncode == 1
        assert done.stderr.splitlines()[0] == "Error: cannot write standard output: no space left"
        assert len(done.stderr.splitlines()) == 2


def test_shell_completion_knows_commands_and_their_options() -> None:
    words = {"_KVTOOL_COMPLETE": "complete_bash"}
    commands = shell("$KVTOOL", **words, COMP_WORDS="kvtool pre", COMP_CWORD="1")
    assert commands.stdout.split() == ["prefix", "presets"]
    options = shell("$KVTOOL", **words, COMP_WORDS="kvtool presets --js", COMP_CWORD="2")
    assert options.stdout.split() == ["--json"]

"""What a command imports is its start-up time: lists of modules, held to what is allowed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    "torch", "transformers", "triton", "numpy", "numba", "matplotlib", "huggingface_hub", "joblib",
}  # fmt: skip
PRESET = "llama-3.1-8b"

PROBE = """
import sys
from kvtool.cli.main import run
code = run(sys.argv[1:])
names = sorted({name.split('.')[0] for name in sys.modules})
print(code, *names, file=sys.stderr)
"""


def modules(*argv: str) -> set[str]:
    """The top-level modules loaded once the command has run; it must have run well."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *argv], capture_output=True, text=True, timeout=60, check=True
    )
    code, *names = done.stderr.splitlines()[-1].split()
    assert code == "0", done.stderr
    assert done.stdout
    return set(names)


@pytest.mark.parametrize(
    "argv",
    [
        ("--help",),
        ("--version",),
        ("size", "--help"),
        ("size", PRESET),
        ("size", PRESET, "--json"),
        ("presets", "gpus"),
    ],
)
def test_nothing_heavy_is_loaded(argv: tuple[str, ...]) -> None:
    assert not modules(*argv) & HEAVY


@pytest.mark.parametrize("argv", [("--help",), ("--version",)])
def test_help_and_version_load_no_pydantic(argv: tuple[str, ...]) -> None:
    assert "pydantic" not in modules(*argv)


@pytest.mark.parametrize(
    "argv",
    [
        ("--version",),
        ("size", PRESET, "--json"),
        ("size", PRESET, "-f", "csv"),
        ("presets", "--json"),
    ],
)
def test_rich_is_for_tables_only(argv: tuple[str, ...]) -> None:
    assert "rich" not in modules(*argv)


def test_the_help_of_kvtool_imports_no_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.replace(".split('.')[0]", ""), "--help"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    loaded = {name for name in done.stderr.split() if name.startswith("kvtool.cli.")}
    assert loaded == {"kvtool.cli.main", "kvtool.cli.options"}


def test_the_probe_sees_what_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import json\n" + PROBE, "presets", "--json"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["command"] == "presets"
    assert "kvtool" in done.stderr.split()

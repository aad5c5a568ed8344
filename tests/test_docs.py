"""What the documents say is what the program prints, and it is all there."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from kvtool import __version__, catalog
from kvtool.cli import main as cli
from kvtool.cli.main import run
from kvtool.engines import ENGINES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = [
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "tests/data/README.md")
    if path.exists()
]


def read(name: str) -> str:
    """A document's text."""
    return (ROOT / name).read_text("utf-8")


def test_every_block_is_what_the_program_prints_now() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/readme.py", "--check"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_is_short_and_begins_with_what_it_is() -> None:
    assert len(README.splitlines()) <= 200
    assert README.startswith("# kvtool\n")
    assert "docs/size.svg" in README


def test_the_picture_loads_nothing_from_elsewhere() -> None:
    picture = read("docs/size.svg")
    assert picture.startswith("<svg ")
    assert "url(http" not in picture
    assert "@import" not in picture


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)\)", path.read_text("utf-8"))
    missing = [
        target for target in targets if "://" not in target and not (path.parent / target).exists()
    ]
    assert missing == []


def params_of(name: str) -> list[Any]:
    """The parameters of a command, or of a group's commands, as the help lists them."""
    command = cli.LazyCommand(name, cli.COMMANDS[name]).load()
    found: list[Any] = []
    for one in getattr(command, "commands", {name: command}).values():
        with one.make_context(name, [], resilient_parsing=True) as context:
            found += one.get_params(context)
    return found


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_and_option_is_documented(name: str) -> None:
    reference = read("docs/cli.md")
    assert f"## kvtool {name}" in reference
    assert f"kvtool {name}" in README
    section = reference.split(f"\n## kvtool {name}")[1].split("\n## ")[0]
    for param in params_of(name):
        for flag in (*param.opts, *param.secondary_opts):
            if flag.startswith("-"):
                assert f"`{flag}" in section, flag


def test_the_options_of_kvtool_itself_are_documented() -> None:
    group = typer.main.get_command(cli.app)
    with group.make_context("kvtool", [], resilient_parsing=True) as context:
        flags = {flag for param in group.get_params(context) for flag in param.opts}
    assert {flag for flag in flags if f"`{flag}`" not in read("docs/cli.md")} == set()


def test_the_readme_names_every_engine() -> None:
    assert {name for name in ENGINES if f"`{name}`" not in README} == set()


OBJECTS = (
    "lengths",
    "sharing",
    "solved",
    "disaggregation",
    "kv_budget_bytes",
    "whole_requests",
    "efficiency",
)
"""Of a plan: objects whose fields are described."""


def fields_in(row: dict[str, Any]) -> set[str]:
    """The names of a row's fields and of the objects in its lists."""
    inner = {
        name
        for key, value in row.items()
        for item in ([value] if key in OBJECTS else value if isinstance(value, list) else ())
        if isinstance(item, dict)
        for name in item
    }
    return set(row) | inner


@pytest.mark.parametrize(
    "argv",
    [
        ["size", "gemma-3-27b", "-c", "2k", "--per-layer", "--assume", "full"],
        ["size", "jamba-v0.1", "-c", "2k"],
        ["presets"],
        ["presets", "models", "--show", "llama-3-8b"],
        ["presets", "gpus", "--show", "h100"],
        ["presets", "workloads", "--show", "chat"],
        ["fragment", "--num-requests", "50"],
        ["plan", "llama-3-8b", "--gpu", "h100", "--engine", "vllm", "--levers"],
        [
            "plan",
            "llama-3-8b",
            "--gpu",
            "h100:2",
            "--ways",
            "--workload",
            "agent",
            "--num-requests",
            "50",
        ],
        ["plan", "llama-3-8b", "--gpu", "h100", "--solve", "batch"],
        [
            "plan",
            "llama-3-8b",
            "--gpu",
            "h100",
            "--tiers",
            "cpu=1GiB@1GB/s",
            "--disaggregate",
            "prefill=h100:1,decode=h100:1",
            "--link",
            "400Gb",
            "--tp",
            "1",
        ],
        [
            "prefix",
            "--workload",
            "chat+agent",
            "--capacity",
            "9k",
            "--model",
            "llama-3-8b",
            "--gpu",
            "h100",
            "--tiers",
            "cpu=1GiB@1GB/s",
            "--show-tree",
            "--explain-request",
            "40",
        ],
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_every_field_of_a_row_is_documented(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {name for row in found["rows"] for name in fields_in(row)} | set(found)
    assert {name for name in names if f"`{name}`" not in read("docs/json.md")} == set()


def codes_in(path: Path) -> set[str]:
    """The error codes that a module gives: a `code=` of a call, or the default of a `code`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "code":
            found |= {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
        if isinstance(node, ast.arguments):
            pairs = zip(node.kwonlyargs, node.kw_defaults, strict=True)
            found |= {
                default.value
                for arg, default in pairs
                if arg.arg == "code" and isinstance(default, ast.Constant)
            }
    return {code for code in found if isinstance(code, str)}


def test_every_error_code_is_documented() -> None:
    codes = {code for path in (ROOT / "kvtool").rglob("*.py") for code in codes_in(path)}
    assert {"usage", "not_json", "above_limit"} <= codes
    assert {code for code in codes if f"`{code}`" not in read("docs/json.md")} == set()


def test_every_module_has_its_line_in_the_design() -> None:
    design = read("docs/design.md")
    modules = {
        str(path.relative_to(ROOT / "kvtool").with_suffix(""))
        for path in (ROOT / "kvtool").rglob("*.py")
        if not path.name.startswith("__")
    }
    assert {name for name in modules if f"`{name}`" not in design} == set()


def test_the_changelog_is_about_this_version() -> None:
    newest = re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__


def test_what_the_readme_says_of_the_checks_and_presets() -> None:
    said = " ".join(README.split())
    assert f"transformers {catalog.class_defaults()['transformers']}'s own cache objects" in said
    models, gpus = len(catalog.preset_ids("models")), len(catalog.preset_ids("gpus"))
    assert f"lists {models} models and {gpus} GPUs" in said


def test_the_accuracy_page_is_what_the_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "scripts/accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    accuracy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(accuracy)
    page = accuracy.report(accuracy.compare(*accuracy.from_tests()))
    assert (ROOT / "docs/accuracy.md").read_text() == page

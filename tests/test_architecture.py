"""The shape of the code: order of imports, sizes and names of files, nothing from one machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 350
VAGUE = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc", "tools"}
MADE = {"build", "dist", "__pycache__", "node_modules"}
TEXT = {"", ".py", ".md", ".toml", ".txt", ".json", ".sh", ".svg", ".yml", ".yaml", ".cfg", ".tsv"}

CODE = sorted(
    path for folder in ("kvtool", "kernels", "presets") for path in (ROOT / folder).rglob("*.py")
)


def files() -> Iterator[Path]:
    """The repository's own text files: no environment, no cache, nothing that was built."""
    folders = [ROOT]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_symlink() or path.name in MADE or path.name.endswith(".egg-info"):
                continue
            if path.is_dir():
                if not path.name.startswith(".") or path.name in (".ci", ".github"):
                    folders.append(path)
            elif path.suffix in TEXT:
                yield path


def test_the_contracts_of_the_modules_are_kept() -> None:
    pytest.importorskip("importlinter")
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()",
         "--no-cache", "--no-logo"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


def test_the_contracts_cover_every_module_and_dependency() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    rules = {rule["id"]: rule for rule in settings["tool"]["importlinter"]["contracts"]}
    assert rules["layers"]["exhaustive"] is True
    guarded = {
        name
        for rule in rules.values()
        for name in (*rule.get("protected_modules", ()), *rule.get("forbidden_modules", ()))
    }
    heavy = settings["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-module-level-imports"]
    assert set(heavy) <= guarded


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_and_named_for_what_it_holds(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= MAX_LINES
    names = {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}
    assert not {name.strip("_") for name in names} & VAGUE


def test_the_packages_behind_links_are_found() -> None:
    assert (ROOT / "kvtool/kernels").resolve() == ROOT / "kernels"
    assert (ROOT / "kvtool/presets").resolve() == ROOT / "presets"


def test_nothing_names_a_folder_of_one_machine() -> None:
    # Written so that this file does not match itself.
    machine = re.compile(r"(?<![\w.:/~<>-])/(?:h[o]me|r[o]ot|U[s]ers|w[o]rk)/|w[o]rkplace", re.I)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in files()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if machine.search(line)
    ]
    assert found == []


def test_the_pins_name_no_index() -> None:
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if not line.startswith("#")
    ]
    pin = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+(; platform_system == \"\w+\")?")
    assert [line for line in pins if not pin.fullmatch(line)] == []

"""What is built and installed: the wheel, the sdist, and kvtool in an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvtool import __version__

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)
UNREACHABLE = ("NewConnectionError", "ConnectTimeout", "NameResolutionError", "Network is unreach")

# Any use of a socket ends the process with a code of its own.
NO_NETWORK = """
import os, sys

def refuse(event, args):
    if event.startswith("socket."):
        os.write(2, f"the network was used: {event} {args}\\n".encode())
        os._exit(99)

sys.addaudithook(refuse)
"""


def run(command: list[str | Path], cwd: Path, **environ: str) -> str:
    """The output of a command that must end well; nothing of this checkout is on its path."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVTOOL", "HF_"))}
    done = subprocess.run(
        command, cwd=cwd, env=env | environ, capture_output=True, text=True, timeout=600
    )
    if any(word in done.stderr for word in UNREACHABLE):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two wheels, one of the tree and one by way of the sdist."""
    pytest.importorskip("build")
    tree = tmp_path_factory.mktemp("tree") / "kvtool"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
    out = tmp_path_factory.mktemp("dist")
    build: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    run([*build, out / "direct", "--wheel"], tree)
    shutil.rmtree(tree / "build", ignore_errors=True)
    run([*build, out / "sdist"], tree)  # an sdist, and a wheel from it
    return out


def wheel(folder: Path) -> Path:
    """The one wheel in a folder."""
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_has_what_runs_and_nothing_else(dist: Path) -> None:
    names = set(zipfile.ZipFile(wheel(dist / "direct")).namelist())
    code = {
        f"kvtool/{path.relative_to(ROOT / folder).as_posix()}"
        if folder == "kvtool"
        else f"kvtool/{path.relative_to(ROOT).as_posix()}"
        for folder in ("kvtool", "kernels", "presets")
        for path in (ROOT / folder).rglob("*.py")
    }
    data = {
        f"kvtool/{path.relative_to(ROOT).as_posix()}"
        for pattern in ("*.json", "*/*.toml")
        for path in (ROOT / "presets").glob(pattern)
    }
    assert {"kvtool/py.typed", "kvtool/kernels/__init__.py", "kvtool/presets/__init__.py"} <= names
    assert len(data) > 40
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == code | data | {"kvtool/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_of_the_sdist_is_the_same(dist: Path) -> None:
    direct, indirect = (zipfile.ZipFile(wheel(dist / name)) for name in ("direct", "sdist"))
    assert direct.namelist() == indirect.namelist()
    assert [i.CRC for i in direct.infolist() if "RECORD" not in i.filename] == [
        i.CRC for i in indirect.infolist() if "RECORD" not in i.filename
    ]


def test_installed_elsewhere_it_sizes_a_preset_without_the_network(
    dist: Path, tmp_path: Path
) -> None:
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    run(
        [home / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check",
         "-c", ROOT / "constraints.txt", wheel(dist / "sdist")],
        tmp_path,
    )  # fmt: skip
    watch = tmp_path / "watch"
    watch.mkdir()
    (watch / "sitecustomize.py").write_text(NO_NETWORK)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    out = run(
        [home / "bin/kvtool", "size", "llama-3-70b", "-c", "8k", "--json"],
        elsewhere,
        PYTHONPATH=str(watch),
    )
    (row,) = json.loads(out)["rows"]
    assert (row["source"], row["total_bytes"]) == ("preset", 2_684_354_560)
    where = run([home / "bin/python", "-c", "import kvtool; print(kvtool.__file__)"], elsewhere)
    assert Path(where.strip()).is_relative_to(home)
    with pytest.raises(AssertionError, match="the network was used"):
        run(
            [home / "bin/python", "-c", "import socket; socket.socket()"],
            elsewhere,
            PYTHONPATH=str(watch),
        )


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == __version__


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    pinned = {canonicalize_name(pin.name): pin.specifier for pin in pins}
    for requirement in map(Requirement, wanted):
        (version,) = pinned[canonicalize_name(requirement.name)]
        assert version.operator == "=="
        assert version.version in requirement.specifier

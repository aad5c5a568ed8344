"""What the scripts that measure simulators share: the best of some runs, tables, where they are written."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import date
from importlib.metadata import version
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

DOCUMENT = Path(__file__).resolve().parents[1] / "docs/performance.md"
Integers = tuple[int, ...]
"""What a run came to."""


class Ran(NamedTuple):
    """The best times of a run, what it came to, and by how much it raised the peak of memory."""

    came_to: Integers
    wall_s: float
    cpu_s: float = nan
    grown_mib: float = nan


def best_of(repeat: int, run: Callable[[], Integers]) -> Ran:
    """Run so often."""
    runs = []
    for _ in range(repeat):
        held, cpu, wall = peak_mib(anew=True), time.process_time(), time.perf_counter()
        came_to = run()
        runs.append((time.perf_counter() - wall, time.process_time() - cpu, peak_mib() - held))
    walls, cpus, grown = zip(*runs, strict=True)
    return Ran(came_to, min(walls), min(cpus), max(grown))


def peak_mib(*, anew: bool = False) -> float:
    """The most memory that this process had: on Linux, which counts anew from now if asked to."""
    if sys.platform != "linux":
        return nan
    if anew:
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    return int(re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def measured(command: list[str]) -> dict[str, Any]:
    """`wall_s`, `cpu_s`, `peak_mib` and `output` of a command that must end well."""
    script = Path(__file__).parent / "bench_peak.py"
    done = subprocess.run([sys.executable, script, *command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{done.stderr}\n{' '.join(command)}: exit code {done.returncode}")
    ran: dict[str, Any] = json.loads(done.stdout)
    return ran


def digits(value: float) -> str:
    """As many as mean something."""
    return "–" if isnan(value) else f"{value:.{4 if value < 0.1 else 3 if value < 10 else 1}f}"


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def head(*cells: str) -> tuple[str, str, str]:
    """The first lines of a table, after an empty one: words in its first column, then numbers."""
    return "", row(*cells), f"|---|{'--:|' * (len(cells) - 1)}"


def machine() -> str:
    """What the figures hold for, and when."""
    info = Path("/proc/cpuinfo").read_text("utf-8") if sys.platform == "linux" else ""
    name = re.findall(r"model name\s*: (.+)", info) or [platform.machine()]
    system = f"{platform.system()}, CPython {platform.python_version()}"
    packages = ", ".join(f"{one} {version(one)}" for one in ("numpy", "numba", "kvtool"))
    return f"{os.cpu_count()} cores of {name[0]}, {system}, {packages}, {date.today():%-d %B %Y}."


def publish(lines: Iterable[str], section: str | None) -> None:
    """Print each line as it comes, then put all into a section of the document, if there is one."""
    printed = []
    for line in lines:
        print(line, flush=True)
        printed.append(f"{line}\n")
    if section is None:
        return
    place = rf"(<!-- measured: {section} -->\n).*?(<!-- end -->)"
    page, found = re.subn(
        place,
        lambda around: around[1] + "".join(printed) + around[2],
        DOCUMENT.read_text("utf-8"),
        flags=re.DOTALL,
    )
    if found != 1:
        raise SystemExit(f"{DOCUMENT.name} has {found} sections that are measured: {section}")
    DOCUMENT.write_text(page, "utf-8")

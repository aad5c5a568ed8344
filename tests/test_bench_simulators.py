"""The benchmark of the simulators runs, and no clock decides whether it passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts/bench_simulators.py"
FIRST_CELLS = [
    "`kvtool fragment --dist zipf`", "---", "later runs",
    "requests", "---", "1,000", "10,000", "100,000",
    "scheduler", "---", "engine", "plain scheduler",
    "vLLM: not installed: VLLM_PYTHON=/path/to/python make bench",
    "allocator", "---", "paged", "max", "pow2", "oracle", "grow", "static-batch",
    "with a prefix cache", "---", *["engine"] * 4, "plain scheduler",
]  # fmt: skip


def test_a_quick_run_prints_every_table() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_PYTHON"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick"],
        capture_output=True,
        text=True,
        env=environ,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    tables = [line for line in done.stdout.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables]
    assert [line[0] for line in cells] == FIRST_CELLS
    width = 0
    for line, following in zip(cells, [*cells[1:], [""]], strict=True):
        width = len(line) if following[0] == "---" else width
        assert len(line) == width, line
    rows = {(line[0], line[1]): line[2:] for line in cells if len(line) > 4}
    assert rows["engine", "200"][3:5] == rows["plain scheduler", "200"][3:5]
    assert rows["engine", "30"][3:7] == rows["plain scheduler", "30"][3:7]

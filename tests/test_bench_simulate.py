"""The benchmark of whole runs over time works, and no clock decides whether it passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts/bench_simulate.py"
FIRST_CELLS = [
    "`kvtool simulate`, whole run", "---", "made", "made",
    "lengths alone", "---", "kvtool simulate",
    "sched-sim: not installed: SCHED_SIM=/path/to/program make bench",
    "shared prefixes: made", "---", "kvtool simulate",
    "Dynamo mocker: not installed: DYNAMO_PYTHON=/path/to/python make bench",
]  # fmt: skip
# A peer that knows nothing of simulating: it answers in the right form.
STRANGER = """#!{python}
import json
print(json.dumps({{"version": "0", "finished": 7, "hit_rate": 0.5, "seconds": 1.0}}))
"""


def run(**more: str) -> list[list[str]]:
    """The lines of its tables, as cells."""
    environ = {k: v for k, v in os.environ.items() if k not in ("SCHED_SIM", "DYNAMO_PYTHON")}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick"],
        capture_output=True, text=True, env=environ | more, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_quick_run_prints_every_table() -> None:
    cells = run()
    assert [line[0] for line in cells] == FIRST_CELLS
    width = 0
    for line, following in zip(cells, [*cells[1:], [""]], strict=True):
        width = len(line) if following[0] == "---" else width
        assert len(line) == width, line
    assert [line[1] for line in cells if line[0] in ("made", "kvtool simulate")] == [
        "200", "1,000", "50", "100",
    ]  # fmt: skip


def test_others_get_the_same_requests_and_their_row(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    stranger.write_text(STRANGER.format(python=sys.executable))
    stranger.chmod(0o755)
    cells = {
        line[0]: line[1:] for line in run(SCHED_SIM=str(stranger), DYNAMO_PYTHON=str(stranger))
    }
    assert cells["sched-sim (its own times)"][0] == "50"
    mocker = cells["Dynamo mocker 0 (its own times)"]
    assert (mocker[0], mocker[5]) == ("7", "0.5000")
    assert mocker[-1].endswith("×")

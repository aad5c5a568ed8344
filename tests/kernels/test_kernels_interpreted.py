"""The kernels against float64 in triton's interpreter: what they compute, wherever they run.

Each group runs in a process of its own (kernel_runner): a crash there is a failed test here, and
TRITON_INTERPRET reaches nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need triton, which is there on Linux only")

RUNNER = Path(__file__).with_name("kernel_runner.py")
PARTS = 6


def run_group(group: str, part: int = 0, parts: int = 1, timeout_s: float = 600) -> None:
    """Every case of a group within its tolerance, or the first one that is not."""
    done = subprocess.run(
        [sys.executable, str(RUNNER), group, str(part), str(parts)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    last = next((line["case"] for line in reversed(lines) if "case" in line), "the import")
    assert done.returncode == 0, f"exit {done.returncode} in {last}\n{done.stderr[-3000:]}"
    names = [line["case"] for line in lines if "case" in line]
    errors = [line["errors"] for line in lines if "errors" in line]
    assert len(names) == len(errors) > 0
    wrong = [
        f"{name}: {error}"
        for name, error in zip(names, errors, strict=True)
        if not all(share <= 1 for share in error.values())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("group", ["shapes", "edges", "other", "far"])
def test_a_kernel_computes_what_its_formula_says(group: str) -> None:
    run_group(group)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_whole_matrix_computes_what_its_formula_says(part: int) -> None:
    run_group("matrix", part, PARTS, timeout_s=1800)


def test_a_crash_names_the_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crashing = tmp_path / "runner.py"
    crashing.write_text(
        'import os\nprint(\'{"case": "far away"}\', flush=True)\nos.kill(os.getpid(), 11)\n'
    )
    monkeypatch.setattr(f"{__name__}.RUNNER", crashing)
    with pytest.raises(AssertionError, match="exit -11 in far away"):
        run_group("shapes")

"""The scripts that measure kernels run, and no clock decides whether they pass."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_the_table_of_the_cpu_kernel_has_a_line_for_each_block_size() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_attention.py", "--quick"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| s")]
    assert [(line[0], line[1]) for line in lines] == [
        ("| sequential", "16"), ("| sequential", "64"), ("| shuffled", "16"), ("| shuffled", "64"),
    ]  # fmt: skip
    assert {len(line) for line in lines} == {9}


def script() -> Any:
    """scripts/bench_gpu.py as a module."""
    spec = importlib.util.spec_from_file_location("bench_gpu", SCRIPTS / "bench_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_for_a_gpu_runs_its_steps_and_says_which_failed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_gpu.py", tmp_path, "--small", "--only", "b1-8k,skew,decode"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    names = {"b1-8k.json", "skew.json", "decode.json", "table.md"}
    assert {path.name for path in tmp_path.iterdir()} == names
    told = {line.split()[0]: line for line in done.stdout.splitlines() if line.endswith(" ok")}
    assert set(told) == {"b1-8k", "skew", "decode"}
    cells = [line.split("|")[1:3] for line in done.stdout.splitlines() if line.startswith("| B")]
    assert {what.strip(): bool(figure.strip()) for what, figure in cells} == {
        "B1 ctx 8k": True, "B8 ctx 4k": False, "B32 ctx 4k": False, "B1 ctx 128k": False,
        "B64 ctx 8k": False,
    }  # fmt: skip


def test_every_step_is_a_command_that_kvtool_understands(kvtool: Any) -> None:
    for step in script().STEPS:
        if step.name != "decode":
            ran = kvtool("bench", *step.asked.split(), "--dry-run", "--json")
            assert ran.code == 0, (step.name, ran.err)
            assert ran.json["rows"]


def test_the_figures_of_the_table_follow_from_the_rows() -> None:
    module = script()
    rows = [
        {"provider": "paged", "skew": 1, "time_s_p50": 1.0, "copy_fraction": 0.5,
         "read_fraction": 0.9, "block_size": 16, "pattern": "sequential", "overhead": 0.05,
         "overhead_ci": [0.01, 0.09], "samples_s": [1.0] * 5},
        {"provider": "paged", "skew": 21, "time_s_p50": 1.25, "block_size": 16,
         "pattern": "shuffled", "overhead": 0.26},
        {"provider": "flashinfer", "time_s_p50": 0.9, "samples_s": [0.9] * 5},
    ]  # fmt: skip
    assert module.skewed(rows) == "80%"
    assert module.fraction(rows) == "50% of copy, 90% of read"
    assert module.overhead(16)(rows) == "+5.0% (+1.0% to +9.0%)"
    assert module.shuffled(rows) == "+20.0%"
    assert module.flashinfer(rows) == "0.90× (0.90 to 0.90)"
    with pytest.raises(LookupError):
        module.overhead(64)(rows)


def test_a_step_over_its_time_is_interrupted_and_keeps_its_rows(tmp_path: Path) -> None:
    module = script()
    step = module.Step("slow", "attention --device cpu -b 1 -c 64,96,128,160 --provider sdpa "
                       "--budget 10m --head-dim 64", "", 12)  # fmt: skip
    step = step._replace(asked=step.asked.replace("64,96,128,160", "64..6400+64"))
    said, seconds = module.run_step(step, tmp_path, False, 60.0)
    assert said.startswith("interrupted after")
    assert seconds < 12 + module.GRACE_S
    assert module.rows_of(tmp_path, "slow")


def test_a_step_that_does_not_exist_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_gpu.py", "x", "--only", "rofs"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no such step: rofs" in done.stderr

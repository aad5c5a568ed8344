"""CPU seconds to start kvtool, against Python itself: a Markdown table, for `make bench`."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

PRESET = "llama-3.1-8b"


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one run, children included; the run must end well."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit code {child.returncode}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run every command `--repeat` times and print medians beside the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=11)
    repeat = parser.parse_args().repeat
    script = Path(sys.executable).with_name("kvtool")
    kvtool = [str(script)] if script.exists() else [sys.executable, "-m", "kvtool"]
    cases = [
        ("python -c pass", [sys.executable, "-c", "pass"], None),
        ("kvtool --help", [*kvtool, "--help"], 0.25),
        ("kvtool --version", [*kvtool, "--version"], 0.25),
        (f"kvtool size {PRESET}", [*kvtool, "size", PRESET], 0.35),
        (f"kvtool size {PRESET} --json", [*kvtool, "size", PRESET, "--json"], 0.35),
    ]
    print("| command | CPU s, median | lowest | goal |")
    print("|---|--:|--:|--:|")
    for name, command, goal in cases:
        cpu_seconds(command)  # the first run may compile bytecode
        times = [cpu_seconds(command) for _ in range(repeat)]
        wanted = f"{goal:.2f}" if goal else "–"
        print(f"| `{name}` | {statistics.median(times):.3f} | {min(times):.3f} | {wanted} |")


if __name__ == "__main__":
    main()

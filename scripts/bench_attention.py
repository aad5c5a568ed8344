"""The CPU kernel's speed against its goals, its twin and torch: a table, for `make bench`.

`--write` puts the table into docs/performance.md, which says what it holds; `--quick` measures a tiny
case, to see that it runs. Everything is measured by `kvtool bench attention`, one run a pattern.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[1] / "docs/performance.md"
SECTION = re.compile(r"(?<=<!-- measured: attention -->\n).*?(?=<!-- end -->)", re.DOTALL)
CASE = "-b 8 -c 4k --query-heads 32 --kv-heads 8 --head-dim 128 --kv-dtype fp32 --threads 1"
QUICK = "-b 2 -c 64 --query-heads 4 --kv-heads 2 --head-dim 64 --kv-dtype fp32 --budget 1s"
GOALS = {16: "38%", 64: "45%"}
HEAD = ("blocks", "block size", "wall ms", "CPU ms", "GB/s", "of read roof", "goal",
        "against contiguous", "gather + SDPA takes")  # fmt: skip

Row = dict[str, Any]


def measured(quick: bool, pattern: str) -> dict[str, Any]:
    """A run of the command as its JSON."""
    asked = [*(QUICK if quick else f"{CASE} --budget 3m").split(), "--block-size"]
    command = [sys.executable, "-m", "kvtool", "bench", "attention", "--device", "cpu", *asked]
    done = subprocess.run(
        [*command, "16,64" if quick else "1..256*4", "--pattern", pattern, "--json"],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def lines_of(rows: list[Row]) -> Iterator[str]:
    """A line for each block size of a run."""
    for paged in (row for row in rows if row["provider"] == "paged"):
        size = paged["block_size"]
        (gather,) = (
            row for row in rows if row["provider"] == "gather-sdpa" and row["block_size"] == size
        )
        low, high = paged["overhead_ci"]
        slower = gather["time_s_p50"] / paged["time_s_p50"]
        yield line(
            paged["pattern"], str(size), f"{1e3 * paged['time_s_p50']:.1f}",
            f"{1e3 * paged['cpu_time_s_p50']:.1f}", f"{paged['gb_per_s']:.1f}",
            f"{paged['read_fraction']:.0%}", GOALS.get(size, "–"),
            f"{paged['overhead']:+.1%} ({low:+.1%} to {high:+.1%})", f"{slower:.2f}×",
        )  # fmt: skip


def line(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def report(quick: bool) -> Iterator[str]:
    """The machine, then the table as it is measured."""
    for pattern in ("sequential", "shuffled"):
        run = measured(quick, pattern)
        if pattern == "sequential":
            env = run["env"]
            yield (
                f"One thread of {env['device_name']}, CPython {env['python']}, torch {env['torch']}, "
                f"numba {env['numba']}, kvtool {env['kvtool']}, load {env['load_average']}, "
                f"{date.today():%-d %B %Y}."
            )
            yield from ("", line(*HEAD), f"|---|{'--:|' * (len(HEAD) - 1)}")
        yield from lines_of(run["rows"])


def main() -> None:
    """Print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options, lines = parser.parse_args(), []
    if importlib.util.find_spec("torch") is None:
        print("attention: not measured, torch is not installed: pip install 'kvtool[bench]'")
        return
    for text in report(options.quick):
        print(text, flush=True)
        lines.append(f"{text}\n")
    if options.write and not options.quick:
        page = SECTION.sub(lambda _: "".join(lines), DOCUMENT.read_text("utf-8"))
        DOCUMENT.write_text(page, "utf-8")


if __name__ == "__main__":
    main()

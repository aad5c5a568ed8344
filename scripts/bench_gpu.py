"""Ten minutes on a GPU: what the kernels and whole-model decode reach there, and a short table.

    python scripts/bench_gpu.py FOLDER            # about ten minutes; made for one H200
    python scripts/bench_gpu.py FOLDER --small    # the same steps on tiny cases, on any machine

In this order: roofs, correctness, the naive loop against chunk + gather against contiguous, block
sizes, the published cases, dtypes, splits, skew, decode. Each step is a `kvtool bench` that writes
FOLDER/step.json: a step that fails or runs out of its time is told, and the others go on. The table
has an empty cell for what was not measured. Exit code 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


class Step(NamedTuple):
    """A name, what `kvtool bench` is asked, the same for tiny cases, and seconds allowed."""

    name: str
    asked: str
    small: str
    seconds: int


OURS = "--provider paged,contiguous"
STEPS = (
    Step("roofs", f"attention -b 1,8,32 -c 4k {OURS} --budget 10s", "-b 1 -c 64", 60),
    Step(
        "correct",
        "attention -b 3 -c 1000 --head-dim 80,128,256 --kv-dtype bf16,fp32 --block-size 1,16,256 "
        f"--skew 2 --pattern shuffled {OURS},paged-naive --budget 5s",
        "-b 2 -c 50 --head-dim 64 --kv-dtype fp16,fp32 --block-size 1,16",
        120,
    ),
    Step(
        "correct-more",
        "attention -b 3 -c 1000 --head-dim 64,96,192 --kv-dtype fp16 --layout nhd,hnd "
        f"--query-heads 8,32 --skew 2 --pattern fragmented {OURS} --budget 5s",
        "-b 2 -c 50 --head-dim 64",
        90,
    ),
    Step(
        "loops",
        "attention -b 8,32 -c 4k --block-size 16 --num-stages 3,4,5 "
        f"{OURS},paged-naive --budget 20s",
        "-b 1 -c 64 --num-stages 0",
        60,
    ),
    Step(
        "blocks",
        f"attention -b 32 -c 4k --block-size 1..256*2 --pattern sequential,shuffled {OURS} "
        "--budget 30s",
        "-b 1 -c 64 --block-size 1,16",
        90,
    ),
    Step("b1-8k", "attention -b 1 -c 8k --budget 5s", "-b 1 -c 64", 45),
    Step("b8-4k", "attention -b 8 -c 4k --budget 5s", "-b 1 -c 64", 45),
    Step("b32-4k", "attention -b 32 -c 4k --budget 5s", "-b 1 -c 64", 45),
    Step("b1-128k", "attention -b 1 -c 128k --budget 5s", "-b 1 -c 64", 45),
    Step("b64-8k", "attention -b 64 -c 8k --budget 10s", "-b 1 -c 64", 60),
    Step("dtypes", f"attention -b 32 -c 4k --kv-dtype bf16,fp16,fp32 {OURS} --budget 10s",
         "-b 1 -c 64 --kv-dtype fp16,fp32", 60),
    Step("splits", f"attention -b 1,8 -c 16k --num-splits 0,1,4,8,16,32,64 {OURS} --budget 15s",
         "-b 1 -c 64", 60),
    Step("skew", f"attention -b 32 -c 3008 --skew 1,21 {OURS} --budget 10s", "-b 2 -c 64 --skew 1,2",
         60),
    Step("decode", "decode --model llama-3-8b --batch 1,16 --prompt-tokens 1k --output-tokens 64",
         "--model smollm2-135m --layers 1 --batch 1 --prompt-tokens 8 --output-tokens 4 --num-requests 2", 180),
)  # fmt: skip


class Target(NamedTuple):
    """A line of the table: what it is, in which step, and how its rows become a figure."""

    what: str
    step: str
    figure: Callable[[list[Row]], str]


def fraction(rows: list[Row]) -> str:
    """The paged kernel's share of the copy roof."""
    row = only(rows, provider="paged")
    return f"{row['copy_fraction']:.0%} of copy, {row['read_fraction']:.0%} of read"


def overhead(size: int) -> Callable[[list[Row]], str]:
    """Against the contiguous twin at one block size, blocks in order."""
    return lambda rows: percent(only(rows, provider="paged", block_size=size, pattern="sequential"))


def percent(row: Row) -> str:
    """An overhead and its interval."""
    low, high = row["overhead_ci"]
    return f"{row['overhead']:+.1%} ({low:+.1%} to {high:+.1%})"


def shuffled(rows: list[Row]) -> str:
    """Shuffled against sequential at block size 16: times of two cases, not paired."""
    both = [only(rows, provider="paged", block_size=16, pattern=name) for name in
            ("shuffled", "sequential")]  # fmt: skip
    return f"{both[0]['time_s_p50'] / both[1]['time_s_p50'] - 1:+.1%}"


def naive(rows: list[Row]) -> str:
    """The naive loop and ours, each at its best number of stages, batch 32."""
    best = {
        name: min(
            row["time_s_p50"] for row in rows if row["provider"] == name and row["batch"] == 32
        )
        for name in ("paged-naive", "paged", "contiguous")
    }
    return ", ".join(f"{name} {1e6 * seconds:.0f} µs" for name, seconds in best.items())


def flashinfer(rows: list[Row]) -> str:
    """Our speed as a share of FlashInfer's."""
    ours, theirs = (only(rows, provider=name) for name in ("paged", "flashinfer"))
    return f"{theirs['time_s_p50'] / ours['time_s_p50']:.2f}×"


def skewed(rows: list[Row]) -> str:
    """Speed of a skewed batch as a share of an even one's."""
    even, uneven = (only(rows, provider="paged", skew=skew) for skew in (1, 21))
    return f"{even['time_s_p50'] / uneven['time_s_p50']:.0%}"


def all_right(rows: list[Row]) -> str:
    """How many rows are within their tolerance."""
    return f"{sum(row['correct'] for row in rows)} of {len(rows)} rows right" if rows else ""


TARGETS = (
    Target("correctness, blocks and dtypes", "correct", all_right),
    Target("correctness, head sizes and layouts", "correct-more", all_right),
    Target("naive loop, chunk + gather, contiguous, best stages", "loops", naive),
    Target("B1 ctx 8k", "b1-8k", fraction),
    Target("B8 ctx 4k", "b8-4k", fraction),
    Target("B32 ctx 4k", "b32-4k", fraction),
    Target("B1 ctx 128k", "b1-128k", fraction),
    Target("B64 ctx 8k", "b64-8k", fraction),
    Target("overhead against contiguous, block size 64", "blocks", overhead(64)),
    Target("overhead against contiguous, block size 16", "blocks", overhead(16)),
    Target("overhead against contiguous, block size 1", "blocks", overhead(1)),
    Target("shuffled against sequential, block size 16", "blocks", shuffled),
    Target("against FlashInfer, B32 ctx 4k", "b32-4k", flashinfer),
    Target("skewed (one of 21 means) against even", "skew", skewed),
)


def only(rows: list[Row], **wanted: Any) -> Row:
    """The one row with these values; LookupError if there is none."""
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if not found:
        raise LookupError(f"no row with {wanted}")
    return found[0]


def run_step(step: Step, folder: Path, small: bool) -> tuple[str, float]:
    """Run one step; ('ok' or what went wrong, seconds)."""
    command = [sys.executable, "-m", "kvtool", "bench", *step.asked.split()]
    if small:  # later options win
        command += [*step.small.split(), *(() if step.name == "decode" else ("--budget", "1s"))]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command, "-o", str(folder / f"{step.name}.json")],
            capture_output=True, text=True, timeout=step.seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"more than its {step.seconds} s", time.monotonic() - started
    errors = [line for line in done.stderr.splitlines() if line.startswith(("Error", "Hint"))]
    return ("ok" if done.returncode == 0 else " ".join(errors)), time.monotonic() - started


def rows_of(folder: Path, step: str) -> list[Row]:
    """The rows that a step left."""
    path = folder / f"{step}.json"
    return json.loads(path.read_text("utf-8"))["rows"] if path.is_file() else []


def table(folder: Path) -> list[str]:
    """A line a target; an empty cell for what was not measured."""
    lines = [f"| {'':<52} | {'measured':<52} |", f"|{'-' * 54}|{'-' * 54}|"]
    for target in TARGETS:
        try:
            figure = target.figure(rows_of(folder, target.step))
        except (LookupError, TypeError, ValueError):
            figure = ""
        lines.append(f"| {target.what:<52} | {figure:<52} |")
    return lines


def main() -> int:
    """Run the steps, print what each took, then the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", help="names of steps, with commas", default="")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    chosen = [step for step in STEPS if not asked.only or step.name in asked.only.split(",")]
    failed = False
    for step in chosen:
        said, seconds = run_step(step, asked.folder, asked.small)
        failed |= said != "ok"
        print(f"{step.name:<10} {seconds:6.1f} s  {said}", flush=True)
    print(f"\n{datetime.now(UTC):%Y-%m-%d}", *table(asked.folder), sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Ten minutes on a GPU: what the kernels and whole-model decode reach there, and a short table.

    python scripts/bench_gpu.py FOLDER            # about ten minutes; made for one H200
    python scripts/bench_gpu.py FOLDER --small    # the same steps on tiny cases, on any machine

In this order: roofs, correctness, the naive loop against chunk + gather against contiguous, five cases
with targets, block sizes, dtypes, splits, skew, decode, more correctness. Each step is a `kvtool bench`
that writes FOLDER/step.json: a step that fails or runs out of its time is told, and the others go on.
FOLDER/table.md is written after each; it has an empty cell for what was not measured. Exit code 1 if a
step failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kvtool.stats import paired_ratio

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
        150,
    ),
    Step(
        "loops",
        f"attention -b 8,32 -c 4k --block-size 16 --num-stages 3,4,5,7 {OURS},paged-naive "
        "--budget 20s",
        "-b 1 -c 64 --num-stages 0",
        75,
    ),
    Step("b1-8k", "attention -b 1 -c 8k --budget 5s", "-b 1 -c 64", 60),
    Step("b8-4k", "attention -b 8 -c 4k --budget 5s", "-b 1 -c 64", 60),
    Step("b32-4k", "attention -b 32 -c 4k --budget 5s", "-b 1 -c 64", 60),
    Step("b1-128k", "attention -b 1 -c 128k --budget 5s", "-b 1 -c 64", 60),
    Step("b64-8k", "attention -b 64 -c 8k --budget 10s", "-b 1 -c 64", 75),
    Step(
        "blocks",
        f"attention -b 32 -c 4k --block-size 1,16,64,256 --pattern sequential,shuffled {OURS} "
        "--budget 20s",
        "-b 1 -c 64 --block-size 1,16",
        75,
    ),
    Step("dtypes", f"attention -b 32 -c 4k --kv-dtype bf16,fp16,fp32 {OURS} --budget 10s",
         "-b 1 -c 64 --kv-dtype fp16,fp32", 60),
    Step("splits", f"attention -b 1,8 -c 16k --num-splits 0,1,4,16,64 {OURS} --budget 15s",
         "-b 1 -c 64", 60),
    Step("skew", f"attention -b 32 -c 3008 --skew 1,21 {OURS} --budget 10s",
         "-b 2 -c 64 --skew 1,2", 60),
    Step("decode", "decode --model llama-3-8b --batch 1,16 --prompt-tokens 1k --output-tokens 48 "
         "--cache dynamic,contiguous,paged --repeats 3 --num-requests 12",
         "--model smollm2-135m --layers 1 --batch 1 --prompt-tokens 8 --output-tokens 4 "
         "--num-requests 2 --repeats 1", 180),
    Step(
        "correct-more",
        "attention -b 3 -c 1000 --head-dim 64,96,192 --kv-dtype fp16 --layout nhd,hnd "
        f"--query-heads 8,32 --skew 2 --pattern fragmented {OURS} --budget 5s",
        "-b 2 -c 50 --head-dim 64",
        90,
    ),
)  # fmt: skip
"""What matters most comes first: a machine may be taken back."""
DEADLINE_S = 590
GRACE_S = 15
"""A step that is over its time is interrupted as by Ctrl-C, which keeps its rows; then it is killed."""


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
    """Shuffled against sequential at block size 16, each against its contiguous twin: clocks cancel."""
    both = [only(rows, provider="paged", block_size=16, pattern=name) for name in
            ("shuffled", "sequential")]  # fmt: skip
    return f"{(1 + both[0]['overhead']) / (1 + both[1]['overhead']) - 1:+.1%}"


def best(rows: list[Row], key: str, value: Any, provider: str, **wanted: Any) -> Row:
    """The fastest row of a provider among those that differ in something else."""
    found = [row for row in rows if row["provider"] == provider and row[key] == value
             and all(row[name] == one for name, one in wanted.items())]  # fmt: skip
    if not found:
        raise LookupError(f"no row of {provider}")
    return min(found, key=lambda row: row["time_s_p50"])


def naive(rows: list[Row]) -> str:
    """Each loop at its best number of stages, batch 32."""
    found = {name: best(rows, "batch", 32, name) for name in ("paged-naive", "paged", "contiguous")}
    return ", ".join(
        f"{name} {1e6 * row['time_s_p50']:.0f} µs ({row['num_stages']} stages)"
        for name, row in found.items()
    )


def flashinfer(rows: list[Row]) -> str:
    """Our speed as a share of FlashInfer's: the median of the rounds' ratios, and its interval."""
    ours, theirs = (only(rows, provider=name)["samples_s"] for name in ("paged", "flashinfer"))
    ratio = paired_ratio(theirs, ours)
    return f"{ratio.median:.2f}× ({ratio.low:.2f} to {ratio.high:.2f})"


def skewed(rows: list[Row]) -> str:
    """Speed of a skewed batch as a share of an even one's."""
    even, uneven = (only(rows, provider="paged", skew=skew) for skew in (1, 21))
    return f"{even['time_s_p50'] / uneven['time_s_p50']:.0%}"


def roofs(rows: list[Row]) -> str:
    """Reading and copying at three sizes."""
    found = [only(rows, provider="paged", batch=batch) for batch in (1, 8, 32)]
    return ", ".join(
        f"{row['bytes_useful'] / 2**20:.0f} MiB: {row['read_roof_gb_per_s']:,.0f} read, "
        f"{row['copy_roof_gb_per_s']:,.0f} copy GB/s"
        for row in found
    )


def dtypes(rows: list[Row]) -> str:
    """Each dtype's share of the read roof."""
    found = {name: only(rows, provider="paged", kv_dtype=name) for name in ("bf16", "fp16", "fp32")}
    return ", ".join(f"{name} {row['read_fraction']:.0%}" for name, row in found.items())


def splits(rows: list[Row]) -> str:
    """The kernel's own rule against the best of a few, batch 1. It comes first among the rows."""
    rule = only(rows, provider="paged", batch=1)
    fastest = best(rows, "batch", 1, "paged")
    return (
        f"rule: {rule['num_splits']} splits, {1e6 * rule['time_s_p50']:.1f} µs; best: "
        f"{fastest['num_splits']}, {1e6 * fastest['time_s_p50']:.1f} µs"
    )


def decoded(rows: list[Row]) -> str:
    """Time of a token, paged and contiguous, at batch 1 and 16."""
    return ", ".join(
        f"batch {batch} {cache} {1e3 * only(rows, cache=cache, batch=batch)['itl_s_p50']:.2f} ms"
        for batch in (1, 16)
        for cache in ("contiguous", "paged")
    )


def batches(rows: list[Row]) -> str:
    """Sequences at a time in the same memory, and tokens a second."""
    most, paged = (only(rows, run="ragged", cache=name) for name in ("contiguous-max", "paged"))
    gain = paged["output_tokens_per_s"] / most["output_tokens_per_s"]
    return f"{most['mean_batch']:.1f} → {paged['mean_batch']:.1f} sequences, {gain:.2f}× tokens/s"


def all_right(rows: list[Row]) -> str:
    """How many rows are within their tolerance."""
    return f"{sum(row['correct'] for row in rows)} of {len(rows)} rows right" if rows else ""


TARGETS = (
    Target("roofs", "roofs", roofs),
    Target("correctness, blocks and dtypes", "correct", all_right),
    Target("correctness, head sizes and layouts", "correct-more", all_right),
    Target("naive loop, chunk + gather, contiguous", "loops", naive),
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
    Target("dtypes, of the read roof", "dtypes", dtypes),
    Target("splits at 16k, batch 1", "splits", splits),
    Target("skewed (one of 21 means) against even", "skew", skewed),
    Target("Llama-3-8B, a token", "decode", decoded),
    Target("Llama-3-8B, batches in the same memory", "decode", batches),
)


def only(rows: list[Row], **wanted: Any) -> Row:
    """The one row with these values; LookupError if there is none."""
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if not found:
        raise LookupError(f"no row with {wanted}")
    return found[0]


def run_step(step: Step, folder: Path, small: bool, most_s: float) -> tuple[str, float]:
    """Run one step; ('ok' or what went wrong, seconds)."""
    command = [sys.executable, "-m", "kvtool", "bench", *step.asked.split()]
    if small:  # later options win
        command += [*step.small.split(), *(() if step.name == "decode" else ("--budget", "1s"))]
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, "-o", str(folder / f"{step.name}.json")],
            stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
        late = _wait(process, min(step.seconds, most_s))
        errors.seek(0)
        said = [line.strip() for line in errors if line.startswith(("Error", "Hint"))]
    seconds = time.monotonic() - started
    if late:
        return f"interrupted after {seconds:.0f} s; its rows so far are kept", seconds
    if process.returncode == 0:
        return "ok", seconds
    return " ".join(said) or f"exit code {process.returncode}", seconds


def _wait(process: subprocess.Popen[Any], seconds: float) -> bool:
    """Whether the process had to be told to end."""
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return True


def rows_of(folder: Path, step: str) -> list[Row]:
    """The rows that a step left."""
    path = folder / f"{step}.json"
    return json.loads(path.read_text("utf-8"))["rows"] if path.is_file() else []


def table(folder: Path) -> list[str]:
    """A line a target; an empty cell for what was not measured."""
    lines = [f"| {'':<44} | {'measured':<52} |", f"|{'-' * 46}|{'-' * 54}|"]
    for target in TARGETS:
        try:
            figure = target.figure(rows_of(folder, target.step))
        except (LookupError, TypeError, ValueError):  # not measured, or without a speed
            figure = ""
        lines.append(f"| {target.what:<44} | {figure:<52} |")
    return lines


def has_gpu() -> bool:
    """Whether `kvtool bench` would find one."""
    asked = "from kvtool.bench.device import find_device; find_device('cuda')"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True)
    return done.returncode == 0


def main() -> int:
    """Run the steps; after each one the table is written anew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", help="names of steps, with commas", default="")
    asked = parser.parse_args()
    names = {step.name for step in STEPS}
    wanted = set(asked.only.split(",")) if asked.only else names
    if not wanted <= names:
        parser.error(f"no such step: {', '.join(sorted(wanted - names))}")
    if not asked.small and not has_gpu():
        print(
            "Error: torch sees no GPU here\nHint: --small runs the steps on tiny cases",
            file=sys.stderr,
        )
        return 1
    asked.folder.mkdir(parents=True, exist_ok=True)
    failed, ends, page = False, time.monotonic() + DEADLINE_S, ""
    for step in (one for one in STEPS if one.name in wanted):
        left = ends - time.monotonic() - GRACE_S
        said, seconds = ("no time left", 0.0)
        if left > 0:
            said, seconds = run_step(step, asked.folder, asked.small, left)
        failed |= said != "ok"
        print(f"{step.name:<12} {seconds:6.1f} s  {said}", flush=True)
        what = " on tiny cases: no figure stands for its name" if asked.small else ""
        page = "\n".join([f"{datetime.now(UTC):%Y-%m-%d}{what}", *table(asked.folder), ""])
        (asked.folder / "table.md").write_text(page, "utf-8")
    print(f"\n{page}", end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

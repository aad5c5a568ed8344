"""`kvtool simulate` over time, whole commands, against other simulators: tables, for `make bench`.

`--trace FILE` measures a trace with arrivals beside the made requests, `--shared FILE` one in Mooncake's
format in place of the made one. `--write` puts the tables into docs/performance.md, which says what they
hold and how the others come in; `--quick` does a fraction of the work, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench_traces import write_requests
from bench_words import digits, head, machine, measured, publish, row

HERE = Path(__file__).parent
SCHED_SIM, DYNAMO = "SCHED_SIM", "DYNAMO_PYTHON"
BLOCKS, BLOCK_SIZE, LONGEST = 10_000, 512, 131_072
"""The pool for traces in Mooncake's format."""


class Sizes(NamedTuple):
    """Made requests, those that others get, and how many runs the best is of."""

    made: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    compared: int = 10_000
    shared: int = 12_000
    repeat: int = 3


QUICK = Sizes((200, 1_000), 50, 100, 1)


def kvtool(*asked: str) -> list[str]:
    """`kvtool simulate` with these options."""
    return [sys.executable, "-m", "kvtool", "simulate", *asked, "--json"]


def made(count: int) -> list[str]:
    """So many requests of the vLLM paper's lengths, forty a second, for a pool of 320,000 tokens."""
    return ["--dist", "zipf", "--num-requests", str(count), "--rate", "40", "--num-blocks", "20000"]


def best(command: list[str], repeat: int) -> dict[str, Any]:
    """The least wall seconds, CPU seconds and memory of some runs, after one that may compile."""
    measured(command)
    runs = [measured(command) for _ in range(repeat)]
    return {
        **runs[0],
        **{key: min(run[key] for run in runs) for key in ("wall_s", "cpu_s", "peak_mib")},
    }


def simulated(command: list[str], repeat: int) -> dict[str, Any]:
    """A run of ours, and the row that it printed."""
    ran = best(command, repeat)
    return {**ran, "row": json.loads(ran["output"])["rows"][0]}


def figures(ran: dict[str, Any], count: int) -> tuple[str, ...]:
    """The columns that runs have in common."""
    times = (digits(ran[key]) for key in ("wall_s", "cpu_s", "peak_mib"))
    return f"{count:,}", *times, f"{round(count / ran['wall_s']):,}"


def timed(sizes: Sizes, traces: list[Path]) -> Iterator[str]:
    """Our command on made requests and on traces."""
    asked = [("made", made(count)) for count in sizes.made]
    asked += [
        (path.stem, ["--requests", str(path), "--num-blocks", "20000"]) for path in traces
    ]  # fmt: skip
    for name, options in asked:
        ran = simulated(kvtool(*options), sizes.repeat)
        found = ran["row"]
        steps = (f"{found[name]:,}" for name in ("steps", "preemptions"))
        yield row(name, *figures(ran, found["requests"]), *steps)


def lengths_alone(sizes: Sizes, folder: Path) -> Iterator[str]:
    """The same requests with arrivals through sched-sim: chunked prefill, 8,192 tokens a step."""
    paths = folder / "requests.jsonl", folder / "requests.json"
    write_both(*paths, sizes.compared)
    ran = simulated(kvtool("--requests", str(paths[0]), "--num-blocks", "20000"), sizes.repeat)
    yield row("kvtool simulate", *figures(ran, sizes.compared), "–")
    if program := os.environ.get(SCHED_SIM):
        asked = [program, "trace", str(paths[1]), "--scheduler", "chunked", "--no-gantt"]
        other = best([*asked, "--token-budget", "8192"], sizes.repeat)
        ratio = f"{other['wall_s'] / ran['wall_s']:,.1f}×"
        yield row("sched-sim (its own times)", *figures(other, sizes.compared), ratio)
    else:
        yield missing("sched-sim", SCHED_SIM, "program", 6)


def write_both(ours: Path, theirs: Path, count: int) -> None:
    """The first requests of the made ones, in our format and in sched-sim's."""
    from kvtool.lengths import parse_lengths
    from kvtool.requests import SECOND_NS
    from kvtool.workload import Workload, chunks

    prompt, output = (
        parse_lengths("zipf", name="lengths", mean=mean, cap=1024) for mean in (161.31, 337.99)
    )
    asked = Workload(name="zipf", prompt=prompt, output=output, num_requests=count, rate=4.0)
    columns = [
        (chunk.arrival_ns.tolist(), chunk.prompt_tokens.tolist(), chunk.output_tokens.tolist())
        for chunk in chunks(asked)
    ]
    rows = [one for column in columns for one in zip(*column, strict=True)]
    with ours.open("w", encoding="utf-8") as file:
        for at, tokens, more in rows:
            line = {"arrival_ns": at, "prompt_tokens": tokens, "output_tokens": more}
            file.write(json.dumps(line) + "\n")
    theirs.write_text(
        json.dumps(
            [
                {"id": str(k), "timestamp": at / SECOND_NS, "prompt_tokens": tokens, "output_tokens": more}
                for k, (at, tokens, more) in enumerate(rows)
            ]
        )
    )  # fmt: skip


def shared(sizes: Sizes, path: Path) -> Iterator[str]:
    """A trace with shared prefixes through Dynamo's mocker, whose steps last as long as it says."""
    pool = ["--num-blocks", str(BLOCKS), "--block-size", str(BLOCK_SIZE)]
    asked = ["--requests", str(path), *pool, "--prefix-caching", "--max-model-len", str(LONGEST)]
    ran = simulated(kvtool(*asked), sizes.repeat)
    found = ran["row"]
    hits = found["hit_tokens"] / found["queried_tokens"]
    yield row("kvtool simulate", *figures(ran, found["requests"]), f"{hits:.4f}", "–")
    if python := os.environ.get(DYNAMO):
        script = str(HERE / "peers/dynamo_mocker.py")
        other = best([python, script, str(path), str(BLOCKS), str(BLOCK_SIZE)], sizes.repeat)
        told = json.loads(other["output"])
        ratio = f"{other['wall_s'] / ran['wall_s']:,.1f}×"
        name = f"Dynamo mocker {told['version']} (its own times)"
        yield row(name, *figures(other, told["finished"]), f"{told['hit_rate']:.4f}", ratio)
    else:
        yield missing("Dynamo mocker", DYNAMO, "python", 7)


def missing(name: str, variable: str, what: str, columns: int) -> str:
    """A line of a table for who is not there."""
    return row(f"{name}: not installed: {variable}=/path/to/{what} make bench", *["–"] * columns)


def report(sizes: Sizes, traces: list[Path], of_shared: Path | None, folder: Path) -> Iterator[str]:
    """Every table, line by line as it is measured."""
    columns = ("requests", "wall s", "CPU s", "peak MiB", "requests/s")
    if of_shared is None:
        of_shared = folder / "made.jsonl"
        write_requests(of_shared, sizes.shared)
    yield f"{machine()[:-1]}, load {os.getloadavg()[0]:.2f}."
    yield from head("`kvtool simulate`, whole run", *columns, "steps", "preempted")
    yield from timed(sizes, traces)
    yield from head("lengths alone", *columns, "slower than kvtool")
    yield from lengths_alone(sizes, folder)
    yield from head(
        f"shared prefixes: {of_shared.stem}", *columns, "hit rate", "slower than kvtool"
    )
    yield from shared(sizes, of_shared)


def main() -> None:
    """Print the tables, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--shared", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = QUICK if asked.quick else Sizes()
        lines = report(sizes, asked.trace, asked.shared, Path(folder))
        publish(lines, "simulate" if asked.write and not asked.quick else None)


if __name__ == "__main__":
    main()

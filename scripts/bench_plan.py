"""How long plans take: one whole command, and a row of a grid beside the rows of `kvtool size` that it rests on.

What a plan's request takes is asked through `kvtool.capacity.needs_of`, which remembers; its twin lays the
cache out for each row anew, as `kvtool size` does. Bytes must be the same. A Markdown table, for `make bench`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from bench_startup import cpu_seconds

from kvtool import catalog
from kvtool.config import load_config
from kvtool.errors import KvtoolError
from kvtool.model import read_model
from kvtool.plan import PlanCase
from kvtool.plan_flags import row_of
from kvtool.plan_model import model_for
from kvtool.plan_query import PlanQuery, gpus_named
from kvtool.planning import cases_of
from kvtool.sweep import swept

MODELS = ("llama-3-70b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3", "qwen3-next-80b-a3b")
CONTEXTS = tuple(range(1024, 32_769, 512))
TWIN = 200
"""Rows of which the twin is timed."""
COMMAND = "plan llama-3-70b --gpu h100:8 --engine vllm"
REPEAT = 11


def cases(engine: str) -> list[PlanCase]:
    """The grid."""
    query = PlanQuery(
        gpus=gpus_named("h100:8,h200:8"), engines=(engine,), kv_dtypes=("auto", "fp8"), contexts=CONTEXTS,
        users=(None, 16),
    )  # fmt: skip
    found: list[PlanCase] = []
    for name in MODELS:
        loaded = load_config(name)
        shape = read_model(loaded.config, catalog.class_defaults()["types"])
        lost: list[KvtoolError] = []
        found += cases_of(model_for(loaded, shape, query), query, lost)
    return found


def twin_s(grid: list[PlanCase]) -> float:
    """Seconds of a row whose cache is laid out anew, spread over the grid."""
    some = list(islice(grid, 0, None, max(1, len(grid) // TWIN)))
    start = time.perf_counter()
    rows = [case.holder.row(case.context) for case in some]
    spent = time.perf_counter() - start
    for case, row in zip(some, rows, strict=True):
        assert (row.get("one_request_bytes") or row["per_gpu_bytes"]) == row_of(case)[
            "request_bytes"
        ]
    return spent / len(some)


def main() -> None:
    """Print the table."""
    kvtool = [str(Path(sys.executable).with_name("kvtool"))]
    command = [
        *(kvtool if Path(kvtool[0]).exists() else [sys.executable, "-m", "kvtool"]),
        *COMMAND.split(),
    ]
    cpu_seconds(command)
    whole = statistics.median(cpu_seconds(command) for _ in range(REPEAT))
    print("| what | rows | seconds | ms a row | its twin, ms a row | ratio |")
    print("|---|--:|--:|--:|--:|--:|")
    print(f"| `kvtool {COMMAND}`, CPU, whole command | 1 | {whole:.2f} | – | – | – |")
    for engine in ("ideal", "vllm"):
        start = time.perf_counter()
        grid = cases(engine)
        for case in grid:
            row_of(case)
        spent = time.perf_counter() - start
        each, twin = 1e3 * spent / len(grid), 1e3 * twin_s(grid)
        print(
            f"| a grid, {engine} | {len(grid):,} | {spent:.2f} | {each:.2f} | {twin:.2f} | {twin / each:.1f}x |"
        )
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "grid.jsonl")
        for what in ("kept in a file", "found in the file"):
            start = time.perf_counter()
            found = swept(grid, row_of, path=path)
            spent = time.perf_counter() - start
            each = f"{1e3 * spent / len(grid):.2f}"
            print(f"| the same, {what} | {len(found.rows):,} | {spent:.2f} | {each} | – | – |")


if __name__ == "__main__":
    main()

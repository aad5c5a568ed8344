"""How long plans take: one whole command, and a row of a grid beside the same row when nothing is remembered.

Rows of a grid share what a request takes, what a rank holds and what a step reads; their twin works all of it
out for itself, and must be equal. A Markdown table, for `make bench`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from functools import cache
from itertools import islice
from pathlib import Path

from bench_startup import cpu_seconds

from kvtool import capacity, catalog, decode_speed, plan, plan_loads, plan_weights, planning
from kvtool.config import load_config
from kvtool.engine_memory import loading
from kvtool.errors import KvtoolError
from kvtool.model import read_model
from kvtool.plan import PlanCase
from kvtool.plan_flags import row_of
from kvtool.plan_model import PlanModel, model_for
from kvtool.plan_query import PlanQuery, gpus_named
from kvtool.planning import cases_of
from kvtool.sweep import swept

MODELS = ("llama-3-70b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3", "qwen3-next-80b-a3b")
CONTEXTS = tuple(range(1024, 32_769, 512))
TWIN = 200
"""Rows of which the twin is timed."""
REMEMBERING = (capacity, decode_speed, loading, plan, plan_loads, plan_weights, planning)
COMMAND = "plan llama-3-70b --gpu h100:8 --engine vllm"
REPEAT = 11


def cases(engine: str) -> list[PlanCase]:
    """The grid."""
    query = PlanQuery(
        gpus=gpus_named("h100:8,h200:8"), engines=(engine,), kv_dtypes=("auto", "fp8"), contexts=CONTEXTS,
        users=(None, 16),
    )  # fmt: skip
    lost: list[KvtoolError] = []
    return [case for name in MODELS for case in cases_of(model_of(name), query, lost)]


@cache
def model_of(name: str) -> PlanModel:
    """Read once, as by one command."""
    loaded = load_config(name)
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    return model_for(loaded, shape, PlanQuery(gpus=()))


def twin_s(grid: list[PlanCase]) -> float:
    """Seconds of a row when nothing is remembered from others, spread over the grid; the rows are the same."""
    some = list(islice(grid, 0, None, max(1, len(grid) // TWIN)))
    known = [row_of(case) for case in some]
    spent = 0.0
    for case, row in zip(some, known, strict=True):
        for module in REMEMBERING:
            for one in vars(module).values():
                if hasattr(one, "cache_clear"):
                    one.cache_clear()
        start = time.perf_counter()
        anew = row_of(case)
        spent += time.perf_counter() - start
        assert anew == row
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

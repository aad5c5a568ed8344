"""What engines printed of their KV caches in public logs, beside what kvtool makes of the same model.

    python scripts/accuracy_plan.py            the rows in tests/data/engine_logs.jsonl
    python scripts/accuracy_plan.py TRUTH      a folder with engine_logs.jsonl, or such a file

Used by scripts/accuracy.py. A row is a start-up log: the engine, the model, ranks, KV dtype, and what
was `printed`, rounded. `implied_range` is the interval of bytes a token and rank that those numbers
allow. Printed GB are GiB: the engines divide by 2^30. Each row is tried four ways, as far as it goes:

- rate: bytes a token and rank;
- memory: given the memory that was printed (± its last digit) as --kv-memory, tokens or blocks;
- length: concurrency, or the memory that one request of the maximum length needs;
- pool: GPU, engine's share, weights → low and high of the plan (kvtool/engine_memory).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kvtool import catalog
from kvtool.errors import KvtoolError
from kvtool.units import GIB

Row = dict[str, Any]
DATA = Path(__file__).parents[1] / "tests/data"
LOGS = "engine_logs.jsonl"
WHOLE = (
    "Rows whose model was guessed from the same numbers, or that print nothing to compare, are left out here. With\n"
    "them, of 119 rows, 90 of 95 rates,\n"
    "26 of 29 numbers of tokens, 19 of 19 concurrencies and 18 of 21 pools were inside when this was last written,\n"
    "with the same explanations."
)
MISSES = {
    "LT008": "this old vLLM stored MQA once for each query head; 20,480 bytes are what the model needs",
    "LT044": "this vLLM (0.7.3) padded DeepSeek's latent from 576 to 640 elements",
    "LT072": "vLLM's packed blocks of DeepSeek-V4 are not modelled: these are its layers added up",
    "LT100": "the other rank sampled and had 7.46 GiB: its tokens are printed beside this rank's memory",
    "LT107": "before its fix SGLang left the indexer's 132 bytes a layer out of what it printed",
    "LT156": "a model without latents was run with -mla and allocated too little",
}  # fmt: skip
"""Rows that kvtool does not give, and why (the issues and logs named in their `source`)."""


class Check(NamedTuple):
    """One number of a row: what was printed, and the interval that kvtool gives."""

    what: str
    printed: float
    low: float
    high: float

    @property
    def ok(self) -> bool:
        """Inside, ends included."""
        return self.low <= self.printed <= self.high


class Outcome(NamedTuple):
    """A row, what it was compared as, and each number."""

    row: Row
    model: str
    checks: tuple[Check, ...]

    @property
    def off(self) -> list[str]:
        """The numbers that are outside."""
        return [
            f"{one.what}: {shown(one.printed)} is not in {shown(one.low)} to {shown(one.high)}"
            for one in self.checks
            if not one.ok
        ]


def shown(value: float) -> str:
    """A count, or a size to two places."""
    return f"{value:,.2f}" if abs(value) < 1000 and value % 1 else f"{value:,.0f}"


def beside(path: Path) -> ModuleType:
    """A Python file as a module, from wherever this one was loaded."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


MODELS = beside(Path(__file__).with_name("accuracy_plan_models.py"))
POOLS = beside(DATA.parent / "test_engine_memory.py")


def outcome(row: Row) -> Outcome:
    """A row compared; without a check where nothing says what was run."""
    try:
        found = MODELS.of_row(row)
    except KvtoolError as error:
        return Outcome(row, error.message, ())
    if found is None:
        return Outcome(row, "not known", ())
    checks = [one for make in MAKERS for one in make(row, found)]
    return Outcome(row, f"{found.name}, {found.rule}", tuple(checks))


def _rate(row: Row, found: Any) -> Iterator[Check]:
    """The interval is the row's here, and the point is kvtool's."""
    if row["implied_range"]:
        low, high = row["implied_range"]
        yield Check("rate", found.rate, low, high)


def _memory(row: Row) -> tuple[int, int] | None:
    """The printed KV memory, from the least to the most that rounds to it."""
    if "kv_bytes" in row["printed"]:
        return (row["printed"]["kv_bytes"],) * 2
    for name, halves in ROUNDED.items():
        value = row["printed"].get(name)
        if value is not None:
            half = halves * 0.5 * 10.0 ** -len(f"{value}".partition(".")[2])
            return round((value - half) * GIB), round((value + half) * GIB)
    return None


ROUNDED = {
    "available_kv_GiB": 1, "kv_GiB": 1, "kv_GB_total": 2, "kv_GB_per_rank": 1, "allocated_GiB": 1,
}  # fmt: skip
"""Printed memory, and how many rounded numbers it is the sum of (SGLang prints K and V apart)."""


SPARE = 128
"""SGLang allocates a page more than it counts, of 1 to 128 tokens (memory_pool.py, size + page_size)."""


def _tokens(row: Row) -> int | None:
    printed = row["printed"]
    for name in ("gpu_kv_tokens", "max_tokens_in_kv", "tokens"):
        if name in printed:
            return int(printed[name])
    blocks = printed.get("gpu_blocks")
    return None if blocks is None or blocks < 0 else int(blocks * (row["block_size"] or 16))


def _given_memory(row: Row, found: Any) -> Iterator[Check]:
    """Whole blocks of the memory; of swap space, whose size is exact, as many as were printed."""
    if "cpu_blocks" in row["printed"] and "swap_space_gib" in row:
        count = row["swap_space_gib"] * GIB // (found.block * found.rate)
        yield Check("blocks of swap space", row["printed"]["cpu_blocks"], count, count)
    memory, tokens = _memory(row), _tokens(row)
    if memory is None or tokens is None or "num_gpu_blocks_override" in row["printed"]:
        return
    low = memory[0] // (found.block * found.rate) * found.block
    spare = SPARE if row["engine"] == "sglang" else 0
    yield Check("tokens", tokens, low - spare, memory[1] // found.rate)


def _given_length(row: Row, found: Any) -> Iterator[Check]:
    """Concurrency to the printed two places; memory of one request; the longest that fits."""
    printed, longest = row["printed"], row["max_model_len"]
    tokens, memory = _tokens(row), _memory(row)
    if printed.get("max_concurrency") is not None and tokens and longest:
        low, high = found.concurrency(tokens, longest)
        yield Check("concurrency", printed["max_concurrency"], low - 0.006, high + 0.006)
    needed, estimate = printed.get("needed_GiB"), printed.get("estimated_max_len")
    if needed is not None and longest:  # 0.8 rounded down
        exact = min(found.requests(longest), key=lambda one: abs(one / GIB - needed)) / GIB
        yield Check("GiB of one request", needed, exact - 0.011, exact + 0.006)
    if estimate is not None and memory is not None:
        low, high = (room // (found.block * found.rate) * found.block for room in memory)
        yield Check("longest request", estimate, low, high)


def _given_gpu(row: Row, found: Any) -> Iterator[Check]:
    """GiB of the pool, in the plan's range; known rows of tests/data say what their log leaves out."""
    known = next((one for one in POOLS.POOLS if one.get("id") == row["id"]), None)
    known = known or MODELS.pool_row(row, found)
    if known is None:
        return
    range = POOLS.pool(known)
    low, high = range.low / GIB - POOLS.ROUNDED, range.high / GIB + POOLS.ROUNDED
    yield Check("GiB of the pool", known["kv_gib"], low, high)
    if range.best > 3 * POOLS.kept(known).total.high:
        yield Check("high / low of the pool", range.high / range.low, 1, 1.25)


MAKERS: tuple[Callable[[Row, Any], Iterator[Check]], ...] = (
    _rate, _given_memory, _given_length, _given_gpu,
)  # fmt: skip


def rows_of(path: Path) -> list[Row]:
    """The rows of a file, or of engine_logs.jsonl in a folder."""
    path = path / LOGS if path.is_dir() else path
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def reason(one: Outcome) -> str:
    """Why a row is not given, where that is known."""
    pool = next((row for row in POOLS.POOLS if row.get("id") == one.row["id"]), {})
    only_pool = [check.what for check in one.checks if not check.ok] == ["GiB of the pool"]
    return MISSES.get(one.row["id"]) or (str(pool.get("outside", "")) if only_pool else "")


KINDS = {
    "rate": "bytes a token and rank, in the interval that the log allows",
    "blocks of swap space": "blocks of a swap space, to the block",
    "tokens": "tokens in the memory that was printed",
    "concurrency": "concurrency at the maximum length, to two places",
    "GiB of one request": "memory of one request of the maximum length",
    "longest request": "the longest request in the memory that was printed",
    "GiB of the pool": "the pool of a GPU, in the plan's range",
    "high / low of the pool": "that range at most 1.25 wide, where the pool is 3 × what is kept beside weights",
}


def summary(outcomes: list[Outcome]) -> list[str]:
    """How many numbers of each kind are as kvtool has them, and every one that is not."""
    lines = ["| printed | rows | as kvtool has it |", "|---|--:|--:|"]
    for what, words in KINDS.items():
        found = [check for one in outcomes for check in one.checks if check.what == what]
        if found:
            lines.append(f"| {words} | {len(found)} | {sum(check.ok for check in found)} |")
    lines += ["", "Outside, and why:", ""]
    for one in outcomes:
        if one.off:
            said = (
                f"{one.row['model']} ({one.row['id']}, {one.row['source']}), {'; '.join(one.off)}"
            )
            lines.append(f"- {said}: {reason(one) or 'not explained'}.")
    return lines


def sections() -> list[str]:
    """Two sections of docs/accuracy.md, between their markers."""
    outcomes = [outcome(row) for row in rows_of(DATA / LOGS)]
    presets = beside(DATA.parent / "test_weights_presets.py")
    more = beside(Path(__file__).with_name("accuracy_more.py"))
    missing: dict[str, list[str]] = {}
    for name, why in presets.EXCEPTIONS.items():
        missing.setdefault(why, []).append(name)
    made = sum(one.model.startswith("formula") for one in outcomes)
    unknown = [one.name for one in catalog.model_presets() if not one.weights_known]
    equal = len(presets.PRESETS) - len(presets.EXCEPTIONS)
    return [
        "<!-- plan: begin -->", "## What engines printed of their pools", "",
        f"`python scripts/accuracy_plan.py`: {len(outcomes)} start-up logs and issues in public, of",
        f"{len({row.row['engine'] for row in outcomes})} engines and forks; `tests/test_plan_logs.py` holds",
        "kvtool to them. A printed number is rounded: it counts where kvtool's lies in what rounds to it.",
        f"{made} rows are of models without a preset and go by layers × heads × head size, as the row has them:",
        "they hold the arithmetic alone, the others the reading of the config too.", WHOLE, "",
        *summary(outcomes), "",
        *more.summary([more.outcome(row) for row in more.rows()]), "",
        "## Parameters of the presets", "",
        f"Of {len(presets.PRESETS)} presets, {equal} have to the parameter the count of the class that",
        "transformers 5.24.0 builds for their config on the meta device (`tests/test_weights_presets.py`, the slow",
        "test). The others:", "",
        *(f"- {', '.join(names)}: {why}." for why, names in missing.items()), "",
        f"Of those, {', '.join(unknown)} are counted like the class, which fills in sizes that their source leaves",
        "out: nobody knows whether they are the model's, and `plan` asks for `--weights`.",
        "<!-- plan: end -->",
    ]  # fmt: skip


def main(argv: list[str]) -> int:
    """The table, a row each; 1 if one is outside without a reason."""
    if len(argv) > 1:
        sys.exit(__doc__)
    outcomes = [outcome(row) for row in rows_of(Path(argv[0]) if argv else DATA / LOGS)]
    for one in outcomes:
        inside = f"{sum(check.ok for check in one.checks)} of {len(one.checks)}"
        words = "; ".join(one.off) or ("" if one.checks else "nothing to compare")
        why = f" [{reason(one) or 'NOT EXPLAINED'}]" if one.off else ""
        named = f"{one.row['engine']:20} {one.row['model'][:44]:44} as {one.model[:60]:60}"
        print(f"{one.row['id']} {named} {inside:7} {words}{why}".rstrip())
    print(*summary(outcomes), sep="\n")
    return 1 if any(one.off and not reason(one) for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

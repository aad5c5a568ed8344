"""Several plans beside each other: blocks of what belongs together, what they share in the title."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from kvtool.run import Row
from kvtool.units import GIB
from kvtool.view import Table
from kvtool.view import plan_words as words
from kvtool.view.plan_columns import Column, table
from kvtool.view.words import counted, number, rate, seconds, share, usd

MACHINE = ("engine", "gpu", "gpus", "tp", "pp", "dp", "dcp", "expert_parallel")
WORK = ("engine", "kv_dtype", "gpu_memory_utilization", "context_tokens", "users")
BLOCKS = (("model", *MACHINE), ("model", *WORK), ("model",), ())
"""What rows of a block share: the first of these of which blocks have two rows each on average."""
SETTINGS = ("model", *MACHINE, "kv_dtype", "gpu_memory_utilization", "context_tokens", "users")
"""What the rows of one run may differ in."""
NAMES = {
    "expert_parallel": "ep", "kv_dtype": "KV", "gpu_memory_utilization": "utilisation",
    "context_tokens": "context",
}  # fmt: skip
TEXT = ("model", "engine", "gpu", "kv_dtype")
SOLVED = {
    "context": "context_tokens", "batch": "users", "gpus": "gpus", "kv-dtype": "kv_dtype",
    "utilisation": "gpu_memory_utilization",
}  # fmt: skip
"""The setting that --solve looked for, which is shown even if it came out the same everywhere."""
SHARED: dict[str, tuple[str, ...]] = {"fits": ("yes",), "KV GiB": (), "longest": (), "USD/h": ()}
"""Figures that are said once where all rows of a block have the same, one of these if any is named."""


def tables(rows: Sequence[Row]) -> tuple[Table, ...]:
    """A table for each block of rows."""
    return tuple(_block(block, rows) for block in _blocks(rows))


def sentences(rows: Sequence[Row]) -> list[str]:
    """What a sign or a dash in these tables means."""
    doubtful = any(words.fits_in_doubt(row) for row in rows)
    star = "yes*: fits by the best estimate of the memory, not by the lowest."
    return [*([star] if doubtful else []), *words.without_speed(rows)]


def _blocks(rows: Sequence[Row]) -> list[list[Row]]:
    for names in BLOCKS:
        found = [list(block) for _, block in groupby(rows, key=lambda row: _values(row, names))]
        if len(rows) >= 2 * len(found):
            return found
    return [list(rows)]


def _values(row: Row, names: Iterable[str]) -> tuple[object, ...]:
    return tuple(row[name] for name in names)


def _apart(rows: Sequence[Row]) -> list[str]:
    """Settings that differ; tp is left out where it is the number of GPUs."""
    names = [name for name in SETTINGS if len({row[name] for row in rows}) > 1]
    if "gpus" in names and all(row["tp"] == row["gpus"] for row in rows):
        names = [name for name in names if name != "tp"]
    return names


def _block(block: Sequence[Row], rows: Sequence[Row]) -> Table:
    apart = _apart(block)
    figures = _figures(block)
    shared = {
        one.name: one.same
        for one in figures
        if one.same is not None
        and one.name in SHARED
        and one.same in (SHARED[one.name] or (one.same,))
    }
    columns = [
        Column(
            name=NAMES.get(name, name),
            cells=tuple(_value(row[name]) for row in block),
            right=name not in TEXT,
        )
        for name in apart
    ]
    columns += [one for one in figures if one.name not in shared]
    said = [text for name, value in shared.items() if (text := _shared(name, value))]
    return table(columns, title=": ".join(filter(None, (_title(block, rows), ", ".join(said)))))


def _shared(name: str, value: str) -> str:
    """A figure of all rows, in words."""
    if name == "fits":
        return "all fit"
    if value == "–":
        return ""
    if name == "KV GiB":
        missing = value.startswith("-")
        return (
            f"{value[1:]} GiB missing before any cache" if missing else f"{value} GiB for the cache"
        )
    return f"longest context {value}" if name == "longest" else f"{value} USD/h"


def _title(block: Sequence[Row], rows: Sequence[Row]) -> str:
    """What all rows of the block are: the model, its GPUs, and what other blocks do otherwise."""
    row, inside, outside = block[0], set(_apart(block)), set(_apart(rows))
    solved = {SOLVED.get(one["solved"]["what"]) for one in block if one.get("solved")}
    told = (outside | solved) - inside
    where = "" if "gpu" in inside else row["gpu"]
    if not inside & set(MACHINE[1:]):
        where = words.on(row)
    what = "" if "model" in inside else row["model"]
    said = [f"{what} on {where}".strip() if where else what]
    said += [row["engine"]] if "engine" in told else []
    said += ["experts spread"] if "expert_parallel" in told and row["expert_parallel"] else []
    said += [f"KV in {row['kv_dtype']}"] if "kv_dtype" in told else []
    part = row["gpu_memory_utilization"]
    said += [f"utilisation {part:g}"] if "gpu_memory_utilization" in told and part else []
    if "context_tokens" not in inside:
        said.append(counted(row["context_tokens"], "token"))
    if "users" not in inside and row["users"] is not None:
        said.append(counted(row["users"], "request"))
    return ", ".join(filter(None, said))


def _figures(block: Sequence[Row]) -> list[Column]:
    """Of each row; a plan that does not fit has no speed and makes no tokens."""

    def column(name: str, cells: Iterable[str], rank: int = 0) -> Column:
        return Column(name=name, cells=tuple(cells), rank=rank)

    running = [words.running(row) for row in block]
    return [
        column("KV GiB", (f"{row['kv_budget_bytes']['best'] / GIB:,.2f}" for row in block), 4),
        Column(
            name="fits",
            cells=tuple(_fits(row) for row in block),
            shorter=tuple(_fits(row).partition(":")[0] for row in block),
            right=False,
        ),
        column("requests", (share(row["max_concurrency"]) for row in block)),
        column("longest", (number(row["max_context"] or None) for row in block), 3),
        column("TPOT", (seconds(row["tpot_s"]) for row in running), 1),
        column("tokens/s", (rate(row["output_tokens_per_s"]) for row in running)),
        column("USD/h", (usd(row["usd_per_hour"]) for row in block), 2),
        column("USD/M", (usd(row["usd_per_million_tokens"]) for row in running)),
    ]


def _fits(row: Row) -> str:
    if not row["fits"]:
        return f"no: {row['binds']}"
    return "yes*" if words.fits_in_doubt(row) else "yes"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else "–" if value is None else str(value)

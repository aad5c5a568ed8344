"""How a plan looks: memory line by line, what it holds, how fast; several plans beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.run import Row, Run
from kvtool.units import GIB
from kvtool.view import Table, View
from kvtool.view import plan_extras as more
from kvtool.view import plan_words as words
from kvtool.view.plan_chart import chart
from kvtool.view.words import number, rate, seconds

SETTINGS = (
    "model", "gpu", "gpus", "engine", "tp", "pp", "dp", "dcp", "expert_parallel", "kv_dtype",
    "gpu_memory_utilization", "context_tokens", "users",
)  # fmt: skip
"""What the rows of one run may differ in."""
TITLES = {
    "context_tokens": "context", "gpu_memory_utilization": "utilisation", "kv_dtype": "KV dtype",
    "expert_parallel": "ep",
}  # fmt: skip

MOST_WAYS = 10
"""Of what would make it fit; JSON has all."""


def view(run: Run) -> View:
    """One plan whole, or a line each."""
    rows = run.rows
    if len(rows) != 1:
        return View(tables=(_lines(rows),) if rows else (), chart=chart(rows))
    row = rows[0]
    tables = (
        _memory(row, explained=bool(run.params.get("explain"))),
        _holds(row),
        *_others(row),
        *more.tables(row),
    )
    return View(
        tables=tables, lead=(words.verdict(row),), sentences=(*words.about(row), *more.sentences(row)),
        chart=chart(rows)
    )  # fmt: skip


def _memory(row: Row, *, explained: bool) -> Table:
    """What a GPU has, what is taken from it, what is left."""
    usable, *gives = row["memory"]
    budget = row["kv_budget_bytes"]
    left = {"name": "KV cache", **budget, "basis": "what is left"}
    lines = [
        _line("usable", usable, "", explained),
        *(_line(one["name"], one, "− ", explained) for one in gives),
        _line("KV cache", left, "= ", explained),
    ]
    columns = ("GiB of a GPU", "low", "best", "high", *(("basis",) if explained else ()))
    return Table(columns=columns, rows=tuple(lines), right=frozenset(("low", "best", "high")))


def _line(name: str, one: Mapping[str, Any], sign: str, explained: bool) -> tuple[str, ...]:
    cells = (sign + name, *(f"{one[end] / GIB:,.2f}" for end in ("low", "best", "high")))
    return (*cells, one["basis"]) if explained else cells


def _holds(row: Row) -> Table:
    cells = {
        "blocks": number(row["num_blocks"]),
        "KV tokens a replica": number(row["kv_tokens"]),
        "requests at a time": words.share(row["max_concurrency"]),
        "longest context": number(row["max_context"]),
        "TPOT": seconds(row["tpot_s"]) if row["tpot_s"] is not None else "–",
        "output tokens/s": rate(row["output_tokens_per_s"]),
        "USD/h": _usd(row["usd_per_hour"]),
        "USD/M tokens": _usd(row["usd_per_million_tokens"]),
    }
    return Table(columns=tuple(cells), rows=(tuple(cells.values()),), right=frozenset(cells))


def _others(row: Row) -> tuple[Table, ...]:
    """What would make it fit, or what each lever gains."""
    ways = [one for one in row.get("alternatives") or () if one["fits"]]
    if not ways:
        return ()
    columns = ("instead", "flags", "requests at a time", "TPOT", "USD/h")
    lines = tuple(
        (
            one["change"], one["flags"], words.share(one["max_concurrency"]),
            seconds(one["tpot_s"]) if one["tpot_s"] is not None else "–", _usd(one["usd_per_hour"]),
        )
        for one in ways[:MOST_WAYS]
    )  # fmt: skip
    more = f", the first {MOST_WAYS} of {len(ways):,}" if len(ways) > MOST_WAYS else ""
    return (
        Table(columns=columns, rows=lines, title=f"What would make it fit, cheapest first{more}",
              right=frozenset(columns[2:])),
    )  # fmt: skip


def _lines(rows: tuple[Row, ...]) -> Table:
    apart = [name for name in SETTINGS if len({row[name] for row in rows}) > 1] or ["model", "gpu"]
    if all(row["tp"] == row["gpus"] for row in rows) and "gpus" in apart:
        apart.remove("tp")
    figures = ("for KV", "fits", "requests", "longest", "TPOT", "tokens/s", "USD/h", "USD/M")
    return Table(
        columns=(*(TITLES.get(name, name) for name in apart), *figures),
        rows=tuple((*(_value(row[name]) for name in apart), *_figures(row)) for row in rows),
        right=frozenset((*figures, *(TITLES.get(name, name) for name in apart if name != "model"))),
    )


def _figures(row: Row) -> tuple[str, ...]:
    return (
        f"{row['kv_budget_bytes']['best'] / GIB:,.2f} GiB",
        "yes" if row["fits"] else f"no: {row['binds']}",
        words.share(row["max_concurrency"]),
        number(row["max_context"]),
        seconds(row["tpot_s"]) if row["tpot_s"] is not None else "–",
        rate(row["output_tokens_per_s"]),
        _usd(row["usd_per_hour"]),
        _usd(row["usd_per_million_tokens"]),
    )


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else "–" if value is None else str(value)


def _usd(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}"

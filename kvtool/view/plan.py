"""How a plan looks: memory line by line, what it holds, how fast; several plans beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.run import Row, Run
from kvtool.units import GIB
from kvtool.view import Table, View
from kvtool.view import plan_changes as changes
from kvtool.view import plan_extras as more
from kvtool.view import plan_lines as lines
from kvtool.view import plan_words as words
from kvtool.view.plan_chart import chart
from kvtool.view.plan_columns import Column, table
from kvtool.view.words import number, rate, seconds, share, usd


def view(run: Run) -> View:
    """One plan whole, or a line each."""
    rows = run.rows
    if len(rows) != 1:
        return View(
            tables=lines.tables(rows), sentences=tuple(lines.sentences(rows)), chart=chart(rows)
        )
    row = rows[0]
    return View(
        tables=(
            _memory(row, explained=bool(run.params.get("explain"))),
            _holds(row),
            *more.tables(row),
            *changes.tables(row),
        ),
        lead=words.lead(row),
        sentences=(*changes.sentences(row), *words.about(row), *more.sentences(row)),
        chart=chart(rows),
    )


def _memory(row: Row, *, explained: bool) -> Table:
    """What a GPU has, what is taken from it, what is left."""
    usable, *gives = row["memory"]
    budget = row["kv_budget_bytes"]
    left = {"name": "KV cache", **budget, "basis": "what is left"}
    cells = [
        _line("usable", usable, "", explained),
        *(_line(one["name"], one, "− ", explained) for one in gives),
        _line("KV cache", left, "= ", explained),
    ]
    columns = ("GiB of a GPU", "low", "best", "high", *(("basis",) if explained else ()))
    return Table(columns=columns, rows=tuple(cells), right=frozenset(("low", "best", "high")))


def _line(name: str, one: Mapping[str, Any], sign: str, explained: bool) -> tuple[str, ...]:
    cells = (sign + name, *(f"{one[end] / GIB:,.2f}" for end in ("low", "best", "high")))
    return (*cells, one["basis"]) if explained else cells


def _holds(row: Row) -> Table:
    """What the memory holds; a plan that does not fit has no speed."""
    steps = words.running(row)
    blocks = row["num_blocks"] if row["bytes_per_block"] else None  # not every engine has them
    cells = {
        "blocks": number(blocks),
        "KV tokens each" if row["dp"] > 1 else "KV tokens": number(row["kv_tokens"]),
        "requests": share(row["max_concurrency"]),
        "longest": number(row["max_context"]),
        "TPOT": seconds(steps["tpot_s"]),
        "tokens/s": rate(steps["output_tokens_per_s"]),
        "USD/h": usd(row["usd_per_hour"]),
        "USD/M tokens": usd(steps["usd_per_million_tokens"]),
    }
    ranks = {"blocks": 2, "KV tokens": 1, "KV tokens each": 1}
    return table(
        [Column(name=name, cells=(cell,), rank=ranks.get(name, 0)) for name, cell in cells.items()],
        title="",
    )

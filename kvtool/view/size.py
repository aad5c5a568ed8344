"""How `kvtool size` looks: the totals, a breakdown by kind, and what the plain formula would miss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvtool.run import Row, Run
from kvtool.units import format_bytes
from kvtool.view import Table, View
from kvtool.view.engines import MEANING, concurrency, differences, pool_table
from kvtool.view.sentences import about, shares
from kvtool.view.size_chart import chart
from kvtool.view.words import amount, counted, times, told_apart

OPTIONAL = ("encoder_tokens", "tp", "pp", "dcp", "dp", "block_size")
"""Columns shown only where some row has something other than nothing or 1 in them."""


def view(run: Run, curve: tuple[Row, ...] = (), levels: Mapping[str, int] | None = None) -> View:
    """Tables and sentences of a size run.

    `curve` are the rows to draw, if not its own; `levels` the memory of GPUs to draw beside them.
    The run's `params` say which breakdowns were asked for.
    """
    return View(
        tables=tuple(_tables(run)),
        sentences=tuple(_sentences(run.rows)),
        chart=chart(curve or run.rows, levels or {}),
    )


def _tables(run: Run) -> list[Table]:
    rows = run.rows
    pool = pool_table(rows)
    tables = [_totals(rows), *([pool] if pool else [])]
    firsts = _largest_of_each(rows)
    # Beside each other, engines are told apart in words; --explain has each one's breakdown.
    shown = firsts if run.params.get("explain") else _one_of_each_model(firsts)
    tables += [_kinds(row, rows, titled=len(firsts) > 1) for row in shown if row["kinds"]]
    if run.params.get("per_layer"):
        tables += [_layers(row) for row in firsts if row.get("per_layer")]
    if run.params.get("explain"):
        tables += [_explanation(row) for row in firsts if row["kinds"]]
    return tables


def _sentences(rows: tuple[Row, ...]) -> list[str]:
    firsts = _largest_of_each(rows)
    plain = [row for row in firsts if row["engine"] != "vllm"]
    named = len({row["model"] for row in firsts}) > 1
    said = [text for row in _one_of_each_model(plain) for text in about(row, named=named)]
    if len({row["engine"] for row in rows}) > 1:
        said += differences(list(rows))
    longest = _longest_of_each(rows, firsts)
    said += concurrency(longest)
    return said + [text for row in longest for text in shares(row, longest)]


def _largest_of_each(rows: Iterable[Row]) -> list[Row]:
    """For each model and engine its row of the longest context, at the smallest batch."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row["model"], row["engine"])
        held = best.get(key)
        rank = (row["context_tokens"], -row["batch"])
        if held is None or rank > (held["context_tokens"], -held["batch"]):
            best[key] = row
    return list(best.values())


def _longest_of_each(rows: Iterable[Row], firsts: list[Row]) -> list[Row]:
    """Every row at its model's and engine's longest context, whatever its batch, dtype or ranks."""
    longest = {(row["model"], row["engine"]): row["context_tokens"] for row in firsts}
    return [r for r in rows if r["context_tokens"] == longest[r["model"], r["engine"]]]


def _one_of_each_model(rows: Iterable[Row]) -> list[Row]:
    return list({row["model"]: row for row in reversed(list(rows))}.values())[::-1]


def _totals(rows: tuple[Row, ...]) -> Table:
    engines = len({row["engine"] for row in rows}) > 1
    shown = [n for n in OPTIONAL if any(row[n] not in (None, 0, 1) for row in rows)]
    shown = [n for n in shown if not (engines and n == "block_size")]  # vLLM's own table has it
    single = engines and all(row["batch"] == 1 for row in rows)
    split = any(row["tp"] * row["pp"] * row["dp"] > 1 for row in rows)
    columns = [
        "model", *(["engine"] if engines else []), "context", "batch", "KV dtype",
        *[name.replace("_", " ") for name in shown],
        "next token", *([] if single else ["sequence"]), "total", *(["per GPU"] if split else []),
        *(["which is"] if engines else []),
    ]  # fmt: skip
    cells = []
    for row in rows:
        line = [row["model"], *([row["engine"]] if engines else [])]
        line += [f"{row['context_tokens']:,}", f"{row['batch']:,}", row["kv_dtype"]]
        line += ["–" if row[name] is None else f"{row[name]:,}" for name in shown]
        names = ["bytes_per_token", *([] if single else ["sequence_bytes"]), "total_bytes"]
        line += [amount(row[name]) for name in ([*names, "per_gpu_bytes"] if split else names)]
        cells.append(tuple(line + ([MEANING[row["engine"]]] if engines else [])))
    return Table(
        columns=tuple(columns),
        rows=tuple(cells),
        right=frozenset(columns) - {"model", "engine", "KV dtype", "which is"},
    )


def _kinds(row: Row, rows: Iterable[Row], *, titled: bool) -> Table:
    columns = ("kind", "layers", "KV heads", "K + V size", "tokens held", "bytes", "share")
    name = f"{row['model']}, " if titled else ""
    what = "by kind of layer"
    if row["engine"] != "ideal":
        what += f" ({row['engine']})"
    return Table(
        title=f"{name}{counted(row['context_tokens'], 'token')}{times(row['batch'])}"
        f"{told_apart(row, rows)}, {what}",
        columns=columns,
        rows=tuple(_kind_cells(kind, row["total_bytes"]) for kind in row["kinds"]),
        right=frozenset(columns[1:]),
    )


def _kind_cells(kind: dict[str, Any], total: int) -> tuple[str, ...]:
    grows = kind["kind"] != "linear"
    heads = kind["kv_heads"]
    return (
        _label(kind),
        f"{kind['layers']:,}",
        f"{heads:,}" if grows and heads is not None else "–",
        f"{kind['k_head_dim']} + {kind['v_head_dim']}" if grows and heads is not None else "–",
        f"{kind['tokens']:,}" if grows else "constant",
        format_bytes(kind["bytes"]),
        f"{kind['bytes'] / total:.1%}" if total else "–",
    )


def _label(kind: dict[str, Any]) -> str:
    """The kind, and whose it is where it is not the model's own."""
    for key, word in (("draft", "draft"), ("mtp", "MTP")):
        if key in kind["decided_by"]:
            return f"{kind['kind']} ({word})"
    return str(kind["kind"])


def _layers(row: Row) -> Table:
    columns = ("layer", "kind", "KV heads", "K + V size", "window", "tokens held", "bytes")
    return Table(
        title=f"{row['model']}, {counted(row['context_tokens'], 'token')}, by layer",
        columns=columns,
        rows=tuple(
            (
                str(layer["layer"]),
                layer["kind"],
                f"{layer['kv_heads']:,}",
                f"{layer['k_head_dim']} + {layer['v_head_dim']}",
                "–" if layer["window"] is None else f"{layer['window']:,}",
                f"{layer['tokens']:,}",
                format_bytes(layer["bytes"]),
            )
            for layer in row["per_layer"]
        ),
        right=frozenset(columns) - {"kind"},
    )


def _explanation(row: Row) -> Table:
    """The formula of each kind written out, and the key that decided each number."""
    cells: list[tuple[str, ...]] = []
    for kind in row["kinds"]:
        cells.append((_label(kind), "bytes", f"{kind['formula']} = {kind['bytes']:,}"))
        cells += [("", name, by) for name, by in kind["decided_by"].items()]
    cells.append(("total", "bytes", f"{row['total_bytes']:,}"))
    return Table(
        title=f"{row['model']} ({row['model_type']}), {counted(row['context_tokens'], 'token')}"
        f"{times(row['batch'])}: where each number comes from",
        columns=("kind", "number", "from"),
        rows=tuple(cells),
    )

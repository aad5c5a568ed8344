"""How `kvtool check` looks: what is alike in one line, and every difference."""

from __future__ import annotations

from kvtool.run import Row, Run
from kvtool.units import format_bytes
from kvtool.view import Table, View
from kvtool.view.words import counted, times


def view(run: Run) -> View:
    """One table of groups of layers, and a sentence for each model."""
    models = list(dict.fromkeys(row["model"] for row in run.rows))
    tables = [_table(_of(run, model), titled=len(models) > 1) for model in models]
    return View(
        tables=tuple(tables),
        sentences=tuple(_sentence(_of(run, model)) for model in models),
    )


def _of(run: Run, model: str) -> list[Row]:
    return [row for row in run.rows if row["model"] == model]


def _table(rows: list[Row], *, titled: bool) -> Table:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = tuple(
            row[name] for name in ("kind", "shape", "dtype", "predicted_bytes", "real_bytes")
        )
        groups.setdefault(key, []).append(row)
    columns = ("layers", "kind", "shape", "dtype", "predicted", "held", "equal")
    return Table(
        title=rows[0]["model"] if titled else "",
        columns=columns,
        rows=tuple(_cells(group) for group in groups.values()),
        right=frozenset({"predicted", "held"}),
    )


def _cells(group: list[Row]) -> tuple[str, ...]:
    first = group[0]
    off = first["real_bytes"] - first["predicted_bytes"]
    return (
        _layers([row["layer"] for row in group]),
        first["kind"],
        first["shape"] or "–",
        first["dtype"] or "–",
        f"{first['predicted_bytes']:,}",
        f"{first['real_bytes']:,}",
        "yes" if first["equal"] else f"no, {off:+,} bytes",
    )


def _layers(layers: list[int | None]) -> str:
    """'0–4, 6, 8–11', or 'all' for a tensor of every layer; long lists are counted."""
    numbers = sorted(layer for layer in layers if layer is not None)
    if not numbers:
        return "all"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    said = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    if len(said) > 4:
        return f"{len(numbers)}: {', '.join(said[:3])}, …"
    return ", ".join(said)


def _sentence(rows: list[Row]) -> str:
    first = rows[0]
    wrong = [row for row in rows if not row["equal"]]
    total = sum(row["real_bytes"] for row in rows)
    what = (
        f"{first['model']}: transformers' {first['cache']} cache of "
        f"{counted(first['context_tokens'], 'token')}{times(first['batch'])} holds {total:,} bytes ({format_bytes(total)})"
    )
    where = f"in {_places(rows)}"
    if not wrong:
        return f"{what} {where}, every tensor as predicted{_left_out(first)}."
    predicted = sum(row["predicted_bytes"] for row in rows)
    differ = "differs" if len(wrong) == 1 else "differ"
    return (
        f"{what} {where}; {predicted:,} were predicted, and {len(wrong):,} of "
        f"{counted(len(rows), 'row')} {differ}{_left_out(first)}."
    )


def _left_out(row: Row) -> str:
    """What of the model was not run, and so not compared."""
    return f" ({row['not_compared']} not compared)" if row["not_compared"] else ""


def _places(rows: list[Row]) -> str:
    """'12 layers', or what holds the bytes where tensors are no single layer's."""
    layers = {row["layer"] for row in rows if row["layer"] is not None}
    said = [counted(len(layers), "layer")] if layers else []
    if any(row["layer"] is None for row in rows):
        said.append("tensors of all layers at once")
    return " and ".join(said)

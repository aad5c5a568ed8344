"""Pictures of plans: requests at a time against context; memory of a GPU as stacked bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtool.run import Row
from kvtool.view import Bars, Chart, Line, Panels
from kvtool.view.words import words_of

NAMES = ("engine", "pp", "dp", "kv_dtype", "gpu_memory_utilization", "users")
MOST_BARS = 24


def chart(rows: Sequence[Row]) -> Chart | Panels | None:
    """Lines where some plan has several contexts, else a bar each; None without rows."""
    if not rows:
        return None
    return _lines(rows) if len({row["context_tokens"] for row in rows}) > 1 else _bars(rows)


def _name(row: Row, rows: Sequence[Row]) -> str:
    varying = [name for name in NAMES if len({one[name] for one in rows}) > 1]
    models = len({one["model"] for one in rows}) > 1
    gpus = f"{row['gpus']:,} × {row['gpu']}" if any(one["gpus"] > 1 for one in rows) else row["gpu"]
    if any(one["tp"] * one["pp"] * one["dp"] != one["tp"] for one in rows):
        varying.insert(0, "tp")
    first = f"{row['model']} on {gpus}" if models else gpus
    return ", ".join([first, *words_of(row, varying)])


def _lines(rows: Sequence[Row]) -> Chart:
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        most = row["max_concurrency"]
        if most is not None and math.isfinite(most) and most >= 1:
            points.setdefault(_name(row, rows), []).append((row["context_tokens"], most))
    return Chart(
        title=f"Requests at a time: {', '.join(dict.fromkeys(row['model'] for row in rows))}",
        x_label="context (tokens)",
        y_label="requests at a time",
        lines=tuple(
            Line(name=name, x=tuple(x for x, _ in sorted(found)), y=tuple(y for _, y in sorted(found)))
            for name, found in points.items()
        ),
        log_x=True,
        log_y=True,
    )  # fmt: skip


def _bars(rows: Sequence[Row]) -> Panels:
    """Of a GPU's memory; what is more than all of it goes beyond 100 %."""
    shown = rows[:MOST_BARS]
    kinds = list(dict.fromkeys(one["kind"] for row in shown for one in row["kinds"]))
    taken = list(dict.fromkeys(_part(one["name"]) for row in shown for one in row["memory"][1:]))
    parts = (*taken, *(f"KV cache: {kind}" for kind in kinds), "left alone")
    lines = tuple((_name(row, shown), _shares(row, taken, kinds)) for row in shown)
    models = ", ".join(dict.fromkeys(row["model"] for row in shown))
    bars = Bars(title="best estimate", x_label="share of a GPU's memory", parts=parts, rows=lines)
    return Panels(title=f"Memory of a GPU: {models}", panels=(bars,))


def _part(name: str) -> str:
    """Lines that are thin are one part."""
    return "graphs, context" if name.startswith(("CUDA", "context")) else name


def _shares(row: Row, taken: Sequence[str], kinds: Sequence[str]) -> tuple[float, ...]:
    whole = row["gpu_bytes"] or row["usable_bytes"]
    lines: dict[str, float] = {}
    for one in row["memory"][1:]:
        name = _part(one["name"])
        lines[name] = lines.get(name, 0.0) + one["best"] / whole
    budget = max(0, row["kv_budget_bytes"]["best"]) / whole
    own = {one["kind"]: one["bytes"] for one in row["kinds"]}
    total = sum(own.values()) or 1
    used = [lines.get(name, 0.0) for name in taken]
    cache = [budget * own.get(kind, 0) / total for kind in kinds]
    return (*used, *cache, max(0.0, 1 - sum(used) - sum(cache)))

"""Pictures of plans: requests at a time against context; memory of a GPU as stacked bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvtool.run import Row
from kvtool.units import GIB, format_bytes
from kvtool.view import Bars, Chart, Line, Panels
from kvtool.view.words import words_of

NAMES = ("engine", "pp", "dp", "kv_dtype", "gpu_memory_utilization", "users")
MOST_BARS = 24
LEFT = "left alone"
COLOURS = {
    "weights": 0, "activations": 1, "graphs, context": 3, "reserve": 8,
    "KV cache: full attention": 5, "KV cache: sliding": 6, "KV cache: chunked": 4, "KV cache: latent": 2,
    "KV cache: linear": 7, LEFT: -1,
}  # fmt: skip
"""Places among the colours of `kvtool.plot`: what holds weights stays blue from picture to picture."""
OTHER = 4
THIN = 1e-6
"""Of a GPU: less is a rounding."""


def chart(rows: Sequence[Row]) -> Chart | Panels | None:
    """Lines where some plan has several contexts, else a bar each; None without rows."""
    if not rows:
        return None
    return _lines(rows) if len({row["context_tokens"] for row in rows}) > 1 else _bars(rows)


def _names(rows: Sequence[Row], names: Sequence[str] = NAMES) -> Callable[[Row], str]:
    """How each row is called beside the others."""
    varying = [name for name in names if len({one[name] for one in rows}) > 1]
    if any(one["tp"] * one["pp"] * one["dp"] != one["tp"] for one in rows):
        varying.insert(0, "tp")
    models = len({one["model"] for one in rows}) > 1
    several = any(one["gpus"] > 1 for one in rows)

    def name(row: Row) -> str:
        gpus = f"{row['gpus']:,} × {row['gpu']}" if several else row["gpu"]
        first = f"{row['model']} on {gpus}" if models else gpus
        return ", ".join([first, *words_of(row, varying)])

    return name


def _lines(rows: Sequence[Row]) -> Chart:
    """What fits does not depend on how many are asked for."""
    names = [name for name in NAMES if name != "users"]
    name_of = _names(rows, names)
    points: dict[str, dict[int, float]] = {}
    drawn = set()
    for row in rows:
        most = row["max_concurrency"]
        if most is not None and math.isfinite(most) and most >= 1:
            points.setdefault(name_of(row), {})[row["context_tokens"]] = most
            drawn.add(row["model"])
    models = dict.fromkeys(row["model"] for row in rows)
    none = [name for name in models if name not in drawn]
    title = (
        f"Requests at a time: {', '.join(name for name in models if name in drawn) or 'none fits'}"
    )
    return Chart(
        title=title + (f" (not drawn, not one fits: {', '.join(none)})" if none else ""),
        x_label="context (tokens)",
        y_label="requests at a time",
        lines=tuple(
            Line(name=name, x=tuple(sorted(found)), y=tuple(found[x] for x in sorted(found)))
            for name, found in points.items()
        ),
        log_x=True,
        log_y=True,
    )


def _bars(rows: Sequence[Row]) -> Panels:
    """Of a GPU's memory; what is more than all of it goes beyond 100 %."""
    shown = rows[:MOST_BARS]
    name_of = _names(shown)
    kinds = list(dict.fromkeys(one["kind"] for row in shown for one in row["kinds"]))
    taken = list(dict.fromkeys(_part(one["name"]) for row in shown for one in row["memory"][1:]))
    found = [_bytes(row, taken, kinds) for row in shown]
    every = (*taken, *(_cache(kind) for kind in kinds), LEFT)
    kept = [place for place in range(len(every)) if any(sizes[place] for sizes in found)]
    parts = tuple(every[place] for place in kept)
    wholes = [row["gpu_bytes"] for row in shown]
    sizes = [tuple(each[place] for place in kept) for each in found]
    bars = Bars(
        title="best estimate",
        x_label="share of a GPU's memory",
        parts=parts,
        rows=tuple(
            (name_of(row), tuple(size / whole for size in each))
            for row, each, whole in zip(shown, sizes, wholes, strict=True)
        ),
        colours=tuple(_colour(name) for name in parts),
        labels=tuple(tuple(f"{size / GIB:,.1f} GiB" for size in each) for each in sizes),
        ends=tuple(_lacking(row) for row in shown),
        limits=_limits(shown, wholes),
    )
    models = ", ".join(dict.fromkeys(row["model"] for row in shown))
    cut = f", the first {MOST_BARS} of {len(rows):,} plans" if len(rows) > MOST_BARS else ""
    return Panels(title=f"Memory of a GPU: {models}{cut}", panels=(bars,))


def _lacking(row: Row) -> str:
    return "" if row["fits"] else f"lacks {format_bytes(row['missing_bytes'])}"


def _limits(rows: Sequence[Row], wholes: Sequence[int]) -> tuple[tuple[str, float], ...]:
    """All of a GPU; what the engine may use of it, where that is the same part of each."""
    usable = {
        round(row["usable_bytes"] / whole, 2) for row, whole in zip(rows, wholes, strict=True)
    }
    share = usable.pop()
    all_of_it = ("all of a GPU's memory", 1.0)
    same = not usable and share < 1
    return (all_of_it, ("what the engine may use", share)) if same else (all_of_it,)


def _part(name: str) -> str:
    """Lines that are thin are one part."""
    return "graphs, context" if name.startswith(("CUDA", "context")) else name


def _cache(kind: str) -> str:
    """`full` alone would be read as a cache that is."""
    return f"KV cache: {'full attention' if kind == 'full' else kind}"


def _colour(part: str) -> int:
    """A part has its own, whatever else is in the picture."""
    return COLOURS.get(part, OTHER)


def _bytes(row: Row, taken: Sequence[str], kinds: Sequence[str]) -> list[float]:
    """Of each part: what is taken, what is left for the cache by kind, and what nobody uses."""
    whole = row["gpu_bytes"]
    lines: dict[str, float] = {}
    for one in row["memory"][1:]:
        name = _part(one["name"])
        lines[name] = lines.get(name, 0.0) + one["best"]
    budget = max(0, row["kv_budget_bytes"]["best"])
    own = {one["kind"]: one["bytes"] for one in row["kinds"]}
    total = sum(own.values()) or 1
    used = [lines.get(name, 0.0) for name in taken]
    cache = [budget * own.get(kind, 0) / total for kind in kinds]
    rest = whole - sum(used) - sum(cache)
    return [*used, *cache, rest if rest > whole * THIN else 0.0]

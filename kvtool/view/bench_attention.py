"""How `kvtool bench attention` looks: who is how fast, what paging costs, where the roof is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtool.run import Row
from kvtool.units import format_bytes, format_seconds
from kvtool.view import Chart, Line, Table
from kvtool.view.words import counted

CASE = (
    "batch", "context_tokens", "query_heads", "kv_heads", "head_dim", "block_size", "pattern",
    "kv_dtype", "layout", "skew", "threads", "num_stages",
)  # fmt: skip
"""What tells cases apart. Splits are told beside the provider: each kernel chooses its own."""
HEADS = ("query_heads", "kv_heads", "head_dim")
TITLES = {"context_tokens": "context"}
MOST_VERDICTS = 12
MOST_LINES = 7


def table(rows: Sequence[Row]) -> Table:
    """A line a provider of a case."""
    varying = varying_in(rows)
    cells = _cells(rows)
    columns = (*(_title(name) for name in varying), "provider", *cells)
    return Table(
        title="decode attention",
        columns=columns,
        rows=tuple(
            (
                *(value_of(row[name]) for name in varying),
                row["provider"],
                *(cell(row) for cell in cells.values()),
            )
            for row in rows
        ),
        right=frozenset(columns) - {"provider", "pattern", "kv dtype", "layout"},
    )


def forecast_table(rows: Sequence[Row]) -> Table:
    """A line a case that was not run."""
    cells: dict[str, Callable[[Row], str]] = {
        "copies": lambda row: str(row["pools"]),
        "memory": lambda row: (
            format_bytes(row["memory_bytes"]) + ("" if row["fits"] else " (too much)")
        ),
        "time, about": lambda row: format_seconds(row["expected_s"]),
    }
    shown = [name for name in CASE if name != "num_stages"]
    columns = (*map(_title, shown), *cells)
    return Table(
        columns=columns,
        rows=tuple(
            (*(value_of(row[name]) for name in shown), *(cell(row) for cell in cells.values()))
            for row in rows
        ),
        right=frozenset(columns) - {"pattern", "kv dtype", "layout"},
    )


def forecast_sentences(rows: Sequence[Row]) -> list[str]:
    """All cases together."""
    total = sum(row["expected_s"] for row in rows)
    most = max(row["memory_bytes"] for row in rows)
    return [
        f"{counted(len(rows), 'case')}: about {max(total / 60, 0.1):.1f} minutes by estimate, "
        f"{format_bytes(most)} at most at a time. Nothing was run."
    ]


def _cells(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    cells: dict[str, Callable[[Row], str]] = {
        "time": lambda row: _or_dash(row["time_s_p50"], format_seconds),
        "p10 – p90": _spread,
        "CPU time": lambda row: _or_dash(row["cpu_time_s_p50"], format_seconds),
        "GB/s": lambda row: _or_dash(row["gb_per_s"], "{:,.1f}".format),
        "of read roof": lambda row: _or_dash(row["read_fraction"], "{:.0%}".format),
        "against contiguous": _against,
        "splits": lambda row: _or_dash(row["num_splits"], str),
        "error (of allowed)": _error,
    }
    if all(row["cpu_time_s_p50"] is None for row in rows):
        del cells["CPU time"]
    if all(row["num_splits"] is None for row in rows):
        del cells["splits"]
    return cells


def _spread(row: Row) -> str:
    if row["time_s_p10"] is None:
        return "–"
    return f"{format_seconds(row['time_s_p10'])} – {format_seconds(row['time_s_p90'])}"


def _against(row: Row) -> str:
    """'+3.1 %', with a question mark where the interval spans zero; far ones as a factor."""
    overhead = row["overhead"]
    if overhead is None:
        return "–"
    if overhead >= 1:
        return f"{1 + overhead:.2f}×"
    return f"{overhead:+.1%}" + ("" if row["overhead_resolved"] else " ?")


def _error(row: Row) -> str:
    """'1.3e-06 (8 %)': the largest, and the share of what its element is allowed."""
    if not row["correct"]:
        return "WRONG"
    return f"{row['max_abs_error']:.1e} ({row['error_share']:.0%})"


def sentences(rows: Sequence[Row], env: Mapping[str, Any]) -> list[str]:
    """Where it was measured, what paging costs, and where the case lies on the roofline."""
    said = [_where(rows, env), *_verdicts(rows), *_roofline(rows)]
    if any(row["overhead"] is not None and not row["overhead_resolved"] for row in rows):
        said.append("?: not resolved, the 95 % interval of the paired ratios spans zero.")
    return said


def _where(rows: Sequence[Row], env: Mapping[str, Any]) -> str:
    """'On Intel Xeon (CPU), 1 thread: 32 query and 8 KV heads of 128, fp32, hnd, sequential.'"""
    varying = set(varying_in(rows))
    row = rows[0]
    name = env.get("device_name", row["device"])
    place = f"{name} ({'CPU' if row['device'] == 'cpu' else 'GPU'})"
    parts = []
    if not varying & set(HEADS):
        parts.append(
            f"{row['query_heads']} query and {row['kv_heads']} KV heads of {row['head_dim']}"
        )
    words = {
        "kv_dtype": "{}", "layout": "{}", "pattern": "{} blocks", "block_size": "block size {}",
        "batch": "batch {}", "context_tokens": "context {:,}",
    }  # fmt: skip
    parts += [text.format(row[key]) for key, text in words.items() if key not in varying]
    if row["threads"] is not None and "threads" not in varying:
        parts.append(counted(row["threads"], "thread"))
    return f"On {place}: {', '.join(parts)}."


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """What the block table costs, a case a sentence."""
    said = []
    varying = [name for name in varying_in(rows) if name not in HEADS]
    for row in rows:
        if row["provider"] != "paged" or row["overhead"] is None:
            continue
        low, high = row["overhead_ci"]
        where = ", ".join(f"{_title(name)} {value_of(row[name])}" for name in varying)
        # On a CPU the contiguous cache is one block a sequence: the table is looked up in both.
        what = "paging" if row["device"] == "cuda" else "the place of the blocks"
        interval = f"(95 %: {low:.1%} to {high:.1%})"
        verb = "costs" if row["overhead"] >= 0 else "saves"
        what = (
            f"{what} {verb} {abs(row['overhead']):.1%} {interval}"
            if row["overhead_resolved"]
            else f"what {what} costs is not resolved {interval}"
        )
        said.append(f"{where}: {what}." if where else f"{what[0].upper()}{what[1:]}.")
    if len(said) > MOST_VERDICTS:
        more = len(said) - MOST_VERDICTS
        said = [*said[:MOST_VERDICTS], f"{counted(more, 'more case')}: see --json."]
    return said


def _roofline(rows: Sequence[Row]) -> list[str]:
    """Arithmetic intensity against the ridge, once for each ratio."""
    said = []
    seen: set[tuple[object, ...]] = set()
    for row in rows:
        key = (row["query_heads"] / row["kv_heads"], row["kv_dtype"], row["threads"])
        if key in seen or row["peak_flop_per_s"] is None or row["read_roof_gb_per_s"] is None:
            continue
        seen.add(key)
        intensity = row["flops"] / row["bytes_useful"]
        ridge = row["peak_flop_per_s"] / (row["read_roof_gb_per_s"] * 1e9)
        bound = "memory" if intensity < ridge else "arithmetic"
        apart = [name for name in ("kv_dtype", "threads") if name in varying_in(rows)]
        label = ", ".join(f"{_title(name)} {value_of(row[name])}" for name in apart)
        said.append(
            f"{label}{': a' if label else 'A'}rithmetic intensity {intensity:.1f} FLOP a byte; the measured roofs "
            f"({row['read_roof_gb_per_s']:,.1f} GB/s read, {row['peak_flop_per_s'] / 1e9:,.0f} "
            f"GFLOP/s of a matrix product) meet at {ridge:.1f}: decode is bound by {bound}."
        )
    return said


def charts(rows: Sequence[Row], env: Mapping[str, Any]) -> tuple[Chart, ...]:
    """Bandwidth against block size and against context, and the roofline."""
    timed = [row for row in rows if row.get("gb_per_s") is not None]
    if not timed:
        return ()
    axes = [
        name for name in ("block_size", "context_tokens") if len({row[name] for row in timed}) > 1
    ]
    place = str(env.get("device_name", timed[0]["device"]))
    made = [_bandwidth(timed, axis, place) for axis in axes or ["context_tokens"]]
    return (*made, _roofline_chart(timed))


def _bandwidth(rows: Sequence[Row], axis: str, place: str) -> Chart:
    """GB/s of useful bytes; a line for each provider and each other thing that varies."""
    others = [name for name in varying_in(rows) if name != axis]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(_label(row, others), []).append((row[axis], row["gb_per_s"]))
    for row in rows:  # the roof of a case is the same in each of its rows
        lines.setdefault("read roof", []).append((row[axis], row["read_roof_gb_per_s"]))
    if len(lines) > MOST_LINES:  # what paging is about: more would be told apart by nobody
        lines = {name: at for name, at in lines.items() if name.startswith(("paged", "read roof"))}
    unit = "block size (tokens)" if axis == "block_size" else "context (tokens)"
    return Chart(
        title=f"Decode attention on {place}",
        x_label=unit,
        y_label="GB/s of K and V, queries and output",
        lines=tuple(_line(name, points) for name, points in lines.items()),
        log_x=True,
    )


def _line(name: str, points: list[tuple[float, float]]) -> Line:
    """Points from left to right; of several at one x, such as a roof's, the median."""
    at: dict[float, list[float]] = {}
    for x, y in sorted(points):
        at.setdefault(x, []).append(y)
    return Line(
        name=name, x=tuple(at), y=tuple(sorted(values)[len(values) // 2] for values in at.values())
    )


def _label(row: Row, names: Sequence[str]) -> str:
    return ", ".join(
        (row["provider"], *(f"{_title(name)} {value_of(row[name])}" for name in names))
    )


def _roofline_chart(rows: Sequence[Row]) -> Chart:
    """Operations a second against operations a byte, under the two measured roofs."""
    read = max(row["read_roof_gb_per_s"] for row in rows)
    peak = max(row["peak_flop_per_s"] or 0 for row in rows) / 1e9
    ridge = peak / read if peak else 1.0
    shown = [row["flops"] / row["bytes_useful"] for row in rows]
    ends = (min(*shown, ridge) / 4, ridge, max(*shown, ridge) * 4)
    roof = Line(name="roofs", x=ends, y=(ends[0] * read, peak, peak)) if peak else None
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        at = (row["flops"] / row["bytes_useful"], row["flops"] / row["time_s_p50"] / 1e9)
        points.setdefault(row["provider"], []).append(at)
    return Chart(
        title="Roofline, under the highest roofs of the cases",
        x_label="FLOP a byte",
        y_label="GFLOP/s",
        lines=(
            *((roof,) if roof else ()),
            *(
                Line(name=name, x=tuple(x for x, _ in at), y=tuple(y for _, y in at), joined=False)
                for name, at in points.items()
            ),
        ),
        log_x=True,
        log_y=True,
    )


def varying_in(rows: Sequence[Row]) -> list[str]:
    """Which parts of the case the rows differ in."""
    return [name for name in CASE if len({row[name] for row in rows}) > 1]


def value_of(value: object) -> str:
    """A part of a case in a cell."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _title(name: str) -> str:
    return TITLES.get(name, name).replace("_", " ")


def _or_dash(value: float | None, words: Callable[[Any], str]) -> str:
    return "–" if value is None else words(value)

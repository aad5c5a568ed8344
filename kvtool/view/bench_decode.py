"""How `kvtool bench decode` looks: each cache's times, what the bytes allow, and larger batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtool.run import Row
from kvtool.units import format_bytes, format_seconds
from kvtool.view import Chart, Line, Table
from kvtool.view.words import counted

VARYING = ("prompt_tokens", "output_tokens", "batch")
LEFT = {"cache", "same tokens"}
SMALL_CACHE = 0.05
"""Of a step's bytes: below it no cache layout changes the speed much."""

Cells = dict[str, Callable[[Row], str]]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Equal prompts by cache, then requests of different lengths in one budget."""
    uniform = [row for row in rows if row["run"] == "uniform"]
    ragged = [row for row in rows if row["run"] == "ragged"]
    found = []
    if uniform:
        found.append(_table("equal prompts", uniform, _speeds(uniform)))
        found.append(_table("shares of what this device reaches, and the cache", uniform, _SHARES))
    if ragged:
        found.append(_table(_ragged_title(ragged[0]), ragged, _ragged(ragged)))
    return found


def _table(title: str, rows: Sequence[Row], cells: Cells) -> Table:
    """A line a row: what tells it apart, its cache, and these cells."""
    names = [name for name in VARYING if len({row[name] for row in rows}) > 1]
    titles = [name.replace("_tokens", "").replace("_", " ") for name in names]
    columns = (*titles, "cache", *cells)
    return Table(
        title=title,
        columns=columns,
        rows=tuple(
            (
                *(f"{row[name]:,}" for name in names),
                _cache(row, rows),
                *(cell(row) for cell in cells.values()),
            )
            for row in rows
        ),
        right=frozenset(columns) - LEFT,
    )


def _cache(row: Row, rows: Sequence[Row]) -> str:
    """'paged, blocks of 16': the block size where rows differ in it."""
    sizes = {one["block_size"] for one in rows if one["cache"] == row["cache"]}
    return f"{row['cache']}, blocks of {row['block_size']}" if len(sizes) > 1 else str(row["cache"])


def _speeds(rows: Sequence[Row]) -> Cells:
    cells: Cells = {
        "TTFT": lambda row: _seconds(row["ttft_s"]),
        "TPOT p50": lambda row: _seconds(row["tpot_s_p50"]),
        "ITL p99": lambda row: _seconds(row["itl_s_p99"]),
        "tokens/s": lambda row: _number(row["output_tokens_per_s"]),
        "gain": lambda row: _gain(row["measured_gain"]),
        "bytes allow": lambda row: _gain(row["predicted_gain"]),
        "same tokens": _same,
    }
    if all(row["measured_gain"] is None for row in rows):
        del cells["gain"], cells["bytes allow"]
    return cells


_SHARES: Cells = {
    "prefill FLOP": lambda row: _share(row["mfu_prefill"]),
    "prefill bytes": lambda row: _share(row["mbu_prefill"]),
    "decode FLOP": lambda row: _share(row["mfu_decode"]),
    "decode bytes": lambda row: _share(row["mbu"]),
    "KV reserved": lambda row: _bytes(row["kv_reserved_bytes"]),
    "KV used": lambda row: _bytes(row["kv_used_bytes"]),
    "peak": lambda row: _bytes(row["peak_bytes"]),
}


def _ragged_title(row: Row) -> str:
    samples = f" of {row['samples']} samples" if row["samples"] > 1 else ""
    return (
        f"{counted(row['requests'], 'request')}{samples} of different lengths, "
        f"{format_bytes(row['kv_budget_bytes'])} for the cache"
    )


def _ragged(rows: Sequence[Row]) -> Cells:
    cells: Cells = {
        "mean batch": lambda row: f"{row['mean_batch']:.1f}",
        "peak": lambda row: f"{row['peak_batch']:,}",
        "steps": lambda row: f"{row['steps']:,}",
        "tokens/s": lambda row: _number(row["output_tokens_per_s"]),
        "gain": lambda row: _gain(row["measured_gain"]),
        "bytes allow": lambda row: _gain(row["predicted_gain"]),
        "TPOT p50": lambda row: _seconds(row["tpot_s_p50"]),
        "KV used": lambda row: _bytes(row["kv_used_bytes"]),
        "preemptions": lambda row: f"{row['preemptions']:,}",
        "same tokens": _same,
    }
    if any(row["samples"] > 1 for row in rows):
        cells["shared blocks"] = lambda row: f"{row['shared_blocks']:,}"
        cells["copied"] = lambda row: f"{row['copied_blocks']:,}"
    return cells


def sentences(rows: Sequence[Row], env: Mapping[str, Any]) -> list[str]:
    """What was run, how time grows, how much of a step is the cache, what paging does to batches."""
    said = [_what(rows[0], env)]
    uniform = [row for row in rows if row["run"] == "uniform"]
    said += _growth(uniform)
    said += _weight(uniform)
    said += _batches([row for row in rows if row["run"] == "ragged"])
    if any(row["same_tokens"] is False for row in rows):
        said.append("WRONG: these generate other tokens than the dynamic cache.")
    if any(row["predicted_gain"] is not None for row in rows):
        said.append(
            "gain: tokens/s of a decode step against the baseline's; bytes allow: the most that "
            "reading fewer bytes, or sharing the weights' among more sequences, can give."
        )
    return said


def _what(row: Row, env: Mapping[str, Any]) -> str:
    place = (
        f"{env.get('device_name', row['device'])} ({'CPU' if row['device'] == 'cpu' else 'GPU'})"
    )
    threads = env.get("threads")
    on = f"{place}, {counted(threads, 'thread')}" if threads else place
    weights = "its own weights" if row["weights"] == "folder" else "random weights"
    return (
        f"On {on}: {row['model']}, {counted(row['layers'], 'layer')}, {row['dtype']}, {weights} of "
        f"{format_bytes(row['weights_bytes'])}, {format_bytes(row['bytes_per_token'])} of cache a token."
    )


def _growth(rows: Sequence[Row]) -> list[str]:
    """'A token's time grows with its context to the power of 1.05 without a cache, 0.10 with one.'"""
    fitted = {row["cache"]: row for row in rows if row["time_exponent"] is not None}
    if not fitted:
        return []
    contexts = next(iter(fitted.values()))["exponent_contexts"]
    parts = ", ".join(f"{cache} {row['time_exponent']:.2f}" for cache, row in fitted.items())
    end = ""
    if "none" in fitted:
        power = 1 + fitted["none"]["time_exponent"]
        end = f" Without a cache an output of n tokens therefore takes about n^{power:.1f}."
    return [
        f"A token's time grows with its context ({contexts[0]:,} to {contexts[-1]:,} tokens) to the "
        f"power of: {parts}.{end}"
    ]


def _weight(rows: Sequence[Row]) -> list[str]:
    """How much of what a decode step reads is cache, at the smallest and the largest batch."""
    paged = [row for row in rows if row["step_bytes"] and row["cache"] in ("paged", "dynamic")]
    if not paged:
        return []
    small, large = (choose(paged, key=lambda row: row["batch"]) for choose in (min, max))
    shares = [
        (row["step_bytes"] - _weights_read(row)) / row["step_bytes"] for row in (small, large)
    ]
    if small["batch"] == large["batch"]:
        text = (
            f"At batch {small['batch']} the cache is {shares[0]:.1%} of the bytes that a step reads"
        )
    else:
        text = (
            f"The cache is {shares[0]:.1%} of the bytes that a step reads at batch {small['batch']} "
            f"and {shares[1]:.1%} at batch {large['batch']}"
        )
    end = (
        ": the weights dwarf it, and no layout of it can gain more."
        if shares[1] < SMALL_CACHE
        else "."
    )
    return [text + end]


def _weights_read(row: Row) -> int:
    """A step's bytes without the cache: of each sequence what it holds in the middle of the output."""
    held = row["prompt_tokens"] + row["output_tokens"] // 2
    return max(int(row["step_bytes"] - row["batch"] * held * row["bytes_per_token"]), 0)


def _batches(rows: Sequence[Row]) -> list[str]:
    if len(rows) < 2:
        return []
    most, paged = rows[0], rows[1]
    larger = paged["mean_batch"] / most["mean_batch"] if most["mean_batch"] else 1.0
    return [
        f"In the same {format_bytes(paged['kv_budget_bytes'])}, paging runs {paged['mean_batch']:.1f} "
        f"sequences at a time where reservations of {most['max_model_len']:,} tokens run "
        f"{most['mean_batch']:.1f} ({larger:.1f}×), and {paged['measured_gain']:.2f} times their "
        "tokens/s."
    ]


def charts(rows: Sequence[Row], env: Mapping[str, Any]) -> tuple[Chart, ...]:
    """Tokens/s against the batch, a line a cache."""
    lines: dict[str, list[tuple[float, float]]] = {}
    uniform = [row for row in rows if row["run"] == "uniform" and row["cache"] != "none"]
    for row in uniform:
        lines.setdefault(_cache(row, uniform), []).append(
            (row["batch"], row["output_tokens_per_s"])
        )
    if not lines:
        return ()
    chart = Chart(
        title=f"Decode of {rows[0]['model']} on {env.get('device_name', rows[0]['device'])}",
        x_label="batch",
        y_label="output tokens/s, prefill included",
        lines=tuple(
            Line(name=name, x=tuple(x for x, _ in sorted(at)), y=tuple(y for _, y in sorted(at)))
            for name, at in lines.items()
        ),
    )
    return (chart,)


def _same(row: Row) -> str:
    return {True: "yes", False: "NO", None: "–"}[row["same_tokens"]]


def _seconds(value: float | None) -> str:
    return "–" if value is None else format_seconds(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _bytes(value: int | None) -> str:
    return "–" if value is None else format_bytes(value)


def _gain(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"

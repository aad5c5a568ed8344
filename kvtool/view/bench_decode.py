"""How `kvtool bench decode` looks: each cache's times, what the bytes allow, and larger batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtool.run import Row
from kvtool.units import format_bytes, format_seconds
from kvtool.view import Chart, Line, Table
from kvtool.view.words import counted

VARYING = ("prompt_tokens", "output_tokens", "batch")
LEFT = {"cache", "over", "steps are", "same tokens"}
SMALL_CACHE = 0.05
"""Of a step's bytes: below it no cache layout changes the speed much."""

LAW = 0.25
"""How far the growth between the last two contexts may be from the whole fit's for the fit to be told."""

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
        "ITL p50": lambda row: _seconds(row["itl_s_p50"]),
        "p99": lambda row: _seconds(row["itl_s_p99"]),
        "tokens/s": lambda row: _number(row["output_tokens_per_s"]),
    }
    baselines = {row["baseline"] for row in rows} - {None}
    if baselines:
        cells["gain"] = _measured
        if len(baselines) > 1:
            cells["over"] = lambda row: row["baseline"] or "–"
        cells["bytes allow"] = lambda row: _gain(row["predicted_gain"])
    kinds = {row["cuda_graph"] for row in rows}
    if len(kinds) > 1 or any(row["device"] != "cpu" for row in rows):
        cells["steps are"] = lambda row: {True: "a graph", False: "eager", None: "–"}[
            row["cuda_graph"]
        ]
    cells["same tokens"] = _same
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
        "gain": _measured,
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
    return said + _gains(rows)


def _gains(rows: Sequence[Row]) -> list[str]:
    """What the two figures are, and why one may be above the other."""
    compared = [row for row in rows if row["predicted_gain"] is not None]
    if not compared:
        return []
    bases = " or ".join(dict.fromkeys(row["baseline"] for row in compared))
    said = [
        f"gain: tokens/s of decoding against {bases} (? not resolved in {_rounds(rows)}); bytes "
        "allow: the most that moving fewer bytes, or sharing the weights' among more sequences, "
        "gives at equal bandwidth."
    ]
    beyond = dict.fromkeys(
        row["cache"]
        for row in compared
        if (row["measured_gain_ci"] or [0])[0] > row["predicted_gain"]
        and row["cache"] != row["baseline"]
    )
    if beyond:
        said.append(
            f"{', '.join(beyond)}: more than fewer bytes give, because the baseline's attention reads "
            "them slower or its step does other work besides."
        )
    return said


def _rounds(rows: Sequence[Row]) -> str:
    return counted(min(row["repeats"] for row in rows), "round")


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
    if "none" in fitted and _is_a_law(fitted["none"]):
        power = 1 + fitted["none"]["time_exponent"]
        end = f" Without a cache an output of n tokens therefore takes about n^{power:.1f}."
    return [
        f"A token's time grows with its context ({contexts[0]:,} to {contexts[-1]:,} tokens) to the "
        f"power of: {parts}.{end}"
    ]


def _is_a_law(row: Row) -> bool:
    """Whether the longest contexts grow as the whole fit says."""
    off: float = row["time_exponent_end"] - row["time_exponent"]
    return abs(off) <= LAW


def _weight(rows: Sequence[Row]) -> list[str]:
    """How much of what a decode step reads is cache, at the smallest and the largest batch."""
    paged = [row for row in rows if row["step_bytes"] and row["cache"] in ("paged", "dynamic")]
    if not paged:
        return []
    small, large = (choose(paged, key=lambda row: row["batch"]) for choose in (min, max))
    shares = [row["step_cache_bytes"] / row["step_bytes"] for row in (small, large)]
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
        ": the weights dwarf it, and no layout of the cache gains more than that."
        if shares[1] < SMALL_CACHE
        else "."
    )
    return [text + end]


def _batches(rows: Sequence[Row]) -> list[str]:
    return [_batch(rows[0], paged, rows) for paged in rows[1:]]


def _batch(most: Row, paged: Row, rows: Sequence[Row]) -> str:
    larger = paged["mean_batch"] / most["mean_batch"] if most["mean_batch"] else 1.0
    blocks = f" in blocks of {paged['block_size']}" if len(rows) > 2 else ""
    speed = f"{paged['measured_gain']:.2f} times their tokens/s"
    if not _is_resolved(paged):
        speed += f" (not resolved in {counted(paged['repeats'], 'round')})"
    return (
        f"In the same {format_bytes(paged['kv_budget_bytes'])}, paging{blocks} runs "
        f"{paged['mean_batch']:.1f} sequences at a time where reservations of "
        f"{most['max_model_len']:,} tokens run {most['mean_batch']:.1f} ({larger:.1f}×), and {speed}."
    )


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
    if row["same_tokens"] and row["ties"]:
        return f"yes, {counted(row['ties'], 'near-tie')}"
    return {True: "yes", False: "NO", None: "–"}[row["same_tokens"]]


def _seconds(value: float | None) -> str:
    return "–" if value is None else format_seconds(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _bytes(value: int | None) -> str:
    return "–" if value is None else format_bytes(value)


def _measured(row: Row) -> str:
    """'1.31×', with ' ?' where the rounds do not tell it from 1."""
    return _gain(row["measured_gain"]) + ("" if _is_resolved(row) else " ?")


def _is_resolved(row: Row) -> bool:
    """Whether the interval excludes 1; the baseline's own gain is 1, and none needs no interval."""
    if row["measured_gain"] is None or row["cache"] == row["baseline"]:
        return True
    interval = row["measured_gain_ci"]
    return interval is not None and not interval[0] <= 1 <= interval[1]


def _gain(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"

"""What is said of a plan: the verdict first, why, what to do, then what a step costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtool.run import Row
from kvtool.units import format_bytes
from kvtool.view.words import counted, rate, seconds

BINDS = {
    "weights": "the weights alone are more than an engine may use of a GPU",
    "overhead": "activations and what else the engine keeps leave nothing for the cache",
    "context": "not one request of this length fits",
    "users": "fewer requests fit than are asked for",
    "max_num_seqs": "--max-num-seqs binds, not the memory",
    "kv": "memory for the cache binds",
}


def on(row: Row) -> str:
    """`8 × h100-sxm (tp 8)`."""
    split = [f"{name} {row[name]}" for name in ("tp", "pp", "dp", "dcp") if row[name] > 1]
    return f"{row['gpus']:,} × {row['gpu']}" + (f" ({', '.join(split)})" if split else "")


def verdict(row: Row) -> str:
    """Whether it fits, and what binds."""
    lengths = f"{row['context_tokens']:,} tokens"
    if not row["fits"]:
        return (
            f"Does not fit: {row['model']} for {_users(row)} of {lengths} on {on(row)} lacks "
            f"{format_bytes(row['missing_bytes'])} on each GPU: {BINDS[row['binds']]}."
        )
    most = row["max_concurrency"]
    many = "any number of" if most is None else f"{most:,.4g}"
    return (
        f"Fits: {many} requests of {lengths} at a time on {on(row)}, by the best estimate; "
        f"{BINDS[row['binds']]}."
    )


def _users(row: Row) -> str:
    return "a request" if row["users"] is None else counted(row["users"], "request")


def refusal(rows: Sequence[Row]) -> tuple[str, str]:
    """Message and hint where nothing fits: the nearest miss, and what would do."""
    row = min(rows, key=lambda one: int(one["missing_bytes"]))
    ways = [one for one in row.get("alternatives") or () if one["fits"]]
    hint = "; or ".join(f"{one['change']} ({one['flags']})" for one in ways[:3])
    return verdict(row).rstrip(
        "."
    ), hint or "give it more GPUs, another KV dtype, or a shorter context"


def about(row: Row) -> list[str]:
    """Why, and what it costs."""
    said = (
        _solved(row),
        _tried(row),
        _grows(row),
        _range(row),
        _longest(row),
        _step(row),
        _intensity(row),
        _cost(row),
        _command(row),
    )
    return [text for text in said if text]


def _solved(row: Row) -> str:
    """The one that was missing."""
    found = row.get("solved")
    if found is None or found["value"] is None:
        return ""
    value = found["value"]
    shown = (
        f"{value:,}"
        if isinstance(value, int)
        else f"{value:g}"
        if isinstance(value, float)
        else value
    )
    return f"{found['what'][:1].upper()}{found['what'][1:]}: {shown} ({found['flags']})."


def _tried(row: Row) -> str:
    """What was changed on the same GPUs, and does not suffice."""
    ways = [one["change"] for one in row.get("alternatives") or () if not one["fits"]]
    return f"Not enough on the same GPUs: {', '.join(ways)}." if ways else ""


def _grows(row: Row) -> str:
    """Weights are there once; the cache grows with every token and every user."""
    cache = f"{_users(row)} of {row['context_tokens']:,} tokens: {format_bytes(row['cache_bytes'])} of cache"
    if not row["weights_bytes"]:
        return f"The cache grows: {cache}, all GPUs of a replica together."
    return (
        f"Weights are static, {format_bytes(row['weights_bytes'])} on each GPU whoever comes; the cache grows: "
        f"{cache}, whole model, {format_bytes(row['request_bytes'])} of each request on each GPU."
    )


def _range(row: Row) -> str:
    budget = row["kv_budget_bytes"]
    low, best, high = budget["low"], budget["best"], budget["high"]
    if low == high:
        return ""
    if best <= 0:
        return f"Nothing is left for the cache: {format_bytes(-best)} are missing on each GPU before it."
    return (
        f"For the cache a GPU has {format_bytes(best)}, and {format_bytes(max(0, low))} to "
        f"{format_bytes(high)} if the estimates are off."
    )


def _longest(row: Row) -> str:
    longest = row["max_context"]
    if longest is None or not row["fits"]:
        return ""
    who = "one request" if row["users"] is None else f"{counted(row['users'], 'request')} at a time"
    return f"The longest context for {who}: {longest:,} tokens."


def _step(row: Row) -> str:
    if row["tpot_s"] is None:
        return ""
    return (
        f"With {rate(row['batch'])} requests a replica at {row['context_tokens']:,} tokens a step takes "
        f"{seconds(row['tpot_s'])} (TPOT): a GPU reads {format_bytes(row['read_weights_bytes'])} of weights and "
        f"{format_bytes(row['read_cache_bytes'])} of cache; {row['step_binds']} binds, by the roofline, an estimate."
    )


def _intensity(row: Row) -> str:
    attention, weights = row["attention_intensity"], row["weights_intensity"]
    if weights is None:
        return ""
    least = row["compute_bound_from"]
    ends = (
        "at no batch does computing take as long as reading"
        if least is None
        else f"computing takes as long as reading from a batch of {least:,} on"
    )
    own = "" if attention is None else f"attention does {attention:.3g} FLOP a byte of cache, "
    return (
        f"Of the peaks {row['ridge']:.0f} FLOP a byte would keep both busy: {own}the weights "
        f"{weights:.3g} at this batch; {ends}."
    )


def _cost(row: Row) -> str:
    if row["output_tokens_per_s"] is None:
        return ""
    said = f"All replicas make {rate(row['output_tokens_per_s'])} output tokens/s"
    if row["usd_per_hour"] is None:
        return f"{said}; no price is known (--price)."
    return (
        f"{said}; at {row['usd_per_hour']:.4g} USD an hour a million cost "
        f"{row['usd_per_million_tokens']:.3g} USD."
    )


def _command(row: Row) -> str:
    return f"To start it: {row['command']}" if row["fits"] and row.get("command") else ""


def share(value: Any) -> str:
    """A concurrency for people."""
    return "without end" if value is None else f"{value:,.4g}"

"""What is said of a plan's speed: what a step reads and at which share of the peaks, what binds, what it costs."""

from __future__ import annotations

from typing import Any

from kvtool.run import Row
from kvtool.units import format_bytes
from kvtool.view.words import counted, rate, seconds, share, usd

LESS = 0.995
"""Of the weights that a GPU holds: a step that reads fewer leaves out the embedding table or experts."""


def step(row: Row) -> str:
    """How long a step takes, and on which assumptions."""
    if row["tpot_s"] is None:
        return ""
    each = " a replica" if row["dp"] > 1 else ""
    stages = row["pp"]
    staged = (
        f", {stages:,} stages of {_requests(max(1.0, row['batch'] / stages))} one after the other"
        if stages > 1
        else ""
    )
    part = row["read_weights_bytes"] < LESS * row["weights_bytes"]
    kept = " (no embedding table, no unused experts)" if part else ""
    reached = row.get("efficiency")
    return (
        f"A step of {_requests(row['batch'])}{each} at {counted(row['context_tokens'], 'token')} takes "
        f"{seconds(row['tpot_s'])} (TPOT){staged}, an estimate by the roofline: a GPU reads "
        f"{format_bytes(row['read_weights_bytes'])} of weights{kept} and "
        f"{format_bytes(row['read_cache_bytes'])} of cache{_reached(reached) if reached else ''}; "
        f"{row['step_binds']} binds."
    )


def _requests(batch: float) -> str:
    return f"{rate(batch)} request{'s' * (batch != 1)}"


def _reached(reached: dict[str, Any]) -> str:
    """Shares of the peaks, and who says so."""
    flops = reached["peak_flops"]
    rate_ = f" and {100 * reached['compute']:.3g}% of {flops / 1e12:,.0f} TFLOPS" if flops else ""
    flags = "" if reached["basis"] != "assumed" else "; --efficiency, --calibrate"
    return (
        f", at {100 * reached['bandwidth']:.3g}% of {reached['peak_bytes_per_s'] / 1e9:,.0f} GB/s{rate_}, and "
        f"{seconds(reached['overhead_s'])} a step besides ({reached['basis']}{flags})"
    )


def intensity(row: Row) -> str:
    """Whether more requests would make computing the limit."""
    attention, weights = row["attention_intensity"], row["weights_intensity"]
    if weights is None:
        return ""
    if row["ridge"] is None:
        return f"How fast a {row['gpu']} computes in {row['dtype']} is not known: reading alone is counted."
    least = row["compute_bound_from"]
    ends = (
        "with any number of requests, reading takes longer than computing"
        if least is None
        else f"from {counted(least, 'request')}{' a replica' * (row['dp'] > 1)} on, computing takes as long as reading"
    )
    own = "" if attention is None else f"attention does {rate(attention)} for each byte of cache, "
    return (
        f"At its peaks the GPU does {rate(row['ridge'])} FLOP for each byte that it reads: {own}"
        f"the weights {rate(weights)} for each of theirs; {ends}."
    )


def cost(row: Row) -> str:
    """Tokens a second of all GPUs, and what they cost."""
    if row["output_tokens_per_s"] is None:
        return ""
    made = f"{rate(row['output_tokens_per_s'])} output tokens/s"
    said = (
        f"The {row['dp']:,} replicas together make {made}" if row["dp"] > 1 else f"That is {made}"
    )
    if row["usd_per_hour"] is None:
        return f"{said}; no price is known (--price)."
    return (
        f"{said}; at {share(row['usd_per_hour'])} USD an hour a million of them cost "
        f"{usd(row['usd_per_million_tokens'])} USD."
    )

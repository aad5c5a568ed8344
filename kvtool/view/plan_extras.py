"""What is shown beside a plan: real lengths, ways to split GPUs, prefill apart, tiers of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.run import Row
from kvtool.units import GIB, format_bytes
from kvtool.view import Table
from kvtool.view.plan_columns import Column, table
from kvtool.view.plan_words import running
from kvtool.view.words import number, rate, seconds, share, usd

MOST_WAYS = 12
SPLIT = ("tp", "pp", "dp", "dcp")
MOST_REASONS = 4
"""Of each kind that is shown; JSON has all."""
LESS = {"blocks": 3, "KV GiB": 3, "longest": 2, "copies": 1}
"""Columns that go where room lacks, the highest first."""


def tables(row: Row) -> list[Table]:
    """A table for each thing that was asked for."""
    made = (
        _lengths(row.get("lengths")),
        _ways(row.get("ways")),
        _tiers(row.get("tiers")),
    )
    return [table for table in made if table is not None]


def sentences(row: Row) -> list[str]:
    """What the tables come to."""
    said = (
        _of_lengths(row),
        _of_sharing(row.get("sharing")),
        _of_ways(row),
        *_of_refused(row),
        *_of_tiers(row),
        _of_apart(row.get("disaggregation")),
        _sentence(row.get("quantise_first") or ""),
    )
    return [text for text in said if text]


def _sentence(text: str) -> str:
    return f"{text}." if text and not text.endswith(".") else text


def _lengths(found: Mapping[str, Any] | None) -> Table | None:
    if found is None:
        return None
    lines = [
        (f"all at the {name} of {found[f'length_tokens_{name}']:,} tokens", share(found[f"max_concurrency_{name}"]))
        for name in ("p50", "p95", "p99")
    ]  # fmt: skip
    lines += [
        ("the real mix, as it runs", share(found["max_concurrency_running"])),
        ("the real mix, all with all their output", share(found["max_concurrency_at_end"])),
    ]
    return Table(
        columns=("requests", "at a time"), rows=tuple(lines), right=frozenset(("at a time",)),
        title=f"{found['requests']:,} lengths",
    )  # fmt: skip


def _of_lengths(row: Row) -> str:
    found = row.get("lengths")
    if found is None:
        return ""
    return (
        f"Of {row['workload']} about {share(found['max_concurrency_running'])} requests run at a time, "
        f"{found['running_tokens_mean']:,.0f} tokens each while they do, by an estimate; "
        f"{share(found['max_concurrency_at_end'])} without ever preempting one."
        + _mixed_speed(found)
    )


def _mixed_speed(found: Mapping[str, Any]) -> str:
    if found.get("running_tpot_s") is None:
        return ""
    million = found["running_usd_per_million_tokens"]
    cost = "" if million is None else f", {usd(million)} USD a million"
    return (
        f" So mixed a token takes {seconds(found['running_tpot_s'])} (TPOT), "
        f"{rate(found['running_output_tokens_per_s'])} output tokens/s{cost}; the table is of the one context above."
    )


def _of_sharing(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    least = "at least " if found["whole_trace_fits"] else ""
    return (
        f"With equal prefixes held once {least}{found['max_concurrency_shared']:,} requests that follow each "
        f"other fit, {found['max_concurrency_unshared']:,} where each holds its own."
    )


def _ways(rows: list[Row] | None) -> Table | None:
    """The best first; what is the same in all of them has no column."""
    if not rows:
        return None
    shown = rows[:MOST_WAYS]
    columns = [Column(name="flags", cells=tuple(row["flags"] for row in shown))]
    steps = [running(row) for row in shown]
    figures = {
        "KV GiB": [f"{row['kv_budget_bytes']['best'] / GIB:,.2f}" for row in shown],
        "copies": [f"{row['kv_copies']:.3g}" for row in shown],
        "requests": [share(row["max_concurrency"]) for row in shown],
        "longest": [number(row["max_context"]) for row in shown],
        "TPOT": [seconds(row["tpot_s"]) for row in steps],
        "tokens/s": [rate(row["output_tokens_per_s"]) for row in steps],
    }  # fmt: skip
    columns += [
        Column(name=name, cells=tuple(cells), rank=LESS.get(name, 0))
        for name, cells in figures.items()
        if not (name == "copies" and set(cells) == {"1"})
    ]
    more = f", the first {MOST_WAYS} of {len(rows):,}" if len(rows) > MOST_WAYS else ""
    return table(columns, title=f"ways to split the GPUs{more}")


def _of_ways(row: Row) -> str:
    """Where the plan stands among the ways, if it is not the best."""
    ways: Sequence[Row] = row.get("ways") or ()
    own = [row[name] for name in SPLIT]
    at = next((n for n, one in enumerate(ways, 1) if [one[name] for name in SPLIT] == own), None)
    if at is None or at == 1:
        return ""
    best = ways[0]
    return (
        f"The plan above is way {at:,} of {len(ways):,}; plan the first with {best['flags']}: {share(best['max_concurrency'])} "
        f"requests, {rate(best['output_tokens_per_s'])} tokens/s."
    )


def _of_refused(row: Row) -> list[str]:
    """A sentence for each reason: first why, then which."""
    refused = row.get("refused_ways") or ()
    said = [
        f"Not possible: {one['reason']} ({'; '.join(one['ways'][:4])}"
        f"{'; and more' if len(one['ways']) > 4 else ''})."
        for one in refused[:MOST_REASONS]
    ]
    left = len(refused) - MOST_REASONS
    return [*said, f"Not possible for {left:,} more reasons (--json)."] if left > 0 else said


def _of_apart(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return (
        f"Apart, {found['prefill_gpus']} × {found['prefill_gpu']} for prompts of {found['prompt_tokens']:,} tokens and "
        f"{found['decode_gpus']} × {found['decode_gpu']} for {found['output_tokens']:,} more: a prefill takes "
        f"{seconds(found['prefill_s'])}, sending its {format_bytes(found['kv_bytes'])} of cache "
        f"{seconds(found['transfer_s'])}. At most they serve {rate(found['requests_per_s'])} requests/s apart "
        f"({found['binds']} binds) and {rate(found['mixed_requests_per_s'])} undivided. At {rate(found['same_requests_per_s'])} requests/s a token takes "
        f"{seconds(found['same_rate_tpot_s'])} apart and {seconds(found['same_rate_mixed_tpot_s'])} undivided, where "
        f"{rate(found['mixed_requests_per_s_at_tpot'])} requests/s would have the faster token. Both kinds are busy with "
        f"{found['prefill_gpus_per_decode_gpu']:.3g} prefill GPUs for each decode GPU. By an estimate it "
        f"{'pays' if found['pays'] else 'does not pay'}: {found['rule']}."
    )


def _of_tiers(row: Row) -> list[str]:
    """Whether a tier is worth it for a request of this context."""
    return [
        f"{one['tier']}: bringing a request of {row['context_tokens']:,} tokens back takes "
        f"{seconds(one['load_s'])}, computing it anew {seconds(one['prefill_s'])}: "
        f"{'loading' if one['loads_faster'] else 'computing'} is faster."
        for one in row.get("tiers") or ()
        if one["prefill_s"] is not None
    ]


def _tiers(rows: list[Mapping[str, Any]] | None) -> Table | None:
    if not rows:
        return None
    columns = ("tier", "holds", "blocks", "requests", "load", "compute", "faster from")
    cells = [
        (
            one["tier"], format_bytes(one["capacity_bytes"]), number(one["num_blocks"]), share(one["requests"]),
            seconds(one["load_s"]), seconds(one["prefill_s"]), _break_even(one),
        )
        for one in rows
    ]  # fmt: skip
    return table(
        [
            Column(name=name, cells=found, right=name != "tier", rank=LESS.get(name, 0))
            for name, found in zip(columns, zip(*cells, strict=True), strict=True)
        ],
        title="memory below the GPU's: loading a request's cache from it, or computing it anew",
    )


def _break_even(one: Mapping[str, Any]) -> str:
    """From how many tokens on loading is the faster of the two."""
    least = one["break_even_context"]
    if least is None:
        return "–" if one["prefill_s"] is None else "never"
    return "any length" if least == 1 else f"{least:,} tokens"

"""What is shown beside a plan: real lengths, ways to split GPUs, prefill apart, tiers, levers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.run import Row
from kvtool.units import format_bytes
from kvtool.view import Table
from kvtool.view.plan_words import share
from kvtool.view.words import number, rate, seconds

MOST_WAYS = 12


def tables(row: Row) -> list[Table]:
    """A table for each thing that was asked for."""
    made = (
        _lengths(row.get("lengths")), _ways(row.get("ways")), _tiers(row.get("tiers")),
        _levers(row.get("levers")),
    )  # fmt: skip
    return [table for table in made if table is not None]


def sentences(row: Row) -> list[str]:
    """What the tables come to."""
    said = (
        _of_lengths(row), _of_sharing(row.get("sharing")), _of_refused(row), _of_apart(row.get("disaggregation")),
        row.get("quantise_first") or "",
    )  # fmt: skip
    return [text for text in said if text]


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
        title=f"{found['requests']:,} real lengths",
    )  # fmt: skip


def _of_lengths(row: Row) -> str:
    found = row.get("lengths")
    if found is None:
        return ""
    return (
        f"Of {row['workload']} about {share(found['max_concurrency_running'])} requests run at a time, "
        f"{found['running_tokens_mean']:,.0f} tokens each while they do, by an estimate; "
        f"{share(found['max_concurrency_at_end'])} without ever preempting one."
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
    if not rows:
        return None
    columns = (
        "tp", "pp", "dp", "dcp", "experts spread", "for KV", "copies", "requests", "longest", "TPOT", "tokens/s",
    )  # fmt: skip
    lines = tuple(
        (
            *(str(row[name]) for name in ("tp", "pp", "dp", "dcp")),
            "yes" if row["expert_parallel"] else "no",
            format_bytes(row["kv_budget_bytes"]["best"]), f"{row['kv_copies']:.3g}",
            share(row["max_concurrency"]), number(row["max_context"]),
            seconds(row["tpot_s"]) if row["tpot_s"] is not None else "–",
            rate(row["output_tokens_per_s"]),
        )
        for row in rows[:MOST_WAYS]
    )  # fmt: skip
    more = f", the first {MOST_WAYS} of {len(rows):,}" if len(rows) > MOST_WAYS else ""
    return Table(
        columns=columns, rows=lines, right=frozenset(columns), title=f"ways to split the GPUs{more}"
    )  # fmt: skip


def _of_refused(row: Row) -> str:
    refused = row.get("refused_ways") or ()
    return "; ".join(
        f"Not possible: {', '.join(one['ways'][:4])}"
        f"{' and more' if len(one['ways']) > 4 else ''}: {one['reason']}"
        for one in refused
    )


def _of_apart(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return (
        f"Apart, {found['prefill_gpus']} × {found['prefill_gpu']} for prompts of {found['prompt_tokens']:,} tokens and "
        f"{found['decode_gpus']} × {found['decode_gpu']} for {found['output_tokens']:,} more: a prefill takes "
        f"{seconds(found['prefill_s'])}, sending its {format_bytes(found['kv_bytes'])} of cache "
        f"{seconds(found['transfer_s'])}, a token then {seconds(found['settled_tpot_s'])} against "
        f"{seconds(found['mixed_tpot_s'])} undivided; {rate(found['requests_per_s'])} requests/s against "
        f"{rate(found['mixed_requests_per_s'])}: {found['binds']} binds. Both are busy with "
        f"{found['prefill_gpus_per_decode_gpu']:.3g} prefill GPUs for each decode GPU. TPOT falls by "
        f"{found['saved_tpot_share']:.0%}, requests/s by {found['lost_requests_share']:.0%}: by that rule it "
        f"{'pays' if found['pays'] else 'does not pay'}, an estimate."
    )


def _tiers(rows: list[Mapping[str, Any]] | None) -> Table | None:
    if not rows:
        return None
    columns = (
        "tier",
        "holds",
        "blocks",
        "requests",
        "load one",
        "compute it anew",
        "loading is faster from",
    )
    lines = tuple(
        (
            one["tier"], format_bytes(one["capacity_bytes"]), number(one["num_blocks"]), share(one["requests"]),
            seconds(one["load_s"]), "–" if one["prefill_s"] is None else seconds(one["prefill_s"]),
            "never" if one["break_even_context"] is None else f"{one['break_even_context']:,} tokens",
        )
        for one in rows
    )  # fmt: skip
    return Table(
        columns=columns, rows=lines, right=frozenset(columns[1:]), title="memory below the GPU's"
    )


def _levers(rows: list[Mapping[str, Any]] | None) -> Table | None:
    if not rows:
        return None
    columns = ("lever", "flags", "requests", "gained", "TPOT", "TPOT gained", "on this GPU")
    lines = tuple(
        (
            one["change"], one["flags"], number(one["users"]), _signed(one["users_gained"]),
            seconds(one["tpot_s"]) if one["tpot_s"] is not None else "–",
            seconds(one["tpot_gained_s"]) if (one["tpot_gained_s"] or 0) > 0 else "–", one["support"] or "–",
        )
        for one in rows
    )  # fmt: skip
    return Table(
        columns=columns, rows=lines, right=frozenset(columns[2:6]), title="what each change gains"
    )


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+,.4g}"

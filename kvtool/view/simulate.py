"""How `kvtool simulate` looks: rates and times, who was not served, and what made requests wait."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.run import Row, Run
from kvtool.simulate import Timeline
from kvtool.view import Table, View
from kvtool.view.simulate_pools import (
    binds_of_pools,
    laws_of,
    pools_table,
    preempted_of_pools,
    transfers_of,
)
from kvtool.view.timeline import timeline_chart
from kvtool.view.words import counted, number, rate, seconds, words_of

SETTINGS = (
    "scheduler", "rate",
    "link_bits_per_s", "num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_active_seqs",
    "max_batched_tokens", "max_scheduled_tokens", "watermark", "long_prefill_threshold", "preemption",
    "cpu_blocks",
)  # fmt: skip
"""What the rows of one run may differ in."""
OFTEN = 0.01
"""Of all steps: from here on a limit that requests wait for is said to bind."""
DISAGGREGATED = "disaggregated"
TIMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
LIMITS = {
    "seqs": "a place among the {max_num_active_seqs:,} that may run",
    "tokens": "room among the {max_scheduled_tokens:,} tokens of a step",
    "blocks": "free blocks",
}
"""What requests wait for, by the `waiting_for_…_steps` of a row."""


def view(run: Run, lines: Sequence[Timeline] = ()) -> View:
    """One row: its figures and its times. Several: a line each, and which is best."""
    rows, chart = run.rows, timeline_chart(lines) if lines else None
    if len(rows) == 1:
        apart = (pools_table(rows[0]),) if rows[0]["scheduler"] == DISAGGREGATED else ()
        tables = (_figures(rows[0]), *apart, _times(rows[0]))
        return View(tables=tables, sentences=tuple(_about(rows[0])), chart=chart)
    said = (*(_grows(row, rows) for row in rows if row["queue_grows"]), *_best(rows))
    return View(tables=(_lines(rows),) if rows else (), sentences=said, chart=chart)


def _figures(row: Row) -> Table:
    cells = {
        "output tokens/s": rate(row["output_tokens_per_s"]),
        "requests/s": rate(row["requests_per_s"]),
        "mean batch": rate(row["mean_batch"]),
        "peak batch": number(row["peak_batch"]),
        "blocks used": rate(row["mean_used_blocks"]),
        "steps": number(row["steps"]),
        "preemptions": number(row["preemptions"]),
    }
    return Table(columns=tuple(cells), rows=(tuple(cells.values()),), right=frozenset(cells))


def _times(row: Row) -> Table:
    columns = ("time", "p50", "p90", "p99")
    return Table(
        columns=columns,
        rows=tuple(
            (label, *(seconds(row[f"{name}_s_{percent}"]) for percent in columns[1:]))
            for name, label in TIMES.items()
        ),
        right=frozenset(columns[1:]),
    )


def _lines(rows: tuple[Row, ...]) -> Table:
    apart = _apart(rows)
    cached = any(row["queried_tokens"] for row in rows)
    goals = any(row["slo_met_share"] is not None for row in rows)
    priced = any(row["tokens_per_usd"] is not None for row in rows)
    columns = (
        *(name.replace("_", " ") for name in apart),
        "tokens/s", "requests/s", "batch", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99",
        "E2E p50", "preemptions", "not served", *(["hit rate"] if cached else []),
        *(["SLO met", "goodput/s"] if goals else []), *(["tokens/$"] if priced else []),
    )  # fmt: skip
    times = ("ttft_s_p50", "ttft_s_p99", "itl_s_p50", "itl_s_p99", "e2e_s_p50")
    return Table(
        columns=columns,
        rows=tuple(
            (
                *(_value(row[name]) for name in apart),
                *(rate(row[f"{what}_per_s"]) for what in ("output_tokens", "requests")),
                rate(row["mean_batch"]),
                *(seconds(row[name]) for name in times),
                number(row["preemptions"]),
                number(row["requests"] - row["finished"]),
                *([_hit_rate(row)] if cached else []),
                *(
                    [f"{row['slo_met_share']:.1%}", rate(row["goodput_requests_per_s"])]
                    if goals
                    else []
                ),
                *([rate(row["tokens_per_usd"])] if priced else []),
            )
            for row in rows
        ),
        right=frozenset(columns),
    )


def _value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _apart(rows: tuple[Row, ...]) -> list[str]:
    """The settings that differ; one that only follows another is left out."""
    names = [name for name in SETTINGS if len({row.get(name) for row in rows}) > 1]
    follows = {"max_num_active_seqs": "max_num_seqs", "max_scheduled_tokens": "max_batched_tokens"}
    return [
        name
        for name in names
        if name not in follows or any(row[name] != row[follows[name]] for row in rows)
    ]


def _best(rows: tuple[Row, ...]) -> list[str]:
    """Which row has most throughput, and which answers first."""
    apart, said = _apart(rows), []
    most = max((row["finished"] for row in rows), default=0)
    several, rows = rows, tuple(row for row in rows if row["finished"] == most)
    if len(rows) < len(several):
        said.append(f"Of the {len(rows):,} that served most, {counted(most, 'request')}:")
    rated = [row for row in rows if row["output_tokens_per_s"]]
    if rated:
        top = max(rated, key=lambda row: float(row["output_tokens_per_s"]))
        most_rate = rate(top["output_tokens_per_s"])
        said.append(f"Most output tokens/s: {most_rate} with {', '.join(words_of(top, apart))}.")
    timed = [row for row in rows if row["ttft_s_p99"] is not None]
    if timed:
        first = min(timed, key=lambda row: float(row["ttft_s_p99"]))
        time = seconds(first["ttft_s_p99"])
        said.append(f"Shortest TTFT p99: {time} with {', '.join(words_of(first, apart))}.")
    law = laws_of if rows and rows[0]["scheduler"] == DISAGGREGATED else _law
    return [*said, *([law(rows[0])] if rows else [])]


def _about(row: Row) -> list[str]:
    """The verdict first, then why, then what the times are worth."""
    if row["scheduler"] == DISAGGREGATED:
        told = (
            _grows(row, (row,)) if row["queue_grows"] else "", _goal(row), _verdict(row),
            binds_of_pools(row), transfers_of(row), _unserved(row), preempted_of_pools(row), laws_of(row),
        )  # fmt: skip
        return [text for text in told if text]
    told = (
        _grows(row, (row,)) if row["queue_grows"] else "", _goal(row), _verdict(row), _unserved(row),
        _cached(row), _preempted(row), _binds(row), _law(row),
    )  # fmt: skip
    return [text for text in told if text]


def _grows(row: Row, rows: Sequence[Row]) -> str:
    """Said first: then no time below means anything but the length of the run."""
    which = (
        f"{', '.join(_value(row[name]) for name in _apart(tuple(rows)))}: " if len(rows) > 1 else ""
    )
    return (
        f"{which}The queue grows without bound: {row['arrivals_per_s']:.3g} requests arrive a second, and "
        f"{row['queue_mid']:,} wait in the middle of the arrivals, {row['queue_end']:,} at their end. Times are "
        "those of a run of this length."
    )


def _goal(row: Row) -> str:
    if row["slo_met_share"] is None:
        return ""
    limits = [
        f"{TIMES[name]} {seconds(row[f'slo_{name}_s'])}" for name in ("ttft", "tpot", "e2e")
        if row[f"slo_{name}_s"] is not None
    ]  # fmt: skip
    return (
        f"{row['slo_met_share']:.1%} of requests are within {', '.join(limits)}: a goodput of "
        f"{rate(row['goodput_requests_per_s'])} requests/s."
    )


def _verdict(row: Row) -> str:
    asked, finished = row["requests"], row["finished"]
    if not finished:
        return f"None of {counted(asked, 'request')} is served."
    who = (
        f"{finished:,} of {asked:,} requests are"
        if finished < asked
        else f"All {asked:,} requests are"
    )
    if asked == 1:
        who = "The one request is"
    return (
        f"{who} served in {seconds(row['span_s'])}: {rate(row['output_tokens_per_s'])} output "
        f"tokens/s, {rate(row['requests_per_s'])} requests/s{_batch(row)}."
    )


def _batch(row: Row) -> str:
    if row["mean_batch"] is None:
        return ""
    return f", {rate(row['mean_batch'])} requests in a step on average and at most {row['peak_batch']:,}"


def _unserved(row: Row) -> str:
    larger = row["larger_than_pool"]
    told = [
        (row["rejected"], f"rejected (prompt empty or not shorter than {row['max_model_len']:,})"),
        (larger, f"aborted (larger than the pool of {row['num_blocks']:,} blocks)"),
        (row["aborted"] - larger, "aborted (more than a step's tokens, and not chunked)"),
        (row["unfinished"], "unfinished"),
    ]
    said = [f"{count:,} {what}" for count, what in told if count]
    cut = f"{row['cut']:,} of the served are cut at {row['max_model_len']:,} tokens"
    if not said:
        return f"{cut}." if row["cut"] else ""
    return f"Not served: {', '.join(said)}{f'; {cut}' if row['cut'] else ''}."


def _cached(row: Row) -> str:
    """What the prefix cache spared."""
    queried, hit = row["queried_tokens"], row["hit_tokens"]
    if not queried:
        return ""
    return (
        f"{hit:,} of {queried:,} prompt tokens were cached, {hit / queried:.1%}; "
        f"{counted(row['evictions'], 'eviction')}."
    )


def _preempted(row: Row) -> str:
    if not row["preemptions"]:
        return "Nobody was preempted." if row["steps"] else ""
    share = row["recomputed_tokens"] / row["scheduled_tokens"] if row["scheduled_tokens"] else 0.0
    again = row["rehit_tokens"]
    found = f"; {again:,} of their tokens were cached at the return" if again else ""
    if row["swapped_blocks"]:
        size = "" if row["swapped_bytes"] is None else f" ({row['swapped_bytes'] / 2**30:,.3g} GiB)"
        took = seconds(row["swapped_blocks"] * row["swap_ns"] / 1e9)
        found += f"; {counted(row['swapped_blocks'], 'block')}{size} moved out and in, {took} of all steps"
    return (
        f"{counted(row['preemptions'], 'preemption')} cost {row['recomputed_tokens']:,} computed "
        f"tokens, {share:.1%} of the {row['scheduled_tokens']:,} that were scheduled{found}."
    )


def _binds(row: Row) -> str:
    """What requests waited for once a step was scheduled."""
    steps, waiting = row["steps"], row["waiting_steps"]
    if not steps:
        return ""
    if not waiting:
        return "Nobody was left waiting after a step: no limit binds."
    counts = {what: row[f"waiting_for_{what}_steps"] for what in LIMITS}
    told = sorted((count, what) for what, count in counts.items() if count)[::-1]
    waits = ", ".join(
        f"for {LIMITS[what].format(**row)}{f' in {count:,}' if len(told) > 1 else ''}"
        for count, what in told
    )
    verdict = f"{row['binds']} binds" if waiting >= OFTEN * steps else "Requests seldom waited"
    return f"{verdict}: in {waiting:,} of {counted(steps, 'step')} some were left, {waits}."


def _law(row: Row) -> str:
    """The times are as good as this."""
    if row["read_ns"]:
        return (
            f"A step is taken to last {row['base_ns']:,} ns and the longer of reading, {row['read_ns']:,} ns + "
            f"{row['context_ns']:,} a token of context, and computing, {row['token_ns']:,} a token: not measured."
        )
    return (
        f"Times follow from --step-time, which is chosen, not measured: {row['base_ns']:,} ns a "
        f"step, {row['token_ns']:,} a token, {row['context_ns']:,} a token of context."
    )


def _hit_rate(row: Row) -> str:
    queried = row["queried_tokens"]
    return f"{row['hit_tokens'] / queried:.1%}" if queried else "–"

"""What is said of runs of `kvtool simulate`: what must be known first, the verdict, why, and what times are worth."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.run import Row
from kvtool.view.words import counted, millions, rate, seconds, words_of

OFTEN = 0.01
"""Of all steps: from here on a limit that requests wait for is said to bind."""
FEW_ANSWERS = 3
"""Arrivals that last less than so many answers (E2E p50) show how a server fills up, not how it runs."""
MOST_NAMED = 6
"""Rows that a sentence names one by one."""
MOST_SERVED = 0.99
"""Where fewer are served, it is said before the times of those that are."""
TIMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
LIMITS = {
    "seqs": "a place among the {max_num_active_seqs:,} that may run",
    "tokens": "room among the {max_scheduled_tokens:,} tokens of a step",
    "blocks": "free blocks",
    "batch": "the batch before them to end",
}
"""What requests wait for, by the `waiting_for_…_steps` of a row."""
Named = Sequence[str]
"""The settings in which rows differ."""


def lead_of(row: Row) -> list[str]:
    """What makes the times below mean something else than they seem to."""
    told = (_found_rate(row), _grows(row), _at_once(row), _too_short(row), _of_few(row))
    return [text for text in told if text]


def lead_of_rows(rows: Sequence[Row], apart: Named) -> list[str]:
    """The same of several rows, each with the rows that it is of."""
    told = [f"{_with(row, apart)}: {_found_rate(row)}" for row in rows if _found_rate(row)]
    if grows := [row for row in rows if row["queue_grows"]]:
        told.append(
            f"The queue grows without bound with {_which(grows, rows, apart)}: their times are those of a run "
            "of this length."
        )
    if short := [row for row in rows if _too_short(row)]:
        told.append(
            f"Too few requests for a steady state with {_which(short, rows, apart)}: give more --num-requests."
        )
    at_once = [_at_once(row) for row in rows if _at_once(row)]
    return [*told, *at_once[:1]]


def _which(some: Sequence[Row], rows: Sequence[Row], apart: Named) -> str:
    """Rows by what they are run with, or how many they are."""
    if len(some) == len(rows):
        return "each of these"
    if len(some) > MOST_NAMED:
        return f"{len(some):,} of these {len(rows):,}"
    return "; ".join(_with(row, apart) for row in some)


def best(rows: Sequence[Row], apart: Named) -> list[str]:
    """Which row to take: by the objective where there is one, among those that served most."""
    said = _alike(rows, apart)
    most = max((row["finished"] for row in rows), default=0)
    steady = [row for row in rows if not row["queue_grows"]] or list(rows)
    served = [row for row in steady if row["finished"] == most] or steady
    if len(served) < len(rows):
        kind = "without an endless queue " if len(steady) < len(rows) else ""
        said.append(f"Of the {counted(len(served), 'row')} {kind}that served most:")
    for field, text, highest in (
        ("goodput_requests_per_s", "Highest goodput: {} requests/s", True),
        ("output_tokens_per_s", "Most output tokens/s: {}", True),
        ("ttft_s_p99", "Shortest TTFT p99: {}", False),
    ):
        known = [row for row in served if row[field]]
        if known:
            said.append(_extreme(known, field, text, apart, highest=highest))
    return said


def about(row: Row) -> list[str]:
    """The verdict, then why, then what the times are worth."""
    told = (
        goal(row),
        verdict(row),
        unserved(row),
        _cached(row),
        _preempted(row),
        _binds(row),
        law(row),
    )
    return [text for text in told if text]


def goal(row: Row) -> str:
    """Which share met the objective."""
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


def verdict(row: Row) -> str:
    """How many are served, and how fast."""
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
    batch = "" if row["mean_batch"] is None else (
        f", {rate(row['mean_batch'])} requests in a step on average and at most {row['peak_batch']:,}"
    )  # fmt: skip
    bought = row["tokens_per_usd"]
    return (
        f"{who} served in {seconds(row['span_s'])}: {rate(row['output_tokens_per_s'])} output "
        f"tokens/s, {rate(row['requests_per_s'])} requests/s{batch}"
        f"{'' if bought is None else f'; {millions(bought)} output tokens a USD'}."
    )


def unserved(row: Row) -> str:
    """Who got no answer, and why."""
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


def law(row: Row) -> str:
    """The times are as good as this."""
    terms = law_terms(row, "")
    return f"A step takes {terms}: {row['step_time_basis']}."


def law_terms(row: Row, of: str) -> str:
    """The law of a step in words; `of` precedes the names of its terms."""
    base, read, token, context, pair = (
        row.get(f"{of}{name}_ns") or 0 for name in ("base", "read", "token", "context", "attention")
    )
    computing = f"{_ns(token)} a token"
    if pair:
        computing += f" and {_ns(pair)} a pair of a token and one that it attends to"
    if not read:
        return f"{_ns(base)}, {computing}, {_ns(context)} a token of context"
    return (
        f"{_ns(base)} of the host and the longer of reading ({_ns(read)} for the weights, {_ns(context)} a token "
        f"of context) and computing ({computing})"
    )


def _ns(value: float) -> str:
    """Nanoseconds in the unit that suits them."""
    if value < 1:
        return f"{value * 1000:.3g} ps"
    return (
        f"{value:.3g} ns"
        if value < 1000
        else f"{value / 1e3:.3g} µs"
        if value < 1e6
        else f"{value / 1e6:.3g} ms"
    )


def _with(row: Row, apart: Named) -> str:
    return ", ".join(words_of(row, apart)) or "these settings"


def _found_rate(row: Row) -> str:
    """The answer of --find-rate."""
    found = row.get("found_rate")
    if found is None:
        return ""
    refused = row.get("refused_rate")
    beyond = (
        "" if refused is None else f"; at {refused:.4g} it is {row['refused_rate_met_share']:.1%}"
    )
    return (
        f"The highest rate that keeps the objective: {found:.4g} requests/s, at which "
        f"{row['found_rate_met_share']:.1%} of requests meet it{beyond}."
    )


def _grows(row: Row) -> str:
    if not row["queue_grows"]:
        return ""
    return (
        f"The queue grows without bound: {row['arrivals_per_s']:.3g} requests arrive a second, "
        f"{rate(row['requests_per_s'])} are served; {row['queue_mid']:,} wait in the middle of the arrivals, "
        f"{row['queue_end']:,} at their end. Times are those of a run of this length."
    )


def _at_once(row: Row) -> str:
    """Where there are no arrivals, there are no latencies of a server."""
    if row["arrivals_per_s"] is not None or row["requests"] < 2 or not row["finished"]:
        return ""
    return (
        "All requests wait from the start: TTFT and E2E are of a queue of this length (--rate 4 lets them "
        "arrive); throughput and ITL are what counts here."
    )


def _too_short(row: Row) -> str:
    """Arrivals that end before the first answers do."""
    per_s, answer = row["arrivals_per_s"], row["e2e_s_p50"]
    if row["queue_grows"] or not per_s or answer is None or row.get("found_rate"):
        return ""
    lasts = (row["requests"] - 1) / per_s
    if lasts >= FEW_ANSWERS * answer:
        return ""
    return (
        f"The arrivals last {seconds(lasts)} and an answer takes {seconds(answer)} (E2E p50): too short for a "
        "steady state, give more --num-requests."
    )


def _of_few(row: Row) -> str:
    asked, finished = row["requests"], row["finished"]
    if not finished or finished >= MOST_SERVED * asked:
        return ""
    return f"Times are of the {finished:,} of {asked:,} requests that are served."


def _extreme(rows: Sequence[Row], field: str, text: str, apart: Named, *, highest: bool) -> str:
    """The row with the most or the least of something; who shares it is named too."""
    value = (max if highest else min)(float(row[field]) for row in rows)
    firsts = [row for row in rows if float(row[field]) == value]
    shown = text.format(rate(value) if highest else seconds(value))
    if len(firsts) == len(rows) > 1:
        return f"{shown} with each of them."
    return f"{shown} with {' or '.join(_with(row, apart) for row in firsts)}."


def _alike(rows: Sequence[Row], apart: Named) -> list[str]:
    """Cutting prompts changes nothing where none is longer than a step's tokens."""
    others = [name for name in apart if name != "scheduler"]
    runs: dict[str, dict[tuple[object, ...], tuple[int, int]]] = {"continuous": {}, "chunked": {}}
    for row in rows:
        if row["scheduler"] in runs:
            setting = tuple(row[name] for name in others)
            runs[row["scheduler"]][setting] = row["steps"], row["end_ns"]
    whole, cut = runs.values()
    if not whole or whole != cut:
        return []
    return [
        "continuous and chunked make the same schedule: no prompt had to be cut to the tokens of a step "
        "(--max-batched-tokens)."
    ]


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
    found = f"; {again:,} more were found in the cache at the return" if again else ""
    if row["swapped_blocks"]:
        size = "" if row["swapped_bytes"] is None else f" ({row['swapped_bytes'] / 2**30:,.3g} GiB)"
        took = (
            f"{seconds(row['swapped_blocks'] * row['swap_ns'] / 1e9)} of all steps"
            if row["swap_ns"]
            else "which is taken to last no time: give --swap-bandwidth"
        )
        found += f"; {counted(row['swapped_blocks'], 'block')}{size} moved out and in, {took}"
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
    limit = "The static batch" if row["binds"] == "batch" else row["binds"]
    name = f"{limit} binds" if waiting >= OFTEN * steps else "Requests seldom waited"
    return f"{name}: in {waiting:,} of {counted(steps, 'step')} some were left, {waits}."

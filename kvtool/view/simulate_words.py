"""What is said of runs of `kvtool simulate`: the verdict, why, and what times are worth."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.run import Row
from kvtool.view.simulate_lead import Named, named
from kvtool.view.words import counted, millions, rate, seconds

OFTEN = 0.01
"""Of all steps: from here on a limit that requests wait for is said to bind."""
TIMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
LIMITS = {
    "seqs": "a place among the {max_num_active_seqs:,} that may run",
    "tokens": "room among the {max_scheduled_tokens:,} tokens of a step",
    "blocks": "free blocks",
    "batch": "the batch before them to end",
}
"""What requests wait for, by the `waiting_for_…_steps` of a row."""


def best(rows: Sequence[Row], apart: Named) -> list[str]:
    """Which row to take: by the objective where there is one, among those that served most."""
    said = _alike(rows, apart)
    most = max((row["finished"] for row in rows), default=0)
    steady = [row for row in rows if not row["queue_grows"]] or list(rows)
    served = [row for row in steady if row["finished"] == most] or steady
    if len(served) < len(rows):
        kind = " without an endless queue" if len(steady) < len(rows) else ""
        who = f"The row{kind}" if len(served) == 1 else f"Of the {len(served):,} rows{kind}"
        said.append(f"{who} that served most:")
    at_once = all(row["arrivals_per_s"] is None for row in rows)
    for field, text, highest in (
        ("goodput_requests_per_s", "Highest goodput: {} requests/s", True),
        ("output_tokens_per_s", "Most output tokens/s: {}", True),
        ("ttft_s_p99", "Shortest TTFT p99: {}", False),
    ):
        if at_once and field != "output_tokens_per_s":
            continue
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
        _unsorted(row),
        _preempted(row),
        _binds(row),
        law(row),
    )
    return [text for text in told if text]


def goal(row: Row) -> str:
    """Which share met the objective."""
    if row["slo_met_share"] is None:
        return ""
    names = [name for name in ("ttft", "tpot", "e2e") if row[f"slo_{name}_s"] is not None]
    several = len(names) > 1 and row["slo_met_share"] < 1
    limits = [
        f"{TIMES[name]} {seconds(row[f'slo_{name}_s'])}"
        + (f" ({row[f'slo_{name}_met_share']:.1%})" if several else "")
        for name in names
    ]
    missed = [
        f"the shortest {TIMES[name]} is {seconds(row[f'{name}_s_min'])}" for name in names
        if row[f"{name}_s_min"] is not None and row[f"{name}_s_min"] > row[f"slo_{name}_s"]
    ]  # fmt: skip
    never = (
        f" {', '.join(missed)[:1].upper()}{', '.join(missed)[1:]}: no rate meets it."
        if missed
        else ""
    )
    cut = f", {row['cut']:,} of all cut at {row['max_model_len']:,} tokens" if row["cut"] else ""
    return (
        f"{row['slo_met_share']:.1%} of requests are within {', '.join(limits)}: a goodput of "
        f"{rate(row['goodput_requests_per_s'])} requests/s{cut}.{never}"
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
    bought = ""
    if row["tokens_per_usd"] is not None:
        priced = f"at {row['usd_per_hour']:.4g} USD an hour"
        bought = f"; {millions(row['tokens_per_usd'])} output tokens a USD, {priced}"
    return (
        f"{who} served in {seconds(row['span_s'])}: {rate(row['output_tokens_per_s'])} output "
        f"tokens/s, {rate(row['requests_per_s'])} requests/s{batch}"
        f"{bought}."
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
    base, read, token, context, pair, request = (
        row.get(f"{of}{name}_ns") or 0
        for name in ("base", "read", "token", "context", "attention", "request")
    )
    computing = f"{_ns(token)} a token"
    if pair:
        computing += f", {_ns(pair)} a pair of a token and one that it attends to"
    if request:
        computing += f", {_ns(request)} a request"
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


def _extreme(rows: Sequence[Row], field: str, text: str, apart: Named, *, highest: bool) -> str:
    """The row with the most or the least of something; who shares it is named too."""
    value = (max if highest else min)(float(row[field]) for row in rows)
    written = rate if highest else seconds  # what looks the same is no winner
    firsts = [row for row in rows if written(float(row[field])) == written(value)]
    shown = text.format(written(value))
    if len(firsts) == len(rows) > 1:
        return f"{shown} with each of them."
    return f"{shown} with {' or '.join(named(row, apart) for row in firsts)}."


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


def _unsorted(row: Row) -> str:
    """Where the order of the queue could not do its work."""
    steps = row["unsorted_steps"]
    if not steps:
        return ""
    return (
        f"After {steps:,} of {counted(row['steps'], 'step')} more than 128 were waiting: SGLang does not sort so "
        "many, and the order is that of arrival."
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

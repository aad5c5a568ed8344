"""Rows of `kvtool simulate`: requests through vLLM's scheduler, and what they come to.

A step is a call of `schedule`, seen after it and before its output is processed. What a replay has in
whole nanoseconds a row has in seconds.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvtool.queueing import NO_GROWTH, looks, queue_row
from kvtool.requests import SECOND_NS
from kvtool.timeline import over_time

if TYPE_CHECKING:
    from kvtool.requests import Column, Requests
    from kvtool.run import Row
    from kvtool.sim.replay import Replay
    from kvtool.sim.settings import Settings
    from kvtool.slo import Slo

PERCENTILES = (50, 90, 99)


def row_of(
    found: Replay,
    requests: Requests,
    settings: Settings,
    bytes_per_token: int | None = None,
    *,
    scheduler: str | None = None,
) -> Row:
    """The row of a run: its settings, its totals, times of requests, and what made them wait.

    `bytes_per_token` of the whole model say how many bytes were swapped. The scheduler is what the settings
    say, unless it is static.
    """
    name = scheduler or ("chunked" if settings.chunked_prefill else "continuous")
    larger = _larger_than_pool(found, requests, settings, is_static=name == "static")
    block_bytes = None if bytes_per_token is None else bytes_per_token * settings.block_size
    return {
        "scheduler": name,
        "requests": len(requests),
        **echo_of(settings),
        **_totals(found),
        "larger_than_pool": larger,
        **rates_of(found, int(found.steps["end_ns"][-1]) if len(found.steps["end_ns"]) else None),
        **times_of(found),
        **_queue(found),
        **over_time(found, settings),
        "swapped_bytes": None if block_bytes is None else found.swapped_blocks * block_bytes,
    }


def goals_of(found: Replay, slo: Slo | None, row: Row, priced_usd: float | None) -> Row:
    """Which requests met an objective, what a dollar buys, and whether the queue has an end."""
    from kvtool.slo import NAMES, met, met_each

    limits = slo.limits if slo else {}
    goals: Row = {
        f"slo_{name}_s": limits[name] / SECOND_NS if name in limits else None for name in NAMES
    }
    each = met_each(slo, found) if slo else {}
    goals |= {
        f"slo_{name}_met_share": _mean(each[name]) if name in each else None for name in NAMES
    }
    share = goodput = None
    if slo is not None:
        good = met(slo, found)
        share = _mean(good)
        goodput = float(good.sum()) / row["span_s"] if row["span_s"] else None
    rate = row["output_tokens_per_s"]
    return {
        **goals,
        "slo_met_share": share,
        "goodput_requests_per_s": goodput,
        "usd_per_hour": priced_usd,
        "tokens_per_usd": rate * 3600 / priced_usd if rate and priced_usd else None,
        **growth_of(found),
    }


def _mean(good: Any) -> float:
    return float(good.mean()) if len(good) else 0.0


def growth_of(found: Replay) -> Row:
    """Who waits in the middle of the arrivals, at three quarters and at their end: `queue_row`."""
    import numpy as np

    arrivals = np.sort(found.arrival_ns[found.arrival_ns >= 0])
    ends, waiting = found.steps["end_ns"], found.steps["waiting"]
    if len(arrivals) < 2 or arrivals[0] == arrivals[-1] or not len(ends):
        return dict(NO_GROWTH)
    places = np.searchsorted(ends, [arrivals[place] for place in looks(len(arrivals))])
    lengths = waiting[np.minimum(places, len(ends) - 1)].tolist()
    return queue_row(arrivals, lengths, int(found.steps["running"].max()))


def echo_of(settings: Settings) -> Row:
    """Every setting under the name of its option, resolved."""
    echoed = asdict(settings)
    law = echoed.pop("step_time")
    return {
        **echoed,
        "index": settings.index if settings.prefix_caching else None,
        "max_num_active_seqs": settings.max_running,
        "max_scheduled_tokens": settings.token_budget,
        **law,
    }


def _totals(found: Replay) -> Row:
    """Counts and sums over the whole run; a request that was cut is one that finished."""
    steps = found.steps
    count = len(steps["end_ns"])
    return {
        "steps": count,
        "end_ns": int(steps["end_ns"][-1]) if count else 0,
        "preemptions": found.preemptions,
        "recomputed_tokens": found.recomputed_tokens,
        "swapped_blocks": found.swapped_blocks,
        "queried_tokens": found.queried_tokens,
        "hit_tokens": found.hit_tokens,
        "requery_tokens": found.requery_tokens,
        "rehit_tokens": found.rehit_tokens,
        "evictions": int(steps["evictions"].sum()),
        "scheduled_tokens": int(steps["scheduled_tokens"].sum()),
        **ends_of(found),
        "used_block_steps": int(steps["used_blocks"].sum()),
        "mean_used_blocks": float(steps["used_blocks"].mean()) if count else None,
        "mean_batch": float(steps["batch"].mean()) if count else None,
        "peak_batch": int(steps["batch"].max()) if count else 0,
    }


def ends_of(found: Replay) -> Row:
    """How requests ended, and the tokens that they were given."""
    from kvtool.sim.settings import STATUSES

    status = {word: int((found.outcomes["status"] == k).sum()) for k, word in enumerate(STATUSES)}
    return {
        "generated_tokens": int(found.outcomes["generated"].sum()),
        "finished": status["done"] + status["cut"],
        **{word: status[word] for word in ("cut", "rejected", "aborted", "unfinished")},
    }


def finished_in(found: Replay) -> Any:
    """Which requests got all their tokens, or all that max_model_len allows."""
    from kvtool.sim.settings import CUT, DONE

    status = found.outcomes["status"]
    return (status == DONE) | (status == CUT)


def _larger_than_pool(
    found: Replay, requests: Requests, settings: Settings, *, is_static: bool
) -> int:
    """Of the aborted those that no pool of this size holds; the others no single step. A static batch
    reserves all at once, and aborts for no other reason."""
    import numpy as np

    from kvtool.sim.settings import ABORTED

    aborted = found.outcomes["status"] == ABORTED
    if is_static:
        return int(aborted.sum())
    tokens = requests.prompt_tokens + found.outcomes["generated"]
    blocks = -(-np.minimum(tokens, settings.max_model_len) // settings.block_size)
    return int((aborted & (blocks > settings.num_blocks)).sum())


def rates_of(found: Replay, end_ns: int | None) -> Row:
    """Tokens and requests that ended, over the time from the first arrival to the last step's end."""
    arrivals = found.arrival_ns[found.arrival_ns >= 0]
    span_s = 0.0 if end_ns is None else (end_ns - int(arrivals.min())) / SECOND_NS
    tokens, finished = int(found.outcomes["generated"].sum()), int(finished_in(found).sum())
    return {
        "span_s": span_s,
        "output_tokens_per_s": tokens / span_s if span_s else None,
        "requests_per_s": finished / span_s if span_s else None,
    }


def times_of(found: Replay) -> Row:
    """TTFT, TPOT and E2E of who finished, ITL of all gaps: who got no answer has no latency."""
    outcomes, finished = found.outcomes, finished_in(found)
    first, arrival = outcomes["first_token_ns"], found.arrival_ns
    finish, generated = outcomes["finish_ns"], outcomes["generated"]
    several = finished & (generated > 1)
    values: dict[str, tuple[Any, Any]] = {
        "ttft": ((first - arrival)[finished], None),
        "itl": found.gaps or (first[:0], None),
        "tpot": ((finish - first)[several] / (generated[several] - 1), None),
        "e2e": ((finish - arrival)[finished], None),
    }
    row: Row = {}
    for name, (ns, weights) in values.items():
        row |= seconds_of(name, ns, weights)
    return row


def seconds_of(name: str, ns: Any, weights: Column | None = None) -> Row:
    """The shortest and PERCENTILES of times, in seconds, under this name."""
    found = zip(PERCENTILES, percentiles(ns, weights), strict=True)
    there = ns if weights is None else ns[weights > 0]
    values = {"min": there.min().item() if len(there) else None}
    values |= {f"p{percent}": value for percent, value in found}
    return {
        f"{name}_s_{which}": None if value is None else value / SECOND_NS
        for which, value in values.items()
    }


def percentiles(values: Any, weights: Column | None = None) -> list[float | None]:
    """PERCENTILES by nearest rank: the smallest value with at least that share at or below it.

    `weights` says how often each value occurs. None where there is no value.
    """
    import numpy as np

    order = np.argsort(values, kind="stable")
    count = np.cumsum(np.ones(len(values), np.int64) if weights is None else weights[order])
    if not len(values) or not count[-1]:
        return [None] * len(PERCENTILES)
    places = [np.searchsorted(count * 100, percent * count[-1]) for percent in PERCENTILES]
    return [values[order[place]].item() for place in places]


def _queue(found: Replay) -> Row:
    """In how many steps the head of the queue was kept out, and by which limit."""
    from kvtool.sim.settings import BATCH_CLOSED, NO_MEMORY, NO_SEAT, NO_TOKENS

    limits = {
        "max_num_seqs": NO_SEAT, "max_batched_tokens": NO_TOKENS, "num_blocks": NO_MEMORY,
        "batch": BATCH_CLOSED,
    }  # fmt: skip
    held_up = found.steps["held_up"]
    counts = {name: int((held_up == limit).sum()) for name, limit in limits.items()}
    return {
        "waiting_steps": sum(counts.values()),
        "waiting_for_seqs_steps": counts["max_num_seqs"],
        "waiting_for_tokens_steps": counts["max_batched_tokens"],
        "waiting_for_blocks_steps": counts["num_blocks"],
        "waiting_for_batch_steps": counts["batch"],
        "binds": max(counts, key=lambda name: counts[name]) if any(counts.values()) else None,
    }


def notes_of(row: Row, *, interrupted: bool = False) -> list[str]:
    """Why requests of a row got no answer or not all of it, and what of it is not known."""
    from kvtool.sim.settings import STOP

    longest, pool = f"--max-model-len {row['max_model_len']:,}", row["num_blocks"]
    larger, budget = row["larger_than_pool"], row["max_scheduled_tokens"]
    told = [
        (row["rejected"], f"rejected: the prompt is empty, or not shorter than {longest}"),
        (larger, f"aborted: larger than the pool, {pool * row['block_size']:,} tokens"),
        (
            row["aborted"] - larger,
            f"aborted: without chunked prefill they need more than the {budget:,} tokens of a step",
        ),
        (row["cut"], f"cut: {longest} ends them before all of their output"),
    ]
    if row["on_stall"] == STOP and not interrupted:
        why = "unfinished: the head of the queue never fits, and --on-stall stop ended the run"
        told.append((row["unfinished"], why))
    notes = [f"{count:,} of {row['requests']:,} requests {why}" for count, why in told if count]
    for name, what in (("index", "radix"), ("policy", "lpm")):
        if row[name] == what:
            notes.append(
                f"--{name} {what}: rules read in SGLang's source, under vLLM's steps; no engine row to compare with"
            )
    if row["itl_s_p50"] is None and row["tpot_s_p50"] is not None:
        notes.append(
            "itl is null: more requests decoded than a step has tokens, and which of them got none"
            " in a step is not written down"
        )
    return notes

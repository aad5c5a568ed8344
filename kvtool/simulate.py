"""Rows of `kvtool simulate`: requests through vLLM's scheduler, and what they come to.

A step is a call of `schedule`, seen after it and before its output is processed. What a replay has in
whole nanoseconds a row has in seconds.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvtool.requests import SECOND_NS

if TYPE_CHECKING:
    from kvtool.requests import Column, Requests
    from kvtool.run import Row
    from kvtool.sim.replay import Replay
    from kvtool.sim.settings import Settings

PERCENTILES = (50, 90, 99)


def row_of(found: Replay, requests: Requests, settings: Settings) -> Row:
    """The row of a run: its settings, its totals, times of requests, and what made them wait."""
    return {
        "scheduler": "chunked" if settings.chunked_prefill else "continuous",
        "requests": len(requests),
        **_settings(settings),
        **_totals(found),
        "larger_than_pool": _larger_than_pool(found, requests, settings),
        **_rates(found),
        **_times(found),
        **_queue(found),
        "swapped_bytes": None,
        "tokens_per_usd": None,
    }


def _settings(settings: Settings) -> Row:
    """Every setting under the name of its option, resolved."""
    echoed = asdict(settings)
    law = echoed.pop("step_time")
    for name in ("preemption", "cpu_blocks"):
        del echoed[name]
    return {
        **echoed,
        "max_num_active_seqs": settings.max_running,
        "max_scheduled_tokens": settings.token_budget,
        **law,
    }


def _totals(found: Replay) -> Row:
    """Counts and sums over the whole run; a request that was cut is one that finished."""
    from kvtool.sim.settings import STATUSES

    steps = found.steps
    status = {word: int((found.outcomes["status"] == k).sum()) for k, word in enumerate(STATUSES)}
    count = len(steps["end_ns"])
    return {
        "steps": count,
        "end_ns": int(steps["end_ns"][-1]) if count else 0,
        "preemptions": found.preemptions,
        "recomputed_tokens": found.recomputed_tokens,
        "queried_tokens": found.queried_tokens,
        "hit_tokens": found.hit_tokens,
        "requery_tokens": found.requery_tokens,
        "rehit_tokens": found.rehit_tokens,
        "evictions": int(steps["evictions"].sum()),
        "scheduled_tokens": int(steps["scheduled_tokens"].sum()),
        "generated_tokens": int(found.outcomes["generated"].sum()),
        "finished": status["done"] + status["cut"],
        **{word: status[word] for word in ("cut", "rejected", "aborted", "unfinished")},
        "used_block_steps": int(steps["used_blocks"].sum()),
        "mean_used_blocks": float(steps["used_blocks"].mean()) if count else None,
        "mean_batch": float(steps["batch"].mean()) if count else None,
        "peak_batch": int(steps["batch"].max()) if count else 0,
    }


def _finished(found: Replay) -> Any:
    """Which requests got all their tokens, or all that max_model_len allows."""
    from kvtool.sim.settings import CUT, DONE

    status = found.outcomes["status"]
    return (status == DONE) | (status == CUT)


def _larger_than_pool(found: Replay, requests: Requests, settings: Settings) -> int:
    """Of the aborted those that no pool of this size holds; the others no single step."""
    import numpy as np

    from kvtool.sim.settings import ABORTED

    tokens = requests.prompt_tokens + found.outcomes["generated"]
    blocks = -(-np.minimum(tokens, settings.max_model_len) // settings.block_size)
    return int(((found.outcomes["status"] == ABORTED) & (blocks > settings.num_blocks)).sum())


def _rates(found: Replay) -> Row:
    """Tokens and requests that ended, over the time from the first arrival to the last step's end."""
    ends, arrivals = found.steps["end_ns"], found.arrival_ns[found.arrival_ns >= 0]
    span_s = (int(ends[-1]) - int(arrivals.min())) / SECOND_NS if len(ends) else 0.0
    tokens, finished = int(found.outcomes["generated"].sum()), int(_finished(found).sum())
    return {
        "span_s": span_s,
        "output_tokens_per_s": tokens / span_s if span_s else None,
        "requests_per_s": finished / span_s if span_s else None,
    }


def _times(found: Replay) -> Row:
    """TTFT, TPOT and E2E of who finished, ITL of all gaps: who got no answer has no latency."""
    outcomes, finished = found.outcomes, _finished(found)
    first, arrival = outcomes["first_token_ns"], found.arrival_ns
    finish, generated = outcomes["finish_ns"], outcomes["generated"]
    several = finished & (generated > 1)
    values: dict[str, tuple[Any, Any]] = {
        "ttft": ((first - arrival)[finished], None),
        "itl": found.gaps or (first[:0], None),
        "tpot": ((finish - first)[several] / (generated[several] - 1), None),
        "e2e": ((finish - arrival)[finished], None),
    }
    return {
        f"{name}_s_p{percent}": None if value is None else value / SECOND_NS
        for name, (ns, weights) in values.items()
        for percent, value in zip(PERCENTILES, percentiles(ns, weights), strict=True)
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
    """In how many steps the head of the queue was kept out, and by which of the three limits."""
    from kvtool.sim.settings import NO_MEMORY, NO_SEAT, NO_TOKENS

    limits = {"max_num_seqs": NO_SEAT, "max_batched_tokens": NO_TOKENS, "num_blocks": NO_MEMORY}
    held_up = found.steps["held_up"]
    counts = {name: int((held_up == limit).sum()) for name, limit in limits.items()}
    return {
        "waiting_steps": sum(counts.values()),
        "waiting_for_seqs_steps": counts["max_num_seqs"],
        "waiting_for_tokens_steps": counts["max_batched_tokens"],
        "waiting_for_blocks_steps": counts["num_blocks"],
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
    if row["itl_s_p50"] is None and row["tpot_s_p50"] is not None:
        notes.append(
            "itl is null: more requests decoded than a step has tokens, and which of them got none"
            " in a step is not written down"
        )
    return notes

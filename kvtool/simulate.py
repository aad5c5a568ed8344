"""Rows of `kvtool simulate`: requests through vLLM's scheduler, and what requests and steps saw.

Steps are calls of `schedule`, seen after it and before its output is processed. Times inside are whole
nanoseconds; in a row they are seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtool.errors import KvtoolError, usage_error
from kvtool.requests import SECOND_NS

if TYPE_CHECKING:
    from kvtool.requests import Column, Requests
    from kvtool.run import Row
    from kvtool.sim.scheduler import Scheduler
    from kvtool.sim.settings import Settings

    Progress = Callable[[int], None]
    Columns = dict[str, Column]

PERCENTILES = (50, 90, 99)
LONGEST_STEP_NS = 2**62
"""Two of these can be added in 64 bits and be seen to have gone over."""
OUTCOMES = (
    "admit_step", "first_token_step", "finish_step", "first_token_ns", "finish_ns",
    "num_preemptions", "generated", "status",
)  # fmt: skip
STEPS = (
    "scheduled_tokens", "batch", "running", "waiting", "used_blocks", "context_tokens", "end_ns",
)  # fmt: skip
LINES_AT_ONCE = 1 << 16
_REQUEST_LINE = (
    '{"admit_step": %d, "first_token_step": %d, "finish_step": %d, "first_token_ns": %d,'
    ' "finish_ns": %d, "num_preemptions": %d, "cached_tokens_first": 0,'
    ' "cached_tokens_after_preemption": 0, "generated": %d, "status": "%s"}\n'
)
_STEP_LINE = (
    '{"scheduled_tokens": %d, "batch": %d, "running": %d, "waiting": %d, "used_blocks": %d,'
    ' "context_tokens": %d, "evictions": 0, "end_ns": %d}\n'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A run of the scheduler. Steps and nanoseconds are -1 where it did not come to that."""

    arrival_ns: Column
    """Of each request by index; -1 if what it waits for never ended."""
    outcomes: Columns
    """OUTCOMES of each request by index; `status` is a place in kvtool.sim.settings.STATUSES."""
    steps: Columns
    """STEPS of each step."""
    gaps: tuple[Column, Column] | None
    """Nanoseconds between a request's consecutive tokens, and how often; None: not known."""
    preemptions: int
    recomputed_tokens: int
    interrupted: bool


def replay(
    requests: Requests, settings: Settings, progress: Progress = lambda ended: None
) -> Replay:
    """The requests through the scheduler, exactly; `progress` is told how many more have ended."""
    import numpy as np

    _check_step_time(requests, settings)
    run = _run_plain if has_dependent(requests) else _run_engine
    try:
        found = run(requests, settings, progress)
        over = bool((np.diff(found.steps["end_ns"]) < 0).any())
    except OverflowError:
        over = True
    if over:
        raise KvtoolError(
            "the clock went beyond 2^63 ns (292 years)",
            "make the steps shorter (--step-time), or the arrivals earlier",
        )
    return found


def has_dependent(requests: Requests) -> bool:
    """Whether a request waits for another one's end: then its arrival is not known beforehand."""
    return bool((requests.arrival_ns < 0).any())


def _check_step_time(requests: Requests, settings: Settings) -> None:
    """Refuse a law of time that could go over in a single step, where it would not be seen."""
    import numpy as np

    law = settings.step_time
    tokens = requests.prompt_tokens + requests.output_tokens
    most = np.minimum(tokens, settings.max_model_len).sum(dtype=float)
    most = min(float(most), settings.num_slots)
    longest = law.base_ns + law.token_ns * min(most, settings.token_budget) + law.context_ns * most
    if longest > LONGEST_STEP_NS:
        raise usage_error(
            "--step-time: a step could take more than 2^62 ns (146 years)",
            "give fewer ns a token: base_ns=10000000,token_ns=20000,context_ns=1 is the default",
        )


def _run_engine(requests: Requests, settings: Settings, progress: Progress) -> Replay:
    """By the fast engine, which wants the requests in the order of arrival."""
    import numpy as np

    from kvtool.sim.engine import Engine

    order = np.argsort(requests.arrival_ns, kind="stable")
    engine = Engine(
        source=[requests.take(order)],
        num_requests=len(requests),
        settings=settings,
        recorded=True,
        progress=progress,
    ).run()
    run, buffer = engine.state.run, engine.state.steps
    # What an interrupt kept from being handed over is still in the buffer.
    records = np.concatenate([engine.all_steps(), buffer[: run.steps_kept]])[: run.step]
    resumed = np.concatenate([*engine.gaps, buffer["gap"][: run.gaps_kept]])
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    outcomes = engine.state.outcomes[place]
    steps = {name: records[name].copy() for name in STEPS if name != "used_blocks"}
    gaps = (
        np.concatenate([np.diff(steps["end_ns"]), resumed]),
        np.concatenate([records["decoded"][1:], np.ones_like(resumed)]),
    )
    return Replay(
        arrival_ns=requests.arrival_ns,
        outcomes={name: outcomes[name].copy() for name in OUTCOMES},
        steps=steps | {"used_blocks": records["held"] // settings.block_size},
        gaps=None if run.skips else gaps,
        preemptions=int(run.preemptions),
        recomputed_tokens=int(run.recomputed),
        interrupted=engine.interrupted,
    )


def _run_plain(requests: Requests, settings: Settings, progress: Progress) -> Replay:
    """By the plain scheduler, which knows requests that wait for others."""
    import numpy as np

    gaps: Counter[int] = Counter()
    arrival_ns = requests.arrival_ns.copy()
    scheduler = _timed_scheduler(requests, settings, gaps, arrival_ns, progress)
    interrupted = False
    try:
        scheduler.run()
    except KeyboardInterrupt:
        interrupted = True
    result = scheduler.result

    def columns(records: list[Any], names: tuple[str, ...]) -> Columns:
        return {
            name: np.array([getattr(one, name) for one in records], np.int64) for name in names
        }

    steps = columns(result.steps, (*(n for n in STEPS if n != "used_blocks"), "held_slots"))
    steps["used_blocks"] = steps.pop("held_slots") // settings.block_size
    return Replay(
        arrival_ns=arrival_ns,
        outcomes=columns(result.outcomes, OUTCOMES),
        steps=steps,
        gaps=(np.array(list(gaps), np.int64), np.array(list(gaps.values()), np.int64)),
        preemptions=len(result.preemptions),
        recomputed_tokens=result.recomputed_tokens,
        interrupted=interrupted,
    )


def _timed_scheduler(
    requests: Requests,
    settings: Settings,
    gaps: Counter[int],
    arrival_ns: Column,
    progress: Progress,
) -> Scheduler:
    """A plain scheduler that also writes down gaps between tokens and who came when."""
    from kvtool.sim import scheduler
    from kvtool.sim.memory import Paged, Request

    last_ns: dict[int, int] = {}

    class Timed(scheduler.Scheduler):
        def _process(self, scheduled: list[tuple[Request, int]]) -> None:
            for request, _ in scheduled:
                if request.computed >= request.num_tokens:
                    if request.index in last_ns:
                        gaps[self.clock_ns - last_ns[request.index]] += 1
                    last_ns[request.index] = self.clock_ns
            super()._process(scheduled)

        def _end(self, request: Request, status: int) -> None:
            for child in self.children.get(request.index, ()):
                arrival_ns[child] = self.clock_ns + (self.think_ns[child] if self.think_ns else 0)
            super()._end(request, status)
            progress(1)

    return Timed(requests, settings, Paged(settings))


# --- what a run comes to --------------------------------------------------------------------------


def row_of(found: Replay, requests: Requests, settings: Settings) -> Row:
    """The row of a run: its settings, its totals, times of requests, and what made them wait."""
    return {
        "scheduler": "chunked" if settings.chunked_prefill else "continuous",
        "requests": len(requests),
        **_settings(settings),
        **_totals(found),
        **_rates(found),
        **_times(found),
        **_queue(found, requests, settings),
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
        "policy": "fcfs",
        "prefix_caching": False,
        "async_scheduling": False,
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
        "queried_tokens": 0,
        "hit_tokens": 0,
        "requery_tokens": 0,
        "rehit_tokens": 0,
        "evictions": 0,
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
    """TTFT of who got a token, ITL of all gaps, E2E and TPOT of who finished."""
    outcomes, finished = found.outcomes, _finished(found)
    first, arrival = outcomes["first_token_ns"], found.arrival_ns
    finish, generated = outcomes["finish_ns"], outcomes["generated"]
    several = finished & (generated > 1)
    values = {
        "ttft": ((first - arrival)[first >= 0], None),
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


def _queue(found: Replay, requests: Requests, settings: Settings) -> Row:
    """In how many steps somebody was left waiting, and what for. The three add up to the first."""
    steps = found.steps
    waits = steps["waiting"] > 0
    seqs = waits & (steps["running"] >= settings.max_running)
    tokens = waits & ~seqs & (steps["scheduled_tokens"] >= settings.token_budget)
    if not settings.chunked_prefill:  # a prompt that does not fit the rest of the step waits too
        longest = int((requests.prompt_tokens + requests.output_tokens).max())
        needed = -(-min(longest, settings.max_model_len) // settings.block_size)
        free = settings.num_blocks - steps["used_blocks"]
        tokens |= waits & ~seqs & (free >= needed + settings.watermark_blocks)
    counts = {
        "max_num_seqs": int(seqs.sum()),
        "max_batched_tokens": int(tokens.sum()),
        "num_blocks": int((waits & ~seqs & ~tokens).sum()),
    }
    return {
        "waiting_steps": sum(counts.values()),
        "waiting_for_seqs_steps": counts["max_num_seqs"],
        "waiting_for_tokens_steps": counts["max_batched_tokens"],
        "waiting_for_blocks_steps": counts["num_blocks"],
        "binds": max(counts, key=lambda name: counts[name]) if any(counts.values()) else None,
    }

"""Requests through the scheduler, each step and each request written down, by whichever engine can.

Where blocks are as good as each other, the fast engine counts them; where one is told from another, or
the order of requests is not that of their arrival, kvtool.sim.blocks goes through them: it is imported when
it is needed, as this takes 60 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtool.requests import Requests
from kvtool.sim import engine
from kvtool.sim.engine import Engine
from kvtool.sim.settings import FCFS, Settings

if TYPE_CHECKING:
    from kvtool.contents import Contents
    from kvtool.requests import Column

    Columns = dict[str, Column]

Progress = Callable[[int], None]
"""Told how many requests have ended since it was last told."""

OUTCOMES = (
    "admit_step", "first_token_step", "finish_step", "first_token_ns", "finish_ns",
    "num_preemptions", "generated", "status",
)  # fmt: skip
CACHED = ("cached_tokens_first", "cached_tokens_after_preemption")
STEPS = (
    "scheduled_tokens", "batch", "running", "waiting", "context_tokens", "begin_ns", "end_ns", "held_up",
    "preemptions",
)  # fmt: skip
SHARED = ("queried", "hit", "requery", "rehit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A run of the scheduler. Steps and nanoseconds are -1 where it did not come to that."""

    arrival_ns: Column
    """Of each request by index; -1 if what it waits for never ended."""
    outcomes: Columns
    """OUTCOMES and CACHED of each request by index; `status` is a place in settings.STATUSES."""
    steps: Columns
    """STEPS (`preemptions` so far), `used_blocks` and `evictions` of each step."""
    gaps: tuple[Column, Column] | None
    """Nanoseconds between a request's consecutive tokens, and how often; None: not known."""
    preemptions: int
    recomputed_tokens: int
    """That preempted requests had computed, less what they found of them when they came back."""
    swapped_blocks: int = 0
    """Moved out of the pool, and those moved in."""
    interrupted: bool
    queried_tokens: int = 0
    hit_tokens: int = 0
    """At first admissions: tokens that were looked up in the prefix cache, and those found."""
    requery_tokens: int = 0
    rehit_tokens: int = 0
    """The same of requests that had been preempted."""


def replay(
    requests: Requests,
    settings: Settings,
    progress: Progress = lambda ended: None,
    *,
    contents: Contents | None = None,
) -> Replay:
    """All of the requests, or as far as an interrupt lets it come; prefix caching needs `contents`."""
    if settings.prefix_caching and contents is None:
        raise ValueError("what the requests consist of must be known")
    if tells_blocks_apart(requests, settings):
        return _run_blocks(requests, settings, progress, contents)
    return _run_counts(requests, settings, progress)


def tells_blocks_apart(requests: Requests, settings: Settings) -> bool:
    """Whether the engine that only counts blocks cannot run this."""
    return (
        settings.prefix_caching
        or settings.async_scheduling
        or settings.policy != FCFS
        or bool((requests.arrival_ns < 0).any())
    )


def compiles(requests: Requests, settings: Settings) -> bool:
    """Whether the first such run on this machine is still to come."""
    if not tells_blocks_apart(requests, settings):
        return engine.compiles()
    from kvtool.sim.blocks import engine as blocks_engine

    return blocks_engine.compiles(settings)


def _run_counts(requests: Requests, settings: Settings, progress: Progress) -> Replay:
    """By the engine that counts, which wants the requests in the order of arrival."""
    order = np.argsort(requests.arrival_ns, kind="stable")
    found = Engine(
        source=[requests.take(order)],
        num_requests=len(requests),
        settings=settings,
        recorded=True,
        progress=progress,
    ).run()
    run = found.state.run
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    told = found.state.outcomes[place]
    outcomes = {name: told[name].copy() for name in OUTCOMES}
    outcomes |= dict.fromkeys(CACHED, np.zeros(len(place), np.int64))
    outcomes["cached_tokens_first"] = -(outcomes["admit_step"] < 0).astype(np.int64)
    steps, gaps = steps_of(found), gaps_of(found)
    return Replay(
        arrival_ns=requests.arrival_ns,
        outcomes=outcomes,
        steps=steps,
        gaps=gaps,
        preemptions=int(run.preemptions),
        recomputed_tokens=int(run.recomputed),
        swapped_blocks=int(run.swapped),
        interrupted=found.interrupted,
    )


def steps_of(found: Engine) -> Columns:
    """The steps of a recorded run of the engine that counts."""
    records = found.all_steps()
    steps = {name: records[name].copy() for name in STEPS}
    steps["used_blocks"] = records["held"] // found.settings.block_size
    steps["evictions"] = np.zeros(len(records), np.int64)
    return steps


def gaps_of(found: Engine) -> tuple[Column, Column] | None:
    """Nanoseconds between tokens of a request, and how often; None if somebody was left out of a step."""
    records = found.all_steps()
    resumed = np.concatenate([records["gap"][:0], *found.gaps])
    if found.state.run.skips:
        return None
    return (  # who decodes had its token before at the end of the step before
        np.concatenate([np.diff(records["end_ns"]), resumed]),
        np.concatenate([records["decoded"][1:], np.ones_like(resumed)]),
    )


def _run_blocks(
    requests: Requests, settings: Settings, progress: Progress, contents: Contents | None
) -> Replay:
    """By the engine that knows blocks, orders and what is under way."""
    from kvtool.sim.blocks.engine import BlocksEngine

    found = BlocksEngine(
        requests=requests, settings=settings, contents=contents, progress=progress
    ).run()
    run, records = found.state.run, found.all_steps()
    return Replay(
        arrival_ns=found.outcome("arrival_ns"),
        outcomes={name: found.outcome(name) for name in (*OUTCOMES, *CACHED)},
        steps={name: records[name].copy() for name in (*STEPS, "used_blocks", "evictions")},
        gaps=found.all_gaps(),
        preemptions=int(run.preemptions),
        recomputed_tokens=int(run.recomputed - run.regained),
        interrupted=found.interrupted,
        **{f"{name}_tokens": int(run[name]) for name in SHARED},
    )

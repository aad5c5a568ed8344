"""Requests through the scheduler, each step and each request written down, by whichever loop can.

The fast engine serves requests whose arrivals are known; where one waits for another's end, the plain
scheduler runs. Both give the same integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtool.errors import KvtoolError
from kvtool.requests import Requests
from kvtool.sim.engine import Engine, clock_is_full
from kvtool.sim.memory import Paged, Request
from kvtool.sim.scheduler import Scheduler
from kvtool.sim.settings import Settings

if TYPE_CHECKING:
    from kvtool.requests import Column

    Columns = dict[str, Column]

Progress = Callable[[int], None]
"""Told how many requests have ended since it was last told."""

MOST_LISTED = 1 << 22
"""Blocks that the plain scheduler may list one by one."""
OUTCOMES = (
    "admit_step", "first_token_step", "finish_step", "first_token_ns", "finish_ns",
    "num_preemptions", "generated", "status",
)  # fmt: skip
STEPS = (
    "scheduled_tokens", "batch", "running", "waiting", "context_tokens", "end_ns", "held_up",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A run of the scheduler. Steps and nanoseconds are -1 where it did not come to that."""

    arrival_ns: Column
    """Of each request by index; -1 if what it waits for never ended."""
    outcomes: Columns
    """OUTCOMES of each request by index; `status` is a place in kvtool.sim.settings.STATUSES."""
    steps: Columns
    """STEPS and `used_blocks` of each step."""
    gaps: tuple[Column, Column] | None
    """Nanoseconds between a request's consecutive tokens, and how often; None: not known."""
    preemptions: int
    recomputed_tokens: int
    interrupted: bool


def replay(
    requests: Requests, settings: Settings, progress: Progress = lambda ended: None
) -> Replay:
    """All of the requests, or as far as an interrupt lets it come."""
    run = _run_plain if has_dependent(requests) else _run_engine
    try:
        return run(requests, settings, progress)
    except OverflowError as error:  # of the plain scheduler, whose whole numbers know no end
        raise clock_is_full() from error


def has_dependent(requests: Requests) -> bool:
    """Whether a request waits for another one's end: then its arrival is not known beforehand."""
    return bool((requests.arrival_ns < 0).any())


def _run_engine(requests: Requests, settings: Settings, progress: Progress) -> Replay:
    """By the fast engine, which wants the requests in the order of arrival."""
    order = np.argsort(requests.arrival_ns, kind="stable")
    engine = Engine(
        source=[requests.take(order)],
        num_requests=len(requests),
        settings=settings,
        recorded=True,
        progress=progress,
    ).run()
    run, records = engine.state.run, engine.all_steps()
    resumed = np.concatenate([records["gap"][:0], *engine.gaps])
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    outcomes = engine.state.outcomes[place]
    steps = {name: records[name].copy() for name in STEPS}
    gaps = (  # who decodes had its token before at the end of the step before
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


class TimedScheduler(Scheduler):
    """The plain scheduler, which also writes down the gaps between tokens and who came when."""

    def __init__(self, requests: Requests, settings: Settings, progress: Progress) -> None:
        super().__init__(requests, settings, Paged(settings))
        self.arrival_ns = requests.arrival_ns.copy()
        self.gaps: Counter[int] = Counter()
        self.last_ns: dict[int, int] = {}
        self.progress = progress

    def _process(self, scheduled: list[tuple[Request, int]]) -> None:
        for request, _ in scheduled:
            if request.computed >= request.num_tokens:
                if request.index in self.last_ns:
                    self.gaps[self.clock_ns - self.last_ns[request.index]] += 1
                self.last_ns[request.index] = self.clock_ns
        super()._process(scheduled)

    def _end(self, request: Request, status: int) -> None:
        for child in self.children.get(request.index, ()):
            think_ns = self.think_ns[child] if self.think_ns else 0
            self.arrival_ns[child] = self.clock_ns + think_ns
        super()._end(request, status)
        self.progress(1)


def _run_plain(requests: Requests, settings: Settings, progress: Progress) -> Replay:
    """By the plain scheduler, which knows requests that wait for others."""
    if settings.num_blocks > MOST_LISTED:
        raise KvtoolError(
            f"requests that wait for each other are run with at most {MOST_LISTED:,} blocks",
            "give fewer --num-blocks, or larger blocks",
            code="too_large",
        )
    scheduler = TimedScheduler(requests, settings, progress)
    interrupted = False
    try:
        scheduler.run()
    except KeyboardInterrupt:
        interrupted = True
    result, gaps = scheduler.result, scheduler.gaps
    steps = _columns(result.steps, (*STEPS, "held_slots"))
    steps["used_blocks"] = steps.pop("held_slots") // settings.block_size
    return Replay(
        arrival_ns=scheduler.arrival_ns,
        outcomes=_columns(result.outcomes, OUTCOMES),
        steps=steps,
        gaps=(np.array(list(gaps), np.int64), np.array(list(gaps.values()), np.int64)),
        preemptions=len(result.preemptions),
        recomputed_tokens=result.recomputed_tokens,
        interrupted=interrupted,
    )


def _columns(records: list[Any], names: tuple[str, ...]) -> Columns:
    return {name: np.array([getattr(one, name) for one in records], np.int64) for name in names}

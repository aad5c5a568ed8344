"""Runs of the scheduler that tells blocks apart, plain and fast: measured rows, drawn cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from sim_cases import drawn_settings, requests

from kvtool.contents import Contents, of_segments
from kvtool.requests import Requests
from kvtool.sim.blocks.engine import BlocksEngine
from kvtool.sim.blocks.pool import CachedPool
from kvtool.sim.blocks.request import Batch, Request
from kvtool.sim.blocks.scheduler import CachedScheduler
from kvtool.sim.blocks.spelling import plain_requests
from kvtool.sim.settings import CUT, DONE, RADIX, REJECTED, UNFINISHED, Settings

OUTCOMES = (
    "admit_step", "first_token_step", "finish_step", "first_token_ns", "finish_ns", "status",
    "num_preemptions", "cached_tokens_first", "cached_tokens_after_preemption", "arrival_ns",
)  # fmt: skip
STEPS = (
    "scheduled_tokens", "batch", "running", "waiting", "used_blocks", "context_tokens",
    "evictions", "held_up", "begin_ns", "end_ns",
)  # fmt: skip
MOST_STEPS = 20_000


class Endless(Exception):
    """A run in which requests preempt each other for ever."""


@dataclass(frozen=True, kw_only=True)
class BlocksCase:
    """What a run is given."""

    requests: Requests
    settings: Settings
    contents: Contents | None = None

    def __repr__(self) -> str:
        columns = {name: column.tolist() for name, column in self.requests.columns().items()}
        return f"BlocksCase({columns}, {self.settings}, {self.contents})"


class TellingScheduler(CachedScheduler):
    """The plain scheduler, which also tells the gaps between tokens, and does not run for ever."""

    def __init__(self, asked: list[Request], settings: Settings, most_steps: int) -> None:
        super().__init__(asked, settings)
        self.most_steps = most_steps
        self.gaps: Counter[int] = Counter()
        self.last_ns: dict[int, int] = {}
        self.token_ns: dict[int, list[int]] = {}

    def _schedule(self) -> None:
        if len(self.steps) > self.most_steps:
            raise Endless
        super()._schedule()

    def _process(self, batch: Batch) -> None:
        before = [request.generated for request, _, _ in batch.scheduled]
        super()._process(batch)
        for (request, _, _), generated in zip(batch.scheduled, before, strict=True):
            if request.generated > generated:
                self.token_ns.setdefault(request.index, []).append(self.clock_ns)
                if request.index in self.last_ns:
                    self.gaps[self.clock_ns - self.last_ns[request.index]] += 1
                self.last_ns[request.index] = self.clock_ns


def run_blocks_plain(case: BlocksCase, most_steps: int = MOST_STEPS) -> TellingScheduler:
    """The plain scheduler."""
    asked = plain_requests(case.requests, case.settings, case.contents)
    scheduler = TellingScheduler(asked, case.settings, most_steps)
    scheduler.run()
    return scheduler


def run_blocks(case: BlocksCase) -> BlocksEngine:
    """The fast engine."""
    return BlocksEngine(
        requests=case.requests, settings=case.settings, contents=case.contents
    ).run()


def plain_numbers(run: CachedScheduler) -> dict[str, Any]:
    """Every integer of a plain run but the gaps."""
    found: dict[str, Any] = {
        name: [getattr(one, name) for one in run.requests] for name in OUTCOMES
    }
    found["generated"] = [one.told for one in run.requests]
    found |= {f"step {name}": [getattr(step, name) for step in run.steps] for name in STEPS}
    free = list(run.pool.free_list) if isinstance(run.pool, CachedPool) else []
    return found | {
        "preemptions": len(run.preemptions),
        "recomputed": run.recomputed_tokens,
        "queried": run.queried_tokens,
        "hit": run.hit_tokens,
        "requery": run.requery_tokens,
        "rehit": run.rehit_tokens,
        "regained": run.regained_tokens,
        "evicted": run.pool.num_evicted,
        "free list": free,
    }


def fast_numbers(run: BlocksEngine) -> dict[str, Any]:
    """The same of the fast engine."""
    found: dict[str, Any] = {name: run.outcome(name).tolist() for name in (*OUTCOMES, "generated")}
    steps = run.all_steps()
    found |= {f"step {name}": steps[name].tolist() for name in STEPS}
    sums = (
        "preemptions",
        "recomputed",
        "queried",
        "hit",
        "requery",
        "rehit",
        "regained",
        "evicted",
    )
    found |= {name: int(run.state.run[name]) for name in sums}
    is_radix = run.settings.prefix_caching and run.settings.index == RADIX
    return found | {"free list": [] if is_radix else list(run.free_list())}


def fast_gaps(run: BlocksEngine) -> Counter[int]:
    """Gaps between tokens and how often each occurs."""
    found: Counter[int] = Counter()
    for gap, weight in zip(*(column.tolist() for column in run.all_gaps()), strict=True):
        found[gap] += weight
    return found


def check_requests(case: BlocksCase, run: BlocksEngine) -> None:
    """What became of everyone is told, and everyone who came got it all or the reason why not."""
    status, generated = run.outcome("status"), run.outcome("generated")
    room = case.settings.max_model_len - case.requests.prompt_tokens
    assert (generated[status == DONE] == case.requests.output_tokens[status == DONE]).all()
    assert (generated[status == CUT] == room[status == CUT]).all()
    if not run.state.run.stopped:
        came = run.outcome("arrival_ns") >= 0
        assert came.all()
        assert not (status == UNFINISHED).any()
    assert (run.outcome("admit_step")[(status == DONE) | (status == CUT)] >= 0).all()
    assert (run.outcome("admit_step")[status == REJECTED] < 0).all()
    assert run.state.run.ended == (status != UNFINISHED).sum()
    if case.settings.policy == "fcfs":
        check_nobody_starves(run)


def check_nobody_starves(run: BlocksEngine) -> None:
    """Nobody is admitted before who came earlier; turns come as their parents end."""
    admitted, arrival = run.outcome("admit_step"), run.outcome("arrival_ns")
    were = np.flatnonzero(admitted >= 0)
    for earlier in were:
        later = were[arrival[were] > arrival[earlier]]
        assert (admitted[later] >= admitted[earlier]).all()


@st.composite
def drawn_contents(draw: st.DrawFn, prompts: Sequence[int], block_size: int) -> Contents:
    """Prompts of a few streams, some shared from the start, some cut into pieces; outputs that meet."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    streams, cuts = draw(st.sampled_from((1, 2, 5, 100))), draw(st.integers(0, 3))
    common = draw(st.sampled_from((0, block_size, 3 * block_size, 7)))
    sizes, flat = [], []
    for prompt in prompts:
        shared = min(int(prompt), common if rng.random() < 0.7 else 0)
        ends = np.sort(rng.integers(shared, prompt, cuts, endpoint=True)) if prompt else []
        stream, at, pieces = int(rng.integers(streams)), 0, []
        for end in (shared, *ends, prompt):
            goes_on = bool(rng.integers(2))
            pieces.append((0 if end == shared else stream, at, int(end) - at))
            stream, at = stream if goes_on else int(rng.integers(streams)), int(end)
        sizes.append(len(pieces))
        flat += [number for piece in pieces for number in piece]
    return of_segments(
        np.array(sizes), np.array(flat, np.int64), rng.integers(0, 2 * streams, len(prompts))
    )


@st.composite
def drawn_turns(draw: st.DrawFn, asked: Requests) -> Requests:
    """Some of the requests wait for others."""
    count = len(asked)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    place = rng.permutation(count)
    parent, arrivals = np.full(count, -1), asked.arrival_ns.copy()
    for k in range(count):
        before = np.flatnonzero(place < place[k])
        if len(before) and rng.random() < 0.5:
            parent[k], arrivals[k] = rng.choice(before), -1
    think = rng.integers(0, draw(st.sampled_from((0, 5, 100))), count, endpoint=True)
    return replace(asked, arrival_ns=arrivals, parent=parent, think_ns=think)


@st.composite
def drawn_blocks(draw: st.DrawFn, most: int = 30) -> BlocksCase:
    """Small pools, all features, in the combinations that vLLM has runs of."""
    pick = st.sampled_from
    longest = draw(pick((20, 60, 4, 150)))
    count = draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prompts = rng.integers(1, longest, count, endpoint=True)
    if draw(st.booleans()):
        prompts[rng.random(count) < 0.1] = draw(pick((0, 400)))
    outputs = rng.integers(1, longest, count, endpoint=True)
    within = draw(pick((0, 0, 10, 1000)))
    asked = requests(prompts, outputs, rng.integers(0, within, count, endpoint=True))
    mode = draw(pick(("fcfs", "priority", "async")))
    limits = replace(
        draw(drawn_settings(longest)),
        preemption="recompute",
        cpu_blocks=0,
        prefix_caching=draw(pick((True, True, True, False))),
        policy="priority" if mode == "priority" else "fcfs",
        async_scheduling=mode == "async",
        finish_by=draw(pick(("max-tokens", "eos"))),
    )
    if mode == "priority":
        asked = replace(
            asked, priority=rng.integers(0, draw(pick((0, 1, 5))), count, endpoint=True)
        )
    if draw(pick((False, False, True))):
        asked = draw(drawn_turns(asked))
    contents = None
    if limits.prefix_caching:
        contents = draw(drawn_contents(prompts.tolist(), limits.block_size))
    return BlocksCase(requests=asked, settings=limits, contents=contents)

"""Runs of the simulators that several test files share: measured rows, drawn cases, both schedulers."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvtool.requests import Requests
from kvtool.sim.engine import Engine
from kvtool.sim.memory import CONTIGUOUS, PAGED, PLACEMENTS, Contiguous, Memory, memory
from kvtool.sim.scheduler import Result, Scheduler, Step
from kvtool.sim.settings import (
    ABORTED,
    CUT,
    DONE,
    NO_MEMORY,
    NO_SEAT,
    NO_TOKENS,
    REJECTED,
    Settings,
    StepTime,
)  # fmt: skip
from kvtool.sim.totals import SHARES, Sums, Totals, warm_up_of

ROWS = Path(__file__).parent / "data/scheduler.jsonl.gz"
ROW_IDS = (
    "a1", "a3", "a5", "a6", "a8", "a10", "a11", "b1", "b2", "b5", "b7", "b8", "c1", "c4", "c5",
    "d1", "d3", "d6", "d7", "d8", "f2", "f4", "f6", "f7", "g1", "g4", "h1", "h4",
)  # fmt: skip
BLOCK_ROW_IDS = (
    "e1",
    "e3",
    "e6",
    "e13",
    "e7",
    "e9",
    "e11",
    "h6",
    "i1",
    "i3",
    "i4",
    "j1",
    "j4",
    "j6",
    "j7",
)
"""Rows of prefix caches, priorities and asynchronous scheduling; the others need counts alone."""
OUTCOMES = (
    "admit_step", "first_token_step", "finish_step", "first_token_ns", "finish_ns",
    "num_preemptions", "generated", "status",
)  # fmt: skip
NEVER = 1 << 60
STEPS = (
    "scheduled_tokens",
    "batch",
    "running",
    "waiting",
    "held",
    "context_tokens",
    "begin_ns",
    "end_ns",
)


def script() -> Any:
    """scripts/accuracy_scheduler.py, whose reading of the rows and comparison the tests share."""
    path = Path(__file__).parents[1] / "scripts/accuracy_scheduler.py"
    spec = importlib.util.spec_from_file_location("accuracy_scheduler", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_script = script()
settings_of, requests_of, digest = _script.settings_of, _script.requests_of, _script.digest
contents_of = _script.contents_of


def differences(row: dict[str, Any], outcomes: Any, steps: dict[str, list[int]]) -> list[str]:
    """What of a run is not as vLLM had it; engines that count slots have no prefix cache."""
    if "held" in steps:
        size, held = row["config"]["block_size"], steps["held"]
        steps = {
            **steps,
            "used_blocks": [one // size for one in held],
            "evictions": [0] * len(held),
        }
    found: list[str] = _script.differences(row, outcomes, steps)
    return found


@lru_cache
def rows() -> dict[str, dict[str, Any]]:
    """What vLLM's own scheduler did, by the id of the workload."""
    lines = gzip.decompress(ROWS.read_bytes()).splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


def requests(
    prompts: Sequence[int], outputs: Sequence[int], arrivals: Sequence[int] | None = None
) -> Requests:
    """Requests as columns; all at 0 unless their arrivals are given."""
    return Requests(
        arrival_ns=np.array([0] * len(prompts) if arrivals is None else arrivals, np.int64),
        prompt_tokens=np.array(prompts, np.int64),
        output_tokens=np.array(outputs, np.int64),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a run is given."""

    requests: Requests
    settings: Settings
    allocator: str = PAGED
    placement: str = ""

    def __repr__(self) -> str:
        columns = {name: column.tolist() for name, column in self.requests.columns().items()}
        return f"Case({columns}, {self.settings}, {self.allocator!r}, {self.placement!r})"


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A run of the plain scheduler, with what it left behind."""

    case: Case
    result: Result
    store: Memory
    scheduler: Scheduler

    def outcomes(self) -> dict[str, list[int]]:
        """The outcomes as columns."""
        return {name: [getattr(one, name) for one in self.result.outcomes] for name in OUTCOMES}

    def steps(self) -> dict[str, list[int]]:
        """The steps as columns."""
        attributes = {name: "held_slots" if name == "held" else name for name in STEPS}
        return {
            name: [getattr(step, attribute) for step in self.result.steps]
            for name, attribute in attributes.items()
        }

    def count(self, status: int) -> int:
        """Requests that ended so."""
        return sum(one.status == status for one in self.result.outcomes)

    def totals(self) -> Totals:
        """What the fast engine should come to, but for the series."""
        result, steps = self.result, self.result.steps
        return Totals(
            requests=len(result.outcomes),
            completed=self.count(DONE) + self.count(CUT),
            cut=self.count(CUT),
            prompt_too_long=self.count(REJECTED),
            larger_than_pool=self.count(ABORTED),
            preemptions=len(result.preemptions),
            recomputed_tokens=result.recomputed_tokens,
            swapped_blocks=result.swapped_blocks,
            copied_tokens=self.store.copied_tokens if isinstance(self.store, Contiguous) else 0,
            peak_running=max((step.running for step in steps), default=0),
            steps=len(steps),
            end_ns=steps[-1].end_ns if steps else 0,
            scheduled_tokens=sum(step.scheduled_tokens for step in steps),
            whole=self.sums(steps),
            window=self.sums(self.window()),
        )

    def sums(self, steps: Sequence[Step]) -> Sums:
        """What the slots of the pool were, over these steps."""
        free = [self.case.settings.num_slots - step.held_slots for step in steps]
        reasons = [step.held_up for step in steps]
        external = sum(slots for slots, why in zip(free, reasons, strict=True) if why == NO_MEMORY)
        return Sums(
            steps=len(steps),
            token=sum(step.token_slots for step in steps),
            reserved=sum(step.reserved_slots for step in steps),
            internal=sum(step.internal_slots for step in steps),
            external=external,
            idle=sum(free) - external,
            running=sum(step.running for step in steps),
            no_seat=reasons.count(NO_SEAT),
            no_tokens=reasons.count(NO_TOKENS),
            no_memory=reasons.count(NO_MEMORY),
        )

    def window(self) -> list[Step]:
        """The steps before which a tenth had ended, while somebody waits or will come."""
        prompts = self.case.requests.prompt_tokens.tolist()
        longest = self.case.settings.max_model_len
        outcomes = [  # who would be rejected does not come, though the run stops before
            one
            for one, prompt in zip(self.result.outcomes, prompts, strict=True)
            if 0 < prompt < longest
        ]
        ends = sorted(one.finish_step for one in outcomes if one.finish_step >= 0)
        needed = warm_up_of(len(self.result.outcomes))
        begin = 0 if not needed else ends[needed - 1] + 1 if needed <= len(ends) else NEVER
        # Who was not admitted comes or waits until its end, if that was told.
        stays = [
            one.admit_step - 1
            if one.admit_step >= 0
            else one.finish_step
            if one.finish_step >= 0
            else NEVER
            for one in outcomes
        ]
        to_come = max(stays, default=-1)
        return [
            step
            for at, step in enumerate(self.result.steps)
            if at >= begin and (step.waiting > 0 or at <= to_come)
        ]


def run_plain(case: Case) -> Plain:
    """The plain scheduler on plain memory."""
    store = memory(case.allocator, case.placement, case.settings)
    scheduler = Scheduler(case.requests, case.settings, store)
    return Plain(case=case, result=scheduler.run(), store=store, scheduler=scheduler)


def engine(case: Case, source: Iterable[Requests] | None = None, **more: Any) -> Engine:
    """The fast engine on the same requests, in one chunk unless a source is given."""
    return Engine(
        source=[case.requests.in_order()] if source is None else source,
        num_requests=len(case.requests),
        settings=case.settings,
        allocator=case.allocator,
        placement=case.placement,
        **more,
    )


def engine_outcomes(case: Case, run: Engine) -> dict[str, list[int]]:
    """The engine's outcomes as columns, in the order of the case's requests."""
    order = np.argsort(case.requests.arrival_ns, kind="stable")
    columns = {}
    for name in OUTCOMES:
        column = np.empty(len(order), np.int64)
        column[order] = run.state.outcomes[name]
        columns[name] = column.tolist()
    return columns


def engine_steps(run: Engine) -> dict[str, list[int]]:
    """The engine's steps as columns."""
    steps = run.all_steps()
    return {name: steps[name].tolist() for name in STEPS}


def cut_up(whole: Requests, sizes: Iterable[int]) -> list[Requests]:
    """The requests in chunks of these sizes, the rest in a last one."""
    chunks, first = [], 0
    for size in sizes:
        chunks.append(whole.take(np.arange(first, min(first + size, len(whole)))))
        first = min(first + size, len(whole))
    return [*chunks, whole.take(np.arange(first, len(whole)))]


def adds_up(sums: Sums, num_slots: int) -> bool:
    """Whether each slot of each step is exactly one of the six."""
    shares = [getattr(sums, name) for name in SHARES]
    return min(shares) >= 0 and sum(shares) == sums.steps * num_slots


def without_series(totals: Totals) -> dict[str, Any]:
    """The totals but for the series, which the plain scheduler does not keep."""
    return {f.name: getattr(totals, f.name) for f in fields(Totals) if f.name != "series"}


@st.composite
def drawn_requests(draw: st.DrawFn, most: int, longest: int) -> Requests:
    """Requests at once or over time; some prompts are empty or beyond every limit."""
    count = draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prompts = rng.integers(1, longest, count, endpoint=True)
    prompts[rng.random(count) < draw(st.sampled_from((0, 0.1)))] = draw(st.sampled_from((0, 400)))
    within = draw(st.sampled_from((0, 0, 10, 1000)))
    return requests(
        prompts,
        rng.integers(1, longest, count, endpoint=True),
        rng.integers(0, within, count, endpoint=True),
    )


@st.composite
def drawn_settings(draw: st.DrawFn, longest: int) -> Settings:
    """Small pools and tight limits, so that every rule is met."""
    pick = st.sampled_from
    size = draw(pick((4, 1, 2, 3, 8, 16, 64)))
    return Settings(
        num_blocks=max(1, draw(st.integers(longest, 4 * longest)) // size),
        block_size=size,
        max_model_len=draw(pick((300, 100, 40, 20, 8))),
        max_num_seqs=draw(pick((256, 256, 16, 5, 2, 1))),
        max_num_active_seqs=draw(pick((None, None, 3))),
        max_batched_tokens=draw(pick((8192, 8192, 64, 16, 5, 2, 1))),
        max_scheduled_tokens=draw(pick((None, None, None, 20, 8, 3, 1))),
        chunked_prefill=draw(pick((True, True, True, False))),
        watermark=draw(pick((0.0, 0.0, 0.01, 0.1, 0.3))),
        reserve_full_prompt=draw(st.booleans()),
        long_prefill_threshold=draw(pick((0, 0, 1, 3, 10))),
        long_prefill_adaptive=draw(st.booleans()),
        preemption=draw(pick(("recompute", "swap"))),
        cpu_blocks=draw(pick((0, 5, 20, 1000))),
        on_stall=draw(pick(("abort-head", "abort-head", "stop"))),
        step_time=StepTime(
            base_ns=draw(pick((7, 1, 0))),
            token_ns=draw(pick((3, 1, 0, 0.75))),
            context_ns=draw(pick((1, 0, 0.000001, 1.3))),
            attention_ns=draw(pick((0, 0, 0.07, 2))),
            request_ns=draw(pick((0, 0, 0.6, 11))),
            read_ns=draw(pick((0, 0, 9, 60))),
            swap_ns=draw(pick((0, 4, 100))),
        ),
    )


@st.composite
def drawn_cases(draw: st.DrawFn, allocators: Sequence[str] = (PAGED, PAGED, *CONTIGUOUS)) -> Case:
    """A run of any allocator and placement."""
    allocator = draw(st.sampled_from(allocators))
    longest = draw(st.sampled_from((20, 60, 4, 200)))
    return Case(
        requests=draw(drawn_requests(40, longest)),
        settings=draw(drawn_settings(longest)),
        allocator=allocator,
        placement="" if allocator == PAGED else draw(st.sampled_from(PLACEMENTS)),
    )


@st.composite
def crowded_cases(draw: st.DrawFn) -> Case:
    """More requests decode than a step has tokens for: half of these runs skip one.

    A crowd makes the first, long prefills crawl and lets many in beside them; when it thins out, the
    prefills take larger chunks, and nothing is left for who was admitted last.
    """
    pick = st.sampled_from
    count = draw(st.integers(20, 50))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    allocator = draw(pick((PAGED, PAGED, "grow")))
    prompts = rng.choice((1, 1, 1, 2, 60), count)
    prompts[:2] = 200, 100
    return Case(
        requests=requests(prompts, rng.choice((1, 1, 2, 5, 20, 40), count)),
        settings=Settings(
            num_blocks=draw(pick((100, 200, 400))),
            block_size=draw(pick((1, 2, 3))),
            max_model_len=300,
            max_num_seqs=draw(pick((16, 256))),
            max_batched_tokens=draw(pick((30, 64))),
            max_scheduled_tokens=draw(pick((4, 6, 8, 10))),
            reserve_full_prompt=draw(st.booleans()),
            long_prefill_threshold=1,
            long_prefill_adaptive=True,
            preemption=draw(pick(("recompute", "swap"))),
            cpu_blocks=20,
            step_time=StepTime(base_ns=5, token_ns=2, context_ns=1, swap_ns=draw(pick((0, 7)))),
        ),
        allocator=allocator,
        placement="" if allocator == PAGED else draw(pick(PLACEMENTS)),
    )


@st.composite
def prefilled_cases(draw: st.DrawFn) -> Case:
    """Some requests come with the cache of their prompt and their first token."""
    case = draw(drawn_cases(allocators=(PAGED,)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    asked = case.requests
    room = case.settings.max_model_len - asked.prompt_tokens
    can = (asked.prompt_tokens > 0) & (asked.output_tokens > 1) & (room > 1)
    came = can & (rng.random(len(asked)) < draw(st.sampled_from((1.0, 0.5))))
    return replace(case, requests=replace(asked, prefilled=came.astype(np.int64)))

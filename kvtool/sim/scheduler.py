"""Continuous batching, plainly: vLLM 0.32's V1 scheduler, first come first served, one step at a time.

The rules R1 to R18 are those of vLLM's v1/core/sched/scheduler.py (schedule, update_from_output) and
v1/core/kv_cache_manager.py, without prefix caching. This is the oracle of `kvtool.sim.engine`, which
gives the same integers without looking at each request in each step.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from kvtool.requests import Requests
from kvtool.sim.memory import Memory, Paged, Request
from kvtool.sim.settings import (
    ABORT_HEAD,
    ABORTED,
    CUT,
    DONE,
    NO_MEMORY,
    NO_SEAT,
    NO_TOKENS,
    NOBODY_WAITS,
    REJECTED,
    SWAP,
    UNFINISHED,
    Settings,
    pairs_of,
)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a request: steps and nanoseconds are -1 where it did not come to that.

    `generated` counts the tokens of a request that has ended.
    """

    admit_step: int = -1
    first_token_step: int = -1
    finish_step: int = -1
    first_token_ns: int = -1
    finish_ns: int = -1
    num_preemptions: int = 0
    generated: int = 0
    status: int = UNFINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A call of `schedule`, seen after it and before its output is processed. Slots are tokens."""

    scheduled_tokens: int
    batch: int
    running: int
    waiting: int
    context_tokens: int
    held_slots: int
    token_slots: int
    reserved_slots: int
    internal_slots: int
    held_up: int
    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class Result:
    """The run of a scheduler."""

    outcomes: list[Outcome]
    steps: list[Step] = field(default_factory=list)
    preemptions: list[tuple[int, int]] = field(default_factory=list)
    recomputed_tokens: int = 0
    swapped_blocks: int = 0
    stopped: bool = False


class Scheduler:
    """Requests wait in a queue, run in the order of admission, and are preempted from the end."""

    def __init__(self, requests: Requests, settings: Settings, memory: Memory) -> None:
        self.settings = settings
        self.memory = memory
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.clock_ns = 0
        self.cpu_blocks = 0
        self.num_ended = 0
        self.swapped: dict[int, int] = {}  # request: its blocks on the CPU
        self.think_ns = [] if requests.think_ns is None else requests.think_ns.tolist()
        self.children: dict[int, list[int]] = {}
        self.result = Result([Outcome() for _ in range(len(requests))])
        self.arrivals: list[tuple[int, int, Request]] = []
        parents = [-1] * len(requests) if requests.parent is None else requests.parent.tolist()
        for index in range(len(requests)):
            prompt, output = int(requests.prompt_tokens[index]), int(requests.output_tokens[index])
            final = min(prompt + output, settings.max_model_len) - 1
            request = Request(index, prompt, output, final)
            if requests.prefilled is not None and requests.prefilled[index]:
                request.computed, request.generated = prompt, 1
            arrival = int(requests.arrival_ns[index])
            if arrival < 0:
                self.children.setdefault(parents[index], []).append(index)
            self.arrivals.append((arrival, index, request))
        self.requests = [request for _, _, request in self.arrivals]
        self.arrivals = [entry for entry in self.arrivals if entry[0] >= 0]
        heapq.heapify(self.arrivals)

    def run(
        self,
        *,
        until_ended: int | None = None,
        most_steps: int | None = None,
        until_ns: int | None = None,
    ) -> Result:
        """Schedule until nothing is left or can go on, so many have ended or steps are made, or the
        next step would begin at `until_ns` or later."""
        while not self.result.stopped:
            if until_ended is not None and self.num_ended >= until_ended:
                break
            if most_steps is not None and len(self.result.steps) >= most_steps:
                break
            self._arrive()
            if not self.waiting and not self.running:
                if not self.arrivals:
                    break
                if until_ns is not None and self.arrivals[0][0] >= until_ns:
                    break
                self.clock_ns = max(self.clock_ns, self.arrivals[0][0])
                continue
            if until_ns is not None and self.clock_ns >= until_ns:
                break
            self._step()
        return self.result

    def _arrive(self) -> None:
        """R17: the front end takes what has arrived and rejects what can never be served."""
        while self.arrivals and self.arrivals[0][0] <= self.clock_ns:
            _, _, request = heapq.heappop(self.arrivals)
            if 0 < request.prompt_tokens < self.settings.max_model_len:
                self.waiting.append(request)
            else:
                self._end(request, REJECTED)

    def _step(self) -> None:
        scheduled: list[tuple[Request, int]] = []
        num_preemptions, swapped = len(self.result.preemptions), self.result.swapped_blocks
        budget = self.settings.token_budget
        crowd = len(self.running) + len(self.waiting)
        budget = self._schedule_running(scheduled, budget, crowd)
        preempted = len(self.result.preemptions) > num_preemptions
        held_up = NO_MEMORY if preempted else self._admit(scheduled, budget, crowd)  # R6
        self._record(scheduled, held_up, self.result.swapped_blocks - swapped)
        self._process(scheduled)
        if not scheduled and (not preempted or self._never_fits()):
            self._stall()

    def _schedule_running(
        self, scheduled: list[tuple[Request, int]], budget: int, crowd: int
    ) -> int:
        """R2 to R5: in the order of admission, preempting from the end. The budget that is left."""
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            n = self._chunk(request, budget, crowd)
            while not self.memory.hold(request, request.computed + n):
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    return budget
            request.computed += n
            budget -= n
            scheduled.append((request, n))
            position += 1
        return budget

    def _chunk(self, request: Request, budget: int, crowd: int) -> int:
        n = self._threshold(request.num_tokens - request.computed, crowd)
        return min(n, budget, self.settings.max_model_len - request.computed - 1)

    def _threshold(self, n: int, crowd: int) -> int:
        """R3: a long prefill is cut unless its request is the only one."""
        settings = self.settings
        threshold = settings.long_prefill_threshold
        if threshold <= 0 or crowd <= 1:
            return n
        if settings.long_prefill_adaptive:
            threshold = max(threshold, settings.max_batched_tokens // crowd)
        return min(n, threshold)

    def _preempt(self, victim: Request) -> None:
        """R5: to the front of the queue; its tokens are computed anew, or fetched from the CPU."""
        self.result.preemptions.append((len(self.result.steps), victim.index))
        self.result.outcomes[victim.index].num_preemptions += 1
        blocks = self.memory.held_slots(victim) // self.settings.block_size
        room = self.settings.cpu_blocks - self.cpu_blocks
        swaps = self.settings.preemption == SWAP and isinstance(self.memory, Paged)
        if swaps and blocks <= room:
            self.swapped[victim.index] = blocks
            self.cpu_blocks += blocks
            self.result.swapped_blocks += blocks
        else:
            self.result.recomputed_tokens += victim.computed
            victim.computed = 0
        self.memory.release(victim)
        self.waiting.appendleft(victim)

    def _admit(self, scheduled: list[tuple[Request, int]], budget: int, crowd: int) -> int:
        """R7 to R9: from the head of the queue until something fails. What failed."""
        while self.waiting:
            if len(self.running) >= self.settings.max_running:
                return NO_SEAT
            if budget <= 0:
                return NO_TOKENS
            request = self.waiting[0]
            n = self._threshold(request.num_tokens - request.computed, crowd)
            if not self.settings.chunked_prefill and n > budget:
                return NO_TOKENS
            n = min(n, budget)
            tokens = request.computed + n
            if not self.memory.can_admit(request, tokens, alone=not self.running):
                return NO_MEMORY
            self.waiting.popleft()
            self.memory.hold(request, tokens)
            blocks = self.swapped.pop(request.index, 0)
            self.cpu_blocks -= blocks
            self.result.swapped_blocks += blocks
            request.computed += n
            budget -= n
            self.running.append(request)
            scheduled.append((request, n))
            outcome = self.result.outcomes[request.index]
            if outcome.admit_step < 0:
                outcome.admit_step = len(self.result.steps)
        return NOBODY_WAITS

    def _record(self, scheduled: list[tuple[Request, int]], held_up: int, moved: int) -> None:
        """The step as it stands, the blocks it swapped out and in, and the clock at its end."""
        law = self.settings.step_time
        tokens = sum(n for _, n in scheduled)
        context = sum(request.computed for request, _ in scheduled)
        pairs = sum(pairs_of(n, request.computed) for request, n in scheduled)
        begin_ns = self.clock_ns
        self.clock_ns += law.ns(tokens, context, pairs, requests=len(scheduled), moved=moved)
        cached = sum(request.computed for request in self.running)
        needed = [min(self.memory.held_slots(r), r.final_tokens) for r in self.running]
        held = self.memory.used_slots()
        self.result.steps.append(
            Step(
                scheduled_tokens=tokens,
                batch=len(scheduled),
                running=len(self.running),
                waiting=len(self.waiting),
                context_tokens=context,
                held_slots=held,
                token_slots=cached,
                reserved_slots=sum(needed) - cached,
                internal_slots=held - sum(needed),
                held_up=held_up,
                begin_ns=begin_ns,
                end_ns=self.clock_ns,
            )
        )

    def _process(self, scheduled: list[tuple[Request, int]]) -> None:
        """R14: who has computed all its tokens gets one more; who has enough of them leaves."""
        for request, _ in scheduled:
            if request.computed < request.num_tokens:
                continue
            request.generated += 1
            outcome = self.result.outcomes[request.index]
            if outcome.first_token_step < 0:
                outcome.first_token_step = len(self.result.steps) - 1
                outcome.first_token_ns = self.clock_ns
            if request.generated >= request.output_tokens:
                self._finish(request, DONE)
            elif request.num_tokens >= self.settings.max_model_len:
                self._finish(request, CUT)

    def _finish(self, request: Request, status: int) -> None:
        self.running.remove(request)
        self.memory.release(request)
        self._end(request, status)

    def _end(self, request: Request, status: int) -> None:
        """The request is over, and what waits for its end may come."""
        outcome = self.result.outcomes[request.index]
        outcome.status = status
        self.num_ended += 1
        if status != REJECTED:
            outcome.generated = request.generated
            outcome.finish_step = len(self.result.steps) - 1
            outcome.finish_ns = self.clock_ns
        for child in self.children.pop(request.index, ()):
            arrival = self.clock_ns + self.think_ns[child] if self.think_ns else self.clock_ns
            heapq.heappush(self.arrivals, (arrival, child, self.requests[child]))

    def _never_fits(self) -> bool:
        """Unchecked and larger than the pool: vLLM would compute and preempt the head for ever."""
        checked = self.settings.reserve_full_prompt or not isinstance(self.memory, Paged)
        return not checked and self.waiting[0].num_tokens > self.settings.num_slots

    def _stall(self) -> None:
        """R18: nothing will change, because the head never fits: it is aborted, or the run ends."""
        if self.settings.on_stall != ABORT_HEAD:
            self.result.stopped = True
            return
        head = self.waiting.popleft()
        blocks = self.swapped.pop(head.index, 0)
        self.cpu_blocks -= blocks
        self._end(head, ABORTED)

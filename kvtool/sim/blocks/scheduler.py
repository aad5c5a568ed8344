"""vLLM 0.32's V1 scheduler with everything that needs blocks to be told apart, plainly.

Prefix caching (rules R10 to R15), priorities (R19), requests that follow others, and asynchronous
scheduling: v1/core/sched/scheduler.py and async_scheduler.py. It looks at each request in each step and
names each block by all tokens before its end: the oracle of the fast one. SGLang's memory (radix_pool)
and its order of the queue (order) can take the place of vLLM's.
"""

from __future__ import annotations

import heapq
from collections import deque

from kvtool.sim.blocks.numbers import MOST_SORTED
from kvtool.sim.blocks.order import by_longest_match
from kvtool.sim.blocks.pool import CachedPool
from kvtool.sim.blocks.radix_pool import RadixPool
from kvtool.sim.blocks.request import Batch, Hits, Request, Step
from kvtool.sim.settings import (
    ABORT_HEAD,
    ABORTED,
    CUT,
    DONE,
    LPM,
    NO_MEMORY,
    NO_SEAT,
    NO_TOKENS,
    NOBODY_WAITS,
    PRIORITY,
    RADIX,
    REJECTED,
    UNFINISHED,
    Settings,
    pairs_of,
)  # fmt: skip

IN_FLIGHT = 2  # steps that asynchronous scheduling has under way


class CachedScheduler:
    """Requests wait in the order of the policy, run in the order of admission."""

    def __init__(self, requests: list[Request], settings: Settings) -> None:
        self.settings = settings
        kind = RadixPool if settings.prefix_caching and settings.index == RADIX else CachedPool
        self.pool: CachedPool | RadixPool = kind(settings.num_blocks, settings.block_size)
        self.requests = requests
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.in_flight: deque[Batch] = deque()
        self.steps: list[Step] = []
        self.preemptions: list[tuple[int, int]] = []
        self.clock_ns = 0
        self.last_end_ns = 0
        self.is_stopped = False
        self.queried_tokens = self.hit_tokens = self.requery_tokens = self.rehit_tokens = 0
        self.recomputed_tokens = self.regained_tokens = 0
        self.children: dict[int, list[Request]] = {}
        for request in requests:
            if request.arrival_ns < 0:
                self.children.setdefault(request.parent, []).append(request)
        self.arrivals = [(r.arrival_ns, r.index) for r in requests if r.arrival_ns >= 0]
        heapq.heapify(self.arrivals)

    def run(self) -> None:
        """Until nothing is left, or nothing can go on."""
        most = IN_FLIGHT if self.settings.async_scheduling else 1
        while not self.is_stopped:
            self._arrive()
            if len(self.in_flight) < most and (self.waiting or self.running):
                self._schedule()
                if len(self.in_flight) < most:
                    continue
            if self.in_flight:
                batch = self.in_flight.popleft()
                self.clock_ns = max(self.clock_ns, batch.end_ns)
                self._process(batch)
            elif self.arrivals:
                self.clock_ns = self.arrivals[0][0]
            else:
                return

    # -- who is there

    def _arrive(self) -> None:
        """R17: the front end takes what has arrived and rejects what can never be served."""
        while self.arrivals and self.arrivals[0][0] <= self.clock_ns:
            _, index = heapq.heappop(self.arrivals)
            request = self.requests[index]
            if 0 < request.prompt_tokens < self.settings.max_model_len:
                self._wait(request)
            else:
                self._end(request, REJECTED, -1)

    def _wait(self, request: Request, *, in_front: bool = False) -> None:
        """R5 and R19: behind all others, or in front, but not by longest match; by priority at its place."""
        if self.settings.policy == PRIORITY:
            self.waiting.append(request)
            self.waiting = deque(sorted(self.waiting, key=lambda one: (*one.order, one.index)))
        elif in_front and self.settings.policy != LPM:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def _schedule(self) -> None:
        step = len(self.steps)
        self.scheduled: dict[Request, int] = {}
        self.budget = self.settings.token_budget
        self.crowd = len(self.running) + len(self.waiting)
        num_preemptions, evicted = len(self.preemptions), self.pool.num_evicted
        self._schedule_running(step)
        preempted = len(self.preemptions) > num_preemptions
        held_up = NO_MEMORY if preempted else self._admit(step)  # R6
        batch = Batch(step=step, end_ns=0, scheduled=[])
        for request, n in self.scheduled.items():
            request.computed += n
            samples = request.computed == request.num_tokens + request.placeholders
            if samples and self.settings.async_scheduling:
                request.placeholders += 1
            batch.scheduled.append((request, n, samples))
        tokens, requests = sum(self.scheduled.values()), len(self.scheduled)
        context = sum(request.computed for request in self.scheduled)
        pairs = sum(pairs_of(n, request.computed) for request, n in self.scheduled.items())
        batch.end_ns = begin_ns = max(self.last_end_ns, self.clock_ns)
        if requests or not self.settings.async_scheduling:
            batch.end_ns += self.settings.step_time.ns(tokens, context, pairs, requests=requests)
        self.last_end_ns = batch.end_ns
        self.steps.append(
            Step(
                scheduled_tokens=tokens,
                batch=requests,
                running=len(self.running),
                waiting=len(self.waiting),
                used_blocks=self.pool.num_blocks - self.pool.num_free,
                context_tokens=context,
                evictions=self.pool.num_evicted - evicted,
                held_up=held_up,
                begin_ns=begin_ns,
                end_ns=batch.end_ns,
            )
        )
        if requests or not self._is_stuck(preempted=preempted):
            self.in_flight.append(batch)
        else:
            self._stall(batch)

    def _schedule_running(self, step: int) -> None:
        """R2 to R5: in the order of admission; who finds no block preempts."""
        position = 0
        while position < len(self.running) and self.budget > 0:
            request = self.running[position]
            n = self._chunk(request)
            if n == 0:
                position += 1
                continue
            while not self._extend(request, request.computed + n):
                victim, scheduled_before = self._victim(request)
                position -= scheduled_before
                self._preempt(victim, step)
                if victim is request:
                    return
            self.scheduled[request] = n
            self.budget -= n
            position += 1

    def _chunk(self, request: Request) -> int:
        """Tokens of a running request in this step; 0: all it can do is under way."""
        waiting_for = request.placeholders
        last = request.prompt_tokens + request.most_output
        if waiting_for and request.computed + 2 - waiting_for >= last:
            return 0
        n = self._threshold(request.num_tokens + waiting_for - request.computed)
        return min(n, self.budget, self.settings.max_model_len - request.computed - 1)

    def _threshold(self, n: int) -> int:
        """R3: a long prefill is cut unless its request is the only one."""
        settings = self.settings
        threshold = settings.long_prefill_threshold
        if threshold <= 0 or self.crowd <= 1:
            return n
        if settings.long_prefill_adaptive:
            threshold = max(threshold, settings.max_batched_tokens // self.crowd)
        return min(n, threshold)

    def _extend(self, request: Request, tokens: int) -> bool:
        """R4: blocks for so many tokens in all; then its full blocks can be found."""
        tokens = min(tokens, self.settings.max_model_len)
        blocks = max(len(request.table), self.pool.blocks_for(tokens))
        if not self.pool.extend(request, blocks):
            return False
        self._register(request, min(tokens, request.num_tokens))
        return True

    def _register(self, request: Request, tokens: int) -> None:
        """R12: full blocks of tokens that are known may be found from now on."""
        if self.settings.prefix_caching:
            self.pool.schedule(request, tokens)

    def _victim(self, asker: Request) -> tuple[Request, int]:
        """R4 and R19: whom to preempt, and whether it stood before the asker in this step."""
        if self.settings.policy != PRIORITY:
            return self.running.pop(), 0
        victim = max(self.running, key=lambda one: one.order)
        self.running.remove(victim)
        n = self.scheduled.pop(victim, None)
        if n is None:
            return victim, 0
        self.budget += n
        return victim, 1

    def _preempt(self, victim: Request, step: int) -> None:
        """R5: its blocks are free at once; generated tokens are kept."""
        self.preemptions.append((step, victim.index))
        self.recomputed_tokens += victim.computed
        victim.lost_tokens = victim.computed
        victim.num_preemptions += 1
        self.pool.release(victim, finished=False)
        victim.computed = 0
        victim.is_running = False
        self._wait(victim, in_front=True)

    def _admit(self, step: int) -> int:
        """R7 to R11: from the head of the queue until something fails. What failed."""
        settings, pool = self.settings, self.pool
        if settings.policy == LPM:
            self._sort()
        while self.waiting:
            if len(self.running) >= settings.max_running:
                return NO_SEAT
            if self.budget <= 0:
                return NO_TOKENS
            request = self.waiting[0]
            hits = self._hits(request)
            cached = hits.num_blocks * pool.block_size
            n = self._threshold(request.num_tokens - cached)
            if not settings.chunked_prefill and n > self.budget:
                return NO_TOKENS
            n = min(n, self.budget)
            if not self._has_room(request, hits, cached + n):
                return NO_MEMORY
            self.waiting.popleft()
            pool.hold(request, hits)
            request.computed, request.prefill_tokens = cached, request.num_tokens
            self._extend(request, cached + n)
            self._note_hits(request, cached, step)
            request.is_running = True
            self.running.append(request)
            self.scheduled[request] = n
            self.budget -= n
        return NOBODY_WAITS

    def _sort(self) -> None:
        """By policy lpm: whose longest prefix is cached goes first, unless nobody can or too many wait."""
        has_place = len(self.running) < self.settings.max_running and self.budget > 0
        if has_place and len(self.waiting) <= MOST_SORTED:
            self.waiting = deque(by_longest_match(self.waiting, self.pool))

    def _hits(self, request: Request) -> Hits:
        """R10: of the full blocks before the last token."""
        if not self.settings.prefix_caching:
            return Hits(0, [])
        return self.pool.look_up(request, (request.num_tokens - 1) // self.pool.block_size)

    def _has_room(self, request: Request, hits: Hits, tokens: int) -> bool:
        """R8 and R9: for the whole prompt so far if that is asked for, and for these tokens."""
        settings, pool = self.settings, self.pool
        beside = settings.watermark_blocks if self.running else 0
        wanted = [tokens]
        if settings.reserve_full_prompt:
            wanted.append(request.num_tokens)
        return all(
            pool.has_room(hits, pool.blocks_for(min(one, settings.max_model_len)) + beside)
            for one in wanted
        )

    def _note_hits(self, request: Request, cached: int, step: int) -> None:
        """Hits at the first admission, and those of a request that was preempted, apart."""
        queried = request.num_tokens if self.settings.prefix_caching else 0
        if request.admit_step < 0:
            request.admit_step, request.cached_tokens_first = step, cached
            self.queried_tokens += queried
            self.hit_tokens += cached
            return
        request.cached_tokens_after_preemption += cached
        self.requery_tokens += queried
        self.rehit_tokens += cached
        self.regained_tokens += min(cached, request.lost_tokens)

    # -- its output

    def _process(self, batch: Batch) -> None:
        """R14: who has computed all its tokens gets one more; who has enough of them leaves."""
        for request, n, samples in batch.scheduled:
            if request.status != UNFINISHED:
                continue
            if samples:
                self._count_token(request, batch.step)
            if request.is_running and request.computed - n < request.prefill_tokens:
                self.pool.compute(request)

    def _count_token(self, request: Request, step: int) -> None:
        request.generated += 1
        if self.settings.async_scheduling:
            request.placeholders -= 1
        if request.first_token_step < 0:
            request.first_token_step, request.first_token_ns = step, self.clock_ns
        if request.generated >= request.output_tokens:
            self._finish(request, DONE, step)
        elif request.num_tokens >= self.settings.max_model_len:
            self._finish(request, CUT, step)
        elif self.settings.async_scheduling and request.is_running:
            self._register(request, request.computed - request.placeholders)

    def _finish(self, request: Request, status: int, step: int) -> None:
        if request.is_running:
            self.running.remove(request)
            if self.settings.async_scheduling:
                self._register(request, request.computed - request.placeholders)
            self.pool.release(request, finished=True)
        else:
            self.waiting.remove(request)  # preempted with its last token under way
        self._end(request, status, step)

    def _end(self, request: Request, status: int, step: int) -> None:
        """The request is over, and what waits for its end may come."""
        request.status = status
        request.is_running = False
        if status != REJECTED:
            request.finish_step, request.finish_ns = step, self.clock_ns
        for child in self.children.pop(request.index, ()):
            child.arrival_ns = self.clock_ns + child.think_ns
            heapq.heappush(self.arrivals, (child.arrival_ns, child.index))

    def _is_stuck(self, *, preempted: bool) -> bool:
        """R18: an empty step, and nothing under way that will change anything.

        Unchecked, a head that is larger than the pool would be computed and preempted for ever.
        """
        if not preempted:
            return not any(batch.scheduled for batch in self.in_flight)
        larger = self.waiting[0].num_tokens > self.settings.num_slots
        return larger and not self.running and not self.settings.reserve_full_prompt

    def _stall(self, batch: Batch) -> None:
        """R18: nothing will change, because the head never fits: it is aborted, or the run ends."""
        self.clock_ns = max(self.clock_ns, batch.end_ns)
        if self.settings.on_stall != ABORT_HEAD:
            self.is_stopped = True
            return
        self._end(self.waiting.popleft(), ABORTED, batch.step)

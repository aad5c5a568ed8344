"""What sharing saves: samples forked from one prompt, and prompts behind one system prompt.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023: parallel sampling and shared prefixes (section 4.4), the samples of a request scheduled as
a gang and preempted by recomputation (4.5), the blocks that sharing saves (6.3).

The live samples of a request have one length, so a request is looked at only when its samples need
blocks (after the fork, and whenever their last blocks are full) or when one of them ends. In between
its tokens are counted, and written to the pool when it is next touched: the same blocks are in use in
every step as if each token were appended when it is computed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtool.requests import Requests
from kvtool.sim.block_pool import BlockPool
from kvtool.sim.fork_ledger import ForkResult, Group, Ledger
from kvtool.sim.settings import Settings, pairs_of
from kvtool.sim.totals import warm_up_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ForkResult", "Forks", "run_forks"]

PREFIX = -1
"""The sequence that pins the blocks of the shared prefix."""


def _ignore(ended: int) -> None:
    """Nobody watches the progress."""


def run_forks(
    requests: Requests, settings: Settings, *, samples: int,
    sample_outputs: NDArray[np.int64] | None = None, shared_prefix: int = 0,
    progress: Callable[[int], None] = _ignore,
) -> ForkResult:  # fmt: skip
    """Run requests that ask for so many samples each.

    `sample_outputs`: output tokens, a row for each request and a column for each sample; None: each
    sample has the request's. `shared_prefix`: tokens of a system prompt before each prompt, computed
    and pinned before the run. `progress` is told of each request that ends.
    """
    return Forks(
        requests, settings, samples=samples, sample_outputs=sample_outputs,
        shared_prefix=shared_prefix, progress=progress,
    ).run()  # fmt: skip


class Forks:
    """Requests that ask for several samples, scheduled first come first served, all or none.

    Read from the settings: the pool, max_model_len (prefix included), the limit of running sequences,
    the watermark and step_time. A prompt is computed in one step, whatever its length: the paper's
    scheduler knew no chunks, and a step has no limit of tokens here. After an interrupt `result`
    tells the steps so far, but `run` cannot go on.
    """

    def __init__(
        self, requests: Requests, settings: Settings, *, samples: int,
        sample_outputs: NDArray[np.int64] | None = None, shared_prefix: int = 0,
        progress: Callable[[int], None] = _ignore,
    ) -> None:  # fmt: skip
        if not 1 <= samples <= settings.max_running or shared_prefix < 0:
            raise ValueError("samples are 1 to max_num_seqs, and a prefix has 0 or more tokens")
        if sample_outputs is not None and sample_outputs.shape != (len(requests), samples):
            raise ValueError("sample_outputs has a row for each request, a column for each sample")
        self.settings, self.progress, self.prefix = settings, progress, shared_prefix
        self.pool = BlockPool(settings.num_blocks, settings.block_size)
        if shared_prefix:
            self.pool.allocate(PREFIX, shared_prefix)
        self.ledger = Ledger(self.pool, shared_prefix)
        self.groups = _groups(requests, settings, samples, sample_outputs, shared_prefix)
        self.waiting: deque[Group] = deque()
        self.running: list[Group] = []
        self.prefilled: list[Group] = []  # in this step, and for the first time
        self.touches, self.ends = _Calendar(), _Calendar()
        self.think_ns = [] if requests.think_ns is None else requests.think_ns.tolist()
        self.arrivals = [(at, k) for k, at in enumerate(requests.arrival_ns.tolist()) if at >= 0]
        heapq.heapify(self.arrivals)
        self.children: dict[int, list[int]] = {}
        for k, parent in enumerate([] if requests.parent is None else requests.parent.tolist()):
            if requests.arrival_ns[k] < 0:
                self.children.setdefault(parent, []).append(k)
        self.step = -1
        self.clock_ns = self.end_ns = 0
        self.seats = 0  # sequences of the running groups, with those that are yet to be forked
        self.scheduled_tokens = self.all_scheduled = self.beyond = 0  # of this step, and of all
        self.completed = self.cut = self.aborted = self.prompt_too_long = 0
        self.preemptions = self.recomputed = self.copied = 0

    def run(self) -> ForkResult:
        """Schedule until every request has ended."""
        while True:
            self._arrive()
            if not self.waiting and not self.running:
                if not self.arrivals:
                    break
                self.clock_ns = self.arrivals[0][0]
                continue
            self._step()
        if self.prefix:
            self.pool.free(PREFIX)
        return self.result()

    def result(self) -> ForkResult:
        """The steps that were made so far."""
        before, window = self.ledger.before, self.ledger.window
        return ForkResult(
            steps=before.measured_steps + window.measured_steps,
            end_ns=self.end_ns,
            completed=self.completed,
            cut=self.cut,
            aborted=self.aborted,
            prompt_too_long=self.prompt_too_long,
            preemptions=self.preemptions,
            scheduled_tokens=self.all_scheduled,
            recomputed_tokens=self.recomputed,
            copied_blocks=self.copied,
            whole_run=not window.measured_steps,
            peak_running=self.ledger.peak_running,
            shared_blocks_peak=self.ledger.shared_blocks_peak,
            **(window if window.measured_steps else before)._asdict(),
        )

    def _arrive(self) -> None:
        """Who has come by now waits; a prompt that is too long, or none, is refused."""
        while self.arrivals and self.arrivals[0][0] <= self.clock_ns:
            group = self.groups[heapq.heappop(self.arrivals)[1]]
            if group.prompt > 0 and group.limits[-1] > 0:
                self.waiting.append(group)
            else:
                self.prompt_too_long += 1
                self._over(group)

    def _step(self) -> None:
        ledger, law = self.ledger, self.settings.step_time
        ended = self.completed + self.aborted
        preempted = self._make_room()
        self._append()
        blocked = preempted or self._admit()
        stuck = blocked and not preempted and not self.running  # alone, the head does not fit
        left = len(self.groups) - ended - self.prompt_too_long  # running, waiting or still to come
        measured = ended >= warm_up_of(len(self.groups)) and left > len(self.running)
        ledger.record(measured=measured, blocked=blocked)
        pairs = ledger.context + self.beyond
        self.clock_ns += law.ns(self.scheduled_tokens, ledger.context, pairs, requests=self.seats)
        self.end_ns = self.clock_ns
        self.all_scheduled += self.scheduled_tokens
        for group in self.prefilled:
            ledger.count(group, self.step, -1)
            self._fork(group)
            ledger.count(group, self.step)
        self.prefilled.clear()
        for group in self.ends.take(self.step):
            self._end_samples(group)
        if stuck:
            self.aborted += 1
            self._over(self.waiting.popleft())

    def _make_room(self) -> bool:
        """Preempt the last admitted until the next step's tokens fit. Whether one was."""
        touched = self.touches.due(self.step + 1)
        before = self.preemptions
        while sum(map(self._growth, touched)) > self.pool.num_free:
            self._preempt(self.running.pop())
        return self.preemptions > before

    def _growth(self, group: Group) -> int:
        """Blocks that a touched group takes. Of those that share a block, the last need not copy."""
        diverges = group.origin == self.step
        return group.live - (diverges and group.start % self.pool.block_size > 0)

    def _preempt(self, group: Group) -> None:
        """All its blocks are freed; the samples keep their tokens, which are computed anew."""
        self.touches.remove(group.touch, group)
        self.ends.remove(group.end, group)
        self.ledger.count(group, self.step, -1)
        for sample in range(group.live):
            self.pool.free(group.key + sample)
        cached = self.step - group.origin
        self.recomputed += group.prompt + group.live * cached
        group.generated = cached + 1
        self.seats -= group.live
        self.preemptions += 1
        self.waiting.appendleft(group)

    def _append(self) -> None:
        """Into the next step: a token for every live sample, and blocks for those that need one."""
        touched = self.touches.take(self.step + 1)
        for group in touched:
            self.ledger.count(group, self.step, -1)
        self.step += 1
        self.ledger.grow()
        for group in touched:
            tokens = group.start + self.step - group.origin
            self._write(group, tokens - self.pool.num_tokens(group.key))
            self.ledger.count(group, self.step)
            self._expect_touch(group)
        self.scheduled_tokens, self.beyond = self.ledger.live, 0

    def _write(self, group: Group, num_tokens: int) -> None:
        """Append to every sample, the longest last: it keeps the block that all had in common."""
        for sequence in range(group.key + group.live - 1, group.key - 1, -1):
            self.copied += self.pool.append(sequence, num_tokens) is not None

    def _expect_touch(self, group: Group) -> None:
        """At the first output token, when samples diverge; then whenever the last block is full."""
        cached = self.step - group.origin
        room = -(group.start + cached) % self.pool.block_size if cached else 0
        group.touch = self.step + 1 + room
        self.touches.add(group.touch, group)

    def _admit(self) -> bool:
        """From the head of the queue until something fails. Whether memory failed."""
        settings = self.settings
        while self.waiting:
            group = self.waiting[0]
            samples = len(group.limits)
            if self.seats + samples > settings.max_running:
                return False
            watermark = settings.watermark_blocks if self.running else 0
            if self._blocks(group) + watermark > self.pool.num_free:
                return True
            self._place(self.waiting.popleft())
            self.scheduled_tokens += group.prompt + samples * group.generated
            self.beyond += self._pairs(group)
        return False

    def _pairs(self, group: Group) -> int:
        """Pairs of a token that is computed and one that it attends to, beyond one for each token of context
        of the group's sequences."""
        start, generated, prompt = group.start, group.generated, pairs_of(group.prompt, group.start)
        if not generated:
            return prompt - start
        each = pairs_of(generated, start + generated) - start - generated
        return prompt + len(group.limits) * each

    def _blocks(self, group: Group) -> int:
        """Blocks that a waiting group takes: what its sequences share, and what each has alone."""
        common = group.start // self.pool.block_size
        alone = self.pool.blocks_for(group.start + group.generated) - common
        sequences = len(group.limits) if group.generated else 1
        return common - self.ledger.prefix_blocks + sequences * alone

    def _place(self, group: Group) -> None:
        """The prompt behind the prefix; after a preemption also the samples with their output."""
        if self.prefix:
            self.pool.fork(PREFIX, group.key)
            self.copied += self.pool.append(group.key, group.prompt) is not None
        else:
            self.pool.allocate(group.key, group.prompt)
        group.origin = self.step - group.generated
        group.live = 1
        if group.generated:
            self._fork(group)
            self._write(group, group.generated)
        else:
            self.prefilled.append(group)
        self.ledger.count(group, self.step)
        self._expect_touch(group)
        self.ends.add(group.end, group)
        self.running.append(group)
        self.seats += len(group.limits)

    def _fork(self, group: Group) -> None:
        """One sequence becomes one for each sample; no block is taken."""
        group.live = len(group.limits)
        for sample in range(1, group.live):
            self.pool.fork(group.key, group.key + sample)

    def _end_samples(self, group: Group) -> None:
        """Free the samples that have their last token; the request ends with its last sample."""
        self.ledger.count(group, self.step, -1)
        generated = self.step - group.origin + 1
        while group.limits and group.limits[-1] == generated:
            group.limits.pop()
            group.live -= 1
            self.seats -= 1
            self.pool.free(group.key + group.live)
        if group.live:
            self.ledger.count(group, self.step)
            self.ends.add(group.end, group)
            return
        self.touches.remove(group.touch, group)
        self.running.remove(group)
        self.completed += 1
        self.cut += group.cut
        self._over(group)

    def _over(self, group: Group) -> None:
        """A request has ended: what waits for its end may come."""
        for child in self.children.pop(group.index, ()):
            arrival = self.clock_ns + (self.think_ns[child] if self.think_ns else 0)
            heapq.heappush(self.arrivals, (arrival, child))
        self.progress(1)


class _Calendar:
    """Which groups are due in which step."""

    def __init__(self) -> None:
        self._due: dict[int, list[Group]] = {}

    def add(self, step: int, group: Group) -> None:
        self._due.setdefault(step, []).append(group)

    def remove(self, step: int, group: Group) -> None:
        self._due[step].remove(group)

    def due(self, step: int) -> list[Group]:
        return self._due.get(step, [])

    def take(self, step: int) -> list[Group]:
        return self._due.pop(step, [])


def _groups(
    requests: Requests, settings: Settings, samples: int,
    sample_outputs: NDArray[np.int64] | None, prefix: int,
) -> list[Group]:  # fmt: skip
    """The requests, their outputs cut at max_model_len; a limit below 1: prompt too long."""
    if sample_outputs is None:
        outputs = [[tokens] * samples for tokens in requests.output_tokens.tolist()]
    else:
        outputs = sample_outputs.tolist()
    groups = []
    for index, prompt in enumerate(requests.prompt_tokens.tolist()):
        start = prefix + prompt
        room = settings.max_model_len - start
        wanted = sorted((max(tokens, 1) for tokens in outputs[index]), reverse=True)
        limits = [min(tokens, room) for tokens in wanted]
        group = Group(
            index=index, key=index * samples, prompt=prompt, start=start, limits=limits,
            cut=wanted[0] > room,
        )  # fmt: skip
        groups.append(group)
    return groups

"""Static batching: a batch is padded to its longest prompt and output, and is freed as a whole.

What serving did before iteration-level scheduling (Yu et al., "Orca", OSDI 2022, section 2). The batch
is the longest beginning of the queue whose rectangle fits into the pool: batch × (longest prompt +
longest output - 1) slots. That takes the true outputs as known, which is the kindest reading. A batch
prefills in its first step and ends with its longest request; who is done earlier is padding until
then.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtool.requests import Requests
from kvtool.sim.settings import Settings
from kvtool.sim.totals import Sums, Totals, warm_up_of

MOST_POINTS = 1024


class Member(NamedTuple):
    """A request that waits: tokens of its prompt, tokens that it will generate, when it came."""

    prompt: int
    output: int
    arrival_ns: int
    cut: bool


@dataclass(slots=True, kw_only=True)
class StaticBatches:
    """A run over `source`, chunks of requests in the order of arrival."""

    source: Iterable[Requests]
    num_requests: int
    settings: Settings
    progress: Callable[[int], None] = lambda ended: None
    clock_ns: int = 0
    steps: int = 0
    completed: int = 0
    cut: int = 0
    prompt_too_long: int = 0
    larger_than_pool: int = 0
    peak: int = 0
    scheduled_tokens: int = 0
    whole: Sums = field(default_factory=Sums)
    window: Sums = field(default_factory=Sums)
    series: list[Sums] = field(default_factory=list)
    following: Member | None = None
    """The head of the queue behind the batch, here already or still to come."""
    seats_bind: bool = False
    interrupted: bool = False

    def run(self) -> StaticBatches:
        """Until all requests have ended, or the user interrupts: then as far as it has come."""
        try:
            for batch in self.batches():
                self._hold(batch)
        except KeyboardInterrupt:
            self.interrupted = True
        return self

    def batches(self) -> Iterator[list[Member]]:
        """Each batch that the queue gives; `following` is then who comes after it."""
        queue = self._members()
        head = next(queue, None)
        while head is not None:
            batch, head = self._fill(head, queue)
            self.following = head
            yield batch

    def _members(self) -> Iterator[Member]:
        """The requests that can be served at all."""
        longest = self.settings.max_model_len
        for requests in self.source:
            columns = (requests.prompt_tokens, requests.output_tokens, requests.arrival_ns)
            for prompt, output, arrival in zip(*(c.tolist() for c in columns), strict=True):
                limit = min(output, longest - prompt)
                if not 0 < prompt < longest:
                    self.prompt_too_long += 1
                elif prompt + limit - 1 > self.settings.num_slots:
                    self.larger_than_pool += 1
                else:
                    yield Member(prompt, limit, arrival, limit < output)

    def _fill(self, head: Member, queue: Iterator[Member]) -> tuple[list[Member], Member | None]:
        """The batch that begins with the head, and who is next."""
        self.clock_ns = max(self.clock_ns, head.arrival_ns)
        batch, prompt, output = [head], head.prompt, head.output
        for member in queue:
            prompt, output = max(prompt, member.prompt), max(output, member.output)
            rectangle = (len(batch) + 1) * (prompt + output - 1)
            full = len(batch) >= self.settings.max_running
            if full or rectangle > self.settings.num_slots or member.arrival_ns > self.clock_ns:
                self.seats_bind = full
                return batch, member
            batch.append(member)
        return batch, None

    def _hold(self, batch: list[Member]) -> None:
        """One batch from its prefill to its last token: in closed form, a request at a time."""
        steps = max(member.output for member in batch)
        width = max(member.prompt for member in batch) + steps - 1
        # In step t of its `output` steps a request has prompt + t tokens and output - 1 - t to come.
        later = sum(m.output * (m.output - 1) // 2 for m in batch)
        tokens = sum(m.output * m.prompt for m in batch) + later
        held = len(batch) * width * steps
        waited = self._steps_waited(len(batch), width, steps)
        free = self.settings.num_slots - len(batch) * width
        sums = Sums(
            steps=steps,
            token=tokens,
            reserved=later,
            padding=held - tokens - later,
            external=free * waited,
            idle=free * (steps - waited),
            running=sum(m.output for m in batch),
        )
        warm = self.completed + self.larger_than_pool >= warm_up_of(self.num_requests)
        self.whole += sums
        if warm and self.following is not None:
            self.window += sums
        self._point(sums)
        self._tick(len(batch), width, steps)
        self.completed += len(batch)
        self.cut += sum(m.cut for m in batch)
        self.peak = max(self.peak, len(batch))
        self.progress(len(batch))

    def _steps_waited(self, batch: int, width: int, steps: int) -> int:
        """Steps of the batch in which the head of the queue is there and has no room: not no seat."""
        if self.following is None or self.seats_bind:
            return 0
        arrival_ns = self.following.arrival_ns - self.clock_ns
        return steps - bisect.bisect_left(
            range(steps),
            arrival_ns,
            key=lambda step: self._spent(batch, width - steps + 1, step)[0],
        )

    def _spent(self, batch: int, prompt: int, steps: int) -> tuple[int, int]:
        """Nanoseconds and tokens of the first steps: the padded prompts, then a token a row."""
        law = self.settings.step_time
        if not steps:
            return 0, 0
        scheduled = batch * (prompt + steps - 1)
        first = law.ns(batch * prompt, batch * prompt)
        return first + self._decode_ns(batch, prompt, steps - 1), scheduled

    def _decode_ns(self, batch: int, prompt: int, steps: int) -> int:
        """Of steps with a token a row, each with one more token of context in each: reading takes longer
        than computing from some step on."""
        law = self.settings.step_time
        begin = 0  # of the steps that read for longer than they compute
        if law.read_ns:
            begin = bisect.bisect_left(
                range(steps), law.token_ns * batch,
                key=lambda step: law.read_ns + law.context_ns * batch * (prompt + step + 1),
            )  # fmt: skip
        left = steps - begin
        context = batch * (left * (prompt + begin) + left * (left + 1) // 2)
        computing = law.token_ns * batch * (begin if law.read_ns else steps)
        return law.base_ns * steps + law.read_ns * left + law.context_ns * context + computing

    def _tick(self, batch: int, width: int, steps: int) -> None:
        """Every row computes in every step, whether its request is done or not."""
        passed_ns, scheduled = self._spent(batch, width - steps + 1, steps)
        self.clock_ns += passed_ns
        self.steps += steps
        self.scheduled_tokens += scheduled

    def _point(self, sums: Sums) -> None:
        """A point a batch; when there are too many, each two become one."""
        self.series.append(sums)
        if len(self.series) >= 2 * MOST_POINTS:
            pairs = zip(self.series[::2], self.series[1::2], strict=True)
            self.series = [one + two for one, two in pairs]

    def totals(self) -> Totals:
        """What the run came to."""
        return Totals(
            requests=self.num_requests,
            completed=self.completed,
            cut=self.cut,
            prompt_too_long=self.prompt_too_long,
            larger_than_pool=self.larger_than_pool,
            peak_running=self.peak,
            steps=self.steps,
            end_ns=self.clock_ns,
            scheduled_tokens=self.scheduled_tokens,
            whole=self.whole,
            window=self.window,
            series=tuple(self.series),
            interrupted=self.interrupted,
        )

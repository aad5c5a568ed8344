"""Static batching: a batch is padded to its longest prompt and output, and is freed as a whole.

What serving did before iteration-level scheduling (Yu et al., "Orca", OSDI 2022, section 2). The batch
is the longest beginning of the queue whose rectangle fits into the pool: batch × (longest prompt +
longest output - 1) slots. That takes the true outputs as known, which is the kindest reading. A batch
prefills in its first step and ends with its longest request; who is done earlier is padding until
then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtool.requests import Requests
from kvtool.sim.clock import LATEST_NS
from kvtool.sim.engine import clock_is_full
from kvtool.sim.settings import (
    BATCH_CLOSED,
    FS_OF_NS,
    NO_MEMORY,
    NO_SEAT,
    Settings,
    StepTime,
    femtoseconds,
    pairs_of,
)
from kvtool.sim.totals import Sums, Totals, warm_up_of

if TYPE_CHECKING:
    from kvtool.requests import Column

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
    closed_by: int = BATCH_CLOSED
    """What kept it out: kvtool.sim.settings has the reasons."""
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
            if member.arrival_ns > self.clock_ns:
                self.closed_by = BATCH_CLOSED
            elif len(batch) >= self.settings.max_running:
                self.closed_by = NO_SEAT
            elif rectangle > self.settings.num_slots:
                self.closed_by = NO_MEMORY
            else:
                batch.append(member)
                continue
            return batch, member
        return batch, None

    def _hold(self, batch: list[Member]) -> None:
        """One batch from its prefill to its last token: in closed form, a request at a time."""
        steps = max(member.output for member in batch)
        width = max(member.prompt for member in batch) + steps - 1
        # In step t of its `output` steps a request has prompt + t tokens and output - 1 - t to come.
        later = sum(m.output * (m.output - 1) // 2 for m in batch)
        tokens = sum(m.output * m.prompt for m in batch) + later
        held = len(batch) * width * steps
        no_memory = self.following is not None and self.closed_by == NO_MEMORY
        waited = steps if no_memory else 0  # whom memory keeps out was there when the batch began
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

    def _tick(self, batch: int, width: int, steps: int) -> None:
        """Every row computes in every step, whether its request is done or not."""
        prompt = width - steps + 1
        _, _, took = steps_of(self.settings.step_time, batch, prompt, steps)
        self.clock_ns += int(took.sum())
        self.steps += steps
        self.scheduled_tokens += batch * width

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


def steps_of(law: StepTime, batch: int, prompt: int, steps: int) -> tuple[Column, Column, Column]:
    """Tokens, tokens of context and nanoseconds of each step: the padded prompts, then a token a row."""
    place = np.arange(steps, dtype=np.int64)
    tokens = np.full(steps, batch, np.int64)
    tokens[0] = batch * prompt
    context = batch * (prompt + place)
    pairs = context.copy()
    pairs[0] = batch * pairs_of(prompt, prompt)
    top, requests = (
        (batch * prompt, int(context[-1]), int(pairs.max())),
        np.full(steps, batch, np.int64),
    )
    longest = law.ns(*top, requests=batch) * steps
    if longest > LATEST_NS:
        raise clock_is_full()
    reading = whole_ns(law.context_ns, context)
    terms = ((law.token_ns, tokens), (law.attention_ns, pairs), (law.request_ns, requests))
    computing = sum((whole_ns(each, counts) for each, counts in terms), np.zeros(steps, np.int64))
    if law.read_ns:
        return tokens, context, law.base_ns + np.maximum(law.read_ns + reading, computing)
    return tokens, context, law.base_ns + reading + computing


def whole_ns(each_ns: float, counts: Column) -> Column:
    """Whole ns of so many times so many ns, without a product beyond 64 bits."""
    whole, part = divmod(femtoseconds(each_ns), FS_OF_NS)
    return whole * counts + part * counts // FS_OF_NS

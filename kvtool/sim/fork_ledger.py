"""What the samples of forked requests hold, step by step, and the sums that a run of them gives."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import NamedTuple

from kvtool.sim.block_pool import BlockPool


class ForkSums(NamedTuple):
    """Sums over steps; a field means what it means in ForkResult."""

    measured_steps: int = 0
    used_block_steps: int = 0
    unshared_block_steps: int = 0
    token_slot_steps: int = 0
    reserved_slot_steps: int = 0
    internal_slot_steps: int = 0
    external_slot_steps: int = 0
    idle_slot_steps: int = 0
    running_steps: int = 0
    shared_block_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkResult:
    """A run of forked requests. A slot is room for one token; `_steps` fields sum over steps.

    Measured are the steps at whose start a tenth of the requests have ended, until none waits or is
    still to come; if there is no such step, all steps (`whole_run`). Counts and peaks are of the
    whole run. A step is seen after scheduling, before new samples are forked and ended ones freed.
    """

    steps: int
    end_ns: int
    """When the last step ended, by the law of time."""
    completed: int
    cut: int
    """Of the completed, those that had a sample ended by max_model_len."""
    aborted: int
    """Requests whose prompt or growth does not fit the pool, even alone."""
    prompt_too_long: int
    """Requests that max_model_len leaves no room for an output token, or that have no prompt."""
    preemptions: int
    scheduled_tokens: int
    recomputed_tokens: int
    """Tokens that preemptions threw away: a prompt once, the cached output of each live sample."""
    copied_blocks: int
    """Copies on write: of a shared last block, and of a partial last block of the prefix."""
    measured_steps: int
    whole_run: bool
    used_block_steps: int
    unshared_block_steps: int
    """Blocks of the same samples if each had all its tokens, prefix included, to itself."""
    token_slot_steps: int
    """Slots filled, a shared one once."""
    reserved_slot_steps: int
    """Empty slots of last blocks that a live sample will still fill."""
    internal_slot_steps: int
    """Slots in used blocks that nobody will ever fill."""
    external_slot_steps: int
    """Free slots while memory keeps the head of the queue out, or in a step that preempted."""
    idle_slot_steps: int
    """Other free slots."""
    running_steps: int
    """Live samples; a request in its prefill is one sequence."""
    peak_running: int
    shared_block_steps: int
    """Blocks that several sequences hold (ref count > 1), the pinned prefix being one of them."""
    shared_blocks_peak: int

    @property
    def saved_share(self) -> float:
        """Blocks that sharing saves, of the blocks without it (vLLM paper, section 6.3)."""
        if not self.unshared_block_steps:
            return 0.0
        return 1 - self.used_block_steps / self.unshared_block_steps


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """A request and its samples, which have one length.

    Sample k is the sequence `key + k` of the pool; sample 0 goes on with the prompt's own sequence.
    """

    index: int
    key: int
    prompt: int
    start: int
    """Tokens that its samples have in common: prefix and prompt."""
    limits: list[int]
    """Output tokens of each sample that has not ended, the longest first."""
    cut: bool
    """Whether max_model_len ends a sample before it has its output."""
    generated: int = 0
    """While it waits: output tokens of each of these samples."""
    live: int = 0
    """Its sequences in the pool."""
    origin: int = 0
    """While it runs, each sample has `step - origin` output tokens cached."""
    touch: int = 0
    """The next step in which its samples need blocks."""

    @property
    def end(self) -> int:
        """The step at whose end its shortest sample has its last token, which is not cached."""
        return self.origin + self.limits[-1] - 1


class Ledger:
    """What all running groups hold together. A group is struck out before it changes.

    Between a fork and the next step, a shared last block is counted as if each sample had its copy.
    """

    def __init__(self, pool: BlockPool, prefix: int) -> None:
        self.pool, self.prefix = pool, prefix
        self.prefix_blocks = prefix // pool.block_size  # full ones: these stay shared
        self.live = self.context = self.filled = self.internal = 0
        self.unshared = self.shared = 0
        self.peak_running = self.shared_blocks_peak = 0
        self.before, self.window = ForkSums(), ForkSums()  # steps outside of the window, and in it

    def count(self, group: Group, step: int, sign: int = 1) -> None:
        """Add a group as it is in a step, or with -1 strike it out."""
        size, live = self.pool.block_size, group.live
        tokens = group.start + step - group.origin
        blocks = -(-tokens // size)
        common = group.start // size
        own = common - self.prefix_blocks
        self.live += sign * live
        self.context += sign * live * tokens
        self.filled += sign * (own * size + live * (tokens - common * size))
        self.unshared += sign * live * blocks
        self.shared += sign * own * (live > 1)
        room = blocks * size - group.start + 1  # a shorter output leaves slots of its last block
        if group.limits[live - 1] < room:
            unused = sum(room - limit for limit in group.limits[:live] if limit < room)
            self.internal += sign * unused

    def grow(self) -> None:
        """One token more for every live sample, in the blocks that it has."""
        self.context += self.live
        self.filled += self.live

    def record(self, *, measured: bool, blocked: bool) -> None:
        """Add up the step as it stands."""
        pool = self.pool
        size = pool.block_size
        free = pool.num_free * size
        filled = self.filled + self.prefix
        internal = self.internal + -self.prefix % size  # copied on write, so never filled
        shared = self.shared + (self.prefix_blocks if self.live else 0)
        now = ForkSums(
            measured_steps=1,
            used_block_steps=pool.num_blocks - pool.num_free,
            unshared_block_steps=self.unshared,
            token_slot_steps=filled,
            reserved_slot_steps=pool.num_blocks * size - free - filled - internal,
            internal_slot_steps=internal,
            external_slot_steps=free if blocked else 0,
            idle_slot_steps=0 if blocked else free,
            running_steps=self.live,
            shared_block_steps=shared,
        )
        self.peak_running = max(self.peak_running, self.live)
        self.shared_blocks_peak = max(self.shared_blocks_peak, shared)
        # One assignment: an interrupt leaves the sums of whole steps.
        if measured:
            self.window = ForkSums(*map(operator.add, self.window, now))
        else:
            self.before = ForkSums(*map(operator.add, self.before, now))

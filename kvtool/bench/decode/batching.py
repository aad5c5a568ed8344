"""Requests of different lengths, batched continuously on real blocks of one budget of memory.

First come, first served. A step lets requests in while there is room, computes their prompts one by
one, then decodes one token of every running sequence in one forward pass. Out of blocks, the newest
sequence gives its blocks back and is computed again later from its prompt and what it had
generated (preemption by recomputation). A request with several samples computes its prompt once and
forks: the samples share its blocks, and the first that writes into a shared block copies it. Sample
s begins with the s-th likeliest token and goes on greedily, so that samples differ and can be
computed again alone.

On reservations, blocks of `max_model_len` tokens, one a sequence, the same loop is a contiguous
batch: nobody is preempted, and a sample copies its prompt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvtool.bench.decode.kv_store import KvStore
from kvtool.bench.decode.stepping import Stepping
from kvtool.errors import KvtoolError
from kvtool.sim.block_pool import BlockPool, OutOfBlocks

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request: ids [tokens], and how many tokens it generates."""

    index: int
    ids: Tensor
    output_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One sample of a request while it runs or waits. Known to the store by itself."""

    prompt: Prompt
    sample: int
    generated: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def is_done(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.generated) >= self.prompt.output_tokens

    def ids(self, device: torch.device) -> Tensor:
        """All its tokens [1, tokens] but the last, whose K and V are not computed yet."""
        more = self.prompt.ids.new_tensor(self.generated[:-1])
        return torch.cat([self.prompt.ids, more])[None].to(device)


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a run came to; times in seconds from its start."""

    sequences: list[Sequence] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    used_bytes: list[int] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    preemptions: int = 0
    recomputed_tokens: int = 0
    shared_blocks: int = 0
    """Most blocks at once that stood in more than one table."""
    wall_s: float = 0.0


class Batcher:
    """The loop over one store. `samples` a request; at most `max_batch` sequences at once."""

    def __init__(self, stepping: Stepping, *, samples: int, max_batch: int) -> None:
        self._stepping = stepping
        self._store: KvStore = stepping.store
        self._samples = samples
        self._max_batch = max_batch
        self._waiting: deque[list[Sequence]] = deque()
        self._running: list[Sequence] = []
        self._tally = Tally()
        self._start = 0.0

    def run(self, prompts: list[Prompt], advance: Callable[[str], None]) -> Tally:
        """All requests to their last token. Raises KvtoolError if one alone does not fit."""
        self._waiting.extend(self._samples_of(prompt) for prompt in prompts)
        self._tally.sequences = [one for group in self._waiting for one in group]
        self._start = time.perf_counter()
        while self._waiting or self._running:
            self._admit()
            self._finish(advance)
            self._make_room()
            if self._running:
                self._decode()
                self._finish(advance)
        self._tally.wall_s = self._now()
        return self._tally

    def _samples_of(self, prompt: Prompt) -> list[Sequence]:
        return [Sequence(prompt=prompt, sample=number) for number in range(self._samples)]

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _admit(self) -> None:
        """Let the head of the queue in while its tokens have blocks; nobody overtakes it."""
        while self._waiting:
            group = self._waiting[0]
            if len(self._running) + len(group) > self._max_batch or not self._fits(group):
                break
            self._waiting.popleft()
            if group[0].generated:
                self._resume(group[0])
            else:
                self._prefill(group)
            self._running.extend(group)
        if not self._running and self._waiting:
            raise self._too_long(self._waiting[0][0])

    def _fits(self, group: list[Sequence]) -> bool:
        """Whether there are blocks for its tokens and the next one, so that it is not let in to be
        preempted at once; every sample writes its next token into a block of its own."""
        pool = self._store.pool
        if self._store.contiguous:
            return len(group) <= pool.num_free
        return first_blocks(group[0], len(group), pool) <= pool.num_free

    def _prefill(self, group: list[Sequence]) -> None:
        parent = group[0]
        self._store.pool.allocate(parent, len(parent.prompt.ids))
        ids = parent.prompt.ids[None].to(self._store.data.device)
        first = self._stepping.logits(parent, ids).topk(len(group)).indices.tolist()
        for sequence, token in zip(group, first, strict=True):
            if sequence is not parent:
                self._store.fork(parent, sequence)
            sequence.generated.append(token)
            sequence.first_s = self._now()

    def _resume(self, sequence: Sequence) -> None:
        """Compute again what was given up: K and V of its prompt and of what it had generated."""
        ids = sequence.ids(self._store.data.device)
        self._store.pool.allocate(sequence, ids.shape[1])
        self._stepping.logits(sequence, ids)
        self._tally.recomputed_tokens += ids.shape[1]

    def _finish(self, advance: Callable[[str], None]) -> None:
        """Free those that have all their tokens."""
        for sequence in [one for one in self._running if one.is_done]:
            sequence.last_s = self._now()
            self._running.remove(sequence)
            self._store.pool.free(sequence)
            advance(f"request {sequence.prompt.index} is done")

    def _make_room(self) -> None:
        """A slot for the next token of each, oldest first; the newest are preempted for it."""
        place = 0
        while place < len(self._running):
            try:
                self._store.append(self._running[place])
                place += 1
            except OutOfBlocks:
                if len(self._running) == 1:
                    raise self._too_long(self._running[0]) from None
                self._preempt(self._running.pop())

    def _preempt(self, sequence: Sequence) -> None:
        self._store.pool.free(sequence)
        self._waiting.appendleft([sequence])
        self._tally.preemptions += 1

    def _decode(self) -> None:
        self._count()
        last = [one.generated[-1] for one in self._running]
        tokens = torch.tensor(last, device=self._store.data.device)
        found = self._stepping.step(self._running, tokens).tolist()
        for sequence, token in zip(self._running, found, strict=True):
            sequence.generated.append(token)

    def _count(self) -> None:
        """Write down the batch and its memory; the clock stands still meanwhile."""
        clock = time.perf_counter()
        self._tally.batches.append(len(self._running))
        self._tally.held_bytes.append(self._store.held_bytes)
        self._tally.used_bytes.append(self._used_bytes())
        self._start += time.perf_counter() - clock

    def _used_bytes(self) -> int:
        """Of tokens that are there, one that several samples share once."""
        pool = self._store.pool
        filled: dict[int, int] = {}
        for sequence, table in pool.owners():
            tokens = pool.num_tokens(sequence)
            for logical, block in enumerate(table):
                inside = min(tokens - logical * pool.block_size, pool.block_size)
                filled[block] = max(filled.get(block, 0), inside)
        shared = sum(pool.ref_count(block) > 1 for block in filled)
        self._tally.shared_blocks = max(self._tally.shared_blocks, shared)
        return sum(filled.values()) * self._store.block_bytes // pool.block_size

    def _too_long(self, sequence: Sequence) -> KvtoolError:
        return does_not_fit(sequence.prompt, self._samples, self._store.pool)


def first_blocks(sequence: Sequence, samples: int, pool: BlockPool) -> int:
    """Blocks of a prompt and what was generated, and of the next token of every sample."""
    now = len(sequence.prompt.ids) + max(len(sequence.generated) - 1, 0)
    last = len(sequence.prompt.ids) + sequence.prompt.output_tokens - 1
    then = min(now + 1, last)
    return pool.blocks_for(then) + (samples - 1 if then > now else 0)


def check_fits(prompts: list[Prompt], samples: int, pool: BlockPool) -> None:
    """Refuse, before the first step, what could never run alone. Raises KvtoolError."""
    for prompt in prompts:
        start = first_blocks(Sequence(prompt=prompt, sample=0), samples, pool)
        alone = pool.blocks_for(len(prompt.ids) + prompt.output_tokens - 1)
        if max(start, alone) > pool.num_blocks:
            raise does_not_fit(prompt, samples, pool)


def does_not_fit(prompt: Prompt, samples: int, pool: BlockPool) -> KvtoolError:
    """The error of a request that is larger than the pool."""
    tokens = len(prompt.ids) + prompt.output_tokens
    return KvtoolError(
        f"request {prompt.index} of {tokens:,} tokens and {samples} samples does not fit"
        f" {pool.num_blocks:,} blocks of {pool.block_size:,} tokens",
        "give the cache more memory, or make the requests shorter",
        code="out_of_blocks",
    )

"""Forks: equal to a twin that appends every token of every sample, and to what a hand can count."""

from __future__ import annotations

import copy
import random
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.requests import Requests
from kvtool.sim.block_pool import BlockPool, OutOfBlocks
from kvtool.sim.forks import PREFIX, ForkResult, Forks, run_forks
from kvtool.sim.memory import Paged
from kvtool.sim.scheduler import Scheduler
from kvtool.sim.settings import DONE, NO_MEMORY, Settings, StepTime

SLOTS = ("token", "reserved", "internal", "external", "idle")


@dataclass
class Job:
    """A request of the twin: the samples that have not ended, and what each generated."""

    index: int
    prompt: int
    limits: dict[int, int]
    generated: int = 0

    def keys(self, pool: BlockPool) -> list[tuple[int, int]]:
        """Its sequences in the pool: one until its prefill is over."""
        return [(self.index, k) for k in self.limits if (self.index, k) in pool]


@dataclass
class Twin:
    """The rules of Forks with no calendar, no sums that are carried on, and no late append."""

    requests: Requests
    settings: Settings
    outputs: np.ndarray
    prefix: int = 0
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    rows: list[dict[str, int]] = field(default_factory=list)
    measured: list[bool] = field(default_factory=list)

    def run(self) -> dict[str, object]:
        self.pool = BlockPool(self.settings.num_blocks, self.settings.block_size)
        if self.prefix:
            self.pool.allocate(PREFIX, self.prefix)
        self.clock = self.end = self.completed = self.cut = self.aborted = self.too_long = 0
        self.preemptions = self.recomputed = self.copied = self.scheduled = 0
        self.arrivals = {k: int(at) for k, at in enumerate(self.requests.arrival_ns) if at >= 0}
        while True:
            self.arrive()
            if self.waiting or self.running:
                self.step()
            elif self.arrivals:
                self.clock = min(self.arrivals.values())
            else:
                return self.told()

    def arrive(self) -> None:
        while self.arrivals and min(self.arrivals.values()) <= self.clock:
            k = min(self.arrivals, key=lambda k: (self.arrivals[k], k))
            del self.arrivals[k]
            prompt = int(self.requests.prompt_tokens[k])
            room = self.settings.max_model_len - self.prefix - prompt
            if prompt < 1 or room < 1:
                self.too_long += 1
                self.ends(k)
                continue
            limits = {s: min(max(int(o), 1), room) for s, o in enumerate(self.outputs[k])}
            self.waiting.append(Job(k, prompt, limits))

    def ends(self, index: int) -> None:
        if self.requests.parent is not None:
            for k in np.flatnonzero(self.requests.parent == index):
                if self.requests.arrival_ns[k] < 0:
                    self.arrivals[int(k)] = self.clock + int(self.requests.think_ns[k])

    def step(self) -> None:
        ended = self.completed + self.aborted
        preempted = self.decode()
        tokens = sum(len(job.keys(self.pool)) for job in self.running)
        blocked, new = (True, []) if preempted else self.admit(tokens)
        context = sum(
            self.pool.num_tokens(key) for job in self.running for key in job.keys(self.pool)
        )
        tokens += sum(job.prompt + len(job.limits) * job.generated for job in new)
        pairs = sum(
            self.pool.num_tokens(key)
            for job in self.running
            if job not in new
            for key in job.keys(self.pool)
        )
        for job in new:
            before = self.prefix + job.prompt
            pairs += sum(range(self.prefix + 1, before + 1))
            pairs += len(job.limits) * sum(range(before + 1, before + job.generated + 1))
        law = self.settings.step_time
        self.scheduled += tokens
        self.clock += law.base_ns + law.token_ns * tokens + law.context_ns * context
        self.clock += law.attention_ns * pairs
        self.clock += law.request_ns * sum(
            len(job.limits if job in new else job.keys(self.pool)) for job in self.running
        )
        self.end = self.clock
        left = len(self.requests) - ended - self.too_long - len(self.running)
        self.measured.append(ended >= len(self.requests) // 10 and left > 0)
        self.rows.append(self.view(blocked))
        for job in list(self.running):
            self.output(job)
        if not preempted and tokens == 0:
            self.aborted += 1
            self.ends(self.waiting.pop(0).index)

    def decode(self) -> bool:
        """Append a token to every sample, with one request less as long as that fails."""
        preempted = False
        while True:
            trial, copied = copy.deepcopy(self.pool), 0
            try:
                for job in self.running:
                    for key in job.keys(trial):
                        copied += trial.append(key) is not None
            except OutOfBlocks:
                preempted = True
                self.preempt(self.running.pop())
                continue
            self.pool = trial
            self.copied += copied
            return preempted

    def preempt(self, job: Job) -> None:
        self.preemptions += 1
        self.recomputed += job.prompt
        for key in job.keys(self.pool):
            self.recomputed += self.pool.num_tokens(key) - self.prefix - job.prompt
            self.pool.free(key)
        self.waiting.insert(0, job)

    def admit(self, tokens: int) -> tuple[bool, list[Job]]:
        new: list[Job] = []
        while self.waiting:
            job = self.waiting[0]
            seats = sum(len(other.limits) for other in [*self.running, job])
            wanted = job.prompt + len(job.limits) * job.generated
            if seats > self.settings.max_running:
                break
            trial = copy.deepcopy(self.pool)
            try:
                copied = self.place(trial, job)
            except OutOfBlocks:
                return True, new
            if tokens and trial.num_free < self.settings.watermark_blocks:
                return True, new
            self.pool = trial
            self.copied += copied
            self.running.append(self.waiting.pop(0))
            new.append(job)
            tokens += wanted
        return False, new

    def place(self, pool: BlockPool, job: Job) -> int:
        first, *others = [(job.index, k) for k in job.limits]
        if self.prefix:
            pool.fork(PREFIX, first)
        else:
            pool.allocate(first, 0)
        copied = sum(pool.append(first) is not None for _ in range(job.prompt))
        for key in others if job.generated else ():
            pool.fork(first, key)
        for _ in range(job.generated):
            copied += sum(pool.append(key) is not None for key in job.keys(pool))
        return copied

    def output(self, job: Job) -> None:
        """Each sample has a token more: the first time, the prompt's sequence is forked."""
        first, *others = [(job.index, k) for k in job.limits]
        for key in others:
            if key not in self.pool:
                self.pool.fork(first, key)
        job.generated += 1
        for index, k in job.keys(self.pool):
            if job.limits[k] == job.generated:
                self.pool.free((index, k))
                del job.limits[k]
        if not job.limits:
            self.running.remove(job)
            self.completed += 1
            room = self.settings.max_model_len - self.prefix - job.prompt
            self.cut += any(int(wanted) > room for wanted in self.outputs[job.index])
            self.ends(job.index)

    def view(self, blocked: bool) -> dict[str, int]:
        """Look at every slot of every block."""
        pool, size = self.pool, self.settings.block_size
        final = {PREFIX: self.prefix}
        keys = [key for job in self.running for key in job.keys(pool)]
        for job in self.running:
            mine = job.keys(pool)
            for key in mine:  # before the fork the longest sample is still to come
                most = job.limits[key[1]] if len(mine) > 1 else max(job.limits.values())
                final[key] = self.prefix + job.prompt + most - 1
        filled, needed = {}, {}
        for key, table in pool.owners():
            for logical, block in enumerate(table):
                have = min(size, pool.num_tokens(key) - logical * size)
                want = min(size, final[key] - logical * size)
                filled[block] = max(have, filled.get(block, 0))
                needed[block] = max(want, needed.get(block, 0))
        free = pool.num_free * size
        return {
            "used_block_steps": len(filled),
            "unshared_block_steps": sum(-(-pool.num_tokens(key) // size) for key in keys),
            "token_slot_steps": sum(filled.values()),
            "reserved_slot_steps": sum(needed[block] - filled[block] for block in filled),
            "internal_slot_steps": sum(size - needed[block] for block in filled),
            "external_slot_steps": free * blocked,
            "idle_slot_steps": free * (not blocked),
            "running_steps": len(keys),
            "shared_block_steps": sum(
                pool.ref_count(block) > 1 for block in range(pool.num_blocks)
            ),
        }

    def told(self) -> dict[str, object]:
        whole = not any(self.measured)
        rows = [row for row, seen in zip(self.rows, self.measured, strict=True) if whole or seen]
        names = self.rows[0] if self.rows else [n for n in ForkResult.__slots__ if "_step" in n]
        sums = {name: sum(row.get(name, 0) for row in rows) for name in names}
        return {
            **sums,
            "steps": len(self.rows), "measured_steps": len(rows), "whole_run": whole,
            "end_ns": self.end, "completed": self.completed, "cut": self.cut,
            "aborted": self.aborted, "prompt_too_long": self.too_long,
            "preemptions": self.preemptions, "recomputed_tokens": self.recomputed,
            "copied_blocks": self.copied, "scheduled_tokens": self.scheduled,
            "peak_running": max((row["running_steps"] for row in self.rows), default=0),
            "shared_blocks_peak": max((row["shared_block_steps"] for row in self.rows), default=0),
        }  # fmt: skip


def made(rng: random.Random, slots: int, count: int, sessions: bool) -> tuple[Requests, np.ndarray]:
    """Requests, with an output for each of up to 6 samples, that a pool of so many slots feels."""
    longest = max(2, slots // 4)
    outputs = np.array([rng.randint(1, longest) for _ in range(6 * count)], np.int64)
    outputs = outputs.reshape(count, 6)
    spread = rng.choice([0, 10, 1000]) * 1_000_000
    arrivals = [rng.randint(0, spread) for _ in range(count)]
    parents = [-1] * count
    for k in range(1, count) if sessions else ():
        if rng.random() < 0.5:
            parents[k], arrivals[k] = rng.randrange(k), -1
    requests = Requests(
        arrival_ns=np.array(arrivals, np.int64),
        prompt_tokens=np.array([rng.randint(0, longest) for _ in range(count)], np.int64),
        output_tokens=outputs[:, 0].copy(),
        parent=np.array(parents, np.int64),
        think_ns=np.array([rng.randint(0, spread) for _ in range(count)], np.int64),
    )
    return requests, outputs


def equal_to_the_twin(
    rng: random.Random, size: int, slots: int, samples: int, count: int, prefix: int
) -> ForkResult:
    prefix = min(prefix, slots // 2 // size * size)
    requests, outputs = made(rng, slots, count, sessions=rng.random() < 0.3)
    given_settings = Settings(
        num_blocks=max(2, slots // size),
        block_size=size,
        max_model_len=rng.choice([slots // 3 + 2, slots, 4 * slots]),
        max_num_seqs=rng.choice([samples, 3 * samples, 64]),
        max_batched_tokens=rng.choice([slots // 4 + 1, 8192]),
        watermark=rng.choice([0.0, 0.1]),
        step_time=StepTime(
            context_ns=rng.choice([1, 100_000]),
            attention_ns=rng.choice([0, 3]),
            request_ns=rng.choice([0, 5]),
        ),
    )
    chosen = outputs[:, :samples]
    run = Forks(
        requests, given_settings, samples=samples, sample_outputs=chosen, shared_prefix=prefix
    )
    result = run.run()
    assert asdict(result) == Twin(requests, given_settings, chosen, prefix).run()
    assert run.pool.num_free == given_settings.num_blocks
    assert run.pool.num_free == run.pool.num_blocks
    assert not list(run.pool.owners())
    assert result.completed + result.aborted + result.prompt_too_long == count
    filled = sum(getattr(result, f"{name}_slot_steps") for name in SLOTS)
    assert filled == given_settings.num_slots * result.measured_steps
    return result


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 32),
    slots=st.integers(16, 300),
    samples=st.integers(1, 6),
    count=st.integers(0, 12),
    prefix=st.integers(0, 40),
)
def test_any_run_is_that_of_the_twin(
    seed: int, size: int, slots: int, samples: int, count: int, prefix: int
) -> None:
    equal_to_the_twin(random.Random(seed), size, slots, samples, count, prefix)


def test_tight_runs_are_those_of_the_twin() -> None:
    """Seeded, so that what must be seen is seen: each event of a run, in both kinds of window."""
    rng = random.Random(1)
    results = [
        equal_to_the_twin(
            rng, rng.choice([1, 2, 3, 4, 7, 16]), rng.randint(40, 400), rng.randint(1, 6),
            rng.choice([1, 2, 8, 14]), rng.choice([0, 0, 5, 16, 33]),
        )
        for _ in range(60)
    ]  # fmt: skip
    for name in (
        "cut", "aborted", "prompt_too_long", "preemptions", "copied_blocks",
        "external_slot_steps", "whole_run",
    ):  # fmt: skip
        assert sum(bool(getattr(result, name)) for result in results) >= 4, name
    assert sum(not result.whole_run for result in results) >= 10


def at_once(prompts: list[int], outputs: list[int]) -> Requests:
    return Requests(
        arrival_ns=np.zeros(len(prompts), np.int64),
        prompt_tokens=np.array(prompts, np.int64),
        output_tokens=np.array(outputs, np.int64),
    )


def test_one_sample_without_a_prefix_is_the_scheduler() -> None:
    """The paged scheduler without chunks is a second oracle, written for another purpose."""
    rng = random.Random(2)
    preemptions = aborted = 0
    for _ in range(20):
        requests, _ = made(rng, 200, 14, sessions=rng.random() < 0.3)
        requests = replace(requests, prompt_tokens=np.maximum(requests.prompt_tokens, 1))
        limits = Settings(
            num_blocks=rng.choice([8, 20, 50]), block_size=4, chunked_prefill=False,
            max_num_seqs=rng.choice([3, 64]), watermark=rng.choice([0.0, 0.2]),
        )  # fmt: skip
        found = run_forks(requests, limits, samples=1)
        result = Scheduler(requests, limits, Paged(limits)).run()
        assert found.steps == len(result.steps)
        assert found.end_ns == result.steps[-1].end_ns
        assert found.completed == sum(one.status == DONE for one in result.outcomes)
        assert found.preemptions == len(result.preemptions)
        assert found.recomputed_tokens == result.recomputed_tokens
        assert found.used_block_steps == found.unshared_block_steps
        assert found.copied_blocks == found.shared_block_steps == 0
        assert found.saved_share == 0.0
        ended = [sum(o.finish_step < k for o in result.outcomes) for k in range(found.steps)]
        steps = [
            step
            for step, gone in zip(result.steps, ended, strict=True)
            if gone >= 1 and len(requests) - gone - step.running > 0
        ]
        free = [(step.held_up == NO_MEMORY, limits.num_slots - step.held_slots) for step in steps]
        assert not found.whole_run
        assert found.measured_steps == len(steps)
        assert found.token_slot_steps == sum(step.token_slots for step in steps)
        assert found.reserved_slot_steps == sum(step.reserved_slots for step in steps)
        assert found.internal_slot_steps == sum(step.internal_slots for step in steps)
        assert found.external_slot_steps == sum(slots for blocked, slots in free if blocked)
        assert found.idle_slot_steps == sum(slots for blocked, slots in free if not blocked)
        assert found.running_steps == sum(step.running for step in steps)
        preemptions += found.preemptions
        aborted += found.aborted
    assert preemptions > 20
    assert aborted > 2


def test_two_samples_by_hand() -> None:
    """Blocks of 4, a prompt of 6 tokens, two samples of 3 tokens each.

    step  cached by each  blocks                                     used  unshared  filled
    0     6 (prefill)     [0123][45..]                                  2         2       6
    1     7, 7            [0123] held twice, [456.] and its copy        3         4      10
    2     8, 8            [0123] held twice, [4567] and [4567]          3         4      12
    After step 0 both have their first token, after step 2 their third, which is never cached.
    """
    result = run_forks(at_once([6], [3]), Settings(num_blocks=8, block_size=4), samples=2)
    assert asdict(result) == {
        "steps": 3, "end_ns": 3 * 10_000_000 + 10 * 20_000 + (6 + 14 + 16),
        "completed": 1, "cut": 0, "aborted": 0, "prompt_too_long": 0, "preemptions": 0,
        "scheduled_tokens": 10,
        "recomputed_tokens": 0, "copied_blocks": 1, "measured_steps": 3, "whole_run": True,
        "used_block_steps": 2 + 3 + 3, "unshared_block_steps": 2 + 4 + 4,
        "token_slot_steps": 6 + 10 + 12, "reserved_slot_steps": 2 + 2 + 0,
        "internal_slot_steps": 0, "external_slot_steps": 0,
        "idle_slot_steps": 4 * (6 + 5 + 5), "running_steps": 1 + 2 + 2, "peak_running": 2,
        "shared_block_steps": 0 + 1 + 1, "shared_blocks_peak": 1,
    }  # fmt: skip
    assert result.saved_share == pytest.approx(1 - 8 / 10)


def test_samples_of_different_lengths_by_hand() -> None:
    """Blocks of 4, a prompt of 4 tokens, outputs of 1, 2 and 3 tokens.

    step  cached by each  blocks                                     used  unshared  filled
    0     4 (prefill)     [0123]                                        1         1       4
    1     5, 5            [0123] held twice, [4...] and [4...]          3         4       6
    2     6               [0123][45..]                                  2         2       6
    The tail of the prompt is full: nothing is copied. In step 1 the sample of 2 tokens leaves 3 slots
    of its block unused and the sample of 3 tokens 2, of which it fills one in step 2.
    """
    requests, outputs = at_once([4], [1]), np.array([[2, 1, 3]])
    limits = Settings(num_blocks=3, block_size=4)
    result = run_forks(requests, limits, samples=3, sample_outputs=outputs)
    assert result.steps == 3
    assert (result.copied_blocks, result.shared_blocks_peak) == (0, 1)
    assert result.used_block_steps == 1 + 3 + 2
    assert result.unshared_block_steps == 1 + 4 + 2
    assert result.token_slot_steps == 4 + 6 + 6
    assert result.reserved_slot_steps == 0 + 1 + 0
    assert result.internal_slot_steps == 0 + 5 + 2


def test_a_prefix_by_hand() -> None:
    """Blocks of 4, a prefix of 6 tokens, two prompts of 3 tokens, one output token each.

    The prefix pins [0123][45..]. Both requests share the first block; the second is copied for each
    of them, and filled to [4567], and a third block is [8...]: 2 + 2 + 2 blocks, 3 + 3 unshared.
    """
    requests, limits = at_once([3, 3], [1, 1]), Settings(num_blocks=6, block_size=4)
    result = run_forks(requests, limits, samples=1, shared_prefix=6)
    assert (result.steps, result.completed, result.copied_blocks) == (1, 2, 2)
    assert (result.used_block_steps, result.unshared_block_steps) == (6, 6)
    assert (result.token_slot_steps, result.reserved_slot_steps) == (6 + 5 + 5, 0)
    assert result.internal_slot_steps == 2 + 3 + 3
    assert (result.shared_block_steps, result.idle_slot_steps) == (1, 0)


@pytest.mark.parametrize("samples", [2, 3, 6])
def test_forks_take_blocks_when_they_diverge(samples: int) -> None:
    limits = Settings(num_blocks=64, block_size=4)
    for prompt, copies in ((7, samples - 1), (8, 0)):
        one, two = (run_forks(at_once([prompt], [k]), limits, samples=samples) for k in (1, 2))
        assert one.used_block_steps == one.unshared_block_steps == 2  # the fork itself: nothing
        assert one.copied_blocks == 0
        apart = samples - 1 if copies else samples
        assert two.used_block_steps == 2 + 2 + apart
        assert two.copied_blocks == copies


def test_a_request_that_never_fits_ends_the_wait_of_the_others() -> None:
    """10 blocks of 1 token: a prompt of 11, and a growth to 4 + 2 x 4, do not fit; 4 + 2 x 3 does."""
    requests = at_once([11, 4, 4, 1], [1, 5, 4, 1])
    result = run_forks(requests, Settings(num_blocks=10, block_size=1), samples=2)
    assert (result.aborted, result.completed) == (2, 2)
    short = Settings(num_blocks=9, max_model_len=8)
    result = run_forks(at_once([8, 0, 7, 6], [1, 1, 2, 2]), short, samples=1)
    assert (result.prompt_too_long, result.completed, result.cut) == (2, 2, 1)
    empty = run_forks(at_once([], []), Settings(num_blocks=1), samples=1)
    assert (empty.steps, empty.whole_run, empty.saved_share) == (0, True, 0.0)


def test_an_interrupt_leaves_the_sums_of_whole_steps() -> None:
    ended: list[int] = []

    def stop(more: int) -> None:
        ended.append(more)
        if sum(ended) == 6:
            raise KeyboardInterrupt

    limits = Settings(num_blocks=40, block_size=4)
    run = Forks(at_once([9] * 20, [12] * 20), limits, samples=3, progress=stop)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    result = run.result()
    assert result.completed == 6
    assert 0 < result.measured_steps < result.steps
    filled = sum(getattr(result, f"{name}_slot_steps") for name in SLOTS)
    assert filled == limits.num_slots * result.measured_steps


def test_what_cannot_be_run_is_refused() -> None:
    requests, limits = at_once([5], [5]), Settings(num_blocks=4, max_num_seqs=4)
    for samples in (0, 5):
        with pytest.raises(ValueError, match="samples"):
            Forks(requests, limits, samples=samples)
    with pytest.raises(ValueError, match="prefix"):
        Forks(requests, limits, samples=1, shared_prefix=-1)
    with pytest.raises(ValueError, match="row"):
        Forks(requests, limits, samples=2, sample_outputs=np.ones((1, 3), np.int64))
    with pytest.raises(OutOfBlocks):
        Forks(requests, limits, samples=1, shared_prefix=65)

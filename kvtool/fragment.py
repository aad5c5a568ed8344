"""The rows of `kvtool fragment`: one allocator, one pool, one kind of traffic each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.pool import Pool
from kvtool.requests import SECOND_NS
from kvtool.run import Row
from kvtool.traffic import Traffic, all_requests, one_by_one

if TYPE_CHECKING:
    from kvtool.sim.forks import ForkResult
    from kvtool.sim.settings import Settings
    from kvtool.sim.totals import Sums, Totals

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a row is about. `samples` and `shared_prefix` are what requests could share."""

    allocator: str
    placement: str | None
    settings: Settings
    pool: Pool
    traffic: Traffic
    samples: int = 1
    shared_prefix: int = 0

    @property
    def shares(self) -> bool:
        """Whether the paged allocator has anything to share."""
        return self.samples > 1 or self.shared_prefix > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A row, and the shares over time that a picture of it needs."""

    row: Row
    series: tuple[Sums, ...]
    interrupted: bool


def measure(case: Case, progress: Progress) -> Measured:
    """Run the requests of a case through its allocator."""
    from kvtool.sim.memory import PAGED

    if case.allocator == PAGED and case.shares:
        return _measure_forks(case, progress)
    totals = _run(case, progress)
    sums = totals.measured
    row = _echo(case) | {
        "requests": totals.requests,
        "completed": totals.completed,
        "cut": totals.cut,
        "rejected": totals.rejected,
        "prompt_too_long": totals.prompt_too_long,
        "larger_than_pool": totals.larger_than_pool,
        "preemptions": totals.preemptions,
        "scheduled_tokens": totals.scheduled_tokens,
        "recomputed_tokens": totals.recomputed_tokens,
        "swapped_blocks": totals.swapped_blocks,
        "copied_tokens": totals.copied_tokens,
        "steps": totals.steps,
        "end_s": totals.end_ns / SECOND_NS,
        "interrupted": totals.interrupted,
        **_of_sums(case, sums, whole_run=totals.window.steps == 0),
        **_waiting(case, sums),
        "peak_batch": totals.peak_running,
        "shared_blocks": 0,
        "copied_blocks": 0,
        "saved_share": 0.0,
    }
    return Measured(row=row, series=totals.series, interrupted=totals.interrupted)


def _run(case: Case, progress: Progress) -> Totals:
    from kvtool.sim.engine import Engine
    from kvtool.sim.memory import STATIC_BATCH
    from kvtool.sim.static_batch import StaticBatches

    source = one_by_one(case.traffic, case.samples, case.shared_prefix)
    count = case.traffic.num_requests * case.samples
    if case.allocator == STATIC_BATCH:
        batches = StaticBatches(
            source=source, num_requests=count, settings=case.settings, progress=progress
        )
        return batches.run().totals()
    engine = Engine(
        source=source,
        num_requests=count,
        settings=case.settings,
        allocator=case.allocator,
        placement=case.placement or "",
        progress=progress,
    )
    return engine.run().totals()


WAITING = ("waiting_for_seqs_steps", "waiting_for_tokens_steps", "waiting_for_blocks_steps")


def _waiting(case: Case, sums: Sums) -> Row:
    """Of the measured steps, those in which the head of the queue was kept out, and by what."""
    from kvtool.sim.memory import STATIC_BATCH

    if case.allocator == STATIC_BATCH:  # there it waits for the end of a batch
        return {}
    return dict(zip(WAITING, (sums.no_seat, sums.no_tokens, sums.no_memory), strict=True))


def _of_sums(case: Case, sums: Sums, *, whole_run: bool) -> Row:
    """Shares of the pool and the batch, averaged over the steps that are measured."""
    from kvtool.sim.memory import PAGED
    from kvtool.sim.totals import SHARES

    steps = max(1, sums.steps)
    used = sums.held / steps / case.settings.block_size
    return {
        "measured_steps": sums.steps,
        "whole_run": whole_run,
        **{f"{name}_share": sums.share(name) for name in SHARES},
        "mean_batch": sums.running / steps,
        "mean_used_blocks": used if case.allocator == PAGED else None,
        **dict.fromkeys(WAITING, None),
    }


MADE = (
    "seed", "prompt_dist", "prompt_mean", "prompt_cap", "output_dist", "output_mean", "output_cap",
)  # fmt: skip


def _echo(case: Case) -> Row:
    """Everything that the row is about, resolved; null where it does not apply to the allocator."""
    from kvtool.sim.memory import PAGED, STATIC_BATCH
    from kvtool.sim.settings import RECOMPUTE

    settings, paged = case.settings, case.allocator == PAGED
    steps = case.allocator != STATIC_BATCH and not (paged and case.shares)
    preempts = paged or case.allocator == "grow"
    return {
        "allocator": case.allocator,
        "placement": case.placement,
        "block_size": settings.block_size if paged else None,
        "num_blocks": settings.num_blocks if paged else None,
        "pool_tokens": settings.num_slots,
        "model": case.pool.model,
        "gpu": case.pool.gpu,
        "tp": case.pool.tp,
        "kv_memory_bytes": case.pool.kv_bytes,
        "bytes_per_token": case.pool.bytes_per_token,
        "workload": case.traffic.name,
        **{name: case.traffic.made.get(name) for name in MADE},
        "rate": case.traffic.rate,
        "n": case.samples,
        "shared_prefix": case.shared_prefix,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_batched_tokens": settings.max_batched_tokens if steps else None,
        "chunked_prefill": settings.chunked_prefill if steps else None,
        "reserve_full_prompt": settings.reserve_full_prompt if paged and steps else None,
        "watermark": settings.watermark if paged else None,
        "preemption": (settings.preemption if paged else RECOMPUTE) if preempts else None,
        "cpu_blocks": settings.cpu_blocks if paged else None,
        "base_ns": settings.step_time.base_ns,
        "token_ns": settings.step_time.token_ns,
        "context_ns": settings.step_time.context_ns,
    }


def _measure_forks(case: Case, progress: Progress) -> Measured:
    """The paged allocator where requests share blocks: forks with copy-on-write."""
    from kvtool.sim.forks import Forks

    requests = all_requests(case.traffic)
    forks = Forks(
        requests,
        case.settings,
        samples=case.samples,
        sample_outputs=None,  # each sample has its request's, as in the vLLM paper's traces
        shared_prefix=case.shared_prefix,
        progress=progress,
    )
    interrupted = False
    try:
        forks.run()
    except KeyboardInterrupt:
        interrupted = True
    result = forks.result()
    return Measured(row=_fork_row(case, result, interrupted), series=(), interrupted=interrupted)


def _fork_row(case: Case, result: ForkResult, interrupted: bool) -> Row:
    from kvtool.sim.totals import Sums

    sums = Sums(
        steps=result.measured_steps,
        token=result.token_slot_steps,
        reserved=result.reserved_slot_steps,
        internal=result.internal_slot_steps,
        external=result.external_slot_steps,
        idle=result.idle_slot_steps,
        running=result.running_steps,
    )
    steps = max(1, result.measured_steps)
    return _echo(case) | {
        "requests": case.traffic.num_requests,
        "completed": result.completed,
        "cut": result.cut,
        "rejected": result.aborted + result.prompt_too_long,
        "prompt_too_long": result.prompt_too_long,
        "larger_than_pool": result.aborted,
        "preemptions": result.preemptions,
        "scheduled_tokens": result.scheduled_tokens,
        "recomputed_tokens": result.recomputed_tokens,
        "swapped_blocks": 0,
        "copied_tokens": 0,
        "steps": result.steps,
        "end_s": result.end_ns / SECOND_NS,
        "interrupted": interrupted,
        **_of_sums(case, sums, whole_run=result.whole_run),
        "peak_batch": result.peak_running,
        "shared_blocks": result.shared_block_steps / steps,
        "copied_blocks": result.copied_blocks,
        "saved_share": result.saved_share,
    }

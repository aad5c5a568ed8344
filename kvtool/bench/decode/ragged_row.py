"""The row of a ragged run: its pool of blocks, its median run, and what larger batches give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvtool.bench.decode import arithmetic
from kvtool.bench.decode.batching import Sequence, Tally
from kvtool.bench.decode.blueprint import Blueprint
from kvtool.bench.decode.gain import gain
from kvtool.bench.decode.model import Decoder
from kvtool.bench.decode.row import model_inputs, p99
from kvtool.bench.decode.settings import ROW, RaggedRun
from kvtool.errors import KvtoolError
from kvtool.run import Row
from kvtool.stats import quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What the budget is as blocks of one size: never more than all sequences together take."""

    num_blocks: int
    block_size: int
    contiguous: bool
    """Whether a block is a whole reservation."""

    @property
    def cache(self) -> str:
        """As rows name it."""
        return "contiguous-max" if self.contiguous else "paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One run on a pool."""

    tally: Tally
    copied_blocks: int
    peak_bytes: int | None


def pools_for(plan: Blueprint, run: RaggedRun, item_bytes: int) -> list[Pool]:
    """The budget as reservations, which is the baseline, then as blocks of each size."""
    paged = [_pool(plan, run, size, item_bytes, contiguous=False) for size in run.block_sizes]
    return [_pool(plan, run, run.max_model_len, item_bytes, contiguous=True), *paged]


def _pool(plan: Blueprint, run: RaggedRun, size: int, item_bytes: int, *, contiguous: bool) -> Pool:
    """The budget as blocks. Raises KvtoolError if it holds none."""
    block_bytes = size * plan.heads.token_bytes(item_bytes)
    tokens = run.requests.prompt_tokens + run.requests.output_tokens
    most = int((-(-tokens // size)).sum()) * run.samples
    least = run.samples if contiguous else 1
    num_blocks = run.kv_budget_bytes // block_bytes
    if num_blocks < least:
        raise KvtoolError(
            f"a budget of {run.kv_budget_bytes:,} bytes holds {num_blocks} blocks of {size:,} tokens"
            f" ({block_bytes:,} bytes each), and a request needs {least}",
            "raise --kv-memory, or lower --max-model-len",
            code="out_of_blocks",
        )
    return Pool(num_blocks=min(num_blocks, most), block_size=size, contiguous=contiguous)


def ragged_row(decoder: Decoder, run: RaggedRun, pool: Pool, ran: Mapping[Pool, list[Ran]]) -> Row:
    """The median run's row, and gains over the first pool's runs, round by round."""
    base = next(iter(ran))
    walls = {each: [one.tally.wall_s for one in ran[each]] for each in (base, pool)}
    measured, interval = gain(walls[base], walls[pool])
    by_wall = sorted(ran[pool], key=lambda one: one.tally.wall_s)
    return (
        _inputs(decoder, run, pool)
        | _measured(by_wall[(len(by_wall) - 1) // 2])
        | {
            "repeats": len(by_wall),
            "baseline": base.cache,
            "predicted_gain": _predicted(decoder, run, pool, base),
            "measured_gain": measured,
            "measured_gain_ci": interval,
        }
    )


def _inputs(decoder: Decoder, run: RaggedRun, pool: Pool) -> Row:
    """What was asked, in the order of every row."""
    requests = run.requests
    return ROW | {
        "run": "ragged",
        "cache": pool.cache,
        **model_inputs(decoder),
        "batch": len(requests) * run.samples,
        "prompt_tokens": float(requests.prompt_tokens.mean()),
        "output_tokens": float(requests.output_tokens.mean()),
        "block_size": None if pool.contiguous else pool.block_size,
        "max_model_len": run.max_model_len,
        "requests": len(requests),
        "samples": run.samples,
        "kv_budget_bytes": run.kv_budget_bytes,
        "num_blocks": pool.num_blocks,
        "checked_sequences": min(run.check_requests, len(requests)) * run.samples,
        "cuda_graph": False,
    }


def _measured(ran: Ran) -> Row:
    tally = ran.tally
    done = tally.sequences
    tpot = [time for one in done if (time := _tpot(one)) is not None]
    return {
        "ttft_s": quantile([one.first_s for one in done], 0.5),
        "tpot_s_p50": quantile(tpot, 0.5) if tpot else None,
        "tpot_s_p99": p99(tpot),
        "output_tokens_per_s": sum(len(one.generated) for one in done) / tally.wall_s,
        "wall_s": tally.wall_s,
        "kv_reserved_bytes": _mean(tally.held_bytes),
        "kv_used_bytes": _mean(tally.used_bytes),
        "peak_bytes": ran.peak_bytes,
        "mean_batch": float(np.mean(tally.batches)) if tally.batches else 0.0,
        "peak_batch": max(tally.batches, default=0),
        "steps": len(tally.batches),
        "preemptions": tally.preemptions,
        "recomputed_tokens": tally.recomputed_tokens,
        "shared_blocks": tally.shared_blocks,
        "copied_blocks": ran.copied_blocks,
    }


def _tpot(sequence: Sequence) -> float | None:
    """(end-to-end − TTFT) / (output − 1), preemptions included."""
    gaps = len(sequence.generated) - 1
    return (sequence.last_s - sequence.first_s) / gaps if gaps else None


def _mean(amounts: list[int]) -> int:
    return round(float(np.mean(amounts))) if amounts else 0


def _predicted(decoder: Decoder, run: RaggedRun, pool: Pool, base: Pool) -> float | None:
    """The most that bytes allow: as many more sequences share what is read of the weights."""
    if not decoder.plan.dense:
        return None
    read = arithmetic.weights_read(decoder.plan, decoder.dtype.itemsize)
    batches = (largest_batch(each, run) for each in (pool, base))
    return arithmetic.batch_gain(read, _read_bytes(decoder, run), *batches)


def largest_batch(pool: Pool, run: RaggedRun) -> float:
    """Sequences that the pool holds at once, on average over their lives, if there are as many.

    A sequence in the middle of its output holds its prompt, which samples share, half of its output
    and half of a last block; the longer it generates, the longer it counts.
    """
    outputs = run.requests.output_tokens.astype(np.float64)
    if pool.contiguous:
        room = float(pool.num_blocks)
    else:
        own = run.requests.prompt_tokens / run.samples + (outputs + pool.block_size) / 2
        room = pool.num_blocks * pool.block_size / float((own * outputs).sum() / outputs.sum())
    return min(room, len(run.requests) * run.samples, run.max_batch)


def _read_bytes(decoder: Decoder, run: RaggedRun) -> float:
    """Cache that a decode step reads of a sequence, on average over their lives."""
    outputs = run.requests.output_tokens
    middle = (run.requests.prompt_tokens + outputs // 2).tolist()
    seen = np.array([decoder.heads.seen_tokens(tokens) for tokens in middle])
    token = arithmetic.token_read_bytes(decoder.heads, decoder.dtype.itemsize)
    return float((seen * outputs).sum() / outputs.sum()) * token

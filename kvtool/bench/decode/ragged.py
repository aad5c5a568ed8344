"""The rows of ragged batching: one budget of memory, reservations of the maximum against blocks.

That paging makes batches larger is shown here: the same requests, the same bytes for the cache, the
same model, and the same loop (batching.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvtool.bench.decode import arithmetic
from kvtool.bench.decode.batching import Batcher, Prompt, Sequence, Tally, check_fits
from kvtool.bench.decode.blueprint import Blueprint, blueprint, refuse_long
from kvtool.bench.decode.failures import named_failure
from kvtool.bench.decode.hushed import hushed
from kvtool.bench.decode.kernels import Kernels, kernels_for
from kvtool.bench.decode.kv_store import KvStore
from kvtool.bench.decode.memory import ITEM_BYTES, check_memory
from kvtool.bench.decode.model import Decoder, build_model
from kvtool.bench.decode.row import model_inputs
from kvtool.bench.decode.settings import ROW, Advance, ModelChoice, RaggedRun, silent
from kvtool.bench.decode.stepping import Stepping, attend
from kvtool.errors import KvtoolError
from kvtool.run import Row
from kvtool.sim.block_pool import BlockPool
from kvtool.stats import quantile

RAGGED = ("contiguous-max", "paged")
"""The baseline first."""

LOWER = "the cache's memory (--kv-memory)"
WARM_UP_REQUESTS = 2
WARM_UP_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What the budget is as blocks of one size: never more than all sequences together take."""

    cache: str
    num_blocks: int
    block_size: int

    @property
    def contiguous(self) -> bool:
        """Whether a block is a whole reservation."""
        return self.cache == "contiguous-max"


def ragged_rows(
    plan: Blueprint,
    choice: ModelChoice,
    run: RaggedRun,
    *,
    advance: Advance = silent,
    make_kernels: Callable[[str, int], Kernels] = kernels_for,
) -> Iterator[Row]:
    """A row for contiguous-max, then one for paged. Raises KvtoolError.

    `same_tokens` is that of the first `check_requests` requests; False is a wrong answer.
    """
    refuse_long(plan, int((run.requests.prompt_tokens + run.requests.output_tokens).max()))
    item = ITEM_BYTES[choice.dtype]
    pools = [pool_for(plan, run, cache, item) for cache in RAGGED]
    check_memory(plan, choice, {"cache": run.kv_budget_bytes}, what="ragged batching", lower=LOWER)
    for pool in pools:
        check_fits(_prompts(plan, run), run.samples, BlockPool(pool.num_blocks, pool.block_size))
    yield from hushed(_rows(plan, choice, run, pools, advance, make_kernels), run.threads)


def pool_for(plan: Blueprint, run: RaggedRun, cache: str, item_bytes: int) -> Pool:
    """The budget as blocks, or as reservations. Raises KvtoolError if it holds none."""
    size = run.max_model_len if cache == "contiguous-max" else run.block_size
    block_bytes = size * plan.heads.token_bytes(item_bytes)
    tokens = run.requests.prompt_tokens + run.requests.output_tokens
    most = int((-(-tokens // size)).sum()) * run.samples
    least = run.samples if cache == "contiguous-max" else 1
    num_blocks = run.kv_budget_bytes // block_bytes
    if num_blocks < least:
        raise KvtoolError(
            f"a budget of {run.kv_budget_bytes:,} bytes holds {num_blocks} blocks of {size:,} tokens"
            f" ({block_bytes:,} bytes each), and a request needs {least}",
            "raise --kv-memory, or lower --max-model-len",
            code="out_of_blocks",
        )
    return Pool(cache=cache, num_blocks=min(num_blocks, most), block_size=size)


def ragged_steps(choice: ModelChoice, run: RaggedRun) -> int:
    """How often `advance` is called: for a progress bar's length."""
    checked = min(run.check_requests, len(run.requests)) * run.samples
    runs = len(RAGGED) * (2 if choice.dtype != "fp32" and checked else 1)
    return 1 + runs * len(run.requests) * run.samples + checked


def _rows(
    plan: Blueprint,
    choice: ModelChoice,
    run: RaggedRun,
    pools: list[Pool],
    advance: Advance,
    make_kernels: Callable[[str, int], Kernels],
) -> Iterator[Row]:
    kernels = make_kernels(choice.device, run.threads)
    checked: dict[str, bool] = {}
    if choice.dtype != "fp32" and run.check_requests:
        checked = _checked(plan, choice, run, pools, kernels, advance)
    with named_failure(f"the weights of {plan.name}", "the width of --dtype"):
        decoder = build_model(plan, choice)
    advance(f"{plan.name}: built")
    known: dict[tuple[int, int], list[int]] = {}
    if choice.dtype == "fp32":
        known = _expected(decoder, run, advance)
    baseline: float | None = None
    for pool in pools:
        with named_failure(f"{pool.cache} batching", LOWER):
            _warm_up(decoder, kernels, pool, run)
            tally, store, peak = _run(decoder, kernels, pool, run, advance)
        row = _row(decoder, pool, run, tally, store) | {"peak_bytes": peak}
        row["same_tokens"] = _same(tally, known) if known else checked.get(pool.cache)
        baseline = row["output_tokens_per_s"] if baseline is None else baseline
        yield row | _gains(decoder, pools, pool, run, row["output_tokens_per_s"] / baseline)


def _prompts(plan: Blueprint, run: RaggedRun) -> list[Prompt]:
    """The requests with random ids, the same for a seed."""
    generator = torch.Generator().manual_seed(run.seed)
    columns = zip(
        run.requests.prompt_tokens.tolist(), run.requests.output_tokens.tolist(), strict=True
    )
    return [
        Prompt(
            index=index,
            ids=torch.randint(0, plan.vocab, (prompt,), generator=generator),
            output_tokens=output,
        )
        for index, (prompt, output) in enumerate(columns)
    ]


def _stepping(decoder: Decoder, kernels: Kernels, pool: Pool, max_tokens: int) -> Stepping:
    store = KvStore(
        decoder.heads,
        kernels,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        dtype=decoder.dtype,
        device=decoder.device,
        contiguous=pool.contiguous,
    )
    return Stepping(decoder, store, max_tokens)


def _warm_up(decoder: Decoder, kernels: Kernels, pool: Pool, run: RaggedRun) -> None:
    """Two requests for a few tokens: kernels compiled, libraries started."""
    few = _prompts(decoder.plan, run)[:WARM_UP_REQUESTS]
    short = [replace(one, output_tokens=min(one.output_tokens, WARM_UP_TOKENS)) for one in few]
    stepping = _stepping(decoder, kernels, pool, run.max_model_len)
    Batcher(stepping, samples=run.samples, max_batch=run.max_batch).run(short, silent)


def _run(
    decoder: Decoder, kernels: Kernels, pool: Pool, run: RaggedRun, advance: Advance
) -> tuple[Tally, KvStore, int | None]:
    gpu = decoder.device.startswith("cuda")
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(decoder.device)
    stepping = _stepping(decoder, kernels, pool, run.max_model_len)
    batcher = Batcher(stepping, samples=run.samples, max_batch=run.max_batch)
    tally = batcher.run(_prompts(decoder.plan, run), advance)
    peak = torch.cuda.max_memory_allocated(decoder.device) if gpu else None
    return tally, stepping.store, peak


def _checked(
    plan: Blueprint,
    choice: ModelChoice,
    run: RaggedRun,
    pools: list[Pool],
    kernels: Kernels,
    advance: Advance,
) -> dict[str, bool]:
    """Cache → whether its tokens are right in fp32, in a model of the first few layers: the same
    requests on as many blocks make the same schedule."""
    few = blueprint(plan.loaded, layers=min(run.check_layers, plan.heads.num_layers))
    fp32 = replace(choice, dtype="fp32", random_weights=True)
    token = few.heads.token_bytes(ITEM_BYTES["fp32"])
    most = max(pool.num_blocks * pool.block_size for pool in pools) * token
    check_memory(few, fp32, {"cache": most}, what="the check in fp32", lower=LOWER)
    decoder = build_model(few, fp32)
    known = _expected(decoder, run, advance)
    with named_failure("the check in fp32", LOWER):
        return {
            pool.cache: _same(_run(decoder, kernels, pool, run, advance)[0], known)
            for pool in pools
        }


def _expected(
    decoder: Decoder, run: RaggedRun, advance: Advance
) -> dict[tuple[int, int], list[int]]:
    """(request, sample) → the tokens of a run of its own with DynamicCache."""
    attend(decoder, "sdpa")
    found = {}
    for prompt in _prompts(decoder.plan, run)[: run.check_requests]:
        for sample in range(run.samples):
            found[prompt.index, sample] = alone(decoder, prompt, sample)
            advance(f"request {prompt.index} alone")
    return found


def alone(decoder: Decoder, prompt: Prompt, sample: int) -> list[int]:
    """What sample `sample` of a request generates by itself, with DynamicCache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=decoder.module.config)
    given = {decoder.cache_name: cache, "use_cache": True, "logits_to_keep": 1}
    ids, rank = prompt.ids[None].to(decoder.device), sample
    out: list[int] = []
    with torch.no_grad():
        while len(out) < prompt.output_tokens:
            logits = decoder.module(input_ids=ids, **given).logits[0, -1]
            out.append(int(logits.topk(rank + 1).indices[rank]))
            ids, rank = ids.new_tensor([[out[-1]]]), 0
    return out


def _same(tally: Tally, known: dict[tuple[int, int], list[int]]) -> bool:
    made = {(one.prompt.index, one.sample): one.generated for one in tally.sequences}
    return all(made[place] == tokens for place, tokens in known.items())


def _row(decoder: Decoder, pool: Pool, run: RaggedRun, tally: Tally, store: KvStore) -> Row:
    done, requests = tally.sequences, run.requests
    tokens = sum(len(one.generated) for one in done)
    tpot = [time for one in done if (time := _tpot(one)) is not None]
    return ROW | {
        "run": "ragged",
        "cache": pool.cache,
        **model_inputs(decoder),
        "batch": len(done),
        "prompt_tokens": float(requests.prompt_tokens.mean()),
        "output_tokens": float(requests.output_tokens.mean()),
        "block_size": None if pool.contiguous else pool.block_size,
        "max_model_len": run.max_model_len,
        "requests": len(requests),
        "samples": run.samples,
        "kv_budget_bytes": run.kv_budget_bytes,
        "num_blocks": pool.num_blocks,
        "ttft_s": quantile([one.first_s for one in done], 0.5),
        "tpot_s_p50": quantile(tpot, 0.5) if tpot else None,
        "tpot_s_p99": quantile(tpot, 0.99) if tpot else None,
        "output_tokens_per_s": tokens / tally.wall_s,
        "wall_s": tally.wall_s,
        "kv_reserved_bytes": _mean(tally.held_bytes),
        "kv_used_bytes": _mean(tally.used_bytes),
        "mean_batch": float(np.mean(tally.batches)) if tally.batches else 0.0,
        "peak_batch": max(tally.batches, default=0),
        "steps": len(tally.batches),
        "preemptions": tally.preemptions,
        "recomputed_tokens": tally.recomputed_tokens,
        "shared_blocks": tally.shared_blocks,
        "copied_blocks": store.copies,
        "checked_sequences": min(run.check_requests, len(requests)) * run.samples,
        "cuda_graph": False,
    }


def _tpot(sequence: Sequence) -> float | None:
    """(end-to-end − TTFT) / (output − 1), preemptions included."""
    gaps = len(sequence.generated) - 1
    return (sequence.last_s - sequence.first_s) / gaps if gaps else None


def _mean(amounts: list[int]) -> int:
    return round(float(np.mean(amounts))) if amounts else 0


def _gains(decoder: Decoder, pools: list[Pool], pool: Pool, run: RaggedRun, measured: float) -> Row:
    """Against contiguous-max: the most that the bytes allow, and what was measured."""
    read = arithmetic.weights_read(decoder.plan, decoder.dtype.itemsize)
    one = _read_bytes(decoder, run)
    batch, base = (largest_batch(each, run) for each in (pool, pools[0]))
    dense = decoder.plan.dense
    return {
        "baseline": pools[0].cache,
        "predicted_gain": arithmetic.batch_gain(read, one, batch, base) if dense else None,
        "measured_gain": measured,
    }


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

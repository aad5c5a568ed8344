"""The rows of ragged batching: one budget of memory, reservations of the maximum against blocks.

That paging makes batches larger is shown here: the same requests, the same bytes for the cache, the
same model, and the same loop (batching.py), the caches in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvtool.bench.attention.case import KV_DTYPES
from kvtool.bench.decode.batching import Batcher, Prompt, Tally, check_fits
from kvtool.bench.decode.blueprint import Blueprint, blueprint, refuse_long
from kvtool.bench.decode.failures import named_failure
from kvtool.bench.decode.hushed import hushed
from kvtool.bench.decode.kernels import Kernels, kernels_for
from kvtool.bench.decode.kv_store import KvStore
from kvtool.bench.decode.memory import check_memory, forget_peak, peak_bytes
from kvtool.bench.decode.model import Decoder, build_model
from kvtool.bench.decode.ragged_row import Pool, Ran, pools_for, ragged_row
from kvtool.bench.decode.same import Verdict, near_ties
from kvtool.bench.decode.settings import Advance, ModelChoice, RaggedRun, silent
from kvtool.bench.decode.stepping import Stepping, attend
from kvtool.errors import KvtoolError
from kvtool.run import Row
from kvtool.sim.block_pool import BlockPool

LOWER = "the cache's memory (--kv-memory)"
WARM_UP_REQUESTS = 2
WARM_UP_TOKENS = 3

Known = dict[tuple[int, int], list[int]]
"""(request, sample) → its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What all runs share."""

    decoder: Decoder
    kernels: Kernels
    run: RaggedRun
    advance: Advance


def ragged_rows(
    plan: Blueprint,
    choice: ModelChoice,
    run: RaggedRun,
    *,
    advance: Advance = silent,
    make_kernels: Callable[[str, int], Kernels] = kernels_for,
) -> Iterator[Row]:
    """A row for contiguous-max, then one for paged with each block size. Raises KvtoolError, for what
    can be known beforehand at once.

    A row is that of its cache's median run. `same_tokens` is that of the first `check_requests`
    requests in every run; False is a wrong answer.
    """
    refuse_long(plan, int((run.requests.prompt_tokens + run.requests.output_tokens).max()))
    pools = pools_for(plan, run, KV_DTYPES[choice.dtype])
    check_memory(plan, choice, {"cache": run.kv_budget_bytes}, what="ragged batching", lower=LOWER)
    for pool in pools:
        check_fits(_prompts(plan, run), run.samples, BlockPool(pool.num_blocks, pool.block_size))
    return hushed(_rows(plan, choice, run, pools, advance, make_kernels), run.threads)


def warms_up_whole(device: str) -> bool:
    """Whether a cache runs everything once untimed: on a GPU a kernel is compiled for each number of
    parts that a batch is cut into, on a CPU there is one for all."""
    return device.startswith("cuda")


def ragged_steps(choice: ModelChoice, run: RaggedRun) -> int:
    """How often `advance` is called: for a progress bar's length."""
    checked = min(run.check_requests, len(run.requests)) * run.samples
    runs = run.repeats + warms_up_whole(choice.device) + (choice.dtype != "fp32" and checked > 0)
    sequences = len(run.requests) * run.samples
    return 1 + runs * (1 + len(run.block_sizes)) * sequences + checked


def _rows(
    plan: Blueprint,
    choice: ModelChoice,
    run: RaggedRun,
    pools: list[Pool],
    advance: Advance,
    make_kernels: Callable[[str, int], Kernels],
) -> Iterator[Row]:
    kernels = make_kernels(choice.device, run.threads)
    checked: dict[Pool, Verdict] = {}
    if choice.dtype != "fp32" and run.check_requests:
        checked = _checked(plan, choice, run, pools, kernels, advance)
    with named_failure(f"the weights of {plan.name}", "the width of --dtype"):
        machine = Machine(
            decoder=build_model(plan, choice), kernels=kernels, run=run, advance=advance
        )
    advance(f"{plan.name}: built")
    known = _expected(machine) if choice.dtype == "fp32" else {}
    ran: dict[Pool, list[Ran]] = {}
    ended: KvtoolError | KeyboardInterrupt | None = None
    try:
        _rounds(machine, pools, ran)
    except (KvtoolError, KeyboardInterrupt) as error:
        ended = error
    for pool, runs in ran.items():
        if known:
            checked[pool] = _verdict(machine.decoder, [one.tally for one in runs], known)
        verdict = checked.get(pool)
        row = ragged_row(machine.decoder, run, pool, ran)
        yield row | {"same_tokens": verdict and verdict.same, "ties": verdict and verdict.ties}
    if ended is not None:
        raise ended


def _rounds(machine: Machine, pools: list[Pool], ran: dict[Pool, list[Ran]]) -> None:
    """Every cache in turn, `repeats` times, so that what drifts meets all alike."""
    for number in range(machine.run.repeats):
        for pool in pools:
            with named_failure(f"{pool.cache} batching", LOWER):
                if number == 0:
                    _warm_up(machine, pool)
                found = _run(machine, pool, _prompts(machine.decoder.plan, machine.run))
            ran.setdefault(pool, []).append(found)


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


def _warm_up(machine: Machine, pool: Pool) -> None:
    """Everything once, or two requests for a few tokens: kernels compiled, libraries started."""
    requests = _prompts(machine.decoder.plan, machine.run)
    if warms_up_whole(machine.decoder.device):
        _run(machine, pool, requests)
        return
    few = requests[:WARM_UP_REQUESTS]
    short = [replace(one, output_tokens=min(one.output_tokens, WARM_UP_TOKENS)) for one in few]
    _run(replace(machine, advance=silent), pool, short)


def _run(machine: Machine, pool: Pool, requests: list[Prompt]) -> Ran:
    """The requests on a pool of their own, which is free again afterwards."""
    decoder, run = machine.decoder, machine.run
    forget_peak(decoder.device)
    store = KvStore(
        decoder.heads,
        machine.kernels,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        dtype=decoder.dtype,
        device=decoder.device,
        contiguous=pool.contiguous,
    )
    stepping = Stepping(decoder, store, run.max_model_len)
    batcher = Batcher(stepping, samples=run.samples, max_batch=run.max_batch)
    tally = batcher.run(requests, machine.advance)
    return Ran(tally=tally, copied_blocks=store.copies, peak_bytes=peak_bytes(decoder.device))


def _checked(
    plan: Blueprint,
    choice: ModelChoice,
    run: RaggedRun,
    pools: list[Pool],
    kernels: Kernels,
    advance: Advance,
) -> dict[Pool, Verdict]:
    """Whether each pool's tokens are right in fp32, in a model of the first few layers: the same
    requests on as many blocks make the same schedule."""
    few = blueprint(plan.loaded, layers=min(run.check_layers, plan.heads.num_layers))
    fp32 = replace(choice, dtype="fp32", random_weights=True)
    token = few.heads.token_bytes(KV_DTYPES["fp32"])
    most = max(pool.num_blocks * pool.block_size for pool in pools) * token
    check_memory(few, fp32, {"cache": most}, what="the check in fp32", lower=LOWER)
    with named_failure("the check in fp32", LOWER):
        machine = Machine(decoder=build_model(few, fp32), kernels=kernels, run=run, advance=advance)
        known, requests = _expected(machine), _prompts(few, run)
        return {
            pool: _verdict(machine.decoder, [_run(machine, pool, requests).tally], known)
            for pool in pools
        }


def _expected(machine: Machine) -> Known:
    """The tokens of each of the first requests in a run of its own with DynamicCache."""
    attend(machine.decoder, "sdpa")
    found = {}
    for prompt in _prompts(machine.decoder.plan, machine.run)[: machine.run.check_requests]:
        for sample in range(machine.run.samples):
            found[prompt.index, sample] = alone(machine.decoder, prompt, sample)
            machine.advance(f"request {prompt.index} alone")
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


def _verdict(decoder: Decoder, tallies: list[Tally], known: Known) -> Verdict:
    """Of every run; ties of the run that has most."""
    ties = 0
    for tally in tallies:
        in_run = 0
        for one in tally.sequences:
            right = known.get((one.prompt.index, one.sample), one.generated)
            if one.generated != right:
                ids = one.prompt.ids.to(decoder.device)
                more = near_ties(decoder, ids, one.generated, one.sample)
                if more is None:
                    return Verdict(False, in_run)
                in_run += more
        ties = max(ties, in_run)
    return Verdict(True, ties)

"""Rows of `kvtool plan`: a model on GPUs, for each combination of what is asked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from kvtool.cache import CacheLayout, check_parallel
from kvtool.capacity import Holder
from kvtool.dtypes import DTYPES, parse_kv_dtype
from kvtool.engine_memory import Range, overhead, usable
from kvtool.engine_memory.defaults import version_of, vllm_batch
from kvtool.engine_memory.usable import SHARE_WORD, torch_total
from kvtool.errors import KvtoolError, usage_error
from kvtool.model.shape import ModelShape
from kvtool.plan import MemoryPlan, PlanCase, fixed
from kvtool.plan_loads import counts_of, loads_of, machine_of
from kvtool.plan_model import PlanModel
from kvtool.plan_query import Gpus, PlanQuery, Split
from kvtool.plan_weights import weights_line
from kvtool.size_row import DS_MLA
from kvtool.sizing import DEFAULT_CONTEXT, check_context, encoder_length

if TYPE_CHECKING:
    from kvtool.catalog import GpuPreset
    from kvtool.engine_memory import Line
    from kvtool.engine_memory.defaults import Batch


def shares_of(query: PlanQuery, engine: str) -> tuple[float, ...]:
    """One for an engine that has no such share."""
    return query.utilizations if engine in SHARE_WORD else query.utilizations[:1]


def splits_of(
    shape: ModelShape, query: PlanQuery, engine: str, lost: list[KvtoolError]
) -> Iterator[Split]:
    """Each way that is asked for; one where GPUs are left over goes to `lost`."""
    for gpus, pp, dp, tp in product(query.gpus, query.pps, query.dps, query.tps):
        alone = 1 if engine in ONE_PROCESS else None
        try:
            yield split_of(gpus, tp or alone, pp, dp, shape)
        except KvtoolError as error:
            lost.append(error)


ONE_PROCESS = ("transformers",)
"""Engines without ranks: more GPUs are replicas."""
NODE = 8
"""GPUs of a node: tensor parallelism, which exchanges in every layer, stays within one unless it is asked for."""


def _ranks(count: int, shape: ModelShape | None, *, whole: bool) -> int:
    """All of so many GPUs, or the most of a node that divide them and the model's heads: the rest are
    replicas."""
    if whole:
        return max(1, count)
    heads = shape.query_heads if shape is not None and shape.query_heads else 0
    fits = (
        ranks for ranks in range(min(count, NODE), 0, -1) if not count % ranks and not heads % ranks
    )
    return next(fits, 1)


def split_of(
    gpus: Gpus, tp: int | None, pp: int, dp: int | None, shape: ModelShape | None = None
) -> Split:
    """Ranks and replicas of so many GPUs."""
    count = gpus.count if gpus.count is not None else (tp or 1) * pp * (dp or 1)
    ranks = tp or _ranks(count // (pp * (dp or 1)), shape, whole=dp is not None)
    replicas = dp or max(1, count // (ranks * pp))
    if ranks * pp * replicas != count:
        many = f"{replicas:,} replica{'s' * (replicas != 1)}"
        raise usage_error(
            f"{count:,} GPUs are no {many} of {ranks:,} × {pp:,} ranks (--dp, --tp, --pp)",
            f"ask for ranks that make up {count:,} GPUs, or for --gpu {gpus.preset.id}:{ranks * pp * replicas}",
        )
    return Split(gpu=gpus.preset, tp=ranks, pp=pp, replicas=replicas)


def cases_of(model: PlanModel, query: PlanQuery, lost: list[KvtoolError]) -> Iterator[PlanCase]:
    """A case for each combination; one that cannot be planned goes to `lost` and costs no other."""
    top = model.shape.max_context
    contexts = query.contexts or (min(DEFAULT_CONTEXT, top or DEFAULT_CONTEXT),)
    ways = [
        (engine, split, kv, share)
        for engine in query.engines
        for split in splits_of(model.shape, query, engine, lost)
        for kv in query.kv_dtypes
        for share in shares_of(query, engine)
    ]
    for (engine, split, kv, share), context, users in product(ways, contexts, query.users):
        try:
            check_context(model.shape, context, allow_long=query.allow_long)
            holder = holder_of(model, query, engine, split, kv, context)
            yield case_of(model, query, holder, split, share, context, users)
        except KvtoolError as error:
            lost.append(error)


def holder_of(
    model: PlanModel, query: PlanQuery, engine: str, split: Split, kv_dtype: str, context: int
) -> Holder:
    """The model's cache on the ranks of a replica."""
    shape = model.shape
    _check_parallel(shape, split.tp, split.pp, query.dcp)
    auto = DTYPES[shape.kv_dtype] if shape.kv_dtype else model.dtype
    latent = kv_dtype.lower() == DS_MLA
    kv = parse_kv_dtype("fp8" if latent else kv_dtype, auto=auto)
    # vLLM takes fp8 for it where an indexer selects (models/config.py, DeepseekV32ForCausalLM), but for
    # FlashInfer's kernels on Blackwell: 43,190 bytes a token of V3.2 on a B200 (a print of 0.18).
    selects = engine == "vllm" and any(entry.kind == "indexer" for entry in shape.layers)
    selects = selects and not (split.gpu.compute_capability or "").startswith("10.")
    layout = CacheLayout(
        shape=shape,
        dtype=model.dtype,
        kv=kv,
        tp=split.tp,
        pp=split.pp,
        dcp=query.dcp,
        block_size=query.block_size,
    )
    tokens = query.max_batched_tokens or batch_of(query, engine, split.gpu).tokens
    return Holder(
        subject=model.subject,
        engine=engine,
        layout=layout,
        options=replace(
            query.vllm, max_batched_tokens=tokens, ds_mla=latent or (selects and kv.name == "fp8")
        ),
        encoder=_encoder(shape, query, context),
    )


def _encoder(shape: ModelShape, query: PlanQuery, context: int) -> int | None:
    """None where nothing fixes it, so that it follows the context."""
    follows = query.encoder_tokens is None and shape.encoder_tokens == 0
    return None if follows else encoder_length(shape, query.encoder_tokens, context)[0]


@lru_cache(maxsize=1024)
def _check_parallel(shape: ModelShape, tp: int, pp: int, dcp: int) -> None:
    """Once a split, for every layer."""
    check_parallel(shape, tp, pp, dcp=dcp)


def case_of(
    model: PlanModel, query: PlanQuery, holder: Holder, split: Split, utilization: float,
    context: int, users: int | None,
) -> PlanCase:  # fmt: skip
    """One combination."""
    gpu = split.gpu
    price = gpu.price_usd_per_hour if query.price is None else query.price
    parameters, active = counts_of(model.stored)
    return PlanCase(
        holder=holder,
        gpu=gpu,
        replicas=split.replicas,
        memory=memory_of(model, query, holder, split, utilization, users),
        context=context,
        users=users,
        max_num_seqs=sequences_of(query, holder.engine, split, users),
        max_model_len=query.max_model_len or context,
        loads=loads_of(model, query, holder, split),
        machine=machine_of(gpu, model.dtype, query),
        usd_per_hour=price,
        repository=model.repository,
        quantization=model.quantization,
        echo={
            "gpu_memory_utilization": utilization if holder.engine in SHARE_WORD else None,
            "max_batched_tokens": holder.options.max_batched_tokens,
            "expert_parallel": query.expert_parallel,
            "enforce_eager": query.enforce_eager if holder.engine == "vllm" else None,
            "parameters": parameters,
            "active_parameters": active,
            "context_basis": query.context_basis,
            "gpu_bytes": torch_total(gpu)[0].best,
        },
    )


def batch_of(query: PlanQuery, engine: str, gpu: GpuPreset) -> Batch:
    """The limits of a step where none are asked for: vLLM's own, by GPU and its version."""
    return vllm_batch(gpu, version=version_of(query.version) if engine == "vllm" else None)


def sequences_of(query: PlanQuery, engine: str, split: Split, users: int | None) -> int | None:
    """Requests that a replica of the engine runs at a time: as told, else its default, raised to the users
    that are asked for; None: it has no such limit."""
    if query.max_num_seqs is not None:
        return query.max_num_seqs
    if engine != "vllm":
        return None
    return max(
        batch_of(query, engine, split.gpu).sequences, math.ceil((users or 0) / split.replicas)
    )


def memory_of(
    model: PlanModel, query: PlanQuery, holder: Holder, split: Split, utilization: float,
    users: int | None = None,
) -> MemoryPlan:  # fmt: skip
    """What a rank has and gives away before the cache."""
    if query.kv_memory is not None:
        return MemoryPlan(
            has=fixed("usable", query.kv_memory, "--kv-memory"), gives=(), is_given=True
        )
    room, basis = usable(holder.engine, split.gpu, utilization)
    gives: list[Line] = [weights_line(model, query, split, holder.engine)]
    gives += overhead(
        holder.engine,
        model.sizes,
        tp=split.tp,
        pp=split.pp,
        max_batched_tokens=holder.options.max_batched_tokens,
        max_num_seqs=sequences_of(query, holder.engine, split, users)
        or batch_of(query, holder.engine, split.gpu).sequences,
        gpu=split.gpu,
        dtype_bytes=model.dtype.bits // 8,
        version=query.version,
        dp=split.replicas,
        eager=query.enforce_eager,
    ).lines
    if query.reserve:
        gives.append(fixed("reserve", query.reserve, "--reserve"))
    return MemoryPlan(has=line("usable", room, basis), gives=tuple(gives))


def line(name: str, room: Range, basis: str) -> Line:
    """A line of a range."""
    return replace(fixed(name, 0, basis), range=room)

"""What a decode step of a planned model reads and computes, and the peaks of the GPU that does."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from kvtool.decode_speed import Loads, Machine

if TYPE_CHECKING:
    from kvtool.capacity import Holder
    from kvtool.catalog import GpuPreset
    from kvtool.dtypes import Dtype
    from kvtool.plan_model import PlanModel
    from kvtool.plan_query import PlanQuery, Split
    from kvtool.weights.stored import Stored


def sharers_of(query: PlanQuery, engine: str, split: Split) -> int:
    """Replicas that hold the experts together: all if they are spread, and of vLLM's data parallelism, whose
    expert layers are cut over tp × dp ranks either way (vLLM's docs, data_parallel_deployment)."""
    return split.replicas if query.expert_parallel or engine == "vllm" else 1


def loads_of(model: PlanModel, query: PlanQuery, holder: Holder, split: Split) -> Loads | None:
    """What a decode step reads and computes; None where no recipe says."""
    if model.stored is None:
        return None
    sharers = sharers_of(query, holder.engine, split)
    spread = split.tp * sharers if query.expert_parallel or sharers > 1 else 1
    dense, routed, experts, chosen, flops, head = _read(model.stored, split.tp, spread)
    whole = whole_bytes(model, query)
    given = whole / bytes_of(model.stored) if whole is not None else 1.0
    return Loads(
        dense_bytes=dense * given / split.pp,
        expert_bytes=routed * given / split.pp,
        experts=experts,
        chosen=chosen,
        token_flops=flops / split.pp,
        head_flops=head / split.pp,
        holder=holder,
        sharers=sharers,
    )


def whole_bytes(model: PlanModel, query: PlanQuery) -> int | None:
    """Of the whole model's weights: as given, as the checkpoint has them, as counted; None: nobody says."""
    if query.weights is not None:
        return query.weights
    if model.exact is not None:
        return model.exact.bytes
    return None if model.stored is None else bytes_of(model.stored)


@lru_cache(maxsize=64)
def bytes_of(weights: Stored) -> int:
    """Added once for all cases of a model."""
    return weights.bytes


@lru_cache(maxsize=64)
def counts_of(weights: Stored | None) -> tuple[int | None, int | None]:
    """Parameters, and those that one token meets; None where no recipe counts them."""
    return (None, None) if weights is None else (weights.parameters, weights.active_parameters)


@lru_cache(maxsize=1024)
def _read(weights: Stored, tp: int, spread: int) -> tuple[float, float, int, int, float, float]:
    """Of all stages, on the fullest of `tp` ranks: bytes that a step reads, dense and of experts; how many experts
    there are and are chosen; FLOPs of a token, and of these the head's. What is whole on every rank is computed
    on every rank; chosen experts are spread evenly."""
    dense = routed = flops = head = 0.0
    experts, chosen = 1, 1
    for one in weights.parts:
        part = one.part
        if not part.is_met or not part.size.count:
            continue
        held = float(one.rank_bits(tp, spread)) / 8
        cut = Fraction(1, tp) if part.role == "experts" else part.rank_count(tp) / part.size.count
        met = 2.0 * part.active.matrices * float(cut)
        flops += met
        head += met if part.role == "head" else 0.0
        if part.role == "experts":
            routed, experts, chosen = routed + held, part.experts, part.chosen
        else:
            dense += held
    return dense, routed, experts, chosen, flops, head


def machine_of(gpu: GpuPreset, dtype: Dtype, query: PlanQuery) -> Machine | None:
    """The peaks of one GPU in the model's dtype, its rate None where it is not published; None for other dtypes
    than those of 16 bits."""
    rates = {"bf16": gpu.dense_bf16_tflops, "fp16": gpu.dense_fp16_tflops}
    if dtype.name not in rates:
        return None
    rate = rates[dtype.name]
    flops = None if rate is None else rate * 1e12
    machine = Machine(bandwidth=gpu.bandwidth_gb_s * 1e9, flops=flops)
    return replace(
        machine,
        read_efficiency=query.read_efficiency or machine.read_efficiency,
        compute_efficiency=query.compute_efficiency or machine.compute_efficiency,
        basis=query.efficiency_basis,
        overhead_s=machine.overhead_s if query.overhead_s is None else query.overhead_s,
    )

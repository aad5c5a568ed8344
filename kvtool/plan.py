"""What of a GPU's memory is left for the cache, line by line, and what it holds: the rows of `kvtool plan`.

Bytes are of one rank, the fullest; they are never summed over ranks. A budget below zero is a shortfall and
holds nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvtool.capacity import LONGEST, Capacity, Holder, capacity, least, max_context
from kvtool.decode_speed import (
    Loads,
    Machine,
    Speed,
    attention_intensity,
    memory_bound_below,
    ridge,
    speed,
    weights_intensity,
)
from kvtool.engine_memory import Line, Range
from kvtool.engine_memory.ranges import total
from kvtool.engines import ideal
from kvtool.run import Row

if TYPE_CHECKING:
    from kvtool.catalog import GpuPreset
    from kvtool.engines.result import Sequence

HOUR = 3600


def fixed(name: str, count: int, basis: str) -> Line:
    """What is known to the byte."""
    return Line(name=name, range=Range(count, count, count), basis=basis)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a rank has, what it gives away, and what is left: below zero, what is missing."""

    has: Line
    gives: tuple[Line, ...]
    is_given: bool = False
    """What it has is the cache's memory, as --kv-memory says."""

    @property
    def left(self) -> Range:
        """For the cache: least where little is there and all else takes most."""
        has, gives = self.has.range, total(line.range for line in self.gives)
        return Range(has.low - gives.high, has.best - gives.best, has.high - gives.low)

    def of(self, name: str) -> int:
        """Bytes of a line, as is expected."""
        return next((line.range.best for line in self.gives if line.name == name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCase:
    """A model on GPUs of one kind: `replicas` of tp × pp ranks each."""

    holder: Holder
    gpu: GpuPreset
    replicas: int
    memory: MemoryPlan
    context: int
    users: int | None = None
    """Requests that are to run at a time, all replicas together."""
    max_model_len: int = 0
    """The longest request that is served."""
    max_num_seqs: int | None = None
    """Of a replica; None: the engine has no such limit."""
    loads: Loads | None = None
    """None: what a step reads or computes is not known."""
    machine: Machine | None = None
    usd_per_hour: float | None = None
    """Of one GPU."""
    repository: str = ""
    """What an engine is to load."""
    quantization: str = ""
    """How an engine is to quantise it as it loads."""
    echo: Row = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """All of them."""
        layout = self.holder.layout
        return self.replicas * layout.tp * layout.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What became of a case."""

    case: PlanCase
    holds: Capacity
    fits: bool
    binds: str
    """What is in the way, or what would be next: weights, overhead, context, users, max_num_seqs or kv."""
    missing_bytes: int
    """A rank's shortfall for what was asked; 0 if it fits."""
    longest: int | None
    """The longest context of the users asked for, one a replica if none was; None: not looked for, or no end."""
    speed: Speed | None


def planned(case: PlanCase, *, look_for_context: bool = True) -> Planned:
    """The case, worked out."""
    budget = case.memory.left.best
    holds = capacity(case.holder, case.context, budget)
    each = each_of(case)
    held = holds.whole_requests >= each
    return Planned(
        case=case,
        holds=holds,
        fits=held and each <= (case.max_num_seqs or each),
        binds=_binds(case, holds, each),
        missing_bytes=0 if held else max(1, least(case.holder, case.context, each) - budget),
        longest=_longest(case, budget, each) if look_for_context and budget > 0 else None,
        speed=_speed(case, holds, each),
    )


def _longest(case: PlanCase, budget: int, each: int) -> int | None:
    """None: memory ends no context, and the model states no maximum."""
    long = case.context > (case.holder.layout.shape.max_context or case.context)  # --allow-long
    found = max_context(case.holder, budget, each, allow_long=long)
    return None if found == LONGEST else found


def _binds(case: PlanCase, holds: Capacity, each: int) -> str:
    memory = case.memory
    if memory.has.range.best <= memory.of("weights") and not memory.is_given:
        return "weights"
    if memory.left.best <= 0:
        return "overhead"
    if not holds.whole_requests:
        return "context"
    if holds.whole_requests < each:
        return "users"
    if case.max_num_seqs is not None and case.max_num_seqs < max(each, holds.whole_requests):
        return "max_num_seqs"
    return "kv"


def running(case: PlanCase, holds: Capacity, each: int) -> int:
    """Requests of a replica that a speed is told of: those asked for, else as many as fit."""
    if case.users is not None:
        return each
    return max(1, min(holds.whole_requests, case.max_num_seqs or holds.whole_requests))


def each_of(case: PlanCase) -> int:
    """Requests of one replica that are asked for; one where nobody says."""
    return 1 if case.users is None else math.ceil(case.users / case.replicas)


def kinds_of(case: PlanCase) -> list[dict[str, Any]]:
    """Bytes of one request by kind, whole model: what the mathematics needs."""
    found: dict[str, int] = {}
    for kind in _sized(case.holder, case.context).kinds:
        found[kind.entry.kind] = found.get(kind.entry.kind, 0) + kind.bytes
    return [{"kind": kind, "bytes": count} for kind, count in found.items()]


def whole_cache(case: PlanCase) -> int:
    """Of the requests asked for, all layers and ranks: copied heads and latents count once."""
    return _sized(case.holder, case.context).bytes * (case.users or 1)


@lru_cache(maxsize=1024)
def _sized(holder: Holder, context: int) -> Sequence:
    """Once for all that a row says of it."""
    return ideal.size(holder.layout, context=context, encoder=holder.encoder_at(context))


def _speed(case: PlanCase, holds: Capacity, each: int) -> Speed | None:
    if case.loads is None or case.machine is None or not holds.whole_requests:
        return None
    if each > min(holds.whole_requests, case.max_num_seqs or each):
        return None  # it does not run
    batch = running(case, holds, each)
    return speed(case.loads, case.machine, batch=batch, context=case.context)


def plan_row(found: Planned) -> Row:
    """The row: bytes of a rank, requests and tokens a second of all replicas."""
    case = found.case
    layout, memory = case.holder.layout, case.memory
    price = None if case.usd_per_hour is None else case.usd_per_hour * case.gpus
    return {
        "model": case.holder.subject.name,
        "model_type": layout.shape.model_type,
        "source": case.holder.subject.source,
        "engine": case.holder.engine,
        "gpu": case.gpu.id,
        "gpus": case.gpus,
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": case.replicas,
        "dcp": layout.dcp,
        "dtype": layout.dtype.name,
        "kv_dtype": case.holder.kv_dtype,
        **case.echo,
        "context_tokens": case.context,
        "users": case.users,
        "max_model_len": case.max_model_len,
        "max_num_seqs": case.max_num_seqs,
        "usable_bytes": memory.has.range.best,
        "weights_bytes": memory.of("weights"),
        "memory": [_line(memory.has), *map(_line, memory.gives)],
        "kv_budget_bytes": {
            "low": memory.left.low,
            "best": memory.left.best,
            "high": memory.left.high,
        },
        "cache_bytes": whole_cache(case),
        "kinds": kinds_of(case),
        **holds_fields(found),
        "fits": found.fits,
        "binds": found.binds,
        "missing_bytes": found.missing_bytes,
        **speed_fields(found, price),
        **roofline_fields(case, found.speed),
        "efficiency": efficiency_of(case),
        "usd_per_hour": price,
    }


def holds_fields(found: Planned) -> Row:
    """What the memory holds. Blocks and KV tokens are of a replica, requests of all."""
    case, holds, left = found.case, found.holds, found.case.memory.left
    low, high = (
        capacity(case.holder, case.context, end).whole_requests for end in (left.low, left.high)
    )
    runs = min(holds.whole_requests, case.max_num_seqs or holds.whole_requests)
    return {
        "request_bytes": holds.request_bytes,
        "num_blocks": holds.num_blocks,
        "bytes_per_block": holds.bytes_per_block,
        "block_size": holds.block_size,
        "kv_tokens": holds.kv_tokens,
        "max_concurrency": concurrency_of(found),
        "whole_requests": {
            "low": low * case.replicas,
            "best": holds.whole_requests * case.replicas,
            "high": high * case.replicas,
        },
        "runs": runs * case.replicas,
        "max_context": found.longest,
    }


def efficiency_of(case: PlanCase) -> Row | None:
    """Shares of the peaks that a step is taken to reach, and what it takes besides."""
    machine = case.machine
    if machine is None:
        return None
    return {
        "bandwidth": machine.read_efficiency,
        "compute": machine.compute_efficiency,
        "overhead_s": machine.overhead_s,
        "peak_bytes_per_s": machine.bandwidth,
        "peak_flops": machine.flops,
        "basis": machine.basis,
    }


def concurrency_of(found: Planned) -> float | None:
    """Requests that all replicas hold at a time; None: they take no memory, and nothing ends them."""
    most = found.holds.max_concurrency
    return most * found.case.replicas if math.isfinite(most) else None


def roofline_fields(case: PlanCase, found: Speed | None) -> Row:
    """What a step reads and computes on a rank, and where it would stop being bound by memory."""
    names = (
        "read_weights_bytes", "read_cache_bytes", "flops", "attention_intensity", "weights_intensity",
        "ridge", "compute_bound_from",
    )  # fmt: skip
    if found is None or case.loads is None or case.machine is None:
        return dict.fromkeys(names)
    values = (
        round(found.weights_bytes), round(found.cache_bytes), found.flops,
        attention_intensity(case.loads, case.context), weights_intensity(case.loads, found.batch),
        ridge(case.machine), memory_bound_below(case.loads, case.machine, case.context),
    )  # fmt: skip
    return dict(zip(names, values, strict=True))


def speed_fields(found: Planned, price: float | None) -> Row:
    """Speed and cost of all replicas: of the users asked for, or of as many as run."""
    speed, case = found.speed, found.case
    rate = None
    if speed is not None:
        rate = (case.users or speed.batch * case.replicas) / speed.tpot_s
    return {
        "batch": speed and speed.batch,
        "tpot_s": speed and speed.tpot_s,
        "output_tokens_per_s": rate,
        "step_binds": speed and speed.binds,
        "usd_per_million_tokens": None if not rate or price is None else price / HOUR / rate * 1e6,
        "tokens_per_usd": None if not rate or not price else rate * HOUR / price,
    }


def _line(line: Line) -> dict[str, Any]:
    one = line.range
    return {
        "name": line.name,
        "low": one.low,
        "best": one.best,
        "high": one.high,
        "basis": line.basis,
    }

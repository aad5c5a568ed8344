"""Rows of `kvtool plan`: a model on GPUs, for each combination of what is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool import catalog
from kvtool.cache import CacheLayout, check_parallel, stages
from kvtool.capacity import Holder
from kvtool.decode_speed import Loads, Machine
from kvtool.dtypes import DTYPES, Dtype, parse_kv_dtype
from kvtool.engine_memory import ModelSizes, Range, overhead, sizes_of, usable
from kvtool.engine_memory.defaults import vllm_batch
from kvtool.engine_memory.usable import torch_total
from kvtool.errors import KvtoolError, usage_error
from kvtool.model.shape import ModelShape
from kvtool.plan import MemoryPlan, PlanCase, fixed
from kvtool.plan_query import Gpus, PlanQuery
from kvtool.size_row import Subject
from kvtool.sizing import DEFAULT_CONTEXT, check_context, encoder_length, model_dtype
from kvtool.units import format_bytes
from kvtool.weights.counted import in_words, weights_of
from kvtool.weights.parts import TEXT

if TYPE_CHECKING:
    from kvtool.catalog import GpuPreset
    from kvtool.config import LoadedConfig
    from kvtool.engine_memory import Line
    from kvtool.weights.headers import Headers
    from kvtool.weights.stored import Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanModel:
    """A model as it is planned with."""

    subject: Subject
    config: Mapping[str, Any]
    dtype: Dtype
    sizes: ModelSizes
    stored: Stored | None
    """None: no recipe counts its weights, whose bytes are given then."""
    exact: Headers | None = None
    """Of the checkpoint itself, where its headers can be read."""
    repository: str = ""
    """What an engine is to load."""
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        """What it caches."""
        return self.subject.shape


def model_for(
    loaded: LoadedConfig, shape: ModelShape, query: PlanQuery, revision: str | None = None
) -> PlanModel:
    """KvtoolError if nothing says how many bytes its weights take."""
    dtype, note = model_dtype(shape, query.dtype)
    found: Stored | None = None
    exact, why = _headers(loaded, revision) if query.weights is None else (None, "")
    try:
        found = weights_of(loaded.name, loaded.config, shape, dtype)
    except KvtoolError:
        if query.weights is None and query.kv_memory is None and exact is None:
            raise
    counted = "" if query.weights is not None or found is None else in_words(loaded.name, found)
    if exact is not None:
        counted = f"its weights are {format_bytes(exact.bytes)}, as {exact.source} say"
    said = (*loaded.notes, note, *shape.notes, why, counted)
    return PlanModel(
        subject=Subject(name=loaded.name, source=loaded.source, shape=shape),
        config=loaded.config,
        dtype=dtype,
        sizes=sizes_of(loaded.name, loaded.config, shape),
        stored=found,
        exact=exact,
        repository=_repository(loaded),
        notes=tuple(text for text in said if text),
    )


def _repository(loaded: LoadedConfig) -> str:
    """A Hub id, or the folder that a config lies in."""
    if loaded.source == "preset":
        preset = catalog.model_preset(loaded.name)
        return preset.hub_id if preset else loaded.name
    return str(Path(loaded.where).parent) if loaded.source in ("folder", "file") else loaded.name


def _headers(loaded: LoadedConfig, revision: str | None) -> tuple[Headers | None, str]:
    """Of a folder's or a Hub repository's safetensors files; None, and why, where there are none to read."""
    place: str | Path = loaded.name if loaded.source == "hub" else Path(loaded.where).parent
    if loaded.source == "folder" and not any(Path(place).glob("*.safetensors")):
        return None, ""
    if loaded.source not in ("hub", "folder"):
        return None, ""
    from kvtool.weights.headers import headers_of

    try:
        return headers_of(place, revision=revision), ""
    except KvtoolError as error:
        return None, f"{error.message}: its weights are counted from the config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the GPUs of one kind are shared out."""

    gpu: GpuPreset
    tp: int
    pp: int
    replicas: int


def splits_of(query: PlanQuery) -> Iterator[Split]:
    """Each way that is asked for; KvtoolError where GPUs are left over."""
    for gpus, pp, dp, tp in product(query.gpus, query.pps, query.dps, query.tps):
        yield split_of(gpus, tp, pp, dp)


def split_of(gpus: Gpus, tp: int | None, pp: int, dp: int | None) -> Split:
    """Ranks and replicas of so many GPUs."""
    count = gpus.count if gpus.count is not None else (tp or 1) * pp * (dp or 1)
    ranks = tp or max(1, count // (pp * (dp or 1)))
    replicas = dp or max(1, count // (ranks * pp))
    if ranks * pp * replicas != count:
        raise usage_error(
            f"{count:,} GPUs are no {replicas:,} replicas of {ranks:,} × {pp:,} ranks (--dp, --tp, --pp)",
            f"write --gpu {gpus.preset.id}:{ranks * pp * replicas}, or other ranks",
        )
    return Split(gpu=gpus.preset, tp=ranks, pp=pp, replicas=replicas)


def cases_of(model: PlanModel, query: PlanQuery, lost: list[KvtoolError]) -> Iterator[PlanCase]:
    """A case for each combination; one that cannot be planned goes to `lost` and costs no other."""
    top = model.shape.max_context
    contexts = query.contexts or (min(DEFAULT_CONTEXT, top or DEFAULT_CONTEXT),)
    for engine, split, kv, share, context, users in product(
        query.engines, splits_of(query), query.kv_dtypes, query.utilizations, contexts, query.users
    ):
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
    layout = CacheLayout(
        shape=shape,
        dtype=model.dtype,
        kv=parse_kv_dtype(kv_dtype, auto=auto),
        tp=split.tp,
        pp=split.pp,
        dcp=query.dcp,
        block_size=query.block_size,
    )
    tokens = query.max_batched_tokens or vllm_batch(split.gpu).tokens
    return Holder(
        subject=model.subject,
        engine=engine,
        layout=layout,
        options=replace(query.vllm, max_batched_tokens=tokens),
        encoder=encoder_length(shape, query.encoder_tokens, context)[0],
    )


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
    return PlanCase(
        holder=holder,
        gpu=gpu,
        replicas=split.replicas,
        memory=memory_of(model, query, holder, split, utilization),
        context=context,
        users=users,
        max_num_seqs=query.max_num_seqs,
        loads=loads_of(model, query, holder, split),
        machine=machine_of(gpu, model.dtype, query),
        usd_per_hour=price,
        repository=model.repository,
        echo={
            "gpu_memory_utilization": utilization,
            "max_batched_tokens": holder.options.max_batched_tokens,
            "expert_parallel": query.expert_parallel,
            "gpu_bytes": torch_total(gpu)[0].best if gpu.usable_bytes else None,
        },
    )


def memory_of(
    model: PlanModel, query: PlanQuery, holder: Holder, split: Split, utilization: float
) -> MemoryPlan:
    """What a rank has and gives away before the cache."""
    if query.kv_memory is not None:
        return MemoryPlan(has=fixed("usable", query.kv_memory, "--kv-memory"), gives=())
    room, basis = usable(holder.engine, split.gpu, utilization)
    gives: list[Line] = [weights_line(model, query, split)]
    gives += overhead(
        holder.engine,
        model.sizes,
        tp=split.tp,
        pp=split.pp,
        max_batched_tokens=holder.options.max_batched_tokens,
        max_num_seqs=query.max_num_seqs or vllm_batch(split.gpu).sequences,
        gpu=split.gpu,
        dtype_bytes=model.dtype.bits // 8,
        version=query.version,
    ).lines
    if query.reserve:
        gives.append(fixed("reserve", query.reserve, "--reserve"))
    return MemoryPlan(has=line("usable", room, basis), gives=tuple(gives))


def line(name: str, room: Range, basis: str) -> Line:
    """A line of a range."""
    return replace(fixed(name, 0, basis), range=room)


def weights_line(model: PlanModel, query: PlanQuery, split: Split) -> Line:
    """Of the fullest rank: as given, an equal share; as counted, by how each part is cut."""
    ranks = split.tp * split.pp
    if query.weights is not None:
        each = f", an equal share of {ranks:,} ranks" if ranks > 1 else ""
        return fixed("weights", -(-query.weights // ranks), f"--weights{each}")
    if model.stored is None:
        assert model.exact is not None, "checked: there are weights"
        return fixed(
            "weights", -(-model.exact.bytes // ranks), f"{model.exact.source}, an equal share"
        )
    experts = split.tp * split.replicas if query.expert_parallel else 1
    count = _rank_bytes(model.stored, model.shape.num_modules, split.tp, split.pp, experts)
    if model.exact is None:
        return fixed("weights", count, model.stored.basis)
    share = -(-count * model.exact.bytes // model.stored.bytes)  # cut as what was counted is
    return fixed("weights", share, model.exact.source)


@lru_cache(maxsize=1024)
def _rank_bytes(weights: Stored, modules: int, tp: int, pp: int, experts: int) -> int:
    """The sum over its parts, the same for every context and KV dtype."""
    return weights.rank_bytes(tp, stages(modules, pp), experts)


def loads_of(model: PlanModel, query: PlanQuery, holder: Holder, split: Split) -> Loads | None:
    """What a decode step reads and computes; None where no recipe says."""
    if model.stored is None:
        return None
    spread = split.tp * split.replicas if query.expert_parallel else 1
    dense, routed, experts, chosen, flops = _read(model.stored, split.tp, spread)
    given = query.weights / model.stored.bytes if query.weights is not None else 1.0
    return Loads(
        dense_bytes=dense * given / split.pp,
        expert_bytes=routed * given / split.pp,
        experts=experts,
        chosen=chosen,
        token_flops=flops / split.tp / split.pp,
        layout=holder.layout,
    )


@lru_cache(maxsize=1024)
def _read(weights: Stored, tp: int, spread: int) -> tuple[float, float, int, int, float]:
    """Bytes of all stages that a step reads on one of `tp` ranks, dense and of experts; how many experts
    there are and are chosen; FLOPs of a token on all ranks."""
    dense = routed = flops = 0.0
    experts, chosen = 1, 1
    for one in weights.parts:
        part = one.part
        if part.role not in TEXT or part.role == "embedding":
            continue
        held = float(one.rank_bits(tp, spread)) / 8
        flops += 2.0 * part.active.matrices
        if part.role == "experts":
            routed, experts, chosen = routed + held, part.experts, part.chosen
        else:
            dense += held
    return dense, routed, experts, chosen, flops


def machine_of(gpu: GpuPreset, dtype: Dtype, query: PlanQuery) -> Machine | None:
    """The peaks of one GPU in the model's dtype; None where no rate is known."""
    rates = {"bf16": gpu.dense_bf16_tflops, "fp16": gpu.dense_fp16_tflops}
    rate = rates.get(dtype.name)
    if rate is None:
        return None
    machine = Machine(bandwidth=gpu.bandwidth_gb_s * 1e9, flops=rate * 1e12)
    return replace(
        machine,
        read_efficiency=query.read_efficiency or machine.read_efficiency,
        compute_efficiency=query.compute_efficiency or machine.compute_efficiency,
        overhead_s=machine.overhead_s if query.overhead_s is None else query.overhead_s,
    )

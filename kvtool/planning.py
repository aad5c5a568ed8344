"""Rows of `kvtool plan`: a model on GPUs, for each combination of what is asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool import catalog
from kvtool.cache import CacheLayout, check_parallel, stages
from kvtool.capacity import Holder
from kvtool.dtypes import DTYPES, Dtype, parse_kv_dtype
from kvtool.engine_memory import ModelSizes, Range, overhead, sizes_of, usable
from kvtool.engine_memory.defaults import vllm_batch
from kvtool.engine_memory.usable import torch_total
from kvtool.errors import KvtoolError, usage_error
from kvtool.model.shape import ModelShape
from kvtool.plan import MemoryPlan, PlanCase, fixed
from kvtool.plan_loads import counts_of, loads_of, machine_of, sharers_of
from kvtool.plan_query import Gpus, PlanQuery
from kvtool.size_row import Subject
from kvtool.sizing import DEFAULT_CONTEXT, check_context, encoder_length, model_dtype
from kvtool.units import format_bytes
from kvtool.weights.counted import in_words, weights_of

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
    quantization: str = ""
    """How an engine is to quantise it as it loads."""
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
    if exact is not None and found is not None and exact.bytes < LEAST * found.bytes:
        why = f"{exact.source} have {format_bytes(exact.bytes)}, which is not the whole model"
        exact = None
    if exact is not None:
        counted = f"its weights are {format_bytes(exact.bytes)}, as {exact.source} say"
        if found is not None and abs(exact.bytes / found.bytes - 1) > 1 - LEAST_LIKE:
            counted += f"; by its config they would be {format_bytes(found.bytes)}"
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


def splits_of(query: PlanQuery, engine: str, lost: list[KvtoolError]) -> Iterator[Split]:
    """Each way that is asked for; one where GPUs are left over goes to `lost`."""
    for gpus, pp, dp, tp in product(query.gpus, query.pps, query.dps, query.tps):
        alone = 1 if engine in ONE_PROCESS else None
        try:
            yield split_of(gpus, tp or alone, pp, dp)
        except KvtoolError as error:
            lost.append(error)


LEAST, LEAST_LIKE = 0.5, 0.9
"""Of the counted bytes: headers of fewer are of a part of the model; of fewer than the second, it is said."""
ONE_PROCESS = ("transformers",)
"""Engines without ranks: more GPUs are replicas."""
NODE = 8
"""GPUs of a node: tensor parallelism, which exchanges in every layer, stays within one unless it is asked for."""


def _ranks(count: int, *, whole: bool) -> int:
    """All of so many GPUs, or the most of a node that divide them: the rest are replicas."""
    most = count if whole else min(count, NODE)
    return next((ranks for ranks in range(most, 0, -1) if count % ranks == 0), 1)


def split_of(gpus: Gpus, tp: int | None, pp: int, dp: int | None) -> Split:
    """Ranks and replicas of so many GPUs."""
    count = gpus.count if gpus.count is not None else (tp or 1) * pp * (dp or 1)
    ranks = tp or _ranks(count // (pp * (dp or 1)), whole=dp is not None)
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
    ways = [(engine, split) for engine in query.engines for split in splits_of(query, engine, lost)]
    for (engine, split), kv, share, context, users in product(
        ways, query.kv_dtypes, query.utilizations, contexts, query.users
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
            "gpu_memory_utilization": utilization,
            "max_batched_tokens": holder.options.max_batched_tokens,
            "expert_parallel": query.expert_parallel,
            "parameters": parameters,
            "active_parameters": active,
            "context_basis": query.context_basis,
            "gpu_bytes": torch_total(gpu)[0].best if gpu.usable_bytes else None,
        },
    )


def sequences_of(query: PlanQuery, engine: str, split: Split, users: int | None) -> int | None:
    """Requests that a replica of the engine runs at a time: as told, else its default, raised to the users
    that are asked for; None: it has no such limit."""
    if query.max_num_seqs is not None:
        return query.max_num_seqs
    if engine != "vllm":
        return None
    return max(vllm_batch(split.gpu).sequences, math.ceil((users or 0) / split.replicas))


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
        or vllm_batch(split.gpu).sequences,
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


def weights_line(model: PlanModel, query: PlanQuery, split: Split, engine: str) -> Line:
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
    sharers = sharers_of(query, engine, split)
    if sharers > 1 and not query.expert_parallel:
        _check_cut(model.stored, split.tp * sharers)
    experts = split.tp * sharers if query.expert_parallel or sharers > 1 else 1
    count = _rank_bytes(model.stored, model.shape.num_modules, split.tp, split.pp, experts)
    if model.exact is None:
        return fixed("weights", count, model.stored.basis)
    share = -(-count * model.exact.bytes // model.stored.bytes)  # cut as what was counted is
    return fixed("weights", share, model.exact.source)


def _check_cut(weights: Stored, ranks: int) -> None:
    """Experts that are not spread are cut, and vLLM asserts that their columns divide by the ranks."""
    for one in weights.parts:
        if one.part.role == "experts" and one.part.pieces % ranks:
            raise usage_error(
                f"experts of {one.part.pieces:,} columns are not cut over the {ranks:,} ranks of all replicas",
                "add --ep, which spreads whole experts, or ask for other --dp or --tp",
            )


@lru_cache(maxsize=1024)
def _rank_bytes(weights: Stored, modules: int, tp: int, pp: int, experts: int) -> int:
    """The sum over its parts, the same for every context and KV dtype."""
    return weights.rank_bytes(tp, stages(modules, pp), experts)

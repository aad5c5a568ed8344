"""Whether a model fits GPUs that are shared out in many ways, each asked quickly: without what a plan says besides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.capacity import least
from kvtool.errors import KvtoolError
from kvtool.plan import PlanCase, Planned, planned
from kvtool.plan_model import PlanModel
from kvtool.plan_query import UTILIZATION, Gpus, PlanQuery, Split
from kvtool.planning import case_of, cases_of, holder_of, memory_of
from kvtool.sizing import DEFAULT_CONTEXT, check_context

if TYPE_CHECKING:
    from kvtool.capacity import Holder
    from kvtool.catalog import GpuPreset

TPS = (8, 4, 2, 1)


def alone(query: PlanQuery, case: PlanCase) -> PlanQuery:
    """The query that asks for this case and no other."""
    layout = case.holder.layout
    return replace(
        query,
        gpus=(Gpus(preset=case.gpu, count=case.gpus),),
        engines=(case.holder.engine,),
        tps=(layout.tp,),
        pps=(layout.pp,),
        dps=(case.replicas,),
        kv_dtypes=(case.holder.kv_dtype,),
        utilizations=(share_of(case),),
        contexts=(case.context,),
        users=(case.users,),
    )


def share_of(case: PlanCase) -> float:
    """The gpu_memory_utilization that it was planned with; the default where its engine has none."""
    share = case.echo["gpu_memory_utilization"]
    return UTILIZATION if share is None else float(share)


def count_of(split: Split) -> int:
    """GPUs of all ranks and replicas."""
    return split.tp * split.pp * split.replicas


def on(query: PlanQuery, split: Split) -> PlanQuery:
    """The same on other GPUs; a price that was given is that of the GPU it was given for."""
    same = any(one.preset.id == split.gpu.id for one in query.gpus)
    return replace(
        query,
        gpus=(Gpus(preset=split.gpu, count=count_of(split)),),
        tps=(split.tp,),
        pps=(split.pp,),
        dps=(split.replicas,),
        price=query.price if same else None,
    )


def plan_first(model: PlanModel, query: PlanQuery, *, look_for_context: bool = True) -> Planned:
    """The first combination, planned; KvtoolError where it cannot be."""
    lost: list[KvtoolError] = []
    case = next(cases_of(model, query, lost), None)
    if case is None or lost:
        raise lost[0]
    return planned(case, look_for_context=look_for_context)


def splits(
    gpu: GpuPreset,
    count: int,
    *,
    most_replicas: int = 1,
    tps: tuple[int, ...] = TPS,
) -> Iterator[Split]:
    """Ways to share out so many GPUs: most tensor parallelism first, then replicas, then stages."""
    for tp in tps:
        rest, odd = divmod(count, tp)
        if odd:
            continue
        for pp in (one for one in range(1, rest + 1) if not rest % one):
            if rest // pp <= most_replicas:
                yield Split(gpu=gpu, tp=tp, pp=pp, replicas=rest // pp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """GPUs as `dp` replicas of tp × pp ranks, with tokens shared by dcp of tp's ranks."""

    tp: int
    pp: int
    dp: int
    dcp: int = 1
    expert_parallel: bool = False

    def __str__(self) -> str:
        words = [f"tp {self.tp}", f"pp {self.pp}", f"dp {self.dp}"]
        words += [f"dcp {self.dcp}"] if self.dcp > 1 else []
        return ", ".join(words + (["experts spread"] if self.expert_parallel else []))

    @property
    def flags(self) -> str:
        """As typed, whatever was typed before."""
        words = f"--tp {self.tp} --pp {self.pp} --dp {self.dp} --dcp {self.dcp}"
        return words + (" --ep" if self.expert_parallel else "")

    def on(self, query: PlanQuery, gpu: GpuPreset) -> PlanQuery:
        """The query's first of everything else, on these GPUs."""
        split = Split(gpu=gpu, tp=self.tp, pp=self.pp, replicas=self.dp)
        return replace(
            on(query, split),
            engines=query.engines[:1],
            dcp=self.dcp,
            expert_parallel=self.expert_parallel,
            kv_dtypes=query.kv_dtypes[:1],
            utilizations=query.utilizations[:1],
            contexts=query.contexts[:1],
            users=query.users[:1],
        )


def ways_of(model: PlanModel, count: int) -> Iterator[Way]:
    """tp, pp and replicas that multiply to the count; with experts, both ways to hold them."""
    for tp in divisors(count):
        for pp in divisors(count // tp):
            dp = count // tp // pp
            # The first of two alike is kept; over replicas spread experts, which need not divide by the ranks.
            both = (False, True) if dp == 1 else (True, False)
            spreads = both if has_experts(model) and tp * dp > 1 else (False,)
            for dcp in divisors(tp):
                for spread in spreads:
                    yield Way(tp=tp, pp=pp, dp=dp, dcp=dcp, expert_parallel=spread)


def has_experts(model: PlanModel) -> bool:
    """Whether weights are counted that --ep spreads."""
    return model.stored is not None and any(
        one.part.role == "experts" for one in model.stored.parts
    )


def divisors(count: int) -> list[int]:
    """From 1 to the count."""
    return [one for one in range(1, count + 1) if not count % one]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """A model and the first of everything that is asked, but for the GPUs."""

    model: PlanModel
    query: PlanQuery
    context: int
    users: int | None

    def missing(self, split: Split) -> float:
        """Bytes that the fullest rank is short of, 0 if it fits; infinite where it cannot be cut so."""
        query = self.query
        each = 1 if self.users is None else math.ceil(self.users / split.replicas)
        try:
            holder = self._holder(split)
            memory = memory_of(self.model, query, holder, split, query.utilizations[0], self.users)
            need = least(holder, self.context, each)
        except KvtoolError:
            return math.inf
        return max(0, need - memory.left.best)

    def case(self, split: Split) -> PlanCase:
        """As planned by itself."""
        query = replace(self.query, price=on(self.query, split).price)
        share = query.utilizations[0]
        holder = self._holder(split)
        return case_of(self.model, query, holder, split, share, self.context, self.users)

    def _holder(self, split: Split) -> Holder:
        query = self.query
        return holder_of(
            self.model, query, query.engines[0], split, query.kv_dtypes[0], self.context
        )


def context_of(model: PlanModel, query: PlanQuery) -> int:
    """The first context that is asked for: 8k, or the model's maximum, where none is."""
    top = model.shape.max_context or DEFAULT_CONTEXT
    return query.contexts[0] if query.contexts else min(DEFAULT_CONTEXT, top)


def fitting(model: PlanModel, query: PlanQuery, context: int, users: int | None) -> Fitting:
    """Of a query's first values; KvtoolError for a context that the model does not have."""
    check_context(model.shape, context, allow_long=query.allow_long)
    return Fitting(model=model, query=query, context=context, users=users)

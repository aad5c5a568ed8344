"""What would make a plan fit that does not, cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtool import catalog
from kvtool.errors import KvtoolError
from kvtool.fitting import alone, context_of
from kvtool.levers.changes import (
    ORDER,
    Alternative,
    Change,
    both,
    has_share,
    kv_dtypes,
    made,
    spread_experts,
    utilization,
    weights,
)  # fmt: skip
from kvtool.levers.presets import cheapest, more_of
from kvtool.levers.splits import other_splits
from kvtool.plan import planned
from kvtool.plan_query import Split
from kvtool.planning import cases_of
from kvtool.solving import MOST_UTILIZATION, solve

if TYPE_CHECKING:
    from kvtool.plan import PlanCase, Planned
    from kvtool.plan_model import PlanModel
    from kvtool.plan_query import PlanQuery
    from kvtool.solving import Solved

Changes = Callable[["PlanModel", "PlanQuery", "Planned"], Iterator[Change]]


def alternatives(
    model: PlanModel, query: PlanQuery, case: PlanCase, *, most: int | None = None
) -> tuple[Alternative, ...]:
    """Changes of a case of this query. First those that fit: on the same GPUs, by how little they
    change; then other GPUs, by USD an hour, those without a price last. At the end, what was tried on
    the same GPUs and does not suffice.

    Of other presets the cheapest `most`, else all. The cache and the weights are quantised together only where neither suffices alone.
    """
    query, plan = alone(query, case), planned(case, look_for_context=False)
    if plan.binds == "max_num_seqs" and not plan.fits:
        told = more_sequences(query, model, case)
        return (told,) if told else ()
    found = [
        one
        for changes in SAME_GPUS
        for change in changes(model, query, plan)
        if (one := made(change))
    ]
    if not any(one.fits and one.change.bits for one in found):
        found += [one for change in both(model, query, plan) if (one := made(change))]
    found += _other_gpus(model, query, case, most)
    return tuple(sorted(found, key=lambda one: _key(one, case)))


def instead(
    model: PlanModel, query: PlanQuery, found: Solved, *, most: int = 3
) -> tuple[Alternative, ...]:
    """Where nothing solves a query, the first few other changes of what was typed that fit.

    Of a context that was looked for, those that hold one token of it; of users, one.
    """
    context = 1 if found.what == "context" else context_of(model, query)
    users = (None,) if found.what == "batch" else query.users
    asked = replace(query, contexts=(context,), users=users)
    lost: list[KvtoolError] = []
    case = next(cases_of(model, asked, lost), None)
    if case is None:
        return ()
    ways = alternatives(model, asked, case, most=most)
    tried = TRIED.get(found.what, ())
    return tuple(one for one in ways if one.fits and one.change.lever not in tried)[:most]


def more_sequences(query: PlanQuery, model: PlanModel, case: PlanCase) -> Alternative | None:
    """The engine told to run as many as are asked for: no memory is in the way."""
    each = math.ceil((case.users or 1) / case.replicas)
    return made(
        Change(
            lever="users",
            words=f"{each:,} requests of a replica at a time",
            flags=f"--max-num-seqs {each}",
            model=model,
            query=replace(query, max_num_seqs=each),
        )
    )


def _key(one: Alternative, case: PlanCase) -> tuple[bool, bool, bool, float, int, float, int]:
    same = one.plan.case.gpu.id == case.gpu.id and one.gpus == case.gpus
    price = 0.0 if same else math.inf if one.usd_per_hour is None else one.usd_per_hour
    changes = ORDER.index(one.change.lever)
    kind = one.plan.case.gpu.id == case.gpu.id
    return not one.fits, not same, not kind, price, changes, -one.change.bits, one.gpus


FEWER = (256, 64)
"""--max-num-seqs that is tried; 256 is what smaller GPUs have by default."""


def _engine(model: PlanModel, query: PlanQuery, plan: Planned) -> Iterator[Change]:
    """What vLLM keeps besides, made less: a smaller sampler, no CUDA graphs."""
    case = plan.case
    if (
        case.holder.engine != "vllm"
        or query.kv_memory is not None
        or query.max_num_seqs is not None
    ):
        return
    if plan.binds == "weights":  # which nothing of it makes smaller
        return
    each = math.ceil((case.users or 1) / case.replicas)
    for fewer in FEWER:
        if each <= fewer < (case.max_num_seqs or fewer):
            smaller = replace(query, max_num_seqs=fewer)
            yield Change(
                lever="engine", words=f"at most {fewer:,} requests at a time, whose sampler is smaller",
                flags=f"--max-num-seqs {fewer}", model=model, query=smaller,
            )  # fmt: skip
    fewer = next((one for one in reversed(FEWER) if one >= each), each)
    yield Change(
        lever="engine", words="a smaller sampler, no CUDA graphs",
        flags=f"--max-num-seqs {fewer} --enforce-eager", model=model,
        query=replace(query, max_num_seqs=fewer, enforce_eager=True),
        caveat="without CUDA graphs a step takes longer than its TPOT says",
    )  # fmt: skip


def _utilization(model: PlanModel, query: PlanQuery, plan: Planned) -> Iterator[Change]:
    """The lowest share that fits, or the highest there is."""
    if not has_share(query) or query.utilizations[0] >= MOST_UTILIZATION:
        return
    found = solve("utilisation", model, query)
    share = MOST_UTILIZATION if found.value is None else float(found.value)
    if share > query.utilizations[0]:
        yield utilization(model, query, share)


def _context(model: PlanModel, query: PlanQuery, plan: Planned) -> Iterator[Change]:
    """The longest that fits the users."""
    found = solve("context", model, query)
    if isinstance(found.value, int) and found.value < query.contexts[0]:
        yield Change(
            lever="context",
            words=f"{found.value:,} tokens instead of {query.contexts[0]:,}",
            flags=found.flags,
            model=model,
            query=replace(query, contexts=(found.value,)),
            caveat="longer requests are refused",
        )


def _users(model: PlanModel, query: PlanQuery, plan: Planned) -> Iterator[Change]:
    """As many as fit."""
    users = query.users[0]
    if users is None:
        return
    found = solve("batch", model, query)
    if isinstance(found.value, int) and found.value < users:
        yield Change(
            lever="users",
            words=f"{found.value:,} users at a time instead of {users:,}",
            flags=found.flags,
            model=model,
            query=replace(query, users=(found.value,)),
            caveat="the others wait",
        )


def _other_gpus(
    model: PlanModel, query: PlanQuery, case: PlanCase, most: int | None
) -> list[Alternative]:
    """More of the same, and other presets; none where --kv-memory stands for the GPU."""
    layout = case.holder.layout
    start = Split(gpu=case.gpu, tp=layout.tp, pp=layout.pp, replicas=case.replicas)
    more = more_of(model, query, start, case.users)
    same = more and made(more)
    found = [same] if same else []
    if query.kv_memory is not None:
        return found
    others = tuple(one for one in catalog.gpu_presets() if one.id != case.gpu.id)
    try:
        served = cheapest(model, query, case.context, case.users, presets=others, most=most)
        return found + list(served)
    except KvtoolError:
        return found


TRIED = {
    "batch": ("users",),
    "context": ("context",),
    "gpus": ("gpus", "split", "--ep"),
    "kv-dtype": ("kv-dtype",),
    "utilisation": ("utilisation",),
}
"""By what was looked for: levers that move the same."""
SAME_GPUS: tuple[Changes, ...] = (
    spread_experts, other_splits, _engine, _utilization, kv_dtypes, weights, _context, _users,
)  # fmt: skip

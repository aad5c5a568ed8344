"""What each lever gains, and which of cache and weights is to be quantised first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.dtypes import DTYPES, KvDtype
from kvtool.fitting import alone
from kvtool.levers.caveats import support
from kvtool.levers.changes import (
    Alternative,
    Change,
    bits,
    has_share,
    kv_dtypes,
    made,
    utilization,
    weights,
)  # fmt: skip
from kvtool.levers.presets import gpu_change
from kvtool.levers.splits import other_splits
from kvtool.levers.weights import why_not
from kvtool.plan import planned, running
from kvtool.plan_query import Split
from kvtool.solving import MOST_UTILIZATION
from kvtool.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from kvtool.plan import PlanCase, Planned
    from kvtool.plan_model import PlanModel
    from kvtool.plan_query import PlanQuery
    from kvtool.run import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A case with a batch: as many requests as run in it."""

    query: PlanQuery
    plan: Planned

    @property
    def batch(self) -> int:
        """Requests of all replicas."""
        return self.query.users[0] or 1


def _start(query: PlanQuery, case: PlanCase) -> _Start:
    """Its users, or as many as fit: the batch at which every lever's TPOT is compared."""
    plan = planned(case, look_for_context=False)
    users = case.users or running(case, plan.holds, 1) * case.replicas
    filled = replace(case, users=users)
    return _Start(query=alone(query, filled), plan=planned(filled, look_for_context=False))


def levers(model: PlanModel, query: PlanQuery, case: PlanCase) -> tuple[Row, ...]:
    """A row a lever: the users that it adds (all replicas together, by memory) and the seconds that it
    takes off TPOT at the case's batch, ranked by users and then TPOT.
    """
    start = _start(query, case)
    found = [
        one
        for change in _changes(model, start)
        if (one := made(change, look_for_context=False)) is not None
    ]
    rows = [_row(one, start) for one in found]
    return tuple(sorted(rows, key=_rank))


def _rank(row: Row) -> tuple[float, float]:
    gained, faster = row["users_gained"], row["tpot_gained_s"]
    return -(math.inf if gained is None else gained), -(faster or 0.0)


def _changes(model: PlanModel, start: _Start) -> Iterator[Change]:
    query, case = start.query, start.plan.case
    yield from kv_dtypes(model, query, start.plan)
    yield from weights(model, query, start.plan)
    yield from other_splits(model, query, start.plan)
    layout = case.holder.layout
    twice = Split(gpu=case.gpu, tp=2 * layout.tp, pp=layout.pp, replicas=case.replicas)
    wider = gpu_change(model, query, twice, lever="tp")
    yield replace(wider, words=f"tp {twice.tp} instead of {layout.tp}: {wider.words}")
    if case.context > 1:
        half = case.context // 2
        yield Change(
            lever="context",
            words=f"half the context: {half:,} tokens",
            flags=f"--context {half}",
            model=model,
            query=replace(query, contexts=(half,)),
        )
    if has_share(query) and query.utilizations[0] < MOST_UTILIZATION:
        yield utilization(model, query, MOST_UTILIZATION)


def users_of(plan: Planned) -> int | None:
    """Whole requests that memory runs, all replicas together; None: without end."""
    if not math.isfinite(plan.holds.max_concurrency):
        return None
    return plan.holds.whole_requests * plan.case.replicas


def _row(one: Alternative, start: _Start) -> Row:
    change, plan = one.change, one.plan
    before, after = users_of(start.plan), users_of(plan)
    slow, fast = start.plan.speed, plan.speed
    layout = plan.case.holder.layout
    return {
        "lever": change.lever,
        "change": change.words,
        "flags": change.flags,
        "support": _support(change, plan),
        "gpus": plan.case.gpus,
        "usd_per_hour": one.usd_per_hour,
        "kv_dtype": layout.kv.name,
        "context_tokens": plan.case.context,
        "weights_bytes": plan.case.memory.of("weights"),
        "request_bytes": plan.holds.request_bytes,
        "users": after,
        "users_gained": None if after is None or before is None else after - before,
        "batch": start.batch,
        "tpot_s": fast and fast.tpot_s,
        "tpot_gained_s": slow.tpot_s - fast.tpot_s if slow and fast else None,
        "caveat": change.caveat,
    }


def _support(change: Change, plan: Planned) -> str | None:
    """Whether the GPU computes in what the lever stores."""
    if change.lever == "kv-dtype":
        return support(plan.case.gpu, plan.case.holder.layout.kv)
    if change.lever == "weights":
        stored = DTYPES["fp8" if change.bits == 8 else "int4"]
        return support(plan.case.gpu, KvDtype(k=stored, v=stored))
    return None


def cache_or_weights(model: PlanModel, query: PlanQuery, case: PlanCase) -> str:
    """One sentence: which of the two is to be quantised first, to fp8, by the numbers of this case.

    Empty where neither can be. Bytes are a GPU's.
    """
    start = _start(query, case)
    cache, lighter = (
        _fp8(changes(model, start.query, start.plan)) for changes in (kv_dtypes, weights)
    )
    if cache is None and lighter is None:
        return ""
    if cache is None or lighter is None:
        return _one_left(model, cache, lighter, start)
    saved, saved_weights = _saved_cache(cache, start), _saved_weights(lighter, start)
    request = start.plan.holds.request_bytes - cache.plan.holds.request_bytes
    batch, replicas = start.batch, case.replicas
    more = (
        f"the cache saves more from {-(-saved_weights // request) * replicas:,} requests on"
        if request
        else ""
    )
    return (
        f"{_verdict(cache, lighter, start)}: at {batch:,} requests of {case.context:,} tokens fp8 saves "
        f"{format_bytes(saved)} of cache a GPU and {format_bytes(saved_weights)} of weights; users "
        f"{_users(start.plan)} → {_users(cache.plan)} by the cache, {_users(lighter.plan)} by the "
        f"weights{_times(cache, lighter, start)}" + (f"; {more}" if more else "")
    )


def _fp8(changes: Iterator[Change]) -> Alternative | None:
    names = {"kv-dtype": "--kv-dtype fp8"}  # int8 has as many bits
    eight = next(
        (
            one
            for one in changes
            if one.bits == 8 and one.flags.startswith(names.get(one.lever, ""))
        ),
        None,
    )
    return made(eight, look_for_context=False) if eight else None


def _saved_cache(one: Alternative, start: _Start) -> int:
    each = math.ceil(start.batch / start.plan.case.replicas)
    return each * (start.plan.holds.request_bytes - one.plan.holds.request_bytes)


def _saved_weights(one: Alternative, start: _Start) -> int:
    return start.plan.case.memory.of("weights") - one.plan.case.memory.of("weights")


def _verdict(cache: Alternative, lighter: Alternative, start: _Start) -> str:
    by_users = _first(users_of(cache.plan), users_of(lighter.plan))
    if users_of(cache.plan) == users_of(lighter.plan) == 0:
        return "Neither the cache nor the weights alone make room for a request"
    by_time = ""
    if cache.plan.speed and lighter.plan.speed:
        by_time = _first(-cache.plan.speed.tpot_s, -lighter.plan.speed.tpot_s)
    if not by_users or not by_time or by_users == by_time:
        one = by_users or by_time
        return f"Quantise the {one} first" if one else "Cache or weights first is the same"
    return f"Quantise the {by_users} first for users, the {by_time} first for TPOT"


def _first(cache: float | None, lighter: float | None) -> str:
    """The larger of the two."""
    if cache is None or lighter is None or cache == lighter:
        return ""
    return "cache" if cache > lighter else "weights"


def _users(plan: Planned) -> str:
    found = users_of(plan)
    return "without end" if found is None else f"{found:,}"


def _times(cache: Alternative, lighter: Alternative, start: _Start) -> str:
    speeds = (start.plan.speed, cache.plan.speed, lighter.plan.speed)
    known = [format_seconds(one.tpot_s) for one in speeds if one]
    return ", TPOT {} → {} or {}".format(*known) if len(known) == 3 else ""


def _one_left(
    model: PlanModel, cache: Alternative | None, lighter: Alternative | None, start: _Start
) -> str:
    """Where the other is quantised already, or cannot be."""
    if cache is not None:
        one, what, saved = cache, "cache", _saved_cache(cache, start)
        why = why_not(model, start.query)
    else:
        assert lighter is not None, "the caller has one"
        one, what, saved = lighter, "weights", _saved_weights(lighter, start)
        kv = start.plan.case.holder.layout.kv
        known = bits(kv) <= 8 or start.plan.case.holder.options.ds_mla
        engine = start.query.engines[0]
        why = f"the cache is in {kv.name} already" if known else f"{engine} has no fp8 cache"
    return (
        f"Quantise the {what}, {why}: at {start.batch:,} requests of {start.plan.case.context:,} tokens "
        f"fp8 saves {format_bytes(saved)} a GPU; users {_users(start.plan)} → {_users(one.plan)}"
    )

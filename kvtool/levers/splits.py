"""Other ways to split the same GPUs, at no cost: a latent that every rank of tp keeps, and experts that every
replica keeps, are what most often does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.fitting import Fitting, Way, fitting, ways_of
from kvtool.levers.changes import Change
from kvtool.plan import Planned, planned
from kvtool.plan_query import Split
from kvtool.planning import NODE

if TYPE_CHECKING:
    from kvtool.plan_model import PlanModel
    from kvtool.plan_query import PlanQuery

EXCHANGE = "what ranks exchange is not in TPOT"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """Another way, and what its fullest rank is short of in bytes."""

    way: Way
    changes: int
    missing: float
    asked: Fitting
    split: Split


def other_splits(model: PlanModel, query: PlanQuery, plan: Planned) -> Iterator[Change]:
    """Of those that fit, the one that changes fewest flags and, where it is another, the one that makes most
    tokens a second; where none fits, the one that misses least, if that is less than now.
    """
    found = list(_others(model, query, plan))
    fits = [one for one in found if not one.missing]
    if fits:
        nearest = min(fits, key=lambda one: (one.changes, one.way.dcp, -_rate(one)))
        fastest = min(fits, key=lambda one: (-_rate(one), one.way.tp * one.way.pp))
        for one in (nearest,) if nearest is fastest else (nearest, fastest):
            yield _change(model, query, one)
        return
    least = min(found, key=lambda one: (one.missing, one.changes), default=None)
    if least is not None and least.missing < plan.missing_bytes:
        yield _change(model, query, least)


def _others(model: PlanModel, query: PlanQuery, plan: Planned) -> Iterator[_Other]:
    """Ways that the model and the engine have. Experts stay spread; on one replica spreading adds nothing."""
    now, gpu = _now(query), plan.case.gpu
    asked: dict[tuple[int, bool], Fitting] = {}
    for way in ways_of(model, plan.case.gpus):
        spread = way.expert_parallel
        unasked = spread and not now.expert_parallel and way.dp == 1
        if unasked or now.expert_parallel > spread or way.tp > max(NODE, now.tp):
            continue
        changes = _changes(now, way)
        if not changes or (changes == 1 and spread > now.expert_parallel):  # the lever --ep
            continue
        key = way.dcp, spread
        if key not in asked:
            asked[key] = _fitting(model, query, way)
        split = Split(gpu=gpu, tp=way.tp, pp=way.pp, replicas=way.dp)
        missing = asked[key].missing(split)
        if math.isfinite(missing):
            yield _Other(way=way, changes=changes, missing=missing, asked=asked[key], split=split)


def _now(query: PlanQuery) -> Way:
    """Of a query of one case."""
    return Way(
        tp=query.tps[0] or 1,
        pp=query.pps[0],
        dp=query.dps[0] or 1,
        dcp=query.dcp,
        expert_parallel=query.expert_parallel,
    )


def _changes(now: Way, way: Way) -> int:
    """Flags that differ."""
    before = (now.tp, now.pp, now.dp, now.dcp, now.expert_parallel)
    after = (way.tp, way.pp, way.dp, way.dcp, way.expert_parallel)
    return sum(one != other for one, other in zip(before, after, strict=True))


def _fitting(model: PlanModel, query: PlanQuery, way: Way) -> Fitting:
    other = replace(query, dcp=way.dcp, expert_parallel=way.expert_parallel)
    return fitting(model, other, query.contexts[0], query.users[0])


def _rate(one: _Other) -> float:
    """Output tokens a second of all replicas; requests, which rank alike, where no speed is known."""
    plan = planned(one.asked.case(one.split), look_for_context=False)
    each = plan.speed.output_tokens_per_s if plan.speed else plan.holds.whole_requests
    return each * one.split.replicas


def _change(model: PlanModel, query: PlanQuery, one: _Other) -> Change:
    way, now = one.way, _now(query)
    flags = [f"--tp {way.tp}"]
    flags += [f"--pp {way.pp}"] if (way.pp, now.pp) != (1, 1) else []
    flags += [f"--dp {way.dp}"] if (way.dp, now.dp) != (1, 1) else []
    flags += [f"--dcp {way.dcp}"] if (way.dcp, now.dcp) != (1, 1) else []
    flags += ["--ep"] if way.expert_parallel else []
    return Change(
        lever="split",
        words=f"the same GPUs as {_in_words(way)}",
        flags=" ".join(flags),
        model=model,
        query=way.on(query, one.split.gpu),
        caveat=EXCHANGE,
    )


def _in_words(way: Way) -> str:
    """Without what there is one of."""
    said = [word for word in str(way).split(", ") if not word.endswith(" 1")]
    return ", ".join(said)

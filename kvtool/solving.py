"""`kvtool plan --solve`: what is missing of a plan, given the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from kvtool.cache import check_parallel
from kvtool.capacity import limit_of, longest
from kvtool.engine_memory.usable import SHARE_WORD
from kvtool.engine_rows import ROWS
from kvtool.errors import KvtoolError, did_you_mean, usage_error
from kvtool.fitting import TPS, Fitting, context_of, count_of, fitting, on, plan_first
from kvtool.plan_query import Split
from kvtool.plan_weights import cuts_experts
from kvtool.units import format_bytes

if TYPE_CHECKING:
    from kvtool.plan import Planned
    from kvtool.plan_model import PlanModel
    from kvtool.plan_query import PlanQuery

MOST_UTILIZATION = 0.95
"""Above it, little is left for the driver and for what an engine did not foresee."""
KV_LADDER = ("auto", "fp8", "int8", "int4", "int4/int2")
"""From the most bits to the fewest."""
MOST_STAGES = 64
MOST_REPLICAS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The value that was missing, and the plan that has it."""

    what: str
    value: int | float | str | None
    """Tokens, requests of all replicas, GPUs, a KV dtype or a share of the memory; None: none fits."""
    flags: str
    """The value as typed."""
    plan: Planned
    """Where nothing fits, the nearest miss."""
    error: KvtoolError | None = None


def solve(what: str, model: PlanModel, query: PlanQuery) -> Solved:
    """The missing one of `SOLVERS`, given the first value of everything else.

    KvtoolError if the rest cannot be planned; one that nothing solves is in `Solved.error`.
    """
    if what not in SOLVERS:
        known = tuple(SOLVERS)
        raise usage_error(
            f"--solve: nothing is called '{what[:40]}'",
            f"choose among {', '.join(known)}.{did_you_mean(what, known)}",
        )
    return SOLVERS[what](model, replace(query, contexts=(context_of(model, query),)))


def _context(model: PlanModel, query: PlanQuery) -> Solved:
    """The longest context of the users that are asked for, one a replica where none are."""
    top = limit_of(model.shape, allow_long=query.allow_long)

    def plan(tokens: int) -> Planned:
        return plan_first(model, replace(query, contexts=(tokens,)), look_for_context=False)

    shortest = plan(1)
    if not shortest.fits:
        users = "" if query.users[0] is None else f" for each of {query.users[0]:,}"
        return _none("context", shortest, f"not even one token of context fits{users}")
    found = longest(lambda n: plan(n).fits, min(top, query.vllm.max_model_len or top))
    whole = plan_first(model, replace(query, contexts=(found,)))
    return Solved(what="context", value=found, flags=f"--context {found}", plan=whole)


def _batch(model: PlanModel, query: PlanQuery) -> Solved:
    """The most requests at a time, all replicas together; of a replica at most max_num_seqs."""
    one = plan_first(model, replace(query, users=(None,)))
    if not one.fits:
        return _none("batch", one, f"{_asked(one)} does not fit")
    each = one.holds.whole_requests
    if query.max_num_seqs is not None:
        each = min(each, query.max_num_seqs)
    elif not math.isfinite(one.holds.max_concurrency):
        raise KvtoolError(
            f"{model.subject.name} caches nothing: memory limits no batch", "give --max-num-seqs"
        )

    def fits(users: int) -> bool:
        asked = replace(query, users=(users,))
        return plan_first(model, asked, look_for_context=False).fits

    # An engine that is to run more requests than its default keeps more memory for them.
    value = longest(lambda many: fits(many * one.case.replicas), each) * one.case.replicas
    whole = plan_first(model, replace(query, users=(value,)))
    return Solved(what="batch", value=value, flags=f"--batch {value}", plan=whole)


def _gpus(model: PlanModel, query: PlanQuery) -> Solved:
    """The fewest of the first GPU: of as many, most tensor parallelism, then fewest stages.

    A tp, replicas and stages that are given stay; so does everything else.
    """
    gpu = query.gpus[0].preset
    asked = fitting(model, query, context_of(model, query), query.users[0])
    best: Split | None = None
    nearest: tuple[float, Split] | None = None
    for tp, pp in _cuts(model, query):
        most = None if best is None else count_of(best) // (tp * pp)
        if most == 0:
            continue
        found, missed = _replicas(asked, Split(gpu=gpu, tp=tp, pp=pp, replicas=1), most)
        if found and (best is None or _order(found) < _order(best)):
            best = found
        if nearest is None or missed[0] < nearest[0]:
            nearest = missed
    if best is not None:
        whole = plan_first(model, on(query, best))
        return Solved(what="gpus", value=count_of(best), flags=flags_of(best), plan=whole)
    if nearest is None or math.isinf(nearest[0]):
        tp, pp = query.tps[0] or 1, query.pps[0]
        plan_first(model, on(query, Split(gpu=gpu, tp=tp, pp=pp, replicas=query.dps[0] or 1)))
        raise usage_error(f"{gpu.id} cannot be planned with", "choose another with --gpu")
    missing, split = nearest
    if query.dps[0] is None and not query.expert_parallel:
        split = replace(
            split, replicas=1
        )  # as many as users change nothing but how they are shared out
    closest = plan_first(model, on(query, split))
    if split is nearest[1]:
        return _none("gpus", closest, f"no number of {gpu.id} fits {_asked(closest)}")
    return Solved(what="gpus", value=None, flags="", plan=closest, error=_no_gpus(closest, missing))


def _no_gpus(nearest: Planned, least: float) -> KvtoolError:
    """The error where a replica of the nearest miss is short of so many bytes a GPU for its first request:
    others take users off it, no weights."""
    case = nearest.case
    layout = case.holder.layout
    ranks, engine = layout.tp * layout.pp, case.holder.engine
    one = f"{ranks:,} × {case.gpu.id}" + (f" (tp {layout.tp}, pp {layout.pp})" if ranks > 1 else "")
    why = "replicas share users, not weights"
    if ROWS[engine].one_process:
        why = f"{engine} runs in one process, and {why}"
    return KvtoolError(
        f"{case.holder.subject.name}: no number of {case.gpu.id} fits {_asked(nearest)}: for a single request "
        f"{one} lacks {format_bytes(int(least))} a GPU, and more GPUs do not help: {why}",
        _WAYS.get(nearest.binds, _WAYS["users"]).replace("more or larger GPUs", "larger GPUs"),
        code="does_not_fit",
    )


def _cuts(model: PlanModel, query: PlanQuery) -> Iterator[tuple[int, int]]:
    """(tp, pp) that the model allows, the smallest product first."""
    tps = TPS if query.tps[0] is None else (query.tps[0],)
    stages = min(MOST_STAGES, model.shape.num_modules)
    pps = range(1, stages + 1) if query.pps[0] == 1 else (query.pps[0],)
    for tp, pp in sorted(((tp, pp) for tp in tps for pp in pps), key=lambda cut: cut[0] * cut[1]):
        try:
            check_parallel(model.shape, tp, pp, dcp=query.dcp)
        except KvtoolError:
            continue
        yield tp, pp


def _replicas(
    asked: Fitting, split: Split, most: int | None
) -> tuple[Split | None, tuple[float, Split]]:
    """The fewest replicas of this cut that fit, and what the most of them miss."""
    given = asked.query.dps[0]
    if given is not None:
        split = replace(split, replicas=given)
        missing = asked.missing(split)
        return (split if missing == 0 else None), (missing, split)
    spread = 64 if asked.query.expert_parallel else 1
    high = min(MOST_REPLICAS, max(asked.users or 1, spread), most or MOST_REPLICAS)
    model, query = asked.model, asked.query
    allowed = [
        many for many in range(1, high + 1) if cuts_experts(model, query, query.engines[0], split.tp * many)
    ]  # fmt: skip
    if not allowed:
        return None, (math.inf, split)
    last = replace(split, replicas=allowed[-1])
    missing = asked.missing(last)
    if missing:
        return None, (missing, last)
    low, top = 0, len(allowed) - 1
    while low < top:
        middle = (low + top) // 2
        fits = asked.missing(replace(split, replicas=allowed[middle])) == 0
        low, top = (low, middle) if fits else (middle + 1, top)
    return replace(split, replicas=allowed[low]), (0, last)


def _order(split: Split) -> tuple[int, int, int]:
    return count_of(split), -split.tp, split.pp


def flags_of(split: Split, *, pp: int = 1, replicas: int = 1) -> str:
    """The GPUs as typed; stages and replicas where there are several, or were."""
    words = [f"--gpu {split.gpu.id}:{count_of(split)} --tp {split.tp}"]
    words += [f"--pp {split.pp}"] if split.pp != 1 or pp != 1 else []
    words += [f"--dp {split.replicas}"] if split.replicas != 1 or replicas != 1 else []
    return " ".join(words)


def _kv_dtype(model: PlanModel, query: PlanQuery) -> Solved:
    """The KV dtype of the most bits that fits, of those that the engine has."""
    nearest: Planned | None = None
    for name in KV_LADDER:
        try:
            plan = plan_first(model, replace(query, kv_dtypes=(name,)))
        except KvtoolError as error:
            if name == KV_LADDER[0] or error.code != "not_in_engine":
                raise
            continue
        if plan.fits:
            return Solved(what="kv-dtype", value=name, flags=f"--kv-dtype {name}", plan=plan)
        if nearest is None or plan.missing_bytes < nearest.missing_bytes:
            nearest = plan
    assert nearest is not None, "auto was planned"
    words = f"no KV dtype of {query.engines[0]} fits {_asked(nearest)}"
    return _none("kv-dtype", nearest, words)


def _utilization(model: PlanModel, query: PlanQuery) -> Solved:
    """The lowest share of the memory that fits, in steps of 0.01."""
    engine = query.engines[0]
    if engine not in SHARE_WORD:
        raise usage_error(
            f"--solve utilisation: {engine} takes no share of the memory",
            f"choose an engine that does: --engine {' or '.join(SHARE_WORD)}",
        )
    if query.kv_memory is not None:
        raise usage_error(
            "--solve utilisation: --kv-memory says what the cache has, whatever the share",
            "leave out one of the two",
        )

    def plan(percent: int) -> Planned:
        share = replace(query, utilizations=(percent / 100,))
        return plan_first(model, share, look_for_context=False)

    most = plan(round(100 * MOST_UTILIZATION))
    if not most.fits:
        words = f"not even {MOST_UTILIZATION:g} of the memory fits {_asked(most)}"
        return _none("utilisation", most, words)
    low, high = 1, round(100 * MOST_UTILIZATION)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if plan(middle).fits else (middle + 1, high)
    share = low / 100
    whole = plan_first(model, replace(query, utilizations=(share,)))
    flags = f"--gpu-memory-utilization {share:g}"
    return Solved(what="utilisation", value=share, flags=flags, plan=whole)


def _asked(plan: Planned) -> str:
    case = plan.case
    users = "a request" if case.users is None else f"{case.users:,} user{'s' * (case.users > 1)}"
    return f"{users} at {case.context:,} token{'s' * (case.context > 1)}"


_WAYS = {
    "weights": "the weights alone are too large: more or larger GPUs, or weights of fewer bits",
    "overhead": "weights and activations leave nothing: more or larger GPUs, --max-batched-tokens",
    "context": "more or larger GPUs, a KV dtype of fewer bits, or a shorter context",
    "users": "more or larger GPUs, a KV dtype of fewer bits, fewer users, or a shorter context",
}


def _none(what: str, nearest: Planned, words: str) -> Solved:
    """Nothing fits: the error, with the nearest miss."""
    case = nearest.case
    layout = case.holder.layout
    tried = f"{case.gpus} × {case.gpu.id} (tp {layout.tp}, pp {layout.pp}, KV in {layout.kv.name})"
    error = KvtoolError(
        f"{case.holder.subject.name}: {words}: {tried} lacks at least "
        f"{format_bytes(nearest.missing_bytes)} a GPU",
        _WAYS.get(nearest.binds, _WAYS["users"]),
        code="does_not_fit",
    )
    return Solved(what=what, value=None, flags="", plan=nearest, error=error)


def queries_of(what: str, query: PlanQuery) -> Iterator[PlanQuery]:
    """A query for each combination of lists, of which `solve` takes one; of what is missing the first."""
    lists: dict[str, tuple[object, ...]] = {
        "engines": query.engines,
        "gpus": query.gpus,
        "pps": query.pps,
        "dps": query.dps,
        "tps": query.tps,
        "kv_dtypes": query.kv_dtypes,
        "utilizations": query.utilizations,
        "contexts": query.contexts or (None,),
        "users": query.users,
    }
    if what in _FIELDS:
        lists[_FIELDS[what]] = lists[_FIELDS[what]][:1]
    for values in product(*lists.values()):
        named: dict[str, Any] = {name: (one,) for name, one in zip(lists, values, strict=True)}
        yield replace(query, **(named if query.contexts else named | {"contexts": ()}))


_FIELDS = {
    "context": "contexts", "batch": "users", "kv-dtype": "kv_dtypes", "utilisation": "utilizations",
}  # fmt: skip
SOLVERS: dict[str, Callable[[PlanModel, PlanQuery], Solved]] = {
    "context": _context,
    "batch": _batch,
    "gpus": _gpus,
    "kv-dtype": _kv_dtype,
    "utilisation": _utilization,
}
"""What can be missing."""

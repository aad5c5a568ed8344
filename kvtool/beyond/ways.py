"""Ways to split a model over GPUs: tensor and pipeline parallel, replicas, experts and tokens spread.

What ranks exchange takes no time here, so that many ranks look better than they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.cache import check_parallel
from kvtool.engines import ideal
from kvtool.errors import KvtoolError
from kvtool.plan import plan_row, planned
from kvtool.plan_query import Gpus, PlanQuery
from kvtool.planning import PlanModel, cases_of

if TYPE_CHECKING:
    from kvtool.catalog import GpuPreset
    from kvtool.plan import PlanCase
    from kvtool.run import Row

NO_EXCHANGE = (
    "what ranks exchange takes no time: tokens/s of many ranks, and of ranks on several nodes, are upper "
    "bounds"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """GPUs as `dp` replicas of tp × pp ranks."""

    tp: int
    pp: int
    dp: int
    dcp: int = 1
    expert_parallel: bool = False

    def __str__(self) -> str:
        words = [f"tp {self.tp}", f"pp {self.pp}", f"dp {self.dp}"]
        words += [f"dcp {self.dcp}"] if self.dcp > 1 else []
        return ", ".join(words + (["experts spread"] if self.expert_parallel else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Ways that are not possible, for one reason."""

    reason: str
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Rows of `kvtool plan`, the best first, with `kv_copies` beside; and what is not possible."""

    rows: tuple[Row, ...]
    refused: tuple[Refused, ...]
    notes: tuple[str, ...] = (NO_EXCHANGE,)


def parallel_rows(model: PlanModel, query: PlanQuery, gpu: GpuPreset, count: int) -> Ways:
    """Each way to split `count` GPUs, of the query's first engine, context, KV dtype and users.

    Best is what fits and makes most tokens a second; of what does not fit, what misses least.
    `kv_copies`: how often the ranks of tp hold a request's cache in all, 1 where its heads are cut and
    tp / dcp for a latent, which is whole on each.
    """
    rows: list[Row] = []
    refused: dict[str, list[Way]] = {}
    for way in _ways(model, count):
        lost: list[KvtoolError] = []
        try:
            for case in cases_of(model, _asked(query, way, gpu, count), lost):
                rows.append(plan_row(planned(case)) | {"kv_copies": _copies(case)})
        except KvtoolError as whole:
            lost.append(whole)
        for error in lost:
            refused.setdefault(error.message, []).append(way)
    rows.sort(key=_rank)
    return Ways(
        rows=tuple(rows),
        refused=tuple(Refused(reason=why, ways=tuple(ways)) for why, ways in refused.items()),
    )


def _ways(model: PlanModel, count: int) -> Iterator[Way]:
    """tp, pp and replicas that multiply to the count; with experts, both ways to hold them."""
    stored = model.stored
    experts = stored is not None and any(one.part.role == "experts" for one in stored.parts)
    for tp in divisors(count):
        for pp in divisors(count // tp):
            dp = count // tp // pp
            spreads = (False, True) if experts and tp * dp > 1 else (False,)
            for dcp in divisors(tp):
                for spread in spreads if _is_new(model, tp, pp, dcp) else ():
                    yield Way(tp=tp, pp=pp, dp=dp, dcp=dcp, expert_parallel=spread)


def _is_new(model: PlanModel, tp: int, pp: int, dcp: int) -> bool:
    """Context parallelism that is refused is named once, where it is asked of one stage."""
    if dcp == 1 or pp == 1:
        return True
    try:
        check_parallel(model.shape, tp, pp, dcp=dcp)
    except KvtoolError:
        return False
    return True


def divisors(count: int) -> list[int]:
    """From 1 to the count."""
    return [one for one in range(1, count + 1) if not count % one]


def _asked(query: PlanQuery, way: Way, gpu: GpuPreset, count: int) -> PlanQuery:
    return replace(
        query,
        gpus=(Gpus(preset=gpu, count=count),),
        engines=query.engines[:1],
        tps=(way.tp,),
        pps=(way.pp,),
        dps=(way.dp,),
        dcp=way.dcp,
        expert_parallel=way.expert_parallel,
        kv_dtypes=query.kv_dtypes[:1],
        utilizations=query.utilizations[:1],
        contexts=query.contexts[:1],
        users=query.users[:1],
    )


def _copies(case: PlanCase) -> float:
    """Of a request's whole cache, what all ranks of tp hold together, in the layout of `ideal`."""
    layout = replace(case.holder.layout, pp=1, pp_layers=(), block_size=None)
    one = ideal.size(layout, context=case.context, encoder=case.holder.encoder)
    return layout.tp * one.rank_bytes / one.bytes if one.bytes else 1.0


def _rank(row: Row) -> tuple[bool, float, int, int]:
    """Fewer ranks first among equals: they exchange less."""
    speed = row["output_tokens_per_s"] or 0.0
    return not row["fits"], -speed, row["missing_bytes"], row["tp"] * row["pp"]

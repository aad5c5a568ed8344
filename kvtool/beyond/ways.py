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
from kvtool.fitting import Way, ways_of
from kvtool.plan import plan_row, planned
from kvtool.plan_model import PlanModel
from kvtool.planning import cases_of

if TYPE_CHECKING:
    from kvtool.catalog import GpuPreset
    from kvtool.plan import PlanCase
    from kvtool.plan_query import PlanQuery
    from kvtool.run import Row

NO_EXCHANGE = (
    "what ranks exchange takes no time: tokens/s of many ranks, and of ranks on several nodes, are upper "
    "bounds"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Ways that are not possible, for one reason."""

    reason: str
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Rows of `kvtool plan`, the best first, with `flags` to type and `kv_copies` beside; and what is not
    possible."""

    rows: tuple[Row, ...]
    refused: tuple[Refused, ...]
    notes: tuple[str, ...] = (NO_EXCHANGE,)


def parallel_rows(model: PlanModel, query: PlanQuery, gpu: GpuPreset, count: int) -> Ways:
    """Each way to split `count` GPUs, of the query's first engine, context, KV dtype and users. Where experts
    that are spread change nothing, as on the ranks of one replica, there is one row.

    Best is what fits and makes most tokens a second; of what does not fit, what misses least.
    `kv_copies`: how often the ranks of tp hold a request's cache in all, 1 where its heads are cut and
    tp / dcp for a latent, which is whole on each.
    """
    rows: list[Row] = []
    refused: dict[str, list[Way]] = {}
    for way in filter(lambda one: _is_new(model, one), ways_of(model, count)):
        lost: list[KvtoolError] = []
        try:
            for case in cases_of(model, way.on(query, gpu), lost):
                more = {"flags": way.flags, "kv_copies": _copies(case)}
                rows.append(plan_row(planned(case)) | more)
        except KvtoolError as whole:
            lost.append(whole)
        for error in lost:
            refused.setdefault(error.message, []).append(way)
    kept = sorted(_differing(rows), key=_rank)
    return Ways(
        rows=tuple(kept),
        refused=tuple(Refused(reason=why, ways=tuple(ways)) for why, ways in refused.items()),
    )


def _is_new(model: PlanModel, way: Way) -> bool:
    """Context parallelism that is refused is named once, where it is asked of one stage."""
    if way.dcp == 1 or way.pp == 1:
        return True
    try:
        check_parallel(model.shape, way.tp, way.pp, dcp=way.dcp)
    except KvtoolError:
        return False
    return True


def _differing(rows: list[Row]) -> Iterator[Row]:
    """Of two that only differ in whether experts are spread, the first."""
    seen: list[Row] = []
    for row in rows:
        plain = row | {"expert_parallel": False, "flags": row["flags"].removesuffix(" --ep")}
        if plain not in seen:
            seen.append(plain)
            yield row


def _copies(case: PlanCase) -> float:
    """Of a request's whole cache, what all ranks of tp hold together, in the layout of `ideal`."""
    layout = replace(case.holder.layout, pp=1, pp_layers=(), block_size=None)
    one = ideal.size(layout, context=case.context, encoder=case.holder.encoder_at(case.context))
    return layout.tp * one.rank_bytes / one.bytes if one.bytes else 1.0


def _rank(row: Row) -> tuple[bool, float, int, int]:
    """Fewer ranks first among equals: they exchange less."""
    speed = row["output_tokens_per_s"] or 0.0
    return not row["fits"], -speed, row["missing_bytes"], row["tp"] * row["pp"]

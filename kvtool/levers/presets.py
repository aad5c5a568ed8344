"""GPUs that serve a model, the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtool import catalog
from kvtool.cache import shard
from kvtool.dtypes import DTYPES, parse_kv_dtype
from kvtool.engine_memory.usable import is_total_known
from kvtool.errors import KvtoolError
from kvtool.fitting import Fitting, count_of, fitting, on, splits
from kvtool.levers.caveats import NATIVE, support
from kvtool.levers.changes import Alternative, Change
from kvtool.plan import plan_row, planned
from kvtool.planning import NODE
from kvtool.solving import flags_of

if TYPE_CHECKING:
    from kvtool.catalog import GpuPreset
    from kvtool.plan_model import PlanModel
    from kvtool.plan_query import PlanQuery, Split

COUNTS = (1, 2, 4, 8, 16)
NOT_APPLE = ("vllm", "sglang")


def cheapest(
    model: PlanModel,
    query: PlanQuery,
    context: int,
    users: int | None,
    *,
    by: str = "hour",
    presets: tuple[GpuPreset, ...] | None = None,
    most: int | None = None,
) -> tuple[Alternative, ...]:
    """The presets that hold so many requests of this context, in 1 to 16 GPUs, cheapest first.

    By `hour`: of each preset the fewest GPUs that fit, by USD an hour, those without a price last. By
    `tokens`: of each the count with the cheapest output token, by USD a million; where no speed is known
    by USD an hour, after the others. At most so many. Of the query, the first engine, KV dtype and
    utilisation count; the ranks are chosen here.
    """
    asked = fitting(model, query, context, users)
    known = catalog.gpu_presets() if presets is None else presets
    gpus = [one for one in known if runs(one, query.engines[0], model.dtype.name)]
    if by == "tokens":
        each = ([_alternative(asked, one) for one in _likely(asked, gpu)] for gpu in gpus)
        best = (min(fits, key=by_tokens) for fits in each if fits)
        return tuple(sorted(best, key=by_tokens)[:most])
    least = [one for gpu in gpus if (one := next(_fitting(asked, gpu), None))]
    least.sort(key=lambda split: _price(query, split))
    return tuple(sorted((_alternative(asked, one) for one in least[:most]), key=by_hour))


def _price(query: PlanQuery, split: Split) -> tuple[float, int]:
    """As `by_hour`, before anything is planned."""
    given = on(query, split).price
    price = split.gpu.price_usd_per_hour if given is None else given
    return math.inf if price is None else price * count_of(split), count_of(split)


def by_hour(one: Alternative) -> tuple[float, int, str]:
    """USD an hour, then GPUs."""
    price = math.inf if one.usd_per_hour is None else one.usd_per_hour
    return price, one.gpus, one.plan.case.gpu.id


def by_tokens(one: Alternative) -> tuple[float, float, int, str]:
    """USD a million output tokens, then an hour, then GPUs."""
    cost = one.usd_per_million_tokens
    return math.inf if cost is None else cost, *by_hour(one)


def runs(gpu: GpuPreset, engine: str, dtype: str) -> bool:
    """Whether its memory is known, it computes in the model's dtype, and the engine runs on it."""
    if not is_total_known(gpu) or gpu.id in catalog.DEVICES:
        return False
    if gpu.vendor == "Apple" and engine in NOT_APPLE:
        return False
    return dtype == "fp32" or dtype in gpu.native_kv_dtypes


def _fitting(asked: Fitting, gpu: GpuPreset) -> Iterator[Split]:
    """Of every count that fits the first split that does, the fewest GPUs first."""
    for count in COUNTS if gpu.vendor != "Apple" else COUNTS[:1]:
        ways = splits(gpu, count, most_replicas=asked.users or 1)
        fits = next((one for one in ways if asked.missing(one) == 0), None)
        if fits is not None:
            yield fits


def _likely(asked: Fitting, gpu: GpuPreset) -> list[Split]:
    """Of every count, but of several nodes only where one does not do or users are asked for: each doubling seems
    to make tokens cheaper, since what ranks exchange takes no time."""
    found = list(_fitting(asked, gpu))
    near = [one for one in found if count_of(one) <= NODE]
    return near if near and asked.users is None else found


def _alternative(asked: Fitting, split: Split) -> Alternative:
    change = gpu_change(asked.model, asked.query, split)
    query = replace(change.query, contexts=(asked.context,), users=(asked.users,))
    plan = planned(asked.case(split))
    return Alternative(change=replace(change, query=query), plan=plan, row=plan_row(plan))


def gpu_change(model: PlanModel, query: PlanQuery, split: Split, *, lever: str = "gpu") -> Change:
    """The model on these GPUs."""
    count = count_of(split)
    pp, dp = query.pps[0], query.dps[0] or 1
    cut = [f"tp {split.tp}"] if split.tp > 1 else []
    cut += [f"{split.pp} stages"] if split.pp > 1 else []
    cut += [f"{split.replicas} replicas"] if split.replicas > 1 else []
    return Change(
        lever=lever,
        words=f"{count} × {split.gpu.id}" + (f" ({', '.join(cut)})" if cut else ""),
        flags=flags_of(split, pp=pp, replicas=dp),
        model=model,
        query=on(query, split),
        caveat=_caveat(split, model, query),
    )


def _caveat(split: Split, model: PlanModel, query: PlanQuery) -> str:
    said, shape = [], model.shape
    auto = DTYPES[shape.kv_dtype] if shape.kv_dtype else model.dtype
    kv = parse_kv_dtype(query.kv_dtypes[0], auto=auto)
    if (found := support(split.gpu, kv)) != NATIVE:
        said.append(f"{kv.name} on {split.gpu.id}: {found}")
    if split.tp * split.pp > 1:
        link = (split.gpu.interconnect or "").lower()
        fast = any(word in link for word in ("nvlink", "fabric", "gbe"))
        over = "" if fast else " over PCIe" if "pcie" in link else " over a link that is not known"
        said.append(f"what ranks exchange{over} is not in TPOT")
    heads = [one.kv_heads for one in shape.layers if one.kv_heads and not one.replicated]
    if any(one.replicated for one in shape.layers):
        if split.tp > query.dcp:
            said.append("every rank of tp keeps all of a latent cache")
    elif heads and shard(min(heads), split.tp) * split.tp > min(heads) * query.dcp:
        said.append(f"{min(heads)} KV heads are copied on {split.tp} ranks")
    return "; ".join(said)


def more_of(model: PlanModel, query: PlanQuery, start: Split, users: int | None) -> Change | None:
    """Twice as many of the same GPUs, four times, … up to 64 times: tp doubled while heads allow it."""
    try:
        asked = fitting(model, query, query.contexts[0], users)
    except KvtoolError:
        return None
    count = count_of(start)
    for times in (2, 4, 8, 16, 32, 64):
        most = start.replicas * times if users is None else users
        for split in splits(start.gpu, count * times, most_replicas=most):
            if users is None and split.replicas != start.replicas:
                continue
            if asked.missing(split) == 0:
                return gpu_change(model, query, split, lever="gpus")
    return None

"""A change of a plan: what it is in words and as typed, and the plan that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.dtypes import DTYPES, KvDtype, parse_kv_dtype
from kvtool.engine_memory.usable import SHARE_WORD
from kvtool.errors import KvtoolError
from kvtool.fitting import has_experts, plan_first
from kvtool.levers import caveats
from kvtool.levers.weights import quantised, why_not
from kvtool.plan import plan_row
from kvtool.units import format_bytes
from kvtool.weights.usual import WORDS

if TYPE_CHECKING:
    from kvtool.plan import Planned
    from kvtool.plan_model import PlanModel
    from kvtool.plan_query import PlanQuery
    from kvtool.run import Row

KV_DTYPES = ("fp8", "int8", "int4", "int4/int2")
WEIGHTS = ("fp8", "int4")
ORDER = (
    "--ep", "split", "engine", "utilisation", "kv-dtype", "weights", "both", "context", "users", "gpus", "gpu",
)  # fmt: skip
"""Levers by how little they change: answers stay the same, then their accuracy, then what is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A model and a query of one combination, in which something is changed."""

    lever: str
    """Of `ORDER`."""
    words: str
    flags: str
    model: PlanModel
    query: PlanQuery
    caveat: str = ""
    bits: float = 0.0
    """Of what is quantised: fewer change more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A change and its plan. Requests and tokens a second are those of all replicas."""

    change: Change
    plan: Planned
    row: Row
    """The plan's row."""

    @property
    def fits(self) -> bool:
        """What was asked, with the change."""
        return self.plan.fits

    @property
    def usd_per_hour(self) -> float | None:
        """Of all GPUs; None: no price is known."""
        return self._number("usd_per_hour")

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Output tokens; None: no price or no speed is known."""
        return self._number("usd_per_million_tokens")

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.plan.case.gpus

    def _number(self, key: str) -> float | None:
        found = self.row[key]
        return None if found is None else float(found)

    def as_row(self) -> Row:
        """For `alternatives` of a plan's row."""
        kept = (
            "fits", "missing_bytes", "max_concurrency", "whole_requests", "max_context", "gpu", "gpus", "tp", "pp",
            "dp", "kv_dtype", "context_tokens", "users", "weights_bytes", "batch", "tpot_s",
            "output_tokens_per_s", "usd_per_hour", "usd_per_million_tokens",
        )  # fmt: skip
        change = self.change
        said: Row = {"lever": change.lever, "change": change.words, "flags": change.flags}
        return said | {key: self.row[key] for key in kept} | {"caveat": change.caveat}


def made(change: Change, *, look_for_context: bool = True) -> Alternative | None:
    """The change, planned; None where the engine or the model does not have it."""
    try:
        plan = plan_first(change.model, change.query, look_for_context=look_for_context)
    except KvtoolError:
        return None
    return Alternative(change=change, plan=plan, row=plan_row(plan))


def kv_dtypes(model: PlanModel, query: PlanQuery, plan: Planned) -> Iterator[Change]:
    """A cache of fewer bits."""
    if plan.case.holder.options.ds_mla:  # a layout of its own, whose KV dtype cannot be chosen
        return
    case = plan.case
    layout = case.holder.layout
    for name in KV_DTYPES:
        kv = parse_kv_dtype(name, auto=DTYPES["bf16"])
        if kv.k != kv.v and any(one.kind == "latent" for one in layout.shape.layers):
            continue  # a latent is K and V at once
        if bits(kv) < bits(layout.kv):
            yield Change(
                lever="kv-dtype",
                words=f"the cache in {name}",
                flags=f"--kv-dtype {name}",
                model=model,
                query=replace(query, kv_dtypes=(name,)),
                caveat=caveats.of_cache(case.gpu, kv, layout.shape),
                bits=bits(kv),
            )


def bits(kv: KvDtype) -> float:
    """Of an element, K and V on average, without scales."""
    return (kv.k.bits + kv.v.bits) / 2


def weights(model: PlanModel, query: PlanQuery, plan: Planned) -> Iterator[Change]:
    """Weights of fewer bits."""
    if why_not(model, query):
        return
    for name in WEIGHTS:
        smaller, asked = quantised(model, query, name)
        assert smaller.stored is not None, "why_not"
        whole = smaller.stored.bytes if asked.weights is None else asked.weights
        on_gpu = caveats.support(plan.case.gpu, KvDtype(k=DTYPES[name], v=DTYPES[name]))
        note = "" if on_gpu == caveats.NATIVE else f"{name} on {plan.case.gpu.id}: {on_gpu}; "
        yield Change(
            lever="weights",
            words=f"weights in {name}, about {format_bytes(whole)}",
            flags=f"--weights-dtype {name}",
            model=smaller,
            query=asked,
            caveat=note + caveats.WEIGHTS.format(words=WORDS[name]),
            bits=DTYPES[name].bits,
        )


def both(model: PlanModel, query: PlanQuery, plan: Planned) -> Iterator[Change]:
    """The cache in fp8 and weights of fewer bits."""
    for cache in kv_dtypes(model, query, plan):
        if cache.query.kv_dtypes != ("fp8",):
            continue
        for one in weights(model, cache.query, plan):
            yield replace(
                one,
                lever="both",
                words=f"{cache.words} and {one.words}",
                flags=f"{cache.flags} {one.flags}",
                caveat="; ".join(filter(None, (cache.caveat, one.caveat))),
            )


def spread_experts(model: PlanModel, query: PlanQuery, plan: Planned) -> Iterator[Change]:
    """Experts over all replicas instead of a copy in each."""
    replicas = plan.case.replicas
    spread = query.expert_parallel or query.kv_memory is not None
    if has_experts(model) and replicas > 1 and not spread:
        yield Change(
            lever="--ep",
            words=f"experts spread over the {replicas:,} replicas",
            flags="--ep",
            model=model,
            query=replace(query, expert_parallel=True),
            caveat="tokens travel between replicas in every layer, which TPOT leaves out",
        )


def has_share(query: PlanQuery) -> bool:
    """Whether gpu_memory_utilization changes anything."""
    return query.engines[0] in SHARE_WORD and query.kv_memory is None


def utilization(model: PlanModel, query: PlanQuery, share: float) -> Change:
    """Another share of the memory."""
    return Change(
        lever="utilisation",
        words=f"{share:g} of the memory instead of {query.utilizations[0]:g}",
        flags=f"--gpu-memory-utilization {share:g}",
        model=model,
        query=replace(query, utilizations=(share,)),
        caveat=f"leaves {1 - share:.0%} of the GPU to what the engine does not count",
    )

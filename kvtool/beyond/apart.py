"""Prefill and decode on GPUs of their own, by a few lines of arithmetic: `kvtool simulate --disaggregate` runs it.

All requests are alike. Undivided, the same GPUs serve both: while a request decodes, as many prompts are
computed as decode, in some of its steps; in the others all decode alone (kvtool.beyond.instances). The two are
compared at the same requests a second, as DistServe (arXiv 2401.09670) compares rates at the same times: fewer
requests decode faster however the GPUs are shared out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool import prefill as arithmetic
from kvtool.beyond.instances import (
    Kind,
    decoding,
    full,
    full_rate,
    mixed,
    mixed_rate_within,
    step_s,
)  # fmt: skip
from kvtool.config import LoadedConfig
from kvtool.engines import ideal
from kvtool.errors import KvtoolError, usage_error
from kvtool.plan import planned, running
from kvtool.plan_loads import whole_bytes
from kvtool.plan_model import PlanModel
from kvtool.plan_query import Gpus, PlanQuery
from kvtool.planning import cases_of
from kvtool.prefill import Prefill, prefill_of

if TYPE_CHECKING:
    from kvtool.catalog import GpuPreset
    from kvtool.run import Row

NOT_COUNTED = ("prefill_not_counted", "weights_not_counted")
ESTIMATE = "an estimate for requests that are all alike and never wait; kvtool simulate --disaggregate runs it"
LOAD = 0.75
"""Of the most that the slower of both serves: at all of it requests would queue without end."""
RULE = (
    f"it pays where, at {LOAD:.0%} of the most that the slower of both serves, the time between tokens falls by a "
    "larger share than the most requests/s do; queues for prefills and the transfer, which the first token "
    "waits for, are not weighed (kvtool simulate --disaggregate has them)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Requests of one length on GPUs of two kinds. Bytes are those of the whole model, times of an instance."""

    prompt_tokens: int
    output_tokens: int
    prefill_gpu: str
    prefill_gpus: int
    prefill_tp: int
    decode_gpu: str
    decode_gpus: int
    decode_tp: int
    link_bits_per_s: float
    """Of each prefill instance."""
    kv_bytes: int
    """Of a prompt's cache, as `ideal` holds it: what is sent."""
    transfer_s: float
    prefill_s: float
    batch: int
    """Requests that a decode instance holds at a time, each with all its output."""
    tpot_s: float
    """At that batch."""
    decode_s: float
    """From the first token to the last."""
    prefill_gpus_per_decode_gpu: float
    """That keep both busy."""
    requests_per_s: float
    """The most that all these GPUs serve apart."""
    binds: str
    """What more requests a second would need more of: prefill, link or decode."""
    settled_batch: float
    """Of a decode instance at that rate: below `batch` where it waits for the others."""
    settled_tpot_s: float
    idle_share: float
    """Of all GPUs' time, because one kind waits for the other or for the link."""
    mixed_batch: float
    """Of an undivided instance of the decode GPU: less where prompts fill the tokens of all its steps."""
    mixed_tpot_s: float
    """Of such an instance, which is never short of requests."""
    mixed_requests_per_s: float
    """The most that all these GPUs serve undivided."""
    same_requests_per_s: float
    """The smaller of the two: what both serve, and are compared at."""
    same_rate_tpot_s: float
    """Apart."""
    same_rate_mixed_tpot_s: float
    """Undivided: the mean of all requests, of which each instance gets its part."""
    mixed_requests_per_s_at_tpot: float
    """What the undivided GPUs serve if their tokens are to come as fast as those apart at that rate."""
    saved_tpot_share: float
    """What decode loses to prefills in mixed steps, at the same rate: of the time between tokens."""
    lost_requests_share: float
    """Of the most that the undivided GPUs serve; below 0: there are more apart."""
    pays: bool
    rule: str = RULE
    """Of `pays`, in a sentence."""
    notes: tuple[str, ...] = (ESTIMATE,)


def disaggregation(
    model: PlanModel,
    query: PlanQuery,
    prefill_gpu: Gpus,
    decode_gpu: Gpus,
    link_bits_per_s: float,
    prompt: int,
    output: int,
) -> Apart:
    """So many GPUs of each kind, as instances of the query's tp: one of all of them unless it says.

    KvtoolError where a kind holds no request, or what a prefill computes is not known.
    """
    if output < 2:
        raise usage_error(
            "one token is the prefill's: nothing is left to decode", "ask for 2 or more"
        )
    first = _kind(model, query, prefill_gpu, prompt, output)
    second = _kind(model, query, decode_gpu, prompt, output)
    _check_holds(first, prompt, "prefill")
    _check_holds(second, prompt + output, "decode")
    return Apart(
        prompt_tokens=prompt,
        output_tokens=output,
        link_bits_per_s=link_bits_per_s,
        **_named("prefill", first),
        **_named("decode", second),
        **_times(first, second, link_bits_per_s),
    )


def _named(name: str, kind: Kind) -> Row:
    return {
        f"{name}_gpu": kind.case.gpu.id,
        f"{name}_gpus": kind.case.gpus,
        f"{name}_tp": kind.case.holder.layout.tp,
    }


def _times(first: Kind, second: Kind, link: float) -> Row:
    """Of one request, of all of them apart, and of the same GPUs undivided."""
    holder, prompt = first.case.holder, first.prompt
    whole = replace(holder.layout, tp=1, dcp=1, block_size=None)
    kv_bytes = ideal.size(whole, context=prompt, encoder=holder.encoder_at(prompt)).bytes
    transfer_s, prefill_s = kv_bytes * 8 / link, _prefill_s(first.prefill, prompt)
    tpot_s = step_s(second, second.batch)
    rates = {
        "prefill": first.instances / prefill_s,
        "link": first.instances / transfer_s,
        "decode": second.instances * second.batch / tpot_s / second.steps,
    }
    return {
        "kv_bytes": kv_bytes,
        "transfer_s": transfer_s,
        "prefill_s": prefill_s,
        "batch": second.batch,
        "tpot_s": tpot_s,
        "decode_s": second.steps * tpot_s,
        **_apart(first, second, rates),
    }


def _apart(first: Kind, second: Kind, rates: dict[str, float]) -> Row:
    """What the slowest of them lets through, against the same GPUs undivided."""
    gpus = {"prefill": first.case.gpus, "decode": second.case.gpus}
    binds = min(rates, key=lambda name: rates[name])
    rate = rates[binds]
    idle = sum(count * (1 - rate / rates[name]) for name, count in gpus.items())
    settled, settled_s = decoding(second, rate / second.instances)
    mixed_batch, mixed_tpot_s = full(second)
    return {
        "prefill_gpus_per_decode_gpu": (
            rates["decode"] / gpus["decode"] / (rates["prefill"] / gpus["prefill"])
        ),
        "requests_per_s": rate,
        "binds": binds,
        "settled_batch": settled,
        "settled_tpot_s": settled_s,
        "idle_share": idle / sum(gpus.values()),
        "mixed_batch": mixed_batch,
        "mixed_tpot_s": mixed_tpot_s,
        **_compared(first, second, rate),
    }


def _compared(first: Kind, second: Kind, rate: float) -> Row:
    """Both at the same requests a second."""
    whole = full_rate(first) + full_rate(second)
    same = LOAD * min(rate, whole)
    _, apart_s = decoding(second, same / second.instances)
    mixed_s = _undivided_s((first, second), same)
    saved, lost = 1 - apart_s / mixed_s, 1 - rate / whole
    return {
        "mixed_requests_per_s": whole,
        "same_requests_per_s": same,
        "same_rate_tpot_s": apart_s,
        "same_rate_mixed_tpot_s": mixed_s,
        "mixed_requests_per_s_at_tpot": sum(
            mixed_rate_within(kind, apart_s) for kind in (first, second)
        ),
        "saved_tpot_share": saved,
        "lost_requests_share": lost,
        "pays": saved > max(0.0, lost),
    }


def _undivided_s(kinds: tuple[Kind, ...], rate: float) -> float:
    """Mean seconds between tokens of all requests, of which each kind gets as large a part of the most that
    it serves."""
    most = [full_rate(kind) for kind in kinds]
    whole = sum(most)
    return sum(
        own / whole * mixed(kind, rate * own / whole / kind.instances)[1]
        for kind, own in zip(kinds, most, strict=True)
        if own
    )


def _kind(model: PlanModel, query: PlanQuery, gpus: Gpus, prompt: int, output: int) -> Kind:
    """Instances of one pipeline stage; the batch is what fits at the end of all outputs."""
    lost: list[KvtoolError] = []
    asked = replace(
        query, gpus=(gpus,), engines=query.engines[:1], tps=query.tps[:1], pps=(1,), dps=query.dps[:1],
        kv_dtypes=query.kv_dtypes[:1], utilizations=query.utilizations[:1], users=(None,),
        contexts=(prompt + output,),
    )  # fmt: skip
    found = list(cases_of(model, asked, lost))
    if lost:
        raise lost[0]
    (case,) = found
    holds = planned(case, look_for_context=False).holds
    if case.loads is None or case.machine is None:
        raise KvtoolError(
            f"{model.subject.name} on {case.gpu.id}: nothing says what a step reads or how fast it is",
            "memory is planned all the same; times need another model, or its own dtype",
            code="weights_not_counted",
        )
    return Kind(
        case=case,
        prefill=prefill_on(model, query, case.gpu, case.holder.layout.tp, query.kv_dtypes[0]),
        loads=case.loads,
        machine=case.machine,
        batch=running(case, holds, 1) if holds.whole_requests else 0,
        prompt=prompt,
        output=output,
    )


def _check_holds(kind: Kind, tokens: int, name: str) -> None:
    case = kind.case
    if not planned(replace(case, context=tokens), look_for_context=False).holds.whole_requests:
        raise KvtoolError(
            f"{name}: an instance of {case.holder.layout.tp:,} × {case.gpu.id} holds no request of "
            f"{tokens:,} tokens",
            "give it more GPUs (--tp), a smaller --kv-dtype, or other GPUs",
            code="does_not_fit",
        )


def _prefill_s(prefill: Prefill, prompt: int) -> float:
    import numpy as np

    return float(arithmetic.seconds(prefill, np.array([prompt]), np.array([0]))[0])


def prefill_on(
    model: PlanModel, query: PlanQuery, gpu: GpuPreset, tp: int, kv_dtype: str = "auto"
) -> Prefill:
    """What the model's prefill computes, and how fast `tp` of these GPUs are.

    KvtoolError where that is not known: layers that no formula covers, or a GPU without a rate in the
    model's dtype.
    """
    subject, whole = model.subject, whole_bytes(model, query)
    loaded = LoadedConfig(
        config=dict(model.config), name=subject.name, source=subject.source, where=""
    )
    try:
        return prefill_of(
            lambda _: loaded,
            subject.name,
            gpu=f"{gpu.id}:{tp}",
            tp=tp,
            dtype=model.dtype.name,
            kv_dtype=kv_dtype,
            weights=None if whole is None else f"{whole}B",
            efficiency=query.compute_efficiency,
        )
    except KvtoolError as error:
        if error.code not in NOT_COUNTED:
            raise
        hint = "memory is planned all the same; times of a prefill need another model"
        raise KvtoolError(error.message, hint, code=error.code) from error

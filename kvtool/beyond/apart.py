"""Prefill and decode on GPUs of their own, by a few lines of arithmetic: `kvtool simulate --disaggregate` runs it.

Steps take what the roofline says (kvtool.step_law), and all requests are alike. Undivided, the same GPUs
serve both: while a request decodes, as many prompts are computed as decode, in steps that they fill up to
max_batched_tokens; in the other steps all decode alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool import prefill as arithmetic
from kvtool.config import LoadedConfig
from kvtool.engines import ideal
from kvtool.errors import KvtoolError, usage_error
from kvtool.plan import planned, running
from kvtool.plan_query import Gpus, PlanQuery
from kvtool.planning import PlanModel, cases_of
from kvtool.prefill import Prefill, prefill_of
from kvtool.requests import SECOND_NS
from kvtool.step_law import law_of

if TYPE_CHECKING:
    from kvtool.catalog import GpuPreset
    from kvtool.plan import PlanCase
    from kvtool.run import Row
    from kvtool.sim.settings import StepTime

HALVINGS = 40
NOT_COUNTED = ("prefill_not_counted", "weights_not_counted")
ESTIMATE = "an estimate for requests that are all alike and never wait; kvtool simulate --disaggregate runs it"
RULE = (
    "it pays where the time between tokens falls by a larger share than requests a second do, against the "
    "same GPUs undivided"
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
    """Of all these GPUs."""
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
    """Of such an instance."""
    mixed_requests_per_s: float
    """Of all these GPUs undivided."""
    saved_tpot_share: float
    """What decode loses to prefills in mixed steps: of the time between tokens."""
    lost_requests_share: float
    """Of the requests a second of undivided GPUs; below 0: there are more apart."""
    pays: bool
    notes: tuple[str, ...] = (ESTIMATE, RULE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Instances of one kind of GPU. `batch`: requests with all their output that one holds; 0: none."""

    case: PlanCase
    prefill: Prefill
    law: StepTime
    batch: int

    @property
    def instances(self) -> int:
        return self.case.replicas


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
        **_times(first, second, link_bits_per_s, prompt, output),
    )


def _named(name: str, kind: _Kind) -> Row:
    return {
        f"{name}_gpu": kind.case.gpu.id,
        f"{name}_gpus": kind.case.gpus,
        f"{name}_tp": kind.case.holder.layout.tp,
    }


def _times(first: _Kind, second: _Kind, link: float, prompt: int, output: int) -> Row:
    """Of one request, of all of them apart, and of the same GPUs undivided."""
    holder = first.case.holder
    whole = replace(holder.layout, tp=1, dcp=1, block_size=None)
    kv_bytes = ideal.size(whole, context=prompt, encoder=holder.encoder).bytes
    transfer_s, prefill_s = kv_bytes * 8 / link, _prefill_s(first.prefill, prompt)
    tpot_s = _step_s(second, second.batch, 0.0, prompt, output)
    rates = {
        "prefill": first.instances / prefill_s,
        "link": first.instances / transfer_s,
        "decode": second.instances * second.batch / tpot_s / (output - 1),
    }
    return {
        "kv_bytes": kv_bytes,
        "transfer_s": transfer_s,
        "prefill_s": prefill_s,
        "batch": second.batch,
        "tpot_s": tpot_s,
        "decode_s": (output - 1) * tpot_s,
        **_apart(first, second, rates, prompt, output),
    }


def _apart(first: _Kind, second: _Kind, rates: dict[str, float], prompt: int, output: int) -> Row:
    """What the slowest of them lets through, against the same GPUs undivided."""
    gpus = {"prefill": first.case.gpus, "decode": second.case.gpus}
    binds = min(rates, key=lambda name: rates[name])
    rate = rates[binds]
    idle = sum(count * (1 - rate / rates[name]) for name, count in gpus.items())
    settled, settled_s = _settled(second, rate / second.instances, prompt, output)
    mixed_batch, mixed_tpot_s = _mixed(second, prompt, output)
    mixed = sum(_mixed_rate(kind, prompt, output) for kind in (first, second))
    saved, lost = 1 - settled_s / mixed_tpot_s, 1 - rate / mixed
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
        "mixed_requests_per_s": mixed,
        "saved_tpot_share": saved,
        "lost_requests_share": lost,
        "pays": saved > lost,
    }


def _kind(model: PlanModel, query: PlanQuery, gpus: Gpus, prompt: int, output: int) -> _Kind:
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
    prefill = prefill_on(model, query, case.gpu, case.holder.layout.tp, query.kv_dtypes[0])
    return _Kind(
        case=case,
        prefill=prefill,
        law=law_of(prefill).step_time,
        batch=running(case, holds, 1) if holds.whole_requests else 0,
    )


def _check_holds(kind: _Kind, tokens: int, name: str) -> None:
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


def _step_s(kind: _Kind, batch: float, chunk: float, prompt: int, output: int) -> float:
    """Of a step that decodes a batch, half its output there, and computes so many tokens of prompts.

    These are somewhere in their prompts: each attends to half of one, and a step reads the part that is
    there of each prompt that it works on.
    """
    decoding = batch * (prompt + output / 2)
    read = max(chunk, (prompt + chunk) / 2) if chunk else 0.0
    pairs = decoding + chunk * (prompt + 1) / 2
    tokens, requests = max(1, round(batch + chunk)), max(1, round(batch + chunk / prompt))
    return kind.law.ns(tokens, round(decoding + read), round(pairs), requests=requests) / SECOND_NS


def _mixed(kind: _Kind, prompt: int, output: int) -> tuple[float, float]:
    """The batch of an undivided instance, and the mean seconds between the tokens of a request.

    While it decodes, the prompts of a whole batch are computed, in steps that have no room for more tokens:
    where these are all its steps, the batch is what they leave room for.
    """
    budget, steps = kind.case.holder.options.max_batched_tokens, output - 1
    batch = min(float(kind.batch), budget / (1 + prompt / steps))
    filled = batch * prompt / (budget - batch)
    filled_s = _step_s(kind, batch, budget - batch, prompt, output)
    alone_s = _step_s(kind, batch, 0.0, prompt, output)
    return batch, (filled * filled_s + (steps - filled) * alone_s) / steps


def _settled(kind: _Kind, rate: float, prompt: int, output: int) -> tuple[float, float]:
    """The batch of a decode instance that is sent so many requests a second, and its step: fewer decode
    faster. By Little's law the batch is the rate times the seconds that a request decodes."""
    full_s = _step_s(kind, kind.batch, 0.0, prompt, output)
    if rate * (output - 1) * full_s > kind.batch * (1 - 1e-9):
        return float(kind.batch), full_s
    low, high = 0.0, float(kind.batch)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        stays_s = (output - 1) * _step_s(kind, middle, 0.0, prompt, output)
        low, high = (middle, high) if rate * stays_s > middle else (low, middle)
    return high, _step_s(kind, high, 0.0, prompt, output)


def _mixed_rate(kind: _Kind, prompt: int, output: int) -> float:
    """Requests a second of undivided instances; 0 where they hold no whole request."""
    if not kind.batch:
        return 0.0
    batch, tpot_s = _mixed(kind, prompt, output)
    return kind.instances * batch / tpot_s / (output - 1)


def prefill_on(
    model: PlanModel, query: PlanQuery, gpu: GpuPreset, tp: int, kv_dtype: str = "auto"
) -> Prefill:
    """What the model's prefill computes, and how fast `tp` of these GPUs are.

    KvtoolError where that is not known: layers that no formula covers, or a GPU without a rate in the
    model's dtype.
    """
    subject = model.subject
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
            weights=None if query.weights is None else f"{query.weights}B",
        )
    except KvtoolError as error:
        if error.code not in NOT_COUNTED:
            raise
        hint = "memory is planned all the same; times of a prefill need another model"
        raise KvtoolError(error.message, hint, code=error.code) from error

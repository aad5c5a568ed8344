"""How long a step takes: a roofline of a model on a GPU.

A step reads the weights once and the cache of every request in it, and computes its tokens, and one row of
logits for each request in it, as vLLM does; reading and computing overlap, and what takes longer counts
(Williams et al., "Roofline", CACM 52(4), 2009). Beside
them each step costs the host something. Windowed layers are taken to attend to a whole window, and to be
read like the others; what ranks exchange takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.decode_speed import OVERHEAD_NS, READ_EFFICIENCY
from kvtool.errors import usage_error
from kvtool.requests import SECOND_NS
from kvtool.sim.settings import StepTime
from kvtool.units import format_bytes

if TYPE_CHECKING:
    from kvtool.prefill import Prefill

DIGITS = 6
"""Of a time in ns: as many as the clock keeps (kvtool.sim.settings.femtoseconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaw:
    """A law of time and where it comes from."""

    step_time: StepTime
    source: str
    basis: str = ""
    """What it rests on, in a few words."""


def law_of(prefill: Prefill) -> StepLaw:
    """The roofline of one replica: seconds of reading at READ_EFFICIENCY, of computing at its own."""
    if prefill.flops_per_s is None or prefill.bandwidth_bytes_per_s is None:
        raise usage_error("a step takes no time without a GPU", "add --gpu, or give --step-time")
    if prefill.weights_bytes < prefill.looked_up_bytes:
        raise usage_error(
            f"--weights: {format_bytes(prefill.weights_bytes)} are less than the embedding table of "
            f"{prefill.model} in {prefill.dtype}, {format_bytes(prefill.looked_up_bytes)}",
            "give the bytes of the whole model, or the step's time with --step-time",
        )
    reads = prefill.bandwidth_bytes_per_s * READ_EFFICIENCY / SECOND_NS
    computes = prefill.flops_per_s * prefill.efficiency / SECOND_NS
    windows = sum(a.pair_flops * a.window for a in prefill.attention if a.window is not None)
    pairs = sum(a.pair_flops for a in prefill.attention if a.window is None)
    flops = 2 * prefill.parameters + windows
    law = StepTime(
        base_ns=OVERHEAD_NS,
        read_ns=round((prefill.weights_bytes - prefill.looked_up_bytes) / reads),
        token_ns=round(flops / computes, DIGITS),
        context_ns=round(prefill.rank_bytes_per_token * prefill.tp / reads, DIGITS),
        attention_ns=round(pairs / computes, DIGITS),
        request_ns=round(2 * prefill.head_parameters / computes, DIGITS),
    )
    return StepLaw(
        step_time=law,
        basis=(
            f"a roofline of {prefill.model} on {prefill.gpu} at {READ_EFFICIENCY:g} of the bandwidth and "
            f"{prefill.efficiency:g} of the peak, an estimate"
        ),
        source=(
            f"{prefill.model} on {prefill.gpu}: {law.base_ns:,} ns + the longer of reading, {law.read_ns:,} ns + "
            f"{law.context_ns:,.6g} a token of context, and computing, {law.token_ns:,.6g} ns a token, "
            f"{law.attention_ns:,.6g} a pair of a token and one that it attends to and "
            f"{law.request_ns:,.6g} a request (its logits): a roofline at "
            f"{READ_EFFICIENCY:g} of the bandwidth and {prefill.efficiency:g} of the peak, an estimate"
        ),
    )

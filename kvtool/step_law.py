"""How long a step takes: a roofline of a model on a GPU, or fitted to what `bench decode` measured.

A step reads the weights once and the cache of every request in it, and computes its tokens; reading and
computing overlap, and what takes longer counts (Williams et al., "Roofline", CACM 52(4), 2009). Beside
them each step costs the host something. The attention of a prefill's tokens to each other is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.errors import KvtoolError, usage_error
from kvtool.requests import SECOND_NS
from kvtool.sim.settings import StepTime

if TYPE_CHECKING:
    from kvtool.prefill import Prefill

OVERHEAD_NS = 1_000_000
"""Of a step on the host: an estimate. vLLM's own scheduler takes 0.3 to 1.3 ms (docs/performance.md)."""
READ_EFFICIENCY = 0.8
"""Share of the peak bandwidth that reading reaches: an estimate. Paged decode kernels measured elsewhere
reach 0.78 to 0.9 of a copy's bandwidth."""
MOST_RUN_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaw:
    """A law of time and where it comes from."""

    step_time: StepTime
    source: str


def law_of(prefill: Prefill) -> StepLaw:
    """The roofline of one replica: seconds of reading at READ_EFFICIENCY, of computing at its own."""
    if prefill.flops_per_s is None or prefill.bandwidth_bytes_per_s is None:
        raise usage_error("a step takes no time without a GPU", "add --gpu, or give --step-time")
    reads = prefill.bandwidth_bytes_per_s * READ_EFFICIENCY / SECOND_NS
    computes = prefill.flops_per_s * prefill.efficiency / SECOND_NS
    flops = 2 * (prefill.parameters + prefill.head_parameters)
    law = StepTime(
        base_ns=OVERHEAD_NS,
        read_ns=round(prefill.weights_bytes / reads),
        token_ns=round(flops / computes),
        context_ns=round(prefill.bytes_per_token / reads),
    )
    return StepLaw(
        step_time=law,
        source=(
            f"{prefill.model} on {prefill.gpu}: {law.base_ns:,} ns + the longer of reading, {law.read_ns:,} ns + "
            f"{law.context_ns:,} a token of context, and computing, {law.token_ns:,} ns a token: a roofline at "
            f"{READ_EFFICIENCY:g} of the bandwidth and {prefill.efficiency:g} of the peak, an estimate"
        ),
    )


def calibrated(path: str) -> StepLaw:
    """A linear law fitted to a saved run of `kvtool bench decode`: least squares over its rows.

    A row says what a prefill of batch × prompt tokens took (TTFT), and what a step of `batch` tokens
    at the middle of the output did (TPOT). KvtoolError if it is no such run, or its rows do not tell
    the three terms apart.
    """
    import numpy as np

    rows = _rows_of(path)
    points: list[tuple[float, float, float]] = []
    for row in rows:
        batch, prompt, output = (row[name] for name in ("batch", "prompt_tokens", "output_tokens"))
        points.append((batch * prompt, batch * prompt, row["ttft_s"]))
        points.append((batch, batch * (prompt + output / 2), row["tpot_s_p50"]))
    tokens, context, seconds = np.array(points, np.float64).T
    terms = np.stack([np.ones_like(tokens), tokens, context], axis=1)
    if np.linalg.matrix_rank(terms) < 3:
        raise KvtoolError(
            f"{path}: its rows do not tell base, tokens and context apart",
            "run kvtool bench decode with several --batch and --prompt-tokens",
            code="not_calibrated",
        )
    fitted = _not_below_zero(terms, seconds)
    base, token, each = (round(term * SECOND_NS) for term in fitted)
    off = float(np.abs(terms @ fitted - seconds).max() / seconds.max())
    return StepLaw(
        step_time=StepTime(base_ns=base, token_ns=token, context_ns=each),
        source=(
            f"{Path(path).name}: {base:,} ns + {token:,} a token + {each:,} a token of context, fitted to "
            f"{len(points)} measured times, off by {off:.0%} of the longest at most"
        ),
    )


def _not_below_zero(terms: Any, seconds: Any) -> Any:
    """Least squares relative to each time, terms below 0 left out one after the other."""
    import numpy as np

    kept = list(range(terms.shape[1]))
    found = np.zeros(terms.shape[1])
    while kept:
        part = np.linalg.lstsq(
            terms[:, kept] / seconds[:, None], np.ones_like(seconds), rcond=None
        )[0]
        if part.min() >= 0:
            found[kept] = part
            return found
        kept.pop(int(part.argmin()))
    return found


def _rows_of(path: str) -> Sequence[dict[str, Any]]:
    """The rows of a saved run that say what a step took."""
    place = Path(path)
    try:
        if place.stat().st_size > MOST_RUN_BYTES:
            raise KvtoolError(f"{path}: larger than a run is", "give a saved run", code="too_large")
        run = json.loads(place.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise KvtoolError(
            f"{path}: it cannot be read as a saved run ({type(error).__name__})",
            "save one with kvtool bench decode -o run.json",
            code="not_calibrated",
        ) from error
    names = ("batch", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s_p50")
    rows = run.get("rows", ()) if isinstance(run, dict) else ()
    found = [
        row for row in rows
        if isinstance(row, dict) and all(_is_number(row.get(name)) for name in names)
    ]  # fmt: skip
    if not found:
        raise KvtoolError(
            f"{path}: none of its rows says what a step took",
            "save one with kvtool bench decode -o run.json",
            code="not_calibrated",
        )
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value > 0

"""`kvtool bench attention`: each provider of a case, correct first, then timed beside the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtool.bench import roofs
from kvtool.bench.attention.case import Case
from kvtool.bench.attention.correct import Verdict, expected, verdict
from kvtool.bench.attention.data import Data
from kvtool.bench.attention.providers import Missing, Prepared, Provider, providers_of
from kvtool.bench.device import Device, load_torch
from kvtool.bench.timer import Samples, measure
from kvtool.run import Row
from kvtool.stats import Ratio, median, paired_ratio, quantile

READ, COPY = "read roof", "copy roof"
ROUNDS = 30
BASELINE = "contiguous"


@dataclass(slots=True, kw_only=True)
class Found:
    """The rows of a case, and what must be said of it."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure_case(
    data: Data,
    *,
    names: Sequence[str],
    budget_s: float,
    seed: int,
    peak: float | None = None,
    keep: Callable[[Data, dict[str, Prepared]], None] | None = None,
) -> Found:
    """A row for each provider that is there: checked against float64, then timed in one run.

    `peak` is the arithmetic roof in operations a second. `keep` is given the data and the providers
    once they are checked, before anything is timed.
    """
    case, device = data.case, data.device
    if case.threads is not None:
        load_torch().set_num_threads(case.threads)
    found = Found()
    ready, verdicts = _checked(data, names, found)
    if keep is not None:
        keep(data, ready)
    right = {name: one for name, one in ready.items() if verdicts[name].correct}
    samples, eager = _timed(data, right, budget_s, seed)
    found.notes += [f"{name}: not captured in a CUDA graph, its launches count" for name in eager]
    if not data.is_cold:
        found.notes.append(
            f"batch {case.batch}, context {case.context_tokens:,}: so small that it may be read from "
            "the last-level cache; so may the roofs"
        )
    for name, one in ready.items():
        row = _row(case, device, name, one, verdicts[name])
        if name in right:
            row |= _times(case, samples, name, seed)
        else:
            row |= dict.fromkeys(TIMED)
        row |= {"pools": data.pools, "cold": data.is_cold, "peak_flop_per_s": peak}
        found.rows.append(row)
    return found


def _timed(
    data: Data, right: dict[str, Prepared], budget_s: float, seed: int
) -> tuple[dict[str, Samples], tuple[str, ...]]:
    """The providers and the two roofs, interleaved."""
    calls = {name: one.run for name, one in right.items()}
    if not calls:
        return {}, ()
    tensors = list(zip(data.k, data.v, strict=True))
    calls[READ] = roofs.read_call(tensors, data.device, data.case.threads)
    calls[COPY] = roofs.copy_call(tensors, _copies(data))
    return measure(
        calls, pools=data.pools, device=data.device, rounds=ROUNDS, budget_s=budget_s, seed=seed
    )


def _copies(data: Data) -> tuple[Any, ...]:
    """Where the copy roof writes."""
    torch = load_torch()
    return tuple(torch.empty_like(one[0]) for one in (data.k, data.v))


def _checked(
    data: Data, names: Sequence[str], found: Found
) -> tuple[dict[str, Prepared], dict[str, Verdict]]:
    """Every provider that can do the case, and whether it is right.

    Those that promise to keep to the tokens are checked while everything else is NaN.
    """
    answer = expected(data)
    table = {name: one for name, one in providers_of(data.device.kind).items() if name in names}
    ready: dict[str, Prepared] = {}
    verdicts: dict[str, Verdict] = {}
    for masks, padding in ((True, float("nan")), (False, 0.0)):
        data.fill_padding(padding)
        for name, provider in table.items():
            if provider.masks_padding is masks:
                _prepare(name, provider, data, ready, found)
                if name in ready:
                    verdicts[name] = verdict(data, ready[name], answer)
    return {name: ready[name] for name in table if name in ready}, verdicts


def _prepare(
    name: str, provider: Provider, data: Data, ready: dict[str, Prepared], found: Found
) -> None:
    """A provider that is missing, or refuses this case, is a note and no row. Ours may not."""
    torch = load_torch()
    try:
        one = provider.prepare(data)
        for pool in range(data.pools):
            one.run(pool)
        if data.device.is_gpu:
            torch.cuda.synchronize()
    except Missing as why:
        found.notes.append(f"{name} has no row: {why}")
        return
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        if provider.masks_padding:
            raise
        text = " ".join(str(error).split())[:200]
        found.notes.append(f"{name} has no row: {type(error).__name__}: {text}")
        return
    ready[name] = one


TIMED = (
    "time_s_min", "time_s_p10", "time_s_p50", "time_s_p90", "cpu_time_s_p50", "samples",
    "gb_per_s", "read_roof_gb_per_s", "copy_roof_gb_per_s", "read_fraction", "copy_fraction",
    "overhead", "overhead_ci", "overhead_resolved",
)  # fmt: skip
"""What only a correct provider has: a wrong one gets no speed."""


def _row(case: Case, device: Device, name: str, one: Prepared, found: Verdict) -> Row:
    flat = case.to_row() | {"num_splits": one.num_splits}
    return {
        "bench": "attention",
        "provider": name,
        "device": device.kind,
        **flat,
        "max_context_tokens": case.max_context,
        "bytes_useful": case.useful_bytes,
        "bytes_moved": case.useful_bytes + one.extra_bytes,
        "flops": case.flops,
        "max_abs_error": found.max_abs_error,
        "max_lse_error": found.max_lse_error,
        "tolerance": found.tolerance,
        "correct": found.correct,
        "registers": one.registers,
        "spills": one.spills,
        "shared_bytes": one.shared_bytes,
    }


def _times(case: Case, samples: dict[str, Samples], name: str, seed: int) -> Row:
    own = samples[name]
    p50 = median(own.wall_s)
    read = case.kv_bytes / median(samples[READ].wall_s)
    copy = 2 * case.kv_bytes / median(samples[COPY].wall_s)
    speed = case.useful_bytes / p50
    overhead = _overhead(samples, name, seed)
    return {
        "time_s_min": min(own.wall_s),
        "time_s_p10": quantile(own.wall_s, 0.1),
        "time_s_p50": p50,
        "time_s_p90": quantile(own.wall_s, 0.9),
        "cpu_time_s_p50": median(own.cpu_s) if own.cpu_s else None,
        "samples": len(own.wall_s),
        "gb_per_s": speed / 1e9,
        "read_roof_gb_per_s": read / 1e9,
        "copy_roof_gb_per_s": copy / 1e9,
        "read_fraction": speed / read,
        "copy_fraction": speed / copy,
        "overhead": overhead.median - 1 if overhead else None,
        "overhead_ci": [overhead.low - 1, overhead.high - 1] if overhead else None,
        "overhead_resolved": not overhead.spans(1) if overhead else None,
    }


def _overhead(samples: dict[str, Samples], name: str, seed: int) -> Ratio | None:
    """Time beyond the contiguous twin's, as a share of it: the median of the rounds' ratios."""
    if name == BASELINE or BASELINE not in samples:
        return None
    return paired_ratio(samples[name].wall_s, samples[BASELINE].wall_s, seed=seed)

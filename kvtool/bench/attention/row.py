"""The row of a provider: the case, whether it is right, and, if it is, how fast."""

from __future__ import annotations

from typing import Any

from kvtool.bench.attention.correct import Verdict
from kvtool.bench.attention.data import Data
from kvtool.bench.attention.prepared import Prepared
from kvtool.bench.timer import Sampler, Samples
from kvtool.run import Row
from kvtool.stats import Ratio, median, paired_ratio, quantile

READ, COPY = "read roof", "copy roof"
"""Names of the roofs among the samples."""
BASELINE = "contiguous"
TIMED = (
    "time_s_min", "time_s_p10", "time_s_p50", "time_s_p90", "cpu_time_s_p50", "samples",
    "samples_s", "gb_per_s", "read_roof_gb_per_s", "copy_roof_gb_per_s", "read_fraction",
    "copy_fraction", "overhead", "overhead_ci", "overhead_resolved", "captured",
)  # fmt: skip
"""What only a correct provider has: a wrong one gets no speed."""
CLOCKS = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "throttle_reasons")
"""Of a GPU, right after the case's last sample; null on a CPU, and where the driver does not tell."""


def base_row(data: Data, name: str, one: Prepared, found: Verdict) -> Row:
    """What is known of a provider before it is timed."""
    case = data.case
    return {
        "bench": "attention",
        "provider": name,
        "device": data.device.kind,
        **case.to_row(),
        "num_splits": one.num_splits,
        "max_context_tokens": case.max_context,
        "bytes_useful": case.useful_bytes,
        "bytes_moved": case.useful_bytes + one.extra_bytes,
        "flops": case.flops,
        "max_abs_error": found.max_abs_error,
        "tolerance": found.tolerance,
        "error_share": found.error_share,
        "max_lse_error": found.max_lse_error,
        "correct": found.correct,
        "registers": one.registers,
        "spills": one.spills,
        "shared_bytes": one.shared_bytes,
        "pools": data.pools,
        "cold": data.is_cold,
    }


def times(data: Data, samples: dict[str, Samples], name: str, sampler: Sampler, seed: int) -> Row:
    """Speed, its share of the roofs that were sampled beside it, and the overhead."""
    own, case = samples[name], data.case
    p50 = median(own.wall_s)
    read = data.roof_bytes / median(samples[READ].wall_s)
    copy = 2 * data.roof_bytes / median(samples[COPY].wall_s)
    speed = case.useful_bytes / p50
    overhead = _overhead(samples, name, seed)
    return {
        "time_s_min": min(own.wall_s),
        "time_s_p10": quantile(own.wall_s, 0.1),
        "time_s_p50": p50,
        "time_s_p90": quantile(own.wall_s, 0.9),
        "cpu_time_s_p50": median(own.cpu_s) if own.cpu_s else None,
        "samples": len(own.wall_s),
        "samples_s": own.wall_s,
        "gb_per_s": speed / 1e9,
        "read_roof_gb_per_s": read / 1e9,
        "copy_roof_gb_per_s": copy / 1e9,
        "read_fraction": speed / read,
        "copy_fraction": speed / copy,
        "overhead": overhead.median - 1 if overhead else None,
        "overhead_ci": [overhead.low - 1, overhead.high - 1] if overhead else None,
        "overhead_resolved": not overhead.spans(1) if overhead else None,
        "captured": sampler.eager is None if data.device.is_gpu else None,
    }


def clocks(record: dict[str, Any]) -> Row:
    """A GPU's clocks and limits, from what NVML told."""
    return {name: record.get(name) for name in CLOCKS}


def _overhead(samples: dict[str, Samples], name: str, seed: int) -> Ratio | None:
    """Time beyond the contiguous twin's, as a share of it: the median of the rounds' ratios."""
    if name == BASELINE or BASELINE not in samples:
        return None
    return paired_ratio(samples[name].wall_s, samples[BASELINE].wall_s, seed=seed)

"""The row of a uniform run: what was asked, times, bytes, and shares of what this device reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtool.bench.decode import arithmetic
from kvtool.bench.decode.continuous import page_size
from kvtool.bench.decode.gain import gain
from kvtool.bench.decode.model import Decoder
from kvtool.bench.decode.sessions import Setting
from kvtool.bench.decode.settings import ROW, Advance, DecodeCase, DecodeRun, Roofs
from kvtool.bench.decode.trial import Timed
from kvtool.run import Row
from kvtool.stats import median, quantile

Runs = Mapping[DecodeCase, Sequence[Timed]]
"""Of each case of one shape, a run in each round; none is without any."""

BASELINES = {"cpu": ("dynamic",), "cuda": ("contiguous", "dynamic")}
"""What gains are against. On a GPU ours is a graph, which transformers' dynamic cache cannot be."""

LARGEST_READ = 2**30
"""Bytes read for the roof: beyond that it no longer changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all cases share while they run."""

    setting: Setting
    run: DecodeRun
    roofs: Roofs
    advance: Advance
    matmul_flops: float | None
    measured: dict[int, float] = field(default_factory=dict)

    def read_roof(self, num_bytes: int) -> float | None:
        """Bytes a second read of a buffer of about that size, measured once for each power of two."""
        size = min(1 << num_bytes.bit_length() - 1, LARGEST_READ)
        if size not in self.measured and self.roofs.read is not None:
            self.measured[size] = self.roofs.read(size)
        return self.measured.get(size)


def uniform_row(bench: Bench, case: DecodeCase, runs: Runs) -> Row:
    """The row of a case, of all its runs; `runs` are those of its rivals too."""
    found = runs[case]
    ttft, tpot, gaps = (
        [value for one in found for value in getattr(one, name)]
        for name in ("ttft_s", "tpot_s", "gaps_s")
    )
    wall, gap = median([one.wall_s for one in found]), median(gaps)
    last, peaks = found[-1], [one.peak_bytes for one in found if one.peak_bytes is not None]
    return ROW | {
        **_inputs(bench.setting.decoder, case),
        "repeats": len(found),
        "ttft_s": median(ttft),
        "tpot_s_p50": median(tpot),
        "tpot_s_p99": p99(tpot),
        "itl_s_p50": gap,
        "itl_s_p99": p99(gaps),
        "output_tokens_per_s": case.batch * case.output_tokens / wall,
        "decode_tokens_per_s": case.batch / gap,
        "kv_reserved_bytes": last.reserved_bytes,
        "kv_used_bytes": last.used_bytes,
        "peak_bytes": max(peaks, default=None),
        "wall_s": wall,
        **_shares(bench, case, median(ttft), gap),
        **_gains(bench.setting.decoder, case, runs),
        "cuda_graph": last.execution.is_graph,
        "graph_error": last.execution.error,
    }


def p99(times: Sequence[float]) -> float | None:
    """What one in a hundred takes at the least; None of fewer than 3."""
    return quantile(times, 0.99) if len(times) > 2 else None


def _gains(decoder: Decoder, case: DecodeCase, runs: Runs) -> Row:
    """Against the baseline, the median step of each round: the most that bytes allow, and measured."""
    baseline = _baseline(case, runs, BASELINES[decoder.device.partition(":")[0]])
    if baseline is None:
        return {}
    theirs, ours = ([median(one.gaps_s) for one in runs[each]] for each in (baseline, case))
    measured, interval = gain(theirs, ours)
    return {
        "baseline": baseline.cache,
        "predicted_gain": arithmetic.predicted_gain(
            decoder.plan, case, baseline.cache, decoder.dtype.itemsize
        ),
        "measured_gain": measured,
        "measured_gain_ci": interval,
    }


def _baseline(case: DecodeCase, runs: Runs, names: Sequence[str]) -> DecodeCase | None:
    """The first that was run as the case was, as a graph or not."""
    graph = runs[case][-1].execution.is_graph
    for name in names if graph is not None else ():
        for other, found in runs.items():
            if other.cache == name and found[-1].execution.is_graph == graph:
                return other
    return None


def _inputs(decoder: Decoder, case: DecodeCase) -> Row:
    """What every row repeats of what was asked."""
    blocks = {"paged": case.block_size, "continuous": page_size(case)}
    return {
        "run": "uniform",
        "cache": case.cache,
        "batch": case.batch,
        "prompt_tokens": case.prompt_tokens,
        "output_tokens": case.output_tokens,
        "block_size": blocks.get(case.cache),
        "max_model_len": case.reserved_tokens if case.cache in ("static", "contiguous") else None,
        **model_inputs(decoder),
    }


def model_inputs(decoder: Decoder) -> Row:
    """What every row says of the model."""
    return {
        "model": decoder.plan.name,
        "device": decoder.device.partition(":")[0],
        "dtype": decoder.choice.dtype,
        "layers": decoder.heads.num_layers,
        "weights": decoder.weights,
        "num_parameters": decoder.plan.num_parameters,
        "weights_bytes": decoder.weights_bytes,
        "bytes_per_token": decoder.token_bytes,
    }


def _shares(bench: Bench, case: DecodeCase, first: float, gap: float) -> Row:
    """FLOP and bandwidth of each phase as shares of what this device reaches, measured."""
    decoder, plan = bench.setting.decoder, bench.setting.decoder.plan
    item, dense = decoder.dtype.itemsize, decoder.plan.dense
    weights = arithmetic.weights_read(plan, item)
    cache = arithmetic.useful_cache_bytes(plan, case, arithmetic.middle(case), item)
    step_bytes = weights + (0 if case.cache == "none" else cache)
    written = case.batch * case.prompt_tokens * decoder.token_bytes
    prefill_bytes = weights + (0 if case.cache == "none" else written)
    peak = bench.matmul_flops if dense else None
    read = bench.read_roof(step_bytes) if dense else None
    prefill_flops = arithmetic.prefill_flops(plan, case.batch, case.prompt_tokens)
    return {
        "step_bytes": step_bytes if dense else None,
        "step_cache_bytes": step_bytes - weights,
        "step_flops": arithmetic.step_flops(plan, case) if dense else None,
        "mfu_prefill": _share(prefill_flops, first, peak),
        "mfu_decode": _share(arithmetic.step_flops(plan, case), gap, peak),
        "mbu_prefill": _share(prefill_bytes, first, read),
        "mbu": _share(step_bytes, gap, read),
        "matmul_peak_flops": peak,
        "read_roof_bytes_per_s": read,
    }


def _share(amount: int, seconds: float, roof: float | None) -> float | None:
    """What was done a second, as a share of the roof."""
    return amount / seconds / roof if roof else None

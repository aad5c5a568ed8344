"""The row of a uniform run: what was asked, times, bytes, and shares of what this device reaches."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtool.bench.decode import arithmetic
from kvtool.bench.decode.continuous import page_size
from kvtool.bench.decode.model import Decoder
from kvtool.bench.decode.sessions import Setting
from kvtool.bench.decode.settings import ROW, Advance, DecodeCase, DecodeRun, Roofs
from kvtool.bench.decode.trial import Timed
from kvtool.run import Row
from kvtool.stats import quantile

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


def uniform_row(bench: Bench, case: DecodeCase, found: Timed, baseline: Timed | None) -> Row:
    decoder, plan = bench.setting.decoder, bench.setting.decoder.plan
    gap = quantile(found.itl_s, 0.5) if found.itl_s else None
    base = quantile(baseline.itl_s, 0.5) if baseline is not None else None
    return ROW | {
        **_inputs(decoder, case),
        "ttft_s": quantile(found.ttft_s, 0.5) if found.ttft_s else None,
        "tpot_s_p50": quantile(found.tpot_s, 0.5) if found.tpot_s else None,
        "tpot_s_p99": quantile(found.tpot_s, 0.99) if found.tpot_s else None,
        "itl_s_p50": gap,
        "itl_s_p99": quantile(found.itl_s, 0.99) if found.itl_s else None,
        "output_tokens_per_s": case.batch * case.output_tokens / found.wall_s,
        "decode_tokens_per_s": case.batch / gap if gap else None,
        "kv_reserved_bytes": found.reserved_bytes,
        "kv_used_bytes": found.used_bytes,
        "wall_s": found.wall_s,
        **_shares(bench, case, found, gap),
        "baseline": None if baseline is None else "dynamic",
        "predicted_gain": arithmetic.predicted_gain(plan, case, decoder.dtype.itemsize),
        "measured_gain": base / gap if base and gap else None,
        "cuda_graph": found.cuda_graph,
    }


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


def _shares(bench: Bench, case: DecodeCase, found: Timed, gap: float | None) -> Row:
    """FLOP and bandwidth of each phase as shares of what this device reaches, measured."""
    decoder, plan = bench.setting.decoder, bench.setting.decoder.plan
    item, dense = decoder.dtype.itemsize, decoder.plan.dense
    first = quantile(found.ttft_s, 0.5) if found.ttft_s else None
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
        "step_flops": arithmetic.step_flops(plan, case) if dense else None,
        "mfu_prefill": _share(prefill_flops, first, peak),
        "mfu_decode": _share(arithmetic.step_flops(plan, case), gap, peak),
        "mbu_prefill": _share(prefill_bytes, first, read),
        "mbu": _share(step_bytes, gap, read),
        "matmul_peak_flops": peak,
        "read_roof_bytes_per_s": read,
    }


def _share(amount: int, seconds: float | None, roof: float | None) -> float | None:
    """What was done a second, as a share of the roof."""
    return amount / seconds / roof if seconds and roof else None

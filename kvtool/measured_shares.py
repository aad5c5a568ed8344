"""Which shares of a GPU's peaks a saved run of `kvtool bench decode` reached, in place of assumed ones.

A step takes a constant and its bytes over the bandwidth that is reached: both are fitted, so that what the host
costs does not count as slow memory. Shares are of the preset's peaks, so that they carry over to other GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool import catalog
from kvtool.calibrate import alike, device_of, is_named, run_of
from kvtool.errors import KvtoolError
from kvtool.run import SCHEMA

if TYPE_CHECKING:
    from kvtool.catalog import GpuPreset
    from kvtool.run import Row

APART = 1.5
"""The largest step reads so many times the smallest, or one constant is not told from the other."""

UNTOLD = "nothing besides, which so few different steps do not tell"
MOST = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What takes the place of the estimates; `compute` is None where the run does not say."""

    read: float
    compute: float | None
    overhead_s: float
    basis: str


def measured_shares(path: str) -> Shares:
    """KvtoolError `not_calibrated` if the run is of no GPU that is known, or says nothing of bytes."""
    run, measured = run_of(path)
    if run.get("command") != "bench decode" or run.get("schema") != SCHEMA:
        raise _refused(f"{path}: it is no run of this kvtool's bench decode")
    rows = [row for row in alike(measured) if _is_amount(row.get("step_bytes"))]
    if not rows:
        raise _refused(f"{path}: none of its rows says what a step of dense attention reads")
    gpu, name = _gpu(run, rows[0], path)
    points = [(float(row["step_bytes"]), float(row["tpot_s_p50"])) for row in rows]
    overhead, rate, apart = _fitted(points)
    read = rate / (gpu.bandwidth_gb_s * 1e9)
    if not 0.01 <= read <= 1:
        raise _refused(
            f"{path}: its steps read at {read:.3g} of the peak of {gpu.id}, which no such GPU does"
        )
    compute = _compute(rows, gpu)
    said = f" and {compute:.2f} of the peak rate" if compute else ""
    return Shares(
        read=read,
        compute=compute,
        overhead_s=overhead,
        basis=f"measured on {name}, as {Path(path).name} has it: {read:.2f} of the peak bandwidth{said}, and "
        f"{f'{1e3 * overhead:.3g} ms a step besides' if apart else UNTOLD}; taken to hold for every model and GPU",
    )


def _gpu(run: Row, row: Row, path: str) -> tuple[GpuPreset, str]:
    name = device_of(run, row)
    found = [one for one in catalog.gpu_presets() if name and is_named(one.id, name)]
    if not found:
        raise _refused(
            f"{path}: it was measured on {name or 'a machine without a name'}, of which no peak is known"
        )
    words = (name or "").lower()
    closest = [one for one in found if all(part in words for part in one.id.split("-")[1:])]
    # Of several kinds the one with the highest peak: the share is then not too high.
    return max(closest or found, key=lambda one: one.bandwidth_gb_s), str(name)


def _fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float, bool]:
    """Seconds of a step besides, and bytes a second: least squares relative to each time; whether the two could be
    told apart."""
    import numpy as np

    count, seconds = np.array(points).T
    if count.max() >= APART * count.min():
        terms = np.stack([1 / seconds, count / seconds], axis=1)
        base, each = np.linalg.lstsq(terms, np.ones(len(seconds)), rcond=None)[0]
        if base >= 0 and each > 0:
            return float(base), float(1 / each), True
    return 0.0, float(np.median(count / seconds)), False


def _compute(rows: Sequence[Row], gpu: GpuPreset) -> float | None:
    """The best prefill's, of the preset's peak."""
    rates = {"bf16": gpu.dense_bf16_tflops, "fp16": gpu.dense_fp16_tflops}
    peak = rates.get(str(rows[0].get("dtype")))
    reached = [
        row["mfu_prefill"] * row["matmul_peak_flops"]
        for row in rows
        if _is_amount(row.get("mfu_prefill")) and _is_amount(row.get("matmul_peak_flops"))
    ]
    share = max(reached, default=0.0) / (peak * 1e12) if peak else 0.0
    return share if 0.01 <= share <= 1 else None


def _is_amount(value: object) -> bool:
    """Bytes, FLOPs a second or a share that a run may have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MOST


def _refused(message: str) -> KvtoolError:
    return KvtoolError(
        message,
        "save one on a GPU of kvtool presets gpus: kvtool bench decode -o run.json; or give --efficiency",
        code="not_calibrated",
    )

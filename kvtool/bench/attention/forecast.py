"""What a case will take: memory exactly, time by estimate. Nothing is run."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.bench.attention.case import Case
from kvtool.bench.attention.data import MOST_SHARE, memory_of, pools_of
from kvtool.bench.attention.measure import ROUNDS
from kvtool.bench.device import Device
from kvtool.bench.timer import CPU_SAMPLE_S, FEWEST, GPU_SAMPLE_S
from kvtool.run import Row

ASSUMED_BYTES_PER_S = {"cpu": 4e9, "cuda": 1e12}
"""Of a provider, a round: slow ones included. An estimate, for a plan, not a result."""
MAKING_BYTES_PER_S = {"cpu": 0.5e9, "cuda": 50e9}
"""Random numbers, copies and the check in float64."""
COMPILING_S = {"cpu": 1.0, "cuda": 5.0}


def forecast(case: Case, device: Device, names: Sequence[str], budget_s: float) -> Row:
    """A row with the case, the bytes it holds and about how long it takes."""
    pools = pools_of(case, device)
    memory = memory_of(case, pools=pools)
    sample_s = CPU_SAMPLE_S if device.kind == "cpu" else GPU_SAMPLE_S
    one_s = max(sample_s, case.kv_bytes / ASSUMED_BYTES_PER_S[device.kind])
    round_s = one_s * (len(names) + 2)
    timed_s = max(FEWEST * round_s, min(ROUNDS * round_s, budget_s))
    made_s = memory / MAKING_BYTES_PER_S[device.kind] + COMPILING_S[device.kind]
    return {
        "bench": "attention",
        "device": device.kind,
        **case.to_row(),
        "pools": pools,
        "bytes_useful": case.useful_bytes,
        "memory_bytes": memory,
        "expected_s": round(made_s + timed_s, 1),
        "fits": memory_of(case, pools=1) <= MOST_SHARE * device.free_bytes,
    }

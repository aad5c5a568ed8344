"""What is asked of a plan: GPUs, how they are shared out, lengths and users, and what the engine is told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtool import catalog
from kvtool.engine_memory.usable import is_total_known
from kvtool.errors import usage_error
from kvtool.size_row import VllmOptions

if TYPE_CHECKING:
    from kvtool.catalog import GpuPreset
    from kvtool.dtypes import Dtype

UTILIZATION = 0.9
"""gpu_memory_utilization unless another is asked for."""
VERSION = "0.32"
"""Of vLLM, whose rules size the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs of one kind; None: as many as the ranks need."""

    preset: GpuPreset
    count: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the GPUs of one kind are shared out."""

    gpu: GpuPreset
    tp: int
    pp: int
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuery:
    """What is asked of each model. Tuples are run as a product, in the order given."""

    gpus: tuple[Gpus, ...]
    engines: tuple[str, ...] = ("ideal",)
    tps: tuple[int | None, ...] = (None,)
    """None: the GPUs that the stages and replicas leave."""
    pps: tuple[int, ...] = (1,)
    dps: tuple[int | None, ...] = (None,)
    """Replicas; None: as many as the GPUs make."""
    dcp: int = 1
    expert_parallel: bool = False
    kv_dtypes: tuple[str, ...] = ("auto",)
    dtype: Dtype | None = None
    utilizations: tuple[float, ...] = (UTILIZATION,)
    contexts: tuple[int, ...] = ()
    """Empty: 8k, or the model's maximum where that is less."""
    users: tuple[int | None, ...] = (None,)
    context_basis: str | None = None
    """What the context is, where it was not given."""
    max_model_len: int | None = None
    """The longest request that is served; None: the context."""
    max_num_seqs: int | None = None
    """Of a replica; None: the engine's own, or the users if they are more."""
    max_batched_tokens: int | None = None
    """None: the engine's own, by GPU."""
    enforce_eager: bool = False
    """vLLM captures no CUDA graphs."""
    reserve: int = 0
    weights: int | None = None
    version: str | None = VERSION
    """Of vLLM, for what it keeps besides; None: any."""
    kv_memory: int | None = None
    price: float | None = None
    block_size: int | None = None
    encoder_tokens: int | None = None
    allow_long: bool = False
    ranked: bool = False
    """All GPUs that are known were asked for: the smallest number of each that fits."""
    read_efficiency: float | None = None
    compute_efficiency: float | None = None
    """Shares of the peaks that a step reaches; None: estimates."""
    efficiency_basis: str = "assumed"
    """Or `given`, or `measured`."""
    overhead_s: float | None = None
    """Of a step besides reading and computing; None: an estimate."""
    vllm: VllmOptions = field(default_factory=VllmOptions)


def gpus_named(text: str) -> tuple[Gpus, ...]:
    """`h100:8,a100-80gb`; `all` is one of each GPU whose memory is known."""
    from kvtool.units import MAX_LIST, parse_count

    if text.strip().lower() == "all":
        known = (
            one
            for one in catalog.gpu_presets()
            if is_total_known(one) and one.id not in catalog.DEVICES
        )
        return tuple(Gpus(preset=one, count=None) for one in known)
    parts = text.split(",")
    if len(parts) > MAX_LIST:
        raise usage_error(f"--gpu: more than {MAX_LIST:,} values", "give a shorter list")
    found = []
    for part in parts:
        times = re.fullmatch(r"(\d+)\s*[x×*]\s*([a-zA-Z].*)", part.strip())
        if times is not None:
            raise usage_error(
                f"--gpu: '{part.strip()[:40]}' is no GPU", f"write --gpu {times[2]}:{times[1]}"
            )
        name, colon, number = part.strip().partition(":")
        count = parse_count(number, name="--gpu", high=2**16) if colon else None
        found.append(Gpus(preset=catalog.one_device(name), count=count))
    return tuple(found)

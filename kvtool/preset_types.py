"""What a preset of each kind says: the tables of presets/, as they are validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """A model's config.json as its source prints it; keys that are null there are None here."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: str
    hub_id: str
    aliases: tuple[str, ...] = ()
    source: str
    note: str = ""
    weights_known: bool = True
    """False: the source leaves out sizes that the cache does not need and that are not the class's own."""
    config: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPreset:
    """One device. None means that no source was found, never zero."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    id: str
    name: str
    aliases: tuple[str, ...] = ()
    vendor: str
    arch: str
    compute_capability: str | None = None
    nominal_memory: str
    nominal_gb: float
    usable_bytes: int | None = None
    """The driver's total; the marketed figure is neither GB nor GiB."""
    bandwidth_gb_s: float
    dense_bf16_tflops: float | None = None
    dense_fp16_tflops: float | None = None
    dense_fp8_tflops: float | None = None
    dense_int8_tops: float | None = None
    native_kv_dtypes: tuple[str, ...]
    storage_kv_dtypes: tuple[str, ...]
    """Formats the cache can hold but the device does not compute in; disjoint from the native."""
    l2_mb: float | None = None
    interconnect: str | None = None
    num_sms: int | None = None
    price_usd_per_hour: float | None = None
    price_source: str | None = None
    price_date: str | None = None
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadPreset:
    """Lengths in tokens as `kvtool.lengths` reads them. Without a rate, all are there at the start."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    id: str
    name: str
    aliases: tuple[str, ...] = ()
    prompt_dist: str
    prompt_mean: float | None = None
    prompt_cap: int
    output_dist: str
    output_mean: float | None = None
    output_cap: int
    rate: float | None = None
    """Poisson arrivals, requests a second."""
    pool_tokens: int | None = None
    max_model_len: int | None = None
    placement: str | None = None
    block_size: int | None = None
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPreset:
    """A made workload with shared prefixes, as `kvtool.sharing` reads it; lengths in tokens.

    Without a `prefix_dist` there are no prefixes, without a `session_dist` no tokens that the
    requests of a session alone share. Without a `keep`, every node of a level has children.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    id: str
    name: str
    aliases: tuple[str, ...] = ()
    num_prefixes: int = 0
    prefix_dist: str | None = None
    prefix_mean: float = 0
    prefix_cap: int = 0
    zipf: float = 1.0
    share: float = 1.0
    session_dist: str | None = None
    session_mean: float = 0
    session_cap: int = 0
    turn_dist: str
    turn_mean: float
    turn_cap: int
    output_dist: str
    output_mean: float
    output_cap: int
    turns: int = 1
    branch: int = 1
    keep: int | None = None
    concurrency: int = 64
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPreset:
    """What somebody published, and kvtool commands that try it; scripts/claims.py reads `figures`."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    id: str
    name: str
    published: str
    status: str
    runs: dict[str, str]
    figures: tuple[dict[str, Any], ...]
    reason: str
    source: str
    note: str = ""

"""The device that is measured: a GPU, or this machine's CPU, and what must be known of it."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvtool.errors import KvtoolError, did_you_mean, usage_error

NAMES = ("auto", "cuda", "cpu")
TORCH_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_PEERS = ("flashinfer-python", "flash-attn", "flash_attn_3", "vllm")
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE = 32 * 2**20
"""Bytes of a last-level cache that the system does not tell of: larger than most laptops'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """`kind` is what torch calls it: cuda (ROCm too) or cpu."""

    kind: Literal["cuda", "cpu"]
    name: str
    free_bytes: int
    cache_bytes: int
    """The last-level cache: what is measured must be larger, or it is read from there."""
    processors: int
    """Streaming multiprocessors, or cores that this process may use."""

    @property
    def is_gpu(self) -> bool:
        """Whether kernels are launched rather than called."""
        return self.kind == "cuda"


def load_torch() -> Any:
    """torch, or the one error that says how to get it."""
    try:
        import torch
    except ImportError as error:
        raise KvtoolError(
            f"this needs torch, and {error.name or 'a part of it'} is not installed",
            "pip install 'kvtool[bench]'",
            code="missing_extra",
        ) from error
    except Exception as error:  # a broken library, or a variable that it cannot read
        raise KvtoolError(
            f"torch cannot be loaded: {' '.join(str(error).split())[:120]}",
            "check the TORCH_… environment variables, and reinstall 'kvtool[bench]'",
            code="missing_extra",
        ) from error
    return torch


def torch_dtype(name: str) -> Any:
    """torch's dtype of a KV dtype."""
    return getattr(load_torch(), TORCH_DTYPES[name])


def numpy_of(tensor: Any) -> Any:
    """A tensor's memory as numpy, which has no bf16: its bits are given, as uint16."""
    if tensor.dtype == load_torch().bfloat16:
        return tensor.view(load_torch().int16).numpy().view("uint16")
    return tensor.numpy()


def find_device(asked: str = "auto") -> Device:
    """The device of that name; `auto` is the GPU if there is one. Raises KvtoolError."""
    if asked not in NAMES:
        raise usage_error(
            f"--device: '{asked[:40]}' is not known",
            f"the devices are {', '.join(NAMES)}.{did_you_mean(asked, NAMES)}",
        )
    torch = load_torch()
    there = bool(torch.cuda.is_available())
    if asked == "cuda" and not there:
        raise KvtoolError(
            "--device cuda: torch sees no GPU here",
            f"check the driver, or that this torch ({torch.__version__}) is a CUDA or ROCm build; "
            "--device cpu measures the CPU backend",
            code="no_device",
        )
    return _gpu(torch) if there and asked != "cpu" else _cpu()


def _gpu(torch: Any) -> Device:
    properties = torch.cuda.get_device_properties(0)
    return Device(
        kind="cuda",
        name=str(properties.name),
        free_bytes=int(torch.cuda.mem_get_info(0)[0]),
        cache_bytes=int(getattr(properties, "L2_cache_size", 0)) or _UNKNOWN_CACHE,
        processors=int(properties.multi_processor_count),
    )


def _cpu() -> Device:
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        raise KvtoolError(
            "NUMBA_DISABLE_JIT is set, and the CPU's kernels are nothing but machine code",
            "unset it",
            code="no_compiler",
        )
    return Device(
        kind="cpu",
        name=_cpu_name(),
        free_bytes=free_memory(),
        cache_bytes=_last_level_cache(),
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
    )


def free_memory() -> int:
    """Bytes of this machine's memory that can be had without swapping; 2^62 if it does not tell."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 2**62


def _cpu_name() -> str:
    with suppress(OSError, IndexError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _last_level_cache() -> int:
    sizes = [0]
    for file in _CACHE.glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(file.read_text("ascii").strip().removesuffix("K")) * 1024)
    return max(sizes) or _UNKNOWN_CACHE


def describe(device: Device, *, threads: int | None = None) -> dict[str, Any]:
    """What a record says of the device: versions, driver, clocks, limits. None: not told."""
    torch = load_torch()
    found: dict[str, Any] = {
        "device": device.kind,
        "device_name": device.name,
        "processors": device.processors,
        "last_level_cache_bytes": device.cache_bytes,
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "numba": _version("numba"),
        **{name: one for name in _PEERS if (one := _version(name)) is not None},
    }
    if not device.is_gpu:
        return found | {"threads": threads, "load_average": _load()}
    major, minor = torch.cuda.get_device_capability(0)
    found |= {
        "compute_capability": f"{major}.{minor}",
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("CUDA_VISIBLE", "CUDA_DEVICE", "TRITON_", "NVIDIA_TF32"))
        },
    }
    return found | nvml_record()


def nvml_record() -> dict[str, Any]:
    """Driver, clocks, limits and throttling as NVML has them now; empty where there is no NVML."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - not installed, no driver, no permission: all the same here
        return {}
    try:
        return _read_nvml(pynvml)
    finally:
        with suppress(Exception):
            pynvml.nvmlShutdown()


def _read_nvml(nvml: Any) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(_visible_index())

    def ask(function: str, *arguments: Any) -> Any:
        try:
            value = getattr(nvml, function)(handle, *arguments)
        except Exception:  # noqa: BLE001 - what this GPU or driver does not tell is null
            return None
        return value.decode() if isinstance(value, bytes) else value

    ecc, mig = ask("nvmlDeviceGetEccMode"), ask("nvmlDeviceGetMigMode")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    power = ask("nvmlDeviceGetEnforcedPowerLimit")
    driver = None
    with suppress(Exception):
        driver = nvml.nvmlSystemGetDriverVersion()
    return {
        "driver": driver.decode() if isinstance(driver, bytes) else driver,
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        "power_limit_w": power / 1000 if power is not None else None,
        "temperature_c": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": reasons,
        "ecc": bool(ecc[0]) if ecc else None,
        "mig": bool(mig[0]) if mig else None,
    }


def _visible_index() -> int:
    """NVML counts every GPU, torch only the visible ones: the first of those."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def _load() -> float | None:
    """Processes that wanted a core in the last minute: a busy machine measures its neighbours."""
    with suppress(OSError, AttributeError):
        return round(os.getloadavg()[0], 2)
    return None


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None

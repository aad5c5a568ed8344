"""How much of a GPU an engine divides up: its memory as torch sees it, times the engine's share."""

from __future__ import annotations

from kvtool.catalog import GpuPreset
from kvtool.engine_memory.ranges import Range
from kvtool.errors import usage_error
from kvtool.units import GIB

TORCH_GIB: dict[str, tuple[float, float, float]] = {
    "a100-40gb": (39.38, 39.49, 39.59),
    "a100-80gb": (79.10, 79.19, 79.33),
    "a100-80gb-pcie": (79.10, 79.19, 79.33),
    "a10g": (21.98, 22.06, 22.20),
    "a10": (21.98, 22.06, 22.20),
    "b200": (178.3, 178.36, 179.0),
    "b300": (266.5, 268.0, 276.7),
    "dgx-spark": (117.5, 119.7, 121.7),
    "gb300": (267.0, 276.6, 277.5),
    "gh200": (94.4, 94.99, 95.6),
    "h100-nvl": (92.9, 93.1, 93.6),
    "h100-pcie": (79.06, 79.18, 79.26),
    "h100-sxm": (79.06, 79.18, 79.26),
    "h20": (94.99, 95.0, 95.3),
    "h200": (139.70, 139.80, 139.95),
    "l4": (21.95, 22.05, 22.20),
    "mi300x": (191.4, 191.69, 192.0),
    "rtx-3090": (23.55, 23.60, 24.0),
    "rtx-4090": (23.50, 23.60, 24.0),
    "rtx-5090": (31.30, 31.37, 31.85),
    "rtx-a6000": (47.40, 47.53, 47.8),
    "rtx-pro-6000": (94.90, 94.97, 95.1),
    "t4": (14.56, 14.60, 14.75),
    "v100-16gb": (15.75, 15.78, 15.90),
    "v100-32gb": (31.70, 31.74, 31.80),
}
"""torch's total as start-up logs print it ("total_gpu_memory", "Free memory on device (x/total)"),
with the spread between drivers; 24.0 and 31.85 are the GeForce cards under Windows. Sources: H100
79.19 and A100 79.25: llm-d-incubation/llm-d-planner accuracy/accuracy_report.md and logs of vLLM
0.31; H200 139.81, MI300X 191.69, RTX 5090 31.36, RTX PRO 6000 94.97, GB300 276.62, T4 14.56, A10G
22.06, V100 31.74: public vLLM logs; H20, B200, A6000: `note` of the GPU presets. The A10, GH200,
H100 NVL, L4 and V100-16GB are estimates; the B300's best is below the driver's 268.6, its most
the GB300's. The DGX Spark prints 117.51, 119.7 or 121.69, by what its system keeps."""
SHARE = (0.970, 0.988, 1.0)
"""torch's total against the driver's where no print is known: 0.971 (T4) to 0.997 (B200)."""
UNIFIED = (0.85, 0.97, 1.0)
"""The same where the operating system has its share of the memory: an estimate."""
MARKETED = (0.92, 0.96, 1.0)
"""torch's total against the marketed figure in GiB: 0.93 (B300, cards with ECC) to 1.0 (MI300X, A100)."""
MARKETED_AMD = (0.985, 0.998, 1.0)
"""The same of AMD's, all of whose marketed memory software sees: 63.98, 127.97 and 191.98 GiB."""
MARKETED_APPLE = (0.65, 0.75, 0.84)
"""The same of Apple's memory: Metal's default limits are 0.66 to 0.84 (kvtool presets gpus)."""
MARKETED_UNIFIED = (0.85, 0.93, 0.97)
"""The same where Linux has its share: the DGX Spark's totals are 0.92 to 0.95."""
ON_CPU = ("apple", "spark", "jetson")

SHARE_WORD = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}


def usable(engine: str, gpu: GpuPreset, utilization: float) -> tuple[Range, str]:
    """Bytes of one GPU that weights, cache and everything else share, and the basis of that.

    `utilization` counts for vLLM and SGLang alone: the others take what they need of the whole.
    """
    if not 0 < utilization <= 1:
        raise usage_error(
            f"the engine's share of the memory: {utilization} is out of range",
            "give a part of the memory above 0 and up to 1, such as 0.9",
        )
    whole, basis = torch_total(gpu)
    if engine not in SHARE_WORD:
        return whole, basis
    part = Range(*(round(one * utilization) for one in (whole.low, whole.best, whole.high)))
    return part, f"{SHARE_WORD[engine]} {utilization:g} × {basis}"


def is_total_known(gpu: GpuPreset) -> bool:
    """Whether its memory was printed somewhere, not marketed alone."""
    return gpu.usable_bytes is not None or gpu.id in TORCH_GIB


def torch_total(gpu: GpuPreset) -> tuple[Range, str]:
    """A GPU's memory as torch sees it."""
    if gpu.id in TORCH_GIB:
        low, best, high = TORCH_GIB[gpu.id]
        return (
            Range(round(low * GIB), round(best * GIB), round(high * GIB)),
            f"torch's total of {gpu.id} in logs, {best:g} GiB ({low:g} to {high:g} by driver)",
        )
    unified = gpu.vendor == "Apple" or any(word in gpu.id for word in ON_CPU)
    if gpu.usable_bytes is None:
        usual = {"AMD": MARKETED_AMD, "Apple": MARKETED_APPLE}.get(gpu.vendor, MARKETED)
        shares = MARKETED_UNIFIED if unified and gpu.vendor != "Apple" else usual
        whole, words = (
            gpu.nominal_gb * GIB,
            f"{shares[1]:.0%} of the marketed {gpu.nominal_gb:g} GB",
        )
        words += f" of {gpu.id}, whose total nobody printed: an estimate"
    else:
        shares, whole = UNIFIED if unified else SHARE, gpu.usable_bytes
        words = (
            f"the driver's total of {gpu.id} less {1 - shares[1]:.1%} unseen by torch, an estimate"
        )
    return Range(*(round(whole * share) for share in shares)), words

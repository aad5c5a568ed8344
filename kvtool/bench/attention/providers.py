"""Who computes decode attention: one entry a provider, the same names on a GPU and on a CPU.

A provider is given a case's data and answers with a call that does the work on the pool of a number.
What is large, caches and gathered copies, is set aside before: while the clock runs at most an output
is allocated. What is not installed, or cannot do the case, raises `Missing` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvtool.bench.attention import torch_providers
from kvtool.bench.attention.data import Data
from kvtool.bench.attention.prepared import Prepared


class Provider(NamedTuple):
    """How a provider is prepared, and whether it keeps away from what is not a token."""

    prepare: Callable[[Data], Prepared]
    masks_padding: bool
    """True: correct even when everything beyond the lengths is NaN. Checked."""


def providers_of(kind: str) -> dict[str, Provider]:
    """The table of a device's kind, in the order of the rows."""
    if kind == "cuda":
        from kvtool.bench.attention import gpu_providers as gpu

        return {
            "paged": Provider(gpu.paged, True),
            "paged-naive": Provider(gpu.paged_naive, True),
            "contiguous": Provider(gpu.contiguous, True),
            "sdpa": Provider(torch_providers.sdpa, False),
            "gather-sdpa": Provider(torch_providers.gather_sdpa, False),
            "flashinfer": Provider(gpu.flashinfer, False),
            "flash-attn": Provider(gpu.flash_attn, False),
            "vllm": Provider(gpu.vllm, False),
        }
    from kvtool.bench.attention import cpu_providers as cpu

    return {
        "paged": Provider(cpu.paged, True),
        "contiguous": Provider(cpu.contiguous, True),
        "sdpa": Provider(torch_providers.sdpa, False),
        "gather-sdpa": Provider(torch_providers.gather_sdpa, False),
        **dict.fromkeys(
            ("paged-naive", "flashinfer", "flash-attn", "vllm"), Provider(cpu.for_gpus_only, False)
        ),
    }


NAMES = ("paged", "contiguous", "sdpa", "gather-sdpa", "flashinfer", "flash-attn", "vllm")
"""Whoever is there is measured."""
ON_REQUEST = ("paged-naive",)
"""Only measured when it is named."""

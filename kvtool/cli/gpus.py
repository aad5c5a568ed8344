"""--gpu: what part of a GPU's memory, or of several GPUs', a row takes."""

from __future__ import annotations

from typing import Any

from kvtool import catalog
from kvtool.run import Row
from kvtool.units import parse_count
from kvtool.view.words import ranks

LEVELS = "rtx-4090,h100,h200,b200"
"""GPUs whose memory a picture shows unless others are named."""


def gpus_of(text: str) -> list[tuple[catalog.GpuPreset, int]]:
    """Each GPU named and how many of it: `h100:8`."""
    found = []
    for part in text.split(","):
        name, colon, count = part.strip().partition(":")
        times = parse_count(count, name="--gpu", high=2**16) if colon else 1
        found.append((catalog.gpu_preset(name), times))
    return found


def levels_of(gpus: str) -> dict[str, int]:
    """Usable memory of one of each GPU named, for a picture; one without a figure is left out."""
    return {gpu.id: gpu.usable_bytes for gpu, _ in gpus_of(gpus) if gpu.usable_bytes}


def add_gpus(rows: list[Row], text: str) -> list[str]:
    """Put into each row what part of each GPU it takes: one rank of one GPU, or, without ranks,
    the whole of all that were named. Notes on GPUs whose memory is not known."""
    named = gpus_of(text)
    for row in rows:
        row["gpus"] = [
            _share(row, gpu.id, gpu.usable_bytes, count, ranks(row))
            for gpu, count in named
            if gpu.usable_bytes
        ]
    return [f"{gpu.id}: no usable memory is known" for gpu, _ in named if not gpu.usable_bytes]


def _share(row: Row, gpu: str, usable: int, count: int, split: int) -> dict[str, Any]:
    spread = split == 1 and count > 1
    need = row["total_bytes"] if spread else row["per_gpu_bytes"]
    room = usable * count if spread else usable
    return {
        "gpu": gpu,
        "count": count,
        "usable_bytes": usable,
        "ranks": split,
        "need_bytes": need,
        "share": None if need is None else need / room,
    }

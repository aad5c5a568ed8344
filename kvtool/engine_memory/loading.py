"""Weights as an engine holds them: padded for a kernel, copied for another order of products, and what
loading leaves in the allocator. vLLM's "Model loading took" counts all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from kvtool.catalog import GpuPreset
from kvtool.dtypes import Dtype
from kvtool.engine_memory.ranges import NOTHING, Range
from kvtool.engines.vllm_models import FAMILIES
from kvtool.model.shape import ModelShape
from kvtool.weights.parts import Part, Size
from kvtool.weights.storages import MXFP4
from kvtool.weights.stored import Stored, StoredPart

PADDED = {
    "10.0": (256, 256), "10.3": (256, 256), "gfx950": (256, 256), "gfx942": (128, 128),
}  # fmt: skip
"""Columns of an MXFP4 expert on a rank and the hidden size are rounded up to these, by compute capability
(vllm/model_executor/layers/quantization/mxfp4.py, create_weights: FlashInfer's kernels, ROCm's)."""
PADDED_ELSE = (128, 256)
"""Marlin's (the same function). An H100, whose Triton kernels pad as they swizzle, prints as much: 65.97
GiB for gpt-oss-120b (vllm-project/vllm#23278), and an A100 13.72 for gpt-oss-20b."""
FUSED = ("llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text")
"""Types whose checkpoints have all experts of a layer in one tensor."""
AMD, AMD_FUSED = (0.0, 0.01, 0.035), (0.02, 0.36, 0.40)
"""Parts of the weights that the allocator keeps besides once they are loaded: vLLM's prints on the MI300X
(ashishkamra/vllm-memory-estimator, validation_db.json) are 0.2 to 3 % above the weights, and 35 to 37 %
where experts of 16 bits come in one tensor. On NVIDIA's GPUs it counts tensors alone."""


@lru_cache(maxsize=256)
def held(
    engine: str, weights: Stored, shape: ModelShape, dtype: Dtype, gpu: GpuPreset, hidden: int, cut: int
) -> Stored:  # fmt: skip
    """The weights in the forms that `engine` keeps; as stored, for all but vLLM.

    `cut`: ranks that each expert's columns are cut over; 1: they hold whole ones.
    """
    if engine != "vllm":
        return weights
    parts = [_padded(one, gpu, hidden, cut) for one in weights.parts]
    return replace(weights, parts=(*parts, *_copies(shape, dtype)))


def _padded(one: StoredPart, gpu: GpuPreset, hidden: int, ranks: int) -> StoredPart:
    if one.part.role != "experts" or MXFP4.words not in one.storages or not one.part.pieces:
        return one
    columns, rows = PADDED.get(gpu.compute_capability or "", PADDED_ELSE)
    wide = -(-one.part.pieces // ranks)
    more = Fraction(_up(wide, columns) * _up(hidden, rows), wide * hidden)
    return replace(one, bits=one.bits * more)


def _up(count: int, to: int) -> int:
    return -(-count // to) * to


def _copies(shape: ModelShape, dtype: Dtype) -> Iterator[StoredPart]:
    """The matrices that expand a latent, once more: attention multiplies queries by them instead.

    vllm/model_executor/layers/attention/mla_attention.py, process_weights_after_loading: W_UK_T and W_UV.
    """
    family = FAMILIES.get(shape.model_type)
    if family is not None and family.expanded:
        return
    for entry in shape.layers:
        if entry.kind == "latent" and entry.mha_k_dim and not entry.owner:
            expanded = entry.mha_k_dim - entry.v_head_dim + entry.mha_v_dim
            count = entry.k_head_dim * entry.query_heads * expanded
            part = Part(
                role="attention", size=Size(count, count), layer=entry.module, pieces=entry.query_heads
            )  # fmt: skip
            yield StoredPart(part, Fraction(count * dtype.bits))


def left_behind(engine: str, gpu: GpuPreset, count: int, weights: Stored, model_type: str) -> Range:
    """Bytes beside the `count` of a rank that loading leaves in the allocator, and the engine counts."""
    if engine != "vllm" or gpu.vendor != "AMD":
        return NOTHING
    fused = model_type in FUSED and not any(one.storages for one in weights.parts)
    return Range(*(round(count * share) for share in (AMD_FUSED if fused else AMD)))

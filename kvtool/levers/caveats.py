"""What a format costs besides bytes: whether a GPU computes in it, and the accuracy that others measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.catalog import GpuPreset
    from kvtool.dtypes import Dtype, KvDtype
    from kvtool.model.shape import ModelShape

NATIVE, STORAGE, KERNELS, UNKNOWN = "native", "storage only", "by the engine's kernels", "unknown"
_WORST = (NATIVE, STORAGE, KERNELS, UNKNOWN)

SPELLINGS = {
    "fp8": ("fp8", "fp8_e4m3", "fp8_e4m3fnuz"),
    "fp8_e5m2": ("fp8_e5m2", "fp8_e5m2fnuz"),
    "nvfp4": ("fp4",),
}
"""A dtype here, and what GPU presets call it."""
_NO_GPU = ("int4", "int2", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Packed: no GPU reads them as they are, a kernel unpacks them."""

ACCURACY = {
    "fp8": "fp8 KV kept 93 to 100 % of BF16's long-context score (MRCR, 3 models: vLLM's post "
    "2026-04-22-fp8-kvcache)",
    "int8": "int8 KV lost at most 0.4 points of GSM8K on 4 models (InternLM/lmdeploy, kv_quant.md)",
    "int4": "int4 KV lost 0.2 to 3.3 points of GSM8K on 4 models (InternLM/lmdeploy, kv_quant.md); "
    "harder sets lose more: 4-bit KV took AIME25 of Qwen3-235B from 0.77 to 0.60 (SGLang, "
    "quantized_kv_cache.md)",
    "int2": "2-bit KV lost retrieval: 89.3 to 80.8 in Mistral-7B, even with KIVI's scales a channel and a "
    "window in fp16 (arXiv 2402.02750; jy-yuan/KIVI, long_bench.md)",
}
"""By dtype: what was lost, and where that is written."""
QWEN2 = (
    "Qwen2 and 2.5 have keys that 8 bits break: Qwen2.5-7B's GSM8K fell from 90.5 to 2.0 with fp8 "
    "(verl-project/verl#4435, ggml-org/llama.cpp#21385)"
)
LATENT = "fp8 latents broke GLM-4.7-Flash in one release of vLLM (vllm-project/vllm#38652)"
WEIGHTS = "an estimate: linear layers alone, by {words}; the checkpoint that you take decides bytes and accuracy"


def support(gpu: GpuPreset, kv: KvDtype) -> str:
    """Whether the GPU computes in the dtypes of K and V: the worse of the two."""
    return max((_one(gpu, kv.k), _one(gpu, kv.v)), key=_WORST.index)


def _one(gpu: GpuPreset, dtype: Dtype) -> str:
    if dtype.name in _NO_GPU:
        return KERNELS
    names = SPELLINGS.get(dtype.name, (dtype.name,))
    if any(name in gpu.native_kv_dtypes for name in names):
        return NATIVE
    if any(name in gpu.storage_kv_dtypes for name in names):
        return STORAGE
    return UNKNOWN


def of_cache(gpu: GpuPreset, kv: KvDtype, shape: ModelShape) -> str:
    """The caveat of a cache in this dtype, with its source."""
    found = support(gpu, kv)
    said = [] if found == NATIVE else [f"{kv.name} on {gpu.id}: {found}"]
    names = dict.fromkeys((kv.k.name, kv.v.name))
    said += [ACCURACY[name] for name in names if name in ACCURACY]
    if shape.model_type.startswith("qwen2"):
        said.append(QWEN2)
    if "fp8" in names and any(one.kind == "latent" for one in shape.layers):
        said.append(LATENT)
    return "; ".join(said)

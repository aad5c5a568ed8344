"""What a config says about dtypes, context length and encoder length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from kvtool.model.keys import MAX_TOKENS, Keys
from kvtool.model.nested import Part
from kvtool.model.shape import LayerCache

CONTEXT_KEYS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length",
    "max_sequence_length", "model_max_length", "max_target_positions", "max_context_length",
)  # fmt: skip
TORCH_NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8_e5m2",
}  # fmt: skip
KV_ALGORITHMS = {"fp8": "fp8", "fp8_e4m3": "fp8", "nvfp4": "nvfp4", "int8": "int8", "int4": "int4"}


def about_dtypes(part: Part) -> tuple[str | None, str | None, tuple[str, ...]]:
    """(model dtype or None, quantised KV dtype or None, notes)."""
    stated = part.anywhere("dtype", "torch_dtype")
    dtype = None
    notes: list[str] = []
    if isinstance(stated, str) and stated not in ("", "auto"):
        dtype = TORCH_NAMES.get(stated.removeprefix("torch."))
        if dtype is None:
            notes.append(f"the config's dtype '{stated[:40]}' is not a KV dtype that kvtool knows")
    kv_dtype, note = _quantised(part)
    return dtype, kv_dtype, (*notes, *([note] if note else []))


def _quantised(part: Part) -> tuple[str | None, str]:
    """kv_cache_scheme (compressed-tensors) or kv_cache_quant_algo (modelopt); never the weights'."""
    for section in _quantisation(part):
        algorithm = section.get("kv_cache_quant_algo")
        if isinstance(algorithm, str):
            known = KV_ALGORITHMS.get(algorithm.lower())
            why = f"kv_cache_quant_algo = {algorithm[:20]}"
            return known, "" if known else f"{why} is not understood: the model's dtype is used"
        scheme = section.get("kv_cache_scheme")
        if isinstance(scheme, Mapping):
            name = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4"}.get(
                (str(scheme.get("type")), scheme.get("num_bits") or 0)
            )
            return (
                name,
                "" if name else "kv_cache_scheme is not understood: the model's dtype is used",
            )
    return None, ""


def _quantisation(part: Part) -> list[Mapping[str, Any]]:
    sections = []
    for name in ("quantization_config", "compression_config", "hf_quant_config"):
        section = part.anywhere(name)
        if isinstance(section, Mapping):
            inner = section.get("quantization")
            sections.append(inner if isinstance(inner, Mapping) else section)
    return sections


def about_context(part: Part) -> tuple[int | None, bool]:
    """(maximum context, True if the config itself states it)."""
    keys = part.keys
    for name in CONTEXT_KEYS:
        value = keys.get(name)
        if not _is_length(value):
            continue
        stated = keys.stated(name)
        return _extended(keys, int(value)), stated
    return None, False


def _is_length(value: Any) -> TypeGuard[int | float]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 < value <= MAX_TOKENS


def _extended(keys: Keys, length: int) -> int:
    """YaRN may stand beside the original maximum: the larger of the two is what the model does."""
    rope = keys.get("rope_scaling") or keys.get("rope_parameters")
    if not isinstance(rope, Mapping) or rope.get("type", rope.get("rope_type")) != "yarn":
        return length
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not _is_length(factor) or not _is_length(original):
        return length
    return max(length, min(int(original * factor), MAX_TOKENS))


def encoder_tokens(part: Part, layers: tuple[LayerCache, ...]) -> int | None:
    """Encoder tokens that the model's own config fixes; None if it has no cross-attention.

    Whisper-like models state max_source_positions; Llama 3.2 Vision has
    max_num_tiles × (patches + 1) tokens an image. Text models have no fixed length: 0 here, and the
    caller decides.
    """
    if not any(entry.kind == "cross" for entry in layers):
        return None
    for name in ("max_source_positions", "max_encoder_position_embeddings"):
        value = part.anywhere(name) or part.keys.get(name)
        if _is_length(value):
            return int(value)
    vision = part.anywhere("vision_config")
    if isinstance(vision, Mapping):
        sizes = [vision.get("image_size"), vision.get("patch_size"), vision.get("max_num_tiles", 4)]
        if all(_is_length(size) for size in sizes):
            image, patch, tiles = (int(size) for size in sizes)
            return min(tiles * ((image // max(patch, 1)) ** 2 + 1), MAX_TOKENS)
    return 0

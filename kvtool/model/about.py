"""What a config says about dtypes, context length and encoder length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from kvtool.model.keys import MAX_TOKENS, Keys, whole
from kvtool.model.nested import Part

CONTEXT_KEYS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length",
    "max_sequence_length", "model_max_length", "max_target_positions", "max_context_length",
)  # fmt: skip
TORCH_NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
}  # fmt: skip
KV_SCHEMES = {"float 8": "fp8", "float 4": "nvfp4", "int 8": "int8", "int 4": "int4"}
KV_ALGORITHMS = {"fp8": "fp8", "fp8_e4m3": "fp8", "nvfp4": "nvfp4", "int8": "int8", "int4": "int4"}


def about_dtypes(part: Part) -> tuple[str | None, str | None, tuple[str, ...]]:
    """(model dtype or None, quantised KV dtype or None, notes)."""
    stated = part.anywhere("dtype", "torch_dtype")
    dtype = None
    notes: list[str] = []
    if isinstance(stated, str) and stated not in ("", "auto"):
        dtype = TORCH_NAMES.get(stated.removeprefix("torch."))
        if dtype is None:
            notes.append(
                f"the config's dtype '{stated[:40]}' is how weights are stored, not a cache"
            )
    kv_dtype, note = _quantised(part)
    return dtype, kv_dtype, (*notes, *([note] if note else []))


def _quantised(part: Part) -> tuple[str | None, str]:
    """kv_cache_scheme (compressed-tensors) or kv_cache_quant_algo (modelopt); never the weights'."""
    for section in _quantisation(part):
        algorithm = section.get("kv_cache_quant_algo")
        if isinstance(algorithm, str):
            if algorithm.lower() in ("", "none"):
                return None, ""
            known = KV_ALGORITHMS.get(algorithm.lower())
            why = f"kv_cache_quant_algo = {algorithm[:20]}"
            return known, "" if known else f"{why} is not understood: the model's dtype is used"
        scheme = section.get("kv_cache_scheme")
        if isinstance(scheme, Mapping):
            name = KV_SCHEMES.get(f"{scheme.get('type')} {scheme.get('num_bits')}"[:20])
            note = "kv_cache_scheme is not understood: the model's dtype is used"
            return name, "" if name else note
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
        found = keys.find(name)
        if found is None or found[0] == -1 or _is_endless(found[0]):  # XLNet writes -1 for no limit
            continue
        length = whole(*found, low=1, high=MAX_TOKENS)
        return _extended(keys, length), keys.stated(name)
    return None, False


def _is_endless(value: Any) -> bool:
    """Tokenizers write 1e30 for no limit, and it finds its way into configs."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (value > MAX_TOKENS or value != value)


def _is_length(value: Any) -> TypeGuard[int | float]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= MAX_TOKENS


def _extended(keys: Keys, length: int) -> int:
    """YaRN may stand beside the original maximum: the larger of the two is what the model does."""
    rope = keys.get("rope_scaling") or keys.get("rope_parameters")
    if not isinstance(rope, Mapping) or rope.get("type", rope.get("rope_type")) != "yarn":
        return length
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not _is_length(factor) or not _is_length(original):
        return length
    return max(length, min(int(original * factor), MAX_TOKENS))

"""What vLLM 0.32 (V1) reserves: a model's layers as specs, the specs as a pool of blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kvtool.engines.vllm_models import MEASURED, specs_of
from kvtool.engines.vllm_pool import LaidOut, VllmGroup, VllmPool, laid_out, pool_in, pool_of
from kvtool.engines.vllm_specs import LayerSpec, VllmSettings, parse_specs
from kvtool.model.shape import ModelShape

__all__ = [
    "MEASURED",
    "LayerSpec",
    "VllmGroup",
    "VllmPool",
    "VllmSettings",
    "parse_specs",
    "pool_of",
    "reserve",
    "specs_of",
]


def reserve(shape: ModelShape, settings: VllmSettings) -> VllmPool:
    """The pool that vLLM lays out for a model."""
    stated = settings.mamba_block_size is not None or settings.prefix_caching
    length = 0 if stated else settings.max_model_len  # a state's block is as long as a request
    plain = replace(settings, max_model_len=length, kv_memory=None)
    return pool_in(_laid_out(shape, plain), settings)


@lru_cache(maxsize=1024)
def _laid_out(shape: ModelShape, settings: VllmSettings) -> LaidOut:
    """The same for every length and memory: looking for the longest context asks again and again."""
    return laid_out(specs_of(shape, settings), settings, shape.num_modules)

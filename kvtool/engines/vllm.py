"""What vLLM 0.32 (V1) reserves: a model's layers as specs, the specs as a pool of blocks."""

from __future__ import annotations

from kvtool.engines.vllm_models import MEASURED, specs_of
from kvtool.engines.vllm_pool import VllmGroup, VllmPool, pool_of
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
    return pool_of(specs_of(shape, settings), settings, num_layers=shape.num_modules)

"""Tiny models for the tests of `kvtool bench decode`: two layers, heads of 64, 128 words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvtool.bench.decode.blueprint import Blueprint, blueprint
from kvtool.bench.decode.kernels import Kernels, Seen, kernels_for
from kvtool.bench.decode.model import Decoder, build_model
from kvtool.bench.decode.settings import DecodeCase, ModelChoice
from kvtool.config import LoadedConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 24}
CONFIGS = {"llama": LLAMA, "mistral": MISTRAL}

TOKEN_BYTES = 2 * 2 * 2 * 64 * 4
"""K and V, 2 layers, 2 KV heads of 64, fp32."""


torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine


def tiny(config: dict[str, Any], **other: Any) -> Blueprint:
    """The plan of a config with some keys changed."""
    return blueprint(LoadedConfig(config=config | other, name="tiny", source="file", where="-"))


def decoder_of(config: dict[str, Any], **choice: Any) -> Decoder:
    """The model of a config, random weights, on the CPU."""
    return build_model(tiny(config), ModelChoice(**choice))


def case_of(cache: str, **other: Any) -> DecodeCase:
    """A short case whose prompt ends inside a block and whose output fills some."""
    given = {"batch": 3, "prompt_tokens": 21, "output_tokens": 12, "block_size": 16} | other
    return DecodeCase(cache=cache, **given)


def broken_kernels(device: str, threads: int) -> Kernels:
    """Right but for one thing: the newest token is not seen."""
    right = kernels_for(device, threads)

    def short(seen: Seen) -> Seen:
        return replace(seen, lengths=seen.lengths - (seen.lengths > 1).int())

    def paged(q: Any, k: Any, v: Any, table: Any, seen: Seen) -> torch.Tensor:
        return right.paged(q, k, v, table, short(seen))

    return replace(right, paged=paged)

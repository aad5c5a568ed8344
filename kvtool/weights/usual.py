"""Usual ways to quantise a model, for one whose own config says nothing: estimates, since no checkpoint was read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.weights.schemes import SAID_IN

SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "nvfp4": {
        "quant_method": "modelopt", "quant_algo": "NVFP4",
        "exclude_modules": ["*vision*", "*visual*", "*audio*", "*img_processor*"],
    },
}  # fmt: skip
"""Embeddings, head, norms, routers and towers stay as they are."""
LEFT_MORE = (
    "published checkpoints may leave more in 16 bits: usually up to 5 % of the bytes, all of attention in "
    "gemma-4-31b's NVFP4, 31 GiB where 18 are counted (--weights takes a checkpoint's own)"
)
"""vLLM's prints of Llama 4 Maverick, Nemotron 3 Nano and Super in fp8 are 1.4 to 4.9 % above what is counted
(tests/data/engine_logs_more.jsonl)."""
WORDS = {
    "fp8": "fp8 in blocks of 128 × 128",
    "int4": "int4 with AWQ's groups of 128",
    "nvfp4": "NVFP4, 4 bits with an fp8 scale per 16",
}
IN_NAMES = {
    "nvfp4": "nvfp4", "fp8": "fp8", "awq": "int4", "gptq": "int4", "int4": "int4", "w4a16": "int4",
}  # fmt: skip
"""What repositories are called, the most telling word first."""


def by_name(repository: str, config: Mapping[str, Any]) -> str:
    """The scheme that a repository's name tells where the config tells none; empty: neither does."""
    if any(config.get(key) for key in SAID_IN):
        return ""
    lower = repository.lower()
    return next((scheme for word, scheme in IN_NAMES.items() if word in lower), "")

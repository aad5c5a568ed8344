"""What is asked of each model: the words of `kvtool size`, parsed."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtool.dtypes import Dtype
from kvtool.size_row import VllmOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What is asked of each model. Lists are run as a product, in the order given."""

    engines: tuple[str, ...] = ("ideal",)
    contexts: tuple[int, ...] = ()
    """Empty: 1 token, 8k if the model goes that far, and its maximum."""
    batches: tuple[int, ...] = (1,)
    dtype: Dtype | None = None
    kv_dtypes: tuple[str, ...] = ("auto",)
    tps: tuple[int, ...] = (1,)
    pps: tuple[int, ...] = (1,)
    block_sizes: tuple[int | None, ...] = (None,)
    encoder_tokens: int | None = None
    allow_long: bool = False
    per_layer: bool = False
    cache: str = "dynamic"
    """Which cache object of transformers: dynamic or static."""
    prompt: int | None = None
    """Tokens of the context that were the prompt; None: all of them."""
    pp_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty: an even split."""
    dcp: int = 1
    """Decode context parallelism: ranks that share a sequence's tokens."""
    dp: int = 1
    """Data-parallel attention: ranks that share the sequences."""
    vllm: VllmOptions = field(default_factory=VllmOptions)

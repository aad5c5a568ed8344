"""What a model caches, layer by layer: the one description every engine works from.

A `ModelShape` says what there is to cache; how many tokens of it are held, and in which blocks, is
an engine's business (kvtool/engines). Nothing here knows a dtype's size or a context length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

Kind = Literal[
    "full", "sliding", "chunked", "latent", "indexer", "compressed", "linear", "cross", "hidden"
]  # fmt: skip

Trace = tuple[tuple[str, str], ...]
"""Which key or class default decided each number: (('kv_heads', 'num_key_value_heads = 8'), …)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A constant tensor per sequence, such as a convolution's last columns or a recurrent state.

    `parts` are (elements of one column, shards): into how many pieces tensor parallelism can cut
    them (heads, groups, channels). `columns` are needed, `held` are what transformers keeps: a
    convolution of k taps needs k − 1 columns, and transformers holds k.
    """

    name: Literal["conv", "ssm", "buffer"]
    parts: tuple[tuple[int, int], ...]
    columns: int = 1
    held: int = 1
    dtype: str = "model"
    """'model' for the model's dtype, or a dtype's name."""

    @property
    def elements(self) -> int:
        """Elements of one column, whole model."""
        return sum(count for count, _ in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """One thing one layer caches. A layer may cache several (self and cross, attention and state)."""

    layer: int
    """Index among the cache's layers: a looped layer has one for each pass."""
    kind: Kind
    module: int = 0
    """Index of the decoder layer that fills it, for pipeline stages."""
    kv_heads: int = 0
    k_head_dim: int = 0
    v_head_dim: int = 0
    window: int | None = None
    """Most tokens held; None: all of them."""
    extra: int = 0
    """Tokens that the model itself puts before the text."""
    stride: int = 1
    """Tokens per cached entry: 1, or the compression ratio of a compressed pool."""
    overlap: bool = False
    """A pool whose neighbouring windows overlap (DeepSeek-V4's CSA)."""
    query_heads: int = 0
    mha_k_dim: int = 0
    mha_v_dim: int = 0
    """Head sizes if every query head stored its own K and V (a latent's are the expanded ones)."""
    expanded: bool = False
    """True where transformers repeats K and V to every query head before it caches them."""
    fixed_bytes: int = 0
    """Bytes a token besides K and V, whatever the KV dtype (Reformer's bucket numbers)."""
    fixed_above: int = 0
    """Only once the text is longer than this (Reformer's chunk)."""
    reference: bool = False
    """Unlimited-OCR: the prompt is kept whole, only generated tokens slide (over `span`)."""
    span: int = 0
    """Tokens a query attends to, itself included, where that is neither `window` nor all."""
    replicated: bool = False
    """Whole on every tensor-parallel rank, as latents and indexer keys are."""
    states: tuple[State, ...] = ()
    trace: Trace = ()
    owner: str = ""
    """Model type of a draft model's entry; '' for the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as its cache sees it. `layers` lists cache entries in layer order, not modules."""

    model_type: str
    num_layers: int
    num_modules: int
    """Decoder layers; fewer than num_layers where a layer keeps several caches."""
    layers_by: str
    """Which keys decided the number of layers and the kind of each."""
    layers: tuple[LayerCache, ...]
    query_heads: int
    dtype: str | None
    kv_dtype: str | None
    """What the checkpoint says about a quantised KV cache; None if nothing."""
    max_context: int | None
    max_context_stated: bool
    """True if the config itself states the maximum: longer contexts are then refused."""
    encoder_tokens: int | None
    positions_end: bool = True
    """False: positions are relative, or nothing attends to them, and `max_context` is what it was made for."""
    rows_per_sequence: int = 1
    """Rows of input_ids that make one sequence: MusicGen's codebooks."""
    notes: tuple[str, ...] = ()
    stated_kv_heads: int | None = None
    """num_key_value_heads as the config or its class has it, for the plain formula."""
    draft: str = ""
    draft_layers: int = 0
    mtp: int = 0
    """Multi-token-prediction layers among `layers`."""
    assumed: str | None = None

    def __hash__(self) -> int:
        """Of what is short: shapes are keys of what was computed of them, and have many layers."""
        return hash((self.model_type, self.num_layers, self.query_heads, self.max_context))

    def __reduce__(self) -> tuple[Callable[..., ModelShape], tuple[object, ...]]:
        """In a worker process, what arrives again is the shape that is known there."""
        return _known, tuple(getattr(self, one.name) for one in fields(self))

    def type_of(self, entry: LayerCache) -> str:
        """The model type whose class fills this entry: a draft's entries are its own."""
        return entry.owner or self.model_type


@lru_cache(maxsize=64)
def _known(*values: object) -> ModelShape:
    """The one shape of these values."""
    named = zip(fields(ModelShape), values, strict=True)
    return ModelShape(**{one.name: value for one, value in named})  # type: ignore[arg-type]

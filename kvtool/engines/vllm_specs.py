"""What vLLM knows of a layer when it lays its cache out: a kind, a block size and a page size.

The rules are those of vLLM 0.32 (V1), v1/kv_cache_interface.py. A page is one block of one layer;
one block of a group is a page of each of its layers. `page` is vLLM's word and is kept where its
arithmetic is quoted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from kvtool.errors import KvtoolError
from kvtool.model.keys import MAX_LAYERS, MAX_SIZE, MAX_TOKENS, whole

SpecKind = Literal["full", "latent", "sliding", "chunked", "cross", "linear"]

BLOCK_SIZE = 16
"""vLLM's default block size in tokens (config/cache.py, DEFAULT_BLOCK_SIZE)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """How the engine is started. Sizes in tokens, memory in bytes a GPU."""

    max_model_len: int
    tp: int = 1
    pp: int = 1
    pp_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage (VLLM_PP_LAYER_PARTITION); empty: vLLM's own split over pp."""
    dcp: int = 1
    """Decode context parallelism: each rank keeps 1/dcp of a full layer's tokens."""
    dtype: str = "bf16"
    kv_dtype: str = "auto"
    """auto (the model's), a KV dtype, or fp8_ds_mla."""
    block_size: int | None = None
    max_batched_tokens: int = 8192
    batches_in_flight: int = 2
    """2 with asynchronous scheduling, pp with pipeline stages (config/vllm.py)."""
    encoder_budget: int | None = None
    """max_num_encoder_input_tokens; None: max_batched_tokens (config/scheduler.py)."""
    speculative_tokens: int = 0
    """Tokens drafted a step: a state has a block more for each."""
    prefix_caching: bool = False
    hybrid: bool = True
    """False: --disable-hybrid-kv-cache-manager."""
    mamba_block_size: int | None = None
    """None: max_model_len, or the attention's block size with prefix caching."""
    kv_memory: int | None = None
    """Bytes for the cache on each GPU; None: no number of blocks is asked for."""

    @property
    def tokens_in_flight(self) -> int:
        """Tokens scheduled and not yet settled (config/vllm.py, max_in_flight_tokens)."""
        return self.batches_in_flight * self.max_batched_tokens

    @property
    def encoder_tokens(self) -> int:
        """What cross-attention reserves for an encoder's output."""
        return self.max_batched_tokens if self.encoder_budget is None else self.encoder_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer's cache as vLLM sees it. Layers with equal specs can share a group."""

    kind: SpecKind
    block_size: int
    token_bytes: int = 0
    """Bytes of one token on one rank; 0 for a state."""
    state_bytes: int = 0
    """Bytes of a constant state on one rank; 0 for attention."""
    form: tuple[Any, ...] = ()
    """What else must be equal: heads and head sizes, the shapes of a state, the role of a latent."""
    window: int | None = None
    chunk: int | None = None
    padded: int | None = None
    """Page size that the layer is padded to."""
    state_blocks: int = 1
    """Blocks a request holds of a state; more than one only with prefix caching."""
    layer: int = field(default=0, compare=False)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer."""
        own = self.block_size * self.token_bytes + self.state_bytes
        return max(own, self.padded or 0)

    @property
    def keeps_all(self) -> bool:
        """True for full attention and latents: they keep a block for every token."""
        return self.kind in ("full", "latent")


def blocks_per_request(spec: LayerSpec, settings: VllmSettings, length: int) -> int:
    """Blocks that one request of `length` tokens may hold at once.

    v1/kv_cache_interface.py: a window keeps the last window − 1 tokens and those in flight, and one
    block more since it need not start at a block's edge; a chunk has no such block.
    """
    if spec.kind == "linear":
        return spec.state_blocks
    tokens = -(-length // settings.dcp)
    if spec.kind == "cross":
        tokens = settings.encoder_tokens
    elif spec.kind == "sliding":
        tokens = min((spec.window or 1) - 1 + settings.tokens_in_flight, length)
    elif spec.kind == "chunked":
        tokens = min((spec.chunk or 0) + settings.tokens_in_flight, length)
    return -(-tokens // spec.block_size) + (spec.kind == "sliding")


# --- specs from a file ----------------------------------------------------------------------------

CLASSES: dict[str, SpecKind] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "latent",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
    "CrossAttentionSpec": "cross",
    "MambaSpec": "linear",
}
TORCH_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
DS_MLA_BYTES = 656
"""fp8_ds_mla: 512 fp8 values, four fp32 scales and 64 bf16 RoPE values a token."""


def parse_specs(raw: object) -> tuple[LayerSpec, ...]:
    """vLLM's own specs as a list of objects, each standing for its `n_layers` layers.

    The object that holds the list under `specs` will do as well.
    """
    items = raw.get("specs") if isinstance(raw, Mapping) else raw
    if not isinstance(items, list) or not items:
        raise _refuse("a list of layer specs is needed")
    out: list[LayerSpec] = []
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise _refuse(f"spec {number} is not an object")
        count = _whole(item.get("n_layers", 1), "n_layers", MAX_LAYERS)
        if len(out) + count > MAX_LAYERS:
            raise _refuse(f"more than {MAX_LAYERS:,} layers")
        spec = _parse(item)
        out += [replace(spec, layer=len(out) + i) for i in range(count)]
    return tuple(out)


def _refuse(what: str) -> KvtoolError:
    return KvtoolError(
        f"--layer-specs: {what}",
        "write vLLM's specs: cls, block_size, num_kv_heads, head_size, head_size_v, dtype, n_layers",
        code="specs_not_understood",
    )


def _whole(value: Any, by: str, high: int, low: int = 1) -> int:
    try:
        return whole(value, by, low=low, high=high)
    except KvtoolError as error:
        raise _refuse(error.message) from error


def _parse(item: Mapping[str, Any]) -> LayerSpec:
    kind = CLASSES.get(str(item.get("cls")))
    if kind is None:
        raise _refuse(f"cls {str(item.get('cls'))[:40]!r} is not understood")
    if kind != "linear" and item.get("tokens_per_state", 1) != 1:
        raise _refuse(f"tokens_per_state = {str(item.get('tokens_per_state'))[:20]}")
    spec = _parse_state(item) if kind == "linear" else _parse_attention(item, kind)
    stated = item.get("page_size_bytes")
    if stated is not None and _whole(stated, "page_size_bytes", MAX_TOKENS) != spec.page_bytes:
        raise _refuse(f"page_size_bytes is {stated}, and the sizes make {spec.page_bytes}")
    return spec


def _parse_attention(item: Mapping[str, Any], kind: SpecKind) -> LayerSpec:
    heads = _whole(item.get("num_kv_heads"), "num_kv_heads", MAX_SIZE)
    k_dim = _whole(item.get("head_size"), "head_size", MAX_SIZE)
    v_dim = 0 if kind == "latent" else k_dim
    if item.get("head_size_v") is not None:
        v_dim = _whole(item["head_size_v"], "head_size_v", MAX_SIZE, low=0)
    vector = (k_dim + v_dim) * _element(item.get("dtype"))
    if item.get("state_content_bytes") is not None:
        vector = _whole(item["state_content_bytes"], "state_content_bytes", MAX_TOKENS)
    elif item.get("cache_dtype_str") == "fp8_ds_mla":
        vector = DS_MLA_BYTES
    return LayerSpec(
        kind=kind,
        block_size=_whole(item.get("block_size"), "block_size", MAX_TOKENS),
        token_bytes=heads * vector,
        form=(heads, k_dim, v_dim, str(item.get("dtype")), str(item.get("kv_quant_mode") or 0)),
        window=_window(item, kind),
        chunk=_maybe(item, "attention_chunk_size", needed=kind == "chunked"),
        padded=_maybe(item, "page_size_padded"),
    )


def _window(item: Mapping[str, Any], kind: SpecKind) -> int | None:
    """The window, and the tokens before it that speculative decoding holds on to."""
    window = _maybe(item, "sliding_window", needed=kind == "sliding")
    if window is None:
        return None
    return window + _whole(item.get("extra_retained_tokens", 0), "extra_retained_tokens", 1024, 0)


def _maybe(item: Mapping[str, Any], name: str, *, needed: bool = False) -> int | None:
    value = item.get(name)
    if value is None and not needed:
        return None
    return _whole(value, name, MAX_TOKENS)


def _element(dtype: Any) -> int:
    size = TORCH_BYTES.get(str(dtype).removeprefix("torch."))
    if size is None:
        raise _refuse(f"dtype {str(dtype)[:40]!r} is not understood")
    return size


def _parse_state(item: Mapping[str, Any]) -> LayerSpec:
    shapes, dtypes = item.get("shapes"), item.get("dtypes")
    if not isinstance(shapes, list) or not isinstance(dtypes, list) or len(shapes) != len(dtypes):
        raise _refuse("a MambaSpec needs as many dtypes as shapes")
    if not shapes or not all(isinstance(shape, list) and shape for shape in shapes):
        raise _refuse("shapes is not a list of lists of numbers")
    sizes = [[_whole(n, "shapes", MAX_TOKENS) for n in shape] for shape in shapes]
    total = sum(prod(s) * _element(d) for s, d in zip(sizes, dtypes, strict=True))
    extra = _whole(item.get("num_speculative_blocks", 0), "num_speculative_blocks", 1024, low=0)
    saved = item.get("num_prefill_checkpoint_blocks", 0)
    if item.get("mamba_cache_mode", "none") == "align":
        extra += 1 + _whole(saved, "num_prefill_checkpoint_blocks", 1024, low=0)
    elif item.get("mamba_cache_mode", "none") != "none":
        raise _refuse(f"mamba_cache_mode {str(item['mamba_cache_mode'])[:20]!r}")
    return LayerSpec(
        kind="linear",
        block_size=_whole(item.get("block_size"), "block_size", MAX_TOKENS),
        state_bytes=total,
        form=(str(sizes), str(dtypes)),
        padded=_maybe(item, "page_size_padded"),
        state_blocks=1 + extra,
    )

"""A cache of transformers over our store, and the attention function that its layers call.

transformers' own model code runs unchanged. A prefill is computed by torch's SDPA on the new K and V,
which are stored into slots; a decode step by a paged kernel, or by its contiguous twin. A layer with
a sliding window keeps every block; its kernel reads the window alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvtool.bench.decode.kernels import Seen
from kvtool.bench.decode.kv_step import Step
from kvtool.bench.decode.kv_store import KvStore
from kvtool.errors import KvtoolError

Tensor = torch.Tensor

KEY = "kvtool_paged"
"""Under which transformers finds `attention`. No mask function has that name: it then makes no
mask, and ours come from lengths and windows."""

_STEP: ContextVar[Step] = ContextVar("kvtool_step")


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's view of the store: what a model gives it goes into the slots of the step."""

    def __init__(self, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the store is there from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new K and V [batch, kv_heads, tokens, head_dim], and hand the new ones back."""
        step = _STEP.get()
        keys, values = (
            one.transpose(1, 2).reshape(-1, one.shape[1], one.shape[3])
            for one in (key_states, value_states)
        )
        k_cache, v_cache = step.store.data[self.index]
        step.store.kernels.store(keys, values, k_cache, v_cache, step.slots)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """0: positions are always given, and masks are ours."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """What a mask would have to cover."""
        return query_length, 0

    def get_max_length(self) -> int:
        """-1: as many tokens as there are blocks."""
        return -1

    get_max_cache_shape = get_max_length


class PagedCache(Cache):
    """What a model is given for its `cache`: a layer each, over one store."""

    def __init__(self, store: KvStore) -> None:
        super().__init__(layers=[PagedLayer(i) for i in range(store.heads.num_layers)])
        self.store = store

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        """While a forward pass of this step runs."""
        token = _STEP.set(step)
        try:
            yield
        finally:
            _STEP.reset(token)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, for transformers: query [batch, heads, tokens, head_dim], out
    [batch, tokens, heads, head_dim]; key and value are the new ones, stored already."""
    step = _STEP.get()
    window = step.store.heads.windows[module.layer_idx]
    _refuse(module, window, given)
    if step.lengths is None:
        mask = _mask(step, window, query)
        out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
        return out, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _decode(step, module.layer_idx, query[:, :, 0], scale).unsqueeze(1), None


def _decode(step: Step, layer: int, query: Tensor, scale: float) -> Tensor:
    """One query a sequence [batch, heads, head_dim] over blocks, or over reservations."""
    store = step.store
    k_cache, v_cache = store.data[layer]
    assert step.block_table is not None
    assert step.lengths is not None
    seen = Seen(
        lengths=step.lengths,
        max_context=step.max_context,
        scale=scale,
        window=store.heads.windows[layer],
    )
    kernel = store.kernels.contiguous if store.contiguous else store.kernels.paged
    return kernel(query, k_cache, v_cache, step.block_table, seen)


AttentionInterface.register(KEY, attention)


def _refuse(module: Any, window: int, given: dict[str, Any]) -> None:
    """What a layer asks for that no kernel here has; a wrong answer would look like a right one."""
    for key in ("softcap", "s_aux", "position_bias"):
        if given.get(key) is not None:
            raise _cannot(module, f"its attention has {key}, which no kernel here has")
    asked = given.get("sliding_window")
    if asked is not None and asked != window:
        raise _cannot(
            module, f"layer {module.layer_idx} asks for a window of {asked}, not {window}"
        )


def _cannot(module: Any, why: str) -> KvtoolError:
    return KvtoolError(
        f"{type(module).__name__} cannot be run by bench decode: {why}",
        "choose a plain decoder; kvtool presets lists them",
        code="not_runnable",
    )


def _mask(step: Step, window: int, query: Tensor) -> Tensor | None:
    """None for plain causal attention; else which of the prompt's keys each query sees."""
    tokens = query.shape[2]
    if not window or window >= tokens:
        return None
    if window not in step.masks:
        position = torch.arange(tokens, device=query.device)
        back = position[:, None] - position[None, :]
        step.masks[window] = ((back >= 0) & (back < window))[None, None]
    return step.masks[window]

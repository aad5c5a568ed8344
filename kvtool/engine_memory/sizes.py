"""The sizes of a model that decide how much memory a forward pass takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.model.keys import Keys
from kvtool.model.shape import LayerCache, ModelShape
from kvtool.weights.counting import parts_of
from kvtool.weights.model import Model, model_of
from kvtool.weights.parts import Part

TOWERS = (
    "vision_config", "audio_config", "vision_tower", "mm_vision_tower", "visual", "img_processor",
    "encoder_config",
)  # fmt: skip
"""Keys of composites that have an encoder beside the language model."""
CHOSEN = (
    "num_experts_per_tok",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
    "num_experts_per_token",
)
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size")
DENSE_WIDTH = (
    "intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Elements of one token in one layer, the widest of the model, before tensor parallelism.

    `…_up` are the columns that an MLP's first matrices make (twice its width where it is gated).
    """

    hidden: int
    vocabulary: int
    layers: int
    query_width: int = 0
    """All query heads."""
    kv_width: int = 0
    """Keys and values as attention reads them; a latent's are the expanded ones."""
    dense_up: int = 0
    dense_width: int = 0
    chosen: int = 0
    """Routed experts that a token meets; 0: no experts."""
    expert_up: int = 0
    expert_width: int = 0
    tower: bool = False
    """An encoder of images or sounds beside the language model."""
    recurrent: bool = False
    """Layers with a state: convolutions, recurrences, linear attention."""


def sizes_of(name: str, config: Mapping[str, Any], shape: ModelShape) -> ModelSizes:
    """Read from a config by the recipe of its type, or by its keys where there is none.

    Raises KvtoolError if the config has neither hidden_size nor vocab_size.
    """
    model = model_of(config, shape)
    dense, experts = _widths(name, model, config, shape)
    words = model.keys.maybe("vocab_size", "padded_vocab_size")
    return ModelSizes(
        hidden=model.hidden,
        vocabulary=words.value if words else model.size("vocab_size"),
        layers=shape.num_modules,
        query_width=max((_queries(one) for one in shape.layers), default=0),
        kv_width=max((_keys_values(one) for one in shape.layers), default=0),
        dense_up=dense[0],
        dense_width=dense[1],
        chosen=experts[0],
        expert_up=experts[1],
        expert_width=experts[2],
        tower=_has_tower(model),
        recurrent=any(one.kind == "linear" for one in shape.layers),
    )


def _queries(entry: LayerCache) -> int:
    return entry.query_heads * (entry.mha_k_dim or entry.k_head_dim)


def _keys_values(entry: LayerCache) -> int:
    if entry.kind == "latent" and entry.mha_k_dim:
        return entry.query_heads * (entry.mha_k_dim + entry.mha_v_dim)
    return entry.kv_heads * (entry.k_head_dim + entry.v_head_dim)


def _has_tower(model: Model) -> bool:
    levels = (model.keys.raw, *model.level.above)
    return bool(model.level.above) or any(
        raw.get(key) is not None for raw in levels for key in TOWERS
    )


_Widths = tuple[tuple[int, int], tuple[int, int, int]]


def _widths(name: str, model: Model, config: Mapping[str, Any], shape: ModelShape) -> _Widths:
    """(up, width) of the widest dense MLP, and (chosen, up, width) of the experts."""
    try:
        parts = parts_of(name, config, shape)
    except KvtoolError:
        return _widths_by_keys(model)
    dense = max((_mlp(one, model.hidden) for one in _of(parts, "mlp", "shared")), default=(0, 0))
    routed = [(one.chosen, *_mlp(one, model.hidden)) for one in _of(parts, "experts")]
    return dense, max(routed, default=(0, 0, 0))


def _of(parts: Iterable[Part], *roles: str) -> Iterable[Part]:
    return (one for one in parts if one.role in roles and one.pieces and one.size.matrices)


def _mlp(part: Part, hidden: int) -> tuple[int, int]:
    """An MLP's columns up and its width, from its matrices: up, down, perhaps a gate."""
    matrices = max(2, round(part.size.matrices / (part.experts * hidden * part.pieces)))
    return (matrices - 1) * part.pieces, part.pieces


def _widths_by_keys(model: Model) -> _Widths:
    """By the usual keys, and gated."""
    keys = model.keys
    dense = _first(keys, DENSE_WIDTH) or 4 * model.hidden
    chosen = _first(keys, CHOSEN)
    wide = (_first(keys, EXPERT_WIDTH) or dense) if chosen else 0
    return (2 * dense, dense), (chosen, 2 * wide, wide)


def _first(keys: Keys, names: tuple[str, ...]) -> int:
    known = keys.maybe(*names, low=0)
    return known.value if known else 0

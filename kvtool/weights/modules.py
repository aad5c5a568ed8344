"""What checkpoints call the linear layers of each role: the names that lists of modules are held against."""

from __future__ import annotations

from collections.abc import Iterator

from kvtool.weights.parts import Role

LAYERS = (
    "language_model.model.layers.", "model.language_model.layers.", "model.layers.",
    "backbone.layers.", "transformer.h.", "layers.",
)  # fmt: skip
"""What stands before a layer's number."""
Wording = tuple[str, ...]
"""Modules of about the same size. One that holds two of them stands there twice."""

_LLAMA = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")
_NUMBERED = ("w1", "w2", "w3")
_FUSED = ("gate_up_proj", "gate_up_proj", "down_proj")
_PLAIN = ("up_proj", "down_proj")


def _in(module: str, *wordings: Wording) -> tuple[Wording, ...]:
    return tuple(tuple(f"{module}.{name}" for name in wording) for wording in wordings)


IN_LAYER: dict[Role, tuple[Wording, ...]] = {
    "attention": (
        _LLAMA,
        ("self_attn.qkv_proj", "self_attn.o_proj"),
        ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa",
         "self_attn.kv_b_proj", "self_attn.o_proj"),
        ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.o_proj"),
        ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b"),
        ("attention.wqkv", "attention.wo"),
        ("attn.c_attn", "attn.c_proj"),
        ("self_attention.query_key_value", "self_attention.dense"),
    ),
    "state": (
        ("linear_attn.in_proj_qkvz", "linear_attn.out_proj"),
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"),
        ("mixer.in_proj", "mixer.out_proj"),
        ("mamba.in_proj", "mamba.out_proj"),
        ("conv.in_proj", "conv.out_proj"),
    ),
    "mlp": (
        *_in("mlp", _GATED, _FUSED),
        *_in("mixer", _PLAIN),
        *_in("feed_forward", _GATED, _NUMBERED),
        *_in("ffn", _NUMBERED),
        *_in("mlp", ("c_fc", "c_proj"), ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h")),
    ),
    "experts": (
        *_in("mlp.experts.0", _GATED),
        *_in("mlp.experts", _FUSED),
        *_in("block_sparse_moe.experts.0", _NUMBERED),
        *_in("mixer.experts.0", _PLAIN),
        *_in("ffn.experts.0", _NUMBERED),
        *_in("feed_forward.experts", _FUSED),
        *_in("experts", _FUSED),
        *_in("moe", _GATED),
    ),
    "shared": (
        *_in("mlp.shared_experts", _GATED),
        *_in("mlp.shared_expert", _GATED),
        *_in("mixer.shared_experts", _PLAIN),
        *_in("ffn.shared_experts", _NUMBERED),
        *_in("feed_forward.shared_expert", _GATED),
        *_in("block_sparse_moe.shared_experts", _GATED),
        *_in("share_expert", _GATED),
    ),
}  # fmt: skip
"""Of a layer. The first expert stands for all of them."""
STATES_IN_ATTENTION = frozenset({"kimi_linear", "minimax", "minimax_m1", "minimax_text_01"})
"""Types whose linear attention has the names of attention."""
WHOLE: dict[Role, tuple[Wording, ...]] = {
    "head": (("language_model.lm_head",), ("lm_head",), ("head",), ("output",), ("embed_out",)),
    "encoder": (
        ("model.encoder.layers.0.self_attn.q_proj", "model.encoder.layers.0.fc1"),
        ("encoder.block.0.layer.0.SelfAttention.q", "encoder.block.0.layer.1.DenseReluDense.wo"),
    ),
    "vision": (
        ("model.visual.blocks.0.attn.qkv", "model.visual.blocks.0.mlp.linear_fc1"),
        ("visual.blocks.0.attn.qkv", "visual.blocks.0.mlp.linear_fc1"),
        ("model.vision_tower.encoder.layers.0.self_attn.q_proj",
         "model.vision_tower.encoder.layers.0.mlp.fc1"),
        ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
         "vision_tower.vision_model.encoder.layers.0.mlp.fc1"),
        ("vision_tower.encoder.blocks.0.wqkv", "vision_tower.encoder.blocks.0.mlp.fc0"),
        ("model.vision_model.encoder.layers.0.self_attn.q_proj",
         "model.vision_model.encoder.layers.0.mlp.fc1"),
        ("vision_model.transformer.layers.0.self_attn.q_proj",
         "vision_model.transformer.layers.0.mlp.fc1"),
    ),
    "audio": (
        ("model.audio_tower.layers.0.self_attn.q_proj", "model.audio_tower.layers.0.fc1"),
        ("audio_tower.layers.0.self_attn.q_proj", "audio_tower.layers.0.fc1"),
    ),
}  # fmt: skip
"""Of no layer. The first block of a tower stands for all of them."""


def wordings(role: Role, layer: int | None, kind: str) -> Iterator[list[list[str]]]:
    """Each way to write the modules of a role: for each module, its names with all prefixes."""
    if layer is None:
        for wording in WHOLE.get(role, ()):
            yield [[name] for name in wording]
        return
    found = IN_LAYER.get(role, ())
    if role == "state" and kind in STATES_IN_ATTENTION:
        found = (_LLAMA,)
    for wording in found:
        yield [[f"{before}{layer}.{name}" for before in LAYERS] for name in wording]

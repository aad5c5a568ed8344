"""Language models that stand inside composites, most of them nowhere else."""

from __future__ import annotations

from kvtool.weights.pieces import attention, norms
from kvtool.weights.recipe import Recipe

INSIDE: dict[str, Recipe] = {
    "glm4v_text": Recipe(mixer=attention(qkv_bias=True), norms=norms(4)),
    "ministral3": Recipe(),
    "qwen2_5_vl_text": Recipe(mixer=attention(qkv_bias=True)),
    "qwen2_vl_text": Recipe(mixer=attention(qkv_bias=True)),
}

"""Which recipe counts a model type, and which towers stand beside it."""

from __future__ import annotations

from kvtool.weights.crossing import CROSSING
from kvtool.weights.dense import DENSE
from kvtool.weights.gemma import GEMMA
from kvtool.weights.hybrids import HYBRIDS
from kvtool.weights.inside import INSIDE
from kvtool.weights.latent import LATENT, LATENT_LIKE
from kvtool.weights.pieces import Whole
from kvtool.weights.published import PUBLISHED, PUBLISHED_LIKE
from kvtool.weights.recipe import Recipe
from kvtool.weights.sparse import SPARSE
from kvtool.weights.towers import TOWERS

RECIPES: dict[str, Recipe] = {
    **DENSE, **GEMMA, **SPARSE, **LATENT, **HYBRIDS, **CROSSING, **INSIDE, **PUBLISHED,
}  # fmt: skip
LIKE: dict[str, str] = {**LATENT_LIKE, **PUBLISHED_LIKE}
"""Types outside transformers, and the type whose recipe their published code follows."""

__all__ = ["LIKE", "RECIPES", "TOWERS", "Recipe", "Whole"]

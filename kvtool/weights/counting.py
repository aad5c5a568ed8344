"""The parts of a model, counted from its config by the recipe of its type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.model.shape import ModelShape
from kvtool.weights.model import Model, model_of
from kvtool.weights.parts import Part
from kvtool.weights.table import LIKE, RECIPES, TOWERS


def parts_of(name: str, config: Mapping[str, Any], shape: ModelShape) -> tuple[Part, ...]:
    """Every part, by layers, then the rest. `shape` is read from the same config.

    Raises KvtoolError (weights_not_counted), by `name`, for a type without a recipe.
    """
    return tuple(_parts(name, model_of(config, shape)))


def _parts(name: str, model: Model) -> Iterator[Part]:
    kind = model.keys.model_type
    recipe = RECIPES.get(LIKE.get(kind, kind))
    outer = str(model.level.above[0].get("model_type")) if model.level.above else ""
    if recipe is None or (outer and outer not in TOWERS):
        raise not_counted(name, f"{(outer or kind)[:60]} has no recipe")
    if model.keys.raw.get("per_layer_config") is not None:
        raise not_counted(name, "its layers differ")
    for layer in model.layers():
        for piece in (recipe.mixer, recipe.feed, recipe.norms):
            yield from piece(model, layer)
    for whole in (recipe.last_norm, recipe.words, *recipe.beside, *TOWERS.get(outer, ())):
        yield from whole(model)


def not_counted(name: str, why: str) -> KvtoolError:
    """The refusal of a model whose parameters no recipe counts."""
    return KvtoolError(
        f"{name}: its weights are not counted yet ({why})",
        "give --weights 16GiB (those of the whole model), or the cache's memory with --kv-memory",
        code="weights_not_counted",
    )

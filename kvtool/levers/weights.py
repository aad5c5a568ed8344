"""A model with its weights in fewer bits: an estimate, since no checkpoint was read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtool.weights.schemes import scheme_of
from kvtool.weights.stored import stored
from kvtool.weights.usual import SCHEMES

if TYPE_CHECKING:
    from kvtool.plan_model import PlanModel
    from kvtool.plan_query import PlanQuery

QUANTISED_BELOW = 0.75
"""Of the unquantised bytes: --weights that are fewer are a quantised checkpoint's."""


def why_not(model: PlanModel, query: PlanQuery) -> str:
    """Why its weights cannot be quantised here; empty: they are counted, and in 16 bits or more."""
    if query.kv_memory is not None:
        return "--kv-memory leaves the weights out"
    if model.stored is None:
        return "the weights are not counted"
    few = query.weights is not None and query.weights < QUANTISED_BELOW * model.stored.bytes
    if few or scheme_of(model.config, name=model.subject.name).key:
        return "the weights are quantised already"
    return ""


def quantised(model: PlanModel, query: PlanQuery, name: str) -> tuple[PlanModel, PlanQuery]:
    """The model as if stored by a scheme of `SCHEMES`; --weights, where given, shrinks alike."""
    assert model.stored is not None, "why_not"
    parts = tuple(one.part for one in model.stored.parts)
    config = {**model.config, "quantization_config": SCHEMES[name]}
    found = stored(parts, config, model.dtype, name=model.subject.name)
    smaller = replace(model, stored=found, exact=None)  # the headers are those of more bits
    if query.weights is None:
        return smaller, query
    less = -(-query.weights * found.bytes // model.stored.bytes)
    return smaller, replace(query, weights=less)

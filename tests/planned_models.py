"""Models and queries for tests of plans, from the presets."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvtool import catalog, config
from kvtool.model import read_model
from kvtool.plan_model import PlanModel, model_for
from kvtool.plan_query import PlanQuery, gpus_named


@cache
def model(name: str) -> PlanModel:
    loaded = config.load_config(name)
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    return model_for(loaded, shape, PlanQuery(gpus=()))


def asked(gpu: str, engine: str = "ideal", **more: Any) -> PlanQuery:
    return PlanQuery(gpus=gpus_named(gpu), engines=(engine,), **more)

"""Cases of `kvtool plan` for several test files."""

from __future__ import annotations

from typing import Any

from kvtool import catalog
from kvtool.config import load_config
from kvtool.errors import KvtoolError
from kvtool.model import read_model
from kvtool.plan import PlanCase
from kvtool.plan_model import PlanModel, model_for
from kvtool.plan_query import PlanQuery, gpus_named
from kvtool.planning import cases_of


def model_of(name: str, query: PlanQuery) -> PlanModel:
    loaded = load_config(name)
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    return model_for(loaded, shape, query)


def case_of(
    name: str, gpu: str = "h100", engine: str = "vllm", **words: Any
) -> tuple[PlanModel, PlanQuery, PlanCase]:
    query = PlanQuery(gpus=gpus_named(gpu), engines=(engine,), **words)
    model = model_of(name, query)
    lost: list[KvtoolError] = []
    found = list(cases_of(model, query, lost))
    if lost:
        raise lost[0]
    (case,) = found
    return model, query, case

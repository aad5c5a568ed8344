"""What is said of the rows of `kvtool plan` beside them: what speeds, prices and tables leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool import catalog
from kvtool.dtypes import DTYPES, parse_kv_dtype
from kvtool.engine_memory.defaults import version_of
from kvtool.levers.caveats import of_cache
from kvtool.plan_model import PlanModel
from kvtool.plan_query import VERSION, PlanQuery
from kvtool.planning import NODE
from kvtool.run import Row
from kvtool.size_row import DS_MLA

SPARSE = {"indexer", "compressed"}
"""Kinds of layers of which a step reads what is selected."""


STATES_CACHED = (0, 29)
"""The version of vLLM from which on prefixes of models with states are cached where nothing is said: a public
log of 0.29 (tests/data/engine_logs_more.jsonl, S03)."""


def of_vllm(rows: list[Row], query: PlanQuery, given: Mapping[str, Any]) -> list[str]:
    """Of its rows, what its own log or its default may say otherwise."""
    ours = [row for row in rows if row["engine"] == "vllm"]
    said = []
    if query.kv_memory is None and ours and given["engine_version"] is None:
        said.append(f"what vLLM keeps besides follows its {VERSION}: --engine-version sets yours")
    if query.kv_memory is None and rows and all(row["engine"] == "ideal" for row in rows):
        said.append("of no engine: blocks, CUDA graphs and padding are not counted (--engine vllm)")
    if query.kv_memory is not None and any(row["tp"] * row["pp"] > 1 for row in ours):
        said.append(
            "vLLM's log may print one rank's memory, and its pool is what the rank with the least has"
        )
    version = version_of(query.version)
    states = any(one["kind"] == "linear" for row in ours for one in row["kinds"])
    if states and given["prefix_caching"] is None and (version is None or version >= STATES_CACHED):
        said.append(
            "vLLM from 0.29 on caches prefixes of models with states unless it is told not to: --prefix-caching plans that"
        )
    return said


def of_ranked(rows: list[Row], query: PlanQuery) -> list[str]:
    """How the GPUs of --gpu all are ordered, and how many are not among them."""
    if not query.ranked:
        return []
    timed = [row for row in rows if row["tpot_s"] is not None]
    last = dict.fromkeys(row["gpu"] for row in timed if row["ridge"] is None)
    said = ["by USD a million tokens, those without a price after them"] if timed else []
    if last:
        said.append(
            f"last those whose rate of computing nobody published, by reading alone: {', '.join(last)}"
        )
    known = len(catalog.gpu_presets())
    without = known - len({row["gpu"] for row in rows})
    left = (
        f"{without} of {known} GPU presets are not listed: nobody printed their memory, the engine or the model's "
        "dtype does not run on them, they are two devices, or 16 do not hold what is asked (name one to see)"
    )
    return ["; ".join(said)] * bool(said) + [left] * bool(without and rows)


def of_speeds(rows: list[Row]) -> list[str]:
    """What times and prices leave out."""
    timed = [row for row in rows if row["tpot_s"] is not None]
    if not timed:
        return []
    said = "speeds and prices are of decoding alone, without prefills"
    if any(
        row["gpus"] > 1 for row in timed
    ):  # of vLLM replicas too, whose experts are cut over all
        said += "; what ranks exchange takes no time in them"
    if any(row.get("enforce_eager") for row in timed):
        said += "; without CUDA graphs a step takes longer, by the launches of its kernels"
    sparse = dict.fromkeys(
        row["model"] for row in timed if SPARSE & {one["kind"] for one in row["kinds"]}
    )
    most = f"{', '.join(sparse)}: attention that selects reads less of the cache than is counted: TPOT is at most this"
    wide = any(row["command"] and row["gpus"] > NODE for row in timed)
    nodes = f"more than {NODE} GPUs are several nodes: the command is to be started for all of them (Ray, or vLLM's --nnodes)"
    return [said, *([most] if sparse else []), *([nodes] if wide else [])]


def of_formats(rows: list[Row], model: PlanModel, query: PlanQuery) -> list[str]:
    """What a KV dtype that was asked for, or found, may cost."""
    gpu = query.gpus[0].preset
    auto = DTYPES[model.shape.kv_dtype] if model.shape.kv_dtype else model.dtype
    asked = dict.fromkeys(
        row["kv_dtype"] for row in rows if row["kv_dtype"] not in (auto.name, DS_MLA)
    )
    return [
        f"KV in {name}: {text}"
        for name in asked
        if (text := of_cache(gpu, parse_kv_dtype(name, auto=auto), model.shape))
    ]


def of_hidden(given: dict[str, Any], rows: list[Row]) -> list[str]:
    """What a table of several plans has no room for."""
    fields = {
        "levers": "levers", "ways": "ways", "workload": "lengths", "trace": "lengths",
        "disaggregate": "disaggregation", "tiers": "tiers",
    }  # fmt: skip
    asked = [
        f"--{name}"
        for name, field in fields.items()
        if given[name] and any(field in row for row in rows)
    ]
    if len(rows) < 2 or not asked:
        return []
    return [f"of several plans, what {' and '.join(asked)} say is in the JSON (-o plan.json) alone"]


def of_prices(query: PlanQuery) -> list[str]:
    """Where the prices come from: examples of a day, not quotes."""
    if query.price is not None:
        return []
    if query.ranked:
        return ["prices are the presets' examples of one day, not quotes (kvtool presets gpus)"]
    return [
        f"{one.preset.id}: {one.preset.price_usd_per_hour:g} USD an hour is an example of "
        f"{one.preset.price_date}, {one.preset.price_source} (--price sets it)"
        for one in query.gpus
        if one.preset.price_usd_per_hour is not None
    ]

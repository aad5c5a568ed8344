"""What is refused of the words of `kvtool plan` before a model is read: what contradicts itself, or changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kvtool.cli.plan_extras import KINDS, kinds_of, tiers_of
from kvtool.cli.plan_words import is_ranked
from kvtool.cli.simulate_disaggregated import link_bits
from kvtool.errors import KvtoolError, usage_error
from kvtool.plan_query import PlanQuery
from kvtool.sweep_workers import BACKENDS

MOST_ROWS = 200_000
MOST_SLOW = 500
"""Of rows that look for something, or say more than their case."""
LOOKED_FOR = {"context": "context", "batch": "batch", "utilisation": "gpu_memory_utilization"}
"""Options of which --solve takes the place."""
PARTNERS = {
    "num_requests": ("workload",),
    "prompt_tokens": ("disaggregate",),
    "output_tokens": ("disaggregate",),
    "link": ("disaggregate",),
}
"""Options that say something of another one alone."""
OF_VLLM = (
    "prefix_caching", "hybrid", "engine_version", "gpu_memory_utilization", "enforce_eager",
)  # fmt: skip
SLOW = ("solve", "levers", "ways", "workload", "trace", "disaggregate", "tiers")
NOT_RANKED = ("tp", "dp", "ways", "levers", "tiers", "disaggregate", "solve", "kv_memory")
NOT_SOLVED = ("levers", "ways", "tiers", "disaggregate")
NOT_GIVEN_MEMORY = ("reserve", "engine_version", "gpu_memory_utilization")
"""What decides how much is left for the cache, which --kv-memory says."""


def check(given: Mapping[str, Any], query: PlanQuery) -> None:
    """Raise the first that is found."""
    for error in _found(given, query):
        raise error


def _found(given: Mapping[str, Any], query: PlanQuery) -> Iterator[KvtoolError]:
    yield from _pairs(given)
    yield from _apart(given)
    tiers_of(given["tiers"])
    yield from _partners(given, query)
    yield from _solving(given, query)
    yield from _ranking(given, query)
    if query.kv_memory is not None:
        yield from _changes_nothing(given, NOT_GIVEN_MEMORY, "--kv-memory says what is left")
    backend = given["backend"]
    if backend is not None and backend not in BACKENDS:
        yield usage_error(
            f"--backend: '{backend[:40]}' is not known", f"it is {' or '.join(BACKENDS)}"
        )
    yield from _too_many(given, query)


def _pairs(given: Mapping[str, Any]) -> Iterator[KvtoolError]:
    if given["workload"] is not None and given["trace"] is not None:
        yield usage_error("--workload and --trace are two sets of requests", "leave out one")
    if given["calibrate"] is not None and given["efficiency"] is not None:
        yield usage_error("--calibrate and --efficiency say the same", "leave out one")


def _apart(given: Mapping[str, Any]) -> Iterator[KvtoolError]:
    if given["disaggregate"] is None:
        return
    if given["link"] is None:
        yield usage_error("--disaggregate sends caches over a link", "add --link 400Gb")
    kinds_of(given["disaggregate"])
    link_bits(given["link"])
    if given["pp"] != "1":
        yield usage_error("--disaggregate knows no stages", "leave out --pp")


def _partners(given: Mapping[str, Any], query: PlanQuery) -> Iterator[KvtoolError]:
    for name, partners in PARTNERS.items():
        if given[name] is not None and all(given[one] is None for one in partners):
            example = (
                f"add {KINDS}, or" if "disaggregate" in partners else f"add --{partners[0]}, or"
            )
            yield usage_error(f"{_flag(name)} is of --{partners[0]}", f"{example} leave it out")
    if "vllm" in query.engines:
        return
    for name in OF_VLLM:
        if given[name] not in (None, False) or (name == "hybrid" and given[name] is False):
            yield usage_error(f"{_flag(name)} is of vLLM", "add --engine vllm, or leave it out")


def _solving(given: Mapping[str, Any], query: PlanQuery) -> Iterator[KvtoolError]:
    what = given["solve"]
    if what is None:
        return
    yield from _changes_nothing(given, NOT_SOLVED, f"--solve {what} looks for one number")
    named = LOOKED_FOR.get(what)
    if named is not None and given[named] is not None:
        yield usage_error(
            f"--solve {what} looks for it, and {_flag(named)} gives it", "leave out one"
        )
    if what == "kv-dtype" and given["kv_dtype"] != "auto":
        yield usage_error("--solve kv-dtype looks for it, and --kv-dtype gives it", "leave out one")
    if what == "gpus" and any(one.count is not None for one in query.gpus):
        ids = ",".join(one.preset.id for one in query.gpus)
        yield usage_error(
            "--solve gpus looks for how many, and --gpu says it", f"write --gpu {ids}"
        )


def _ranking(given: Mapping[str, Any], query: PlanQuery) -> Iterator[KvtoolError]:
    if not is_ranked(given):
        return
    why = "--gpu all finds ranks and replicas for each GPU"
    yield from _changes_nothing(given, NOT_RANKED, why)
    if given["pp"] != "1":
        yield usage_error(f"{why}: --pp would change nothing", "leave it out, or name GPUs")
    lists = {"--engine": query.engines, "--kv-dtype": query.kv_dtypes,
             "--gpu-memory-utilization": query.utilizations}  # fmt: skip
    for flag, values in lists.items():
        if len(values) > 1:
            yield usage_error(f"--gpu all takes one {flag}", "run it once for each, or name GPUs")


def _changes_nothing(
    given: Mapping[str, Any], names: tuple[str, ...], why: str
) -> Iterator[KvtoolError]:
    for name in names:
        if given[name]:
            yield usage_error(
                f"{why}: {_flag(name)} would change nothing", "leave out one of the two"
            )


def _too_many(given: Mapping[str, Any], query: PlanQuery) -> Iterator[KvtoolError]:
    slow = is_ranked(given) or any(given[name] for name in SLOW)
    kinds = 1 if is_ranked(given) else len(query.gpus)
    rows = math.prod((
        len(given["models"]), kinds, len(query.engines), len(query.tps), len(query.pps), len(query.dps),
        len(query.kv_dtypes), len(query.utilizations), len(query.contexts) or 1, len(query.users),
    ))  # fmt: skip
    most = MOST_SLOW if slow else MOST_ROWS
    if rows > most:
        yield usage_error(
            f"{rows:,} plans are asked for at once, more than {most:,}",
            "give shorter lists, or several runs",
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

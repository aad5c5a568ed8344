"""The words of `kvtool fragment` about its requests and its pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from kvtool import catalog
from kvtool.catalog import WorkloadPreset
from kvtool.errors import usage_error
from kvtool.lengths import Lengths, parse_lengths
from kvtool.pool import LONGEST_IN_POOL, PAPER_SLOTS, Pool, default_tokens, pool_of
from kvtool.trace import Trace, read_trace
from kvtool.traffic import LONGEST, Traffic, made_traffic, room_for_longest, traced_traffic
from kvtool.units import parse_count, parse_counts
from kvtool.workload import Workload

DEFAULT_WORKLOAD, DEFAULT_REQUESTS = "chat", 10_000
MEANS = {"prompt": 161.31, "output": 337.99}
"""Of ShareGPT: vLLM paper, section 6.1."""
CAP = 1024
BLOCK_SIZE = 16
MOST_REQUESTS = 10**9
DISTS = ("dist", "prompt_dist", "output_dist")
OF_LENGTHS = ("prompt_mean", "output_mean", "prompt_cap", "output_cap")


@dataclass(slots=True, kw_only=True)
class Traffics:
    """The requests that the options ask for: a preset, distributions or a trace; made once each."""

    given: Mapping[str, Any]
    preset: WorkloadPreset | None
    trace: Trace | None
    counts: Sequence[int]
    rates: Sequence[str]
    longest: int
    """max_model_len where the options do not say."""
    notes: list[str] = field(default_factory=list)
    made: dict[Any, Traffic] = field(default_factory=dict)

    def traffic(self, count: int, rate: str, longest: int) -> Traffic:
        """`count` requests; the default caps follow from max_model_len."""
        key = (count, rate, longest)
        if key not in self.made:
            self.made[key] = self._make(count, rate, longest)
        return self.made[key]

    def _make(self, count: int, rate: str, longest: int) -> Traffic:
        if self.trace is not None:
            requests = self.trace.requests
            if count < len(requests):
                import numpy as np

                requests = requests.take(np.arange(count))
            trace = replace(self.trace, requests=requests)
            return traced_traffic(trace, rate, self.given["seed"])
        lengths = {side: self._lengths(side, longest) for side in MEANS}
        workload = Workload(
            name=self._name(),
            prompt=lengths["prompt"],
            output=lengths["output"],
            num_requests=count,
            seed=self.given["seed"],
        )
        return made_traffic(workload, rate)

    def _lengths(self, side: str, longest: int) -> Lengths:
        given, preset = self.given, self.preset
        own = f"{side}_dist"
        option = own if given[own] else "dist" if given["dist"] else own
        spec = given[own] or given["dist"] or getattr(preset, own)
        usual_cap = getattr(preset, f"{side}_cap") if preset else min(CAP, max(1, longest // 2))
        cap = given[f"{side}_cap"]
        lengths = parse_lengths(
            spec,
            name=f"--{option.replace('_', '-')}",
            mean=given[f"{side}_mean"],
            cap=usual_cap if cap is None else parse_count(cap, name=f"--{side}-cap"),
            default_mean=(getattr(preset, f"{side}_mean") if preset else None) or MEANS[side],
            column=list(MEANS).index(side),
        )
        if lengths.clipped_share >= 0.005:
            said = f"{side}s: {lengths.clipped_share:.1%} are cut to {lengths.cap:,} tokens"
            self.notes += [] if said in self.notes else [said]
        return lengths

    def _name(self) -> str:
        """The preset's, if nothing of it was changed; else the distributions."""
        changed = any(self.given[name] is not None for name in (*DISTS, *OF_LENGTHS))
        if self.preset is not None and not changed:
            return self.preset.id
        specs = [
            self.given[own] or self.given["dist"] or getattr(self.preset, own)
            for own in (f"{side}_dist" for side in MEANS)
        ]
        return specs[0] if specs[0] == specs[1] else " / ".join(specs)


def traffics_of(given: Mapping[str, Any]) -> Traffics:
    """Where the requests come from; the trace is read here."""
    load.cache_clear()
    dists = [name for name in DISTS if given[name]]
    trace = None
    if given["trace"] is not None:
        others = [n for n in ("workload", *dists, *OF_LENGTHS) if given[n] is not None]
        if others:
            raise usage_error(
                f"--trace has its own requests: --{others[0].replace('_', '-')} says otherwise",
                "leave out one of the two",
            )
        trace = read_trace(given["trace"], format=given["trace_format"])
    preset = None
    both = given["dist"] or (given["prompt_dist"] and given["output_dist"])
    if trace is None and (given["workload"] or not both):
        preset = catalog.workload_preset(given["workload"] or DEFAULT_WORKLOAD)
    return Traffics(
        given=given,
        preset=preset,
        trace=trace,
        counts=_counts(given["num_requests"], trace),
        rates=_rates(given["rate"], preset),
        longest=_longest(given, preset, trace),
        notes=_notes_of(trace, given["rate"]) if trace else [],
    )


def _notes_of(trace: Trace, rate: str | None) -> list[str]:
    """What the reader of the file says, and that its time stamps are not used unless asked for."""
    said = [f"{trace.name}: {text}" for text in trace.notes]
    if trace.has_arrivals and rate is None:
        said.append(
            f"{trace.name}: its time stamps are not used, every request waits from the start; "
            "--rate trace uses them"
        )
    return said


def _counts(typed: str | None, trace: Trace | None) -> list[int]:
    if typed is None:
        return [DEFAULT_REQUESTS if trace is None else len(trace.requests)]
    counts = parse_counts(typed, name="--num-requests", high=MOST_REQUESTS)
    if trace is not None:
        counts = [min(count, len(trace.requests)) for count in counts]
    return list(dict.fromkeys(counts))


def _rates(typed: str | None, preset: WorkloadPreset | None) -> list[str]:
    if typed is None:
        return [f"{preset.rate:g}" if preset and preset.rate else "saturated"]
    return [word.strip() for word in typed.split(",")]


def _longest(given: Mapping[str, Any], preset: WorkloadPreset | None, trace: Trace | None) -> int:
    """The preset's, the model's, or room for the longest request of the trace."""
    if preset is not None and preset.max_model_len:
        return preset.max_model_len
    if given["model"] is not None and given["max_model_len"] is None:
        from kvtool.model import read_model

        table = catalog.class_defaults()["types"]
        longest = read_model(load(given["model"]).config, table).max_context
        if longest is not None:
            return longest
    return LONGEST if trace is None else room_for_longest(trace)


def check_numbers(given: Mapping[str, Any]) -> None:
    """Refuse numbers that are none."""
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            flag = f"--{name.replace('_', '-')}"
            raise usage_error(f"{flag}: {value} is no number of anything", f"give {flag} a number")


def params_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options as they were typed, in JSON's terms."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in given.items()
    }


def files_in(given: Mapping[str, Any]) -> list[str]:
    """The files that a run reads."""
    named = [given[name] for name in ("trace", "model") if given[name]]
    specs = [given[name] for name in DISTS if given[name]]
    return named + [spec.partition(":")[2] for spec in specs if spec.startswith("empirical:")]


def resolved(given: Mapping[str, Any], traffics: Traffics) -> dict[str, Any]:
    """The options with what the workload says where the user says nothing."""
    preset = traffics.preset
    block_size = given["block_size"] or (preset.block_size if preset else None) or BLOCK_SIZE
    longest = given["max_model_len"] or traffics.longest
    return {**given, "block_size": str(block_size), "max_model_len": str(longest)}


def pools_of(given: Mapping[str, Any], traffics: Traffics) -> tuple[list[Pool], list[str]]:
    """A pool for each amount that was typed, and what must be said of it."""
    ways: dict[str, list[Any]] = {
        "num_blocks": _listed(given["num_blocks"], "--num-blocks"),
        "pool_tokens": _listed(given["pool_tokens"], "--pool-tokens"),
        "kv_memory": _words(given["kv_memory"]),
        "gpu": _words(given["gpu"]),
    }
    notes: list[str] = []
    if given["model"] is None and not any(ways.values()):
        ways["pool_tokens"] = [_default_pool(traffics)]
        if ways["pool_tokens"] != [PAPER_SLOTS]:
            notes.append(
                f"the pool is {ways['pool_tokens'][0]:,} tokens, room for {LONGEST_IN_POOL} of the "
                "longest requests: --pool-tokens, or --model and --gpu, say otherwise"
            )
    rest = ("weights", "gpu_memory_utilization", "kv_dtype", "dtype", "tp", "model")
    fixed = {name: given[name] for name in rest}
    several = [name for name, values in ways.items() if len(values) > 1]
    many = several[0] if several else next((name for name in ways if ways[name]), "num_blocks")
    pools = []
    for value in ways[many] or [None]:
        one = {name: values[0] if values else None for name, values in ways.items()}
        pools.append(pool_of(load=load, **fixed, **{**one, many: value}))
    notes += [note for pool in pools for note in (*_source(pool), *pool.notes)]
    return pools, list(dict.fromkeys(notes))


@cache
def load(model: str) -> Any:
    """Once for a run: standard input can be read only once, and the Hub need not be asked again."""
    from kvtool.config import load_config

    return load_config(model)


def _source(pool: Pool) -> tuple[str, ...]:
    return (f"the pool: {pool.source}",) if pool.model is not None else ()


def _default_pool(traffics: Traffics) -> int:
    if traffics.preset is not None and traffics.preset.pool_tokens:
        return traffics.preset.pool_tokens
    typed = traffics.given["max_model_len"]
    longest = [traffics.longest] if typed is None else parse_counts(typed, name="--max-model-len")
    return default_tokens(max(longest))


def _listed(typed: str | None, name: str) -> list[int]:
    return [] if typed is None else parse_counts(typed, name=name)


def _words(typed: str | None) -> list[str]:
    return [] if typed is None else [word.strip() for word in typed.split(",")]

"""The words of `kvtool prefix`: where the prompts come from, and what is asked of each set of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtool import catalog
from kvtool.cli.options import names_in
from kvtool.cli.prefix_memory import ALL, ON_GPU, model_of, rooms_of, tiers_of, words_in
from kvtool.errors import usage_error
from kvtool.model_pool import Fit
from kvtool.output import PICTURES
from kvtool.prefill import Prefill
from kvtool.prefix import Asked, Kind, Room
from kvtool.prefix_worth import Tier
from kvtool.prompts import Prompts, made, traced
from kvtool.sharing import RANGES, WHOLE, sharing_of
from kvtool.sim.prefix.result import HASH, KNOWN, NONE, OUTPUTS, POLICIES, RADIX
from kvtool.units import parse_count, parse_counts

DEFAULT_WORKLOAD = "multi-turn-chat"
BLOCK_SIZE = {HASH: 16, RADIX: 1}
"""vLLM's and SGLang's own defaults."""
MOST_POINTS, MOST_CASES = 100_000, 1000
MOST_SOURCES = 100
OF_WORKLOAD = tuple(name for name in RANGES if name != "keep")
OF_TRACE = ("trace_format", "trace_block_size", "tenants")
OF_MODEL = (
    "kv_dtype", "dtype", "tp", "weights", "gpu", "gpu_memory_utilization", "efficiency", "tiers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What was typed, understood."""

    given: Mapping[str, Any]
    prompts: Sequence[Prompts]
    rooms: Sequence[Room]
    all_rooms: bool
    model: Fit | None
    max_context: int | None
    """Of the model, where its config states one."""
    prefill: Prefill | None
    tiers: tuple[Tier, ...]
    points: int
    explained: int | None
    notes: list[str] = field(default_factory=list)

    def asked(self, prompts: Prompts) -> Asked:
        """What is asked of one set of prompts: defaults follow from what they are."""
        return Asked(
            kinds=self.kinds(prompts),
            rooms=self.rooms_in(prompts),
            all_rooms=self.all_rooms,
            points=self.points,
            model=self.model_name,
            bytes_per_token=self.model.bytes_per_token if self.model else None,
            prefill=self.prefill,
            tiers=self.tiers,
            with_tree=self.given["show_tree"],
            explained=self.explained,
        )

    @property
    def model_name(self) -> str | None:
        """As its config or preset has it."""
        known = self.model or self.prefill
        return known.model if known else None

    def kinds(self, prompts: Prompts) -> list[Kind]:
        """Index × policy × block size × outputs, in the order given."""
        given = self.given
        sizes = _sizes(given["block_size"])
        usual = [NONE] if prompts.is_trace else [KNOWN]
        typed = given["cache_outputs"]
        outputs = usual if typed is None else names_in(typed, "--cache-outputs", OUTPUTS)
        return [
            Kind(index=index, policy=policy, block_size=size, cache_outputs=cached)
            for index in names_in(given["index"], "--index", (HASH, RADIX))
            for policy in names_in(given["policy"], "--policy", POLICIES)
            for size in sizes or [prompts.block_size if prompts.is_trace else BLOCK_SIZE[index]]
            for cached in outputs
        ]

    def rooms_in(self, prompts: Prompts) -> list[Room]:
        """Blocks of made prompts are of one size for all indexes, unless it was typed."""
        if prompts.is_trace or self.given["block_size"] is not None:
            return list(self.rooms)
        unit = BLOCK_SIZE[HASH]
        return [
            replace(room, blocks=None, tokens=room.blocks * unit) if room.blocks else room
            for room in self.rooms
        ]


def parse(given: Mapping[str, Any]) -> Words:
    """The options as typed; every word is understood before a trace or a config is read."""
    _check(given)
    notes: list[str] = []
    fit, prefill, max_context = model_of(given, notes)
    rooms, all_rooms = rooms_of(given, fit)
    explained = given["explain_request"]
    number = None if explained is None else parse_count(explained, name="--explain-request")
    return Words(
        given=given,
        prompts=_prompts(given, number),
        rooms=rooms,
        all_rooms=all_rooms,
        model=fit,
        max_context=max_context,
        prefill=prefill,
        tiers=tiers_of(given["tiers"], fit),
        points=parse_count(given["points"], name="--points", high=MOST_POINTS),
        explained=number,
        notes=notes + _idle(given),
    )


def check_picture(words: Words, output: Path | None) -> None:
    """Refuse a curve of one point before anything is replayed."""
    drawn = output is not None and output.suffix.lower() in PICTURES
    if drawn and not words.all_rooms and len(words.rooms) < 2:
        raise usage_error(
            f"-o {output}: a curve wants several capacities",
            "leave out --capacity, give several, or write -o rows.csv",
        )


def _check(given: Mapping[str, Any]) -> None:
    """Refuse words that contradict each other."""
    if given["trace"] is not None:
        others = [name for name in ("workload", *OF_WORKLOAD) if given[name] is not None]
        if others:
            raise usage_error(
                f"--trace has its own requests: {_flag(others[0])} says otherwise",
                "leave out one of the two",
            )
        outputs = given["cache_outputs"]
        if outputs is not None and KNOWN in names_in(outputs, "--cache-outputs", OUTPUTS):
            raise usage_error(
                "--cache-outputs known: a trace does not say what was generated",
                "take none or unique, or a made --workload",
            )
    if given["trace"] is None and (named := [n for n in OF_TRACE if given[n] is not None]):
        raise usage_error(f"{_flag(named[0])} is of a --trace", "add --trace FILE, or leave it out")
    if given["model"] is None and (named := [n for n in OF_MODEL if given[n] is not None]):
        raise usage_error(
            f"{_flag(named[0])} depends on the model", "add --model, such as --model llama-3-8b"
        )
    if given["show_tree"] and RADIX not in names_in(given["index"], "--index", (HASH, RADIX)):
        raise usage_error("--show-tree draws a radix tree", "add --index radix")
    if given["explain_request"] is not None and ALL in words_in(given["capacity"]):
        raise usage_error(
            "--explain-request looks at one cache, and --capacity is all of them",
            "give a capacity: --capacity 1000",
        )
    if given["tiers"] is not None and ALL in words_in(given["capacity"]):
        raise usage_error(
            "--tiers are below a GPU's cache of some capacity, and --capacity is all of them",
            "give a capacity: --capacity 4GiB, or --capacity gpu with --gpu",
        )
    _sizes(given["block_size"])
    for option, known in (("policy", POLICIES), ("cache_outputs", OUTPUTS)):
        names_in(given[option], _flag(option), known)


def _idle(given: Mapping[str, Any]) -> list[str]:
    """Notes on options that change nothing here."""
    idle = {
        "--points": given["points"] != "1000" and ALL not in words_in(given["capacity"]),
        "--efficiency": given["efficiency"] is not None and given["gpu"] is None,
        "--gpu-memory-utilization": given["gpu_memory_utilization"] is not None
        and ON_GPU not in words_in(given["capacity"]),
        "--seed": given["seed"] and given["trace"] is not None,
        "--weights": given["weights"] is not None and given["gpu"] is None,
        "--tiers": given["tiers"] is not None
        and (
            HASH not in names_in(given["index"], "--index", (HASH, RADIX))
            or "lru" not in names_in(given["policy"], "--policy", POLICIES)
        ),
    }
    return [f"{option} changes nothing here" for option, true in idle.items() if true]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _sizes(typed: str | None) -> list[int]:
    if typed is None:
        return []
    return list(dict.fromkeys(parse_counts(typed, name="--block-size", high=2**20)))


# -- prompts


def _prompts(given: Mapping[str, Any], explained: int | None) -> list[Prompts]:
    counts: list[int | None] = [None]
    if given["num_requests"] is not None:
        counts = [*parse_counts(given["num_requests"], name="--num-requests", high=2**33)]
    if explained is not None:
        if given["num_requests"] is not None:
            raise usage_error(
                f"--explain-request {explained:,} ends the replay there: --num-requests says otherwise",
                "leave out --num-requests",
            )
        counts = [explained]
    if given["trace"] is not None:
        return [_traced(given, count) for count in counts]
    typed = DEFAULT_WORKLOAD if given["workload"] is None else given["workload"]
    names = list(catalog.preset_ids("prefixes")) if typed.lower() == ALL else typed.split(",")
    names = [name.strip() for name in names]
    lists = {name: _numbers(given, name) for name in OF_WORKLOAD}
    combined = math.prod(map(len, (names, counts, *lists.values())))
    if combined > MOST_SOURCES:
        raise usage_error(
            f"{combined:,} sets of prompts are too many", f"ask for at most {MOST_SOURCES}"
        )
    return [
        made(sharing_of(name, num_requests=count, seed=given["seed"],
                        **dict(zip(lists, values, strict=True))))
        for name, count in itertools.product(names, counts)
        for values in itertools.product(*lists.values())
    ]  # fmt: skip


def _numbers(given: Mapping[str, Any], name: str) -> Sequence[float | None]:
    """The list typed for an option of made prompts."""
    typed = given[name]
    if typed is None:
        return [None]
    if name in WHOLE or name.endswith("_tokens"):
        return parse_counts(typed, name=_flag(name), low=int(RANGES[name][0]))
    try:
        return [float(word) for word in typed.split(",")]
    except ValueError:
        raise usage_error(
            f"{_flag(name)}: '{typed[:40]}' is not a number", f"write {_flag(name)} 0.5,1"
        ) from None


def _traced(given: Mapping[str, Any], count: int | None) -> Prompts:
    size = given["trace_block_size"]
    return traced(
        given["trace"],
        num_requests=count,
        format=given["trace_format"],
        block_size=None
        if size is None
        else parse_count(size, name="--trace-block-size", high=2**20),
        tenant=given["tenants"],
    )

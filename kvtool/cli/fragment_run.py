"""The run of `kvtool fragment`: its words as cases, run one by one, and what a picture needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from kvtool.cli.fragment_words import Traffics, names_in, pools_of
from kvtool.errors import INTERRUPTED, KvtoolError, usage_error
from kvtool.fragment import Case, Measured, measure
from kvtool.output import Output
from kvtool.sim.engine import compiles
from kvtool.sim.memory import ALLOCATORS, BUDDY, CONTIGUOUS, PAGED, PLACEMENTS
from kvtool.sim.settings import RECOMPUTE, SWAP, Settings
from kvtool.sim.snapshot import MOST_REQUESTS, memory_map
from kvtool.traffic import one_by_one
from kvtool.units import parse_count, parse_counts
from kvtool.view.fragment import SHARES, Film

MOST_CASES = 1_000
MOST_FILMS, MOST_BARS = 12, 100
MOST_SAMPLES = 10**7
"""Samples that share are kept in memory, a number each."""


def cases_of(
    given: Mapping[str, Any], traffics: Traffics, grid: Sequence[Mapping[str, Any]]
) -> tuple[list[Case], list[str]]:
    """Every combination of the lists in the order given, and what must be said of the pools.

    Blocks mean nothing to the contiguous allocators: those run once for each pool.
    """
    pools, notes = pools_of(given, traffics)
    preemption = names_in(str(given["preemption"]), "--preemption", (RECOMPUTE, SWAP))[0]
    cpu_blocks = parse_count(given["cpu_blocks"], name="--cpu-blocks", low=0, high=2**40)
    if preemption == SWAP and not cpu_blocks:
        raise usage_error("--preemption swap has no blocks to swap to", "add --cpu-blocks 1000")
    cases: dict[Any, Case] = {}
    lists = (traffics.counts, grid, pools, traffics.rates, _samples(given), _prefixes(given))
    for count, limits, pool, rate, samples, prefix in itertools.product(*lists):
        rules = {**limits, "preemption": preemption, "cpu_blocks": cpu_blocks}
        size = rules.pop("block_size")
        paged = Settings(num_blocks=pool.num_blocks(size), block_size=size, **rules)
        whole = Settings(num_blocks=pool.num_tokens(size), block_size=1, **rules)
        if samples > paged.max_running:
            raise usage_error(
                f"--n {samples:,} samples of a request run together, and at most "
                f"{paged.max_running:,} may run",
                "lower --n, or raise --max-num-seqs",
            )
        if (samples > 1 or prefix) and count * samples > MOST_SAMPLES:
            raise usage_error(
                f"{count * samples:,} samples that share are too many",
                f"at most {MOST_SAMPLES:,}: lower --num-requests or --n",
            )
        for allocator, placement in _allocators(given, traffics):
            case = Case(
                allocator=allocator,
                placement=placement,
                settings=paged if allocator == PAGED else whole,
                traffic=traffics.traffic(count, rate, rules["max_model_len"]),
                samples=samples,
                shared_prefix=prefix,
            )
            key = (allocator, placement, case.settings, count, rate, samples, prefix)
            cases.setdefault(key, case)
    if len(cases) > MOST_CASES:
        raise usage_error(f"{len(cases):,} rows are asked for", f"{MOST_CASES:,} is the most")
    return list(cases.values()), notes + _said(cases.values())


def run_cases(cases: Sequence[Case], out: Output) -> tuple[list[Measured], KvtoolError | None]:
    """The rows, and the interruption that ended them early if there was one."""
    if compiles():
        out.aside("compiling the simulator, once on this machine: about 5 s")
    measured: list[Measured] = []
    for case in cases:
        count = case.traffic.num_requests * case.samples
        with out.progress(f"{case.allocator} {case.placement or ''}", count) as advance:
            one = measure(case, advance)
        measured.append(one)
        if one.interrupted:
            return measured, _interrupted(len(measured), len(cases), one)
    return measured, None


def check_picture(cases: Sequence[Case]) -> None:
    """Refuse a picture of more bars than anybody could read, before anything is run."""
    if len(cases) > MOST_BARS:
        raise usage_error(
            f"a picture of {len(cases):,} rows has no room for their bars",
            f"ask for at most {MOST_BARS} rows, or write -o rows.csv",
        )


def films_of(cases: Sequence[Case], measured: Sequence[Measured]) -> list[Film]:
    """What the picture shows of each row: the shares over time, and a map of the pool.

    Of many rows only the bars: a panel for each would be a picture of metres.
    """
    if len(cases) > MOST_FILMS:
        return [Film() for _ in measured]
    return [
        Film(
            series=tuple(
                (sums.steps, tuple(sums.share(name) for name in SHARES)) for sums in one.series
            ),
            regions=None if case.shares and case.allocator == PAGED else _regions(case),
        )
        for case, one in zip(cases, measured, strict=False)
    ]


def _regions(case: Case) -> tuple[tuple[int, int, int, int], ...]:
    """The map of the same requests without the time stamps, so that they meet in the pool."""
    first = next(one_by_one(case.traffic, case.samples, case.shared_prefix))
    requests = first.take(_range(min(MOST_REQUESTS, len(first))))
    requests = replace(requests, arrival_ns=requests.arrival_ns * 0)
    return memory_map(case.allocator, case.placement or "", case.settings, requests)


@cache
def _range(count: int) -> Any:
    import numpy as np

    return np.arange(count)


def _allocators(given: Mapping[str, Any], traffics: Traffics) -> Iterator[tuple[str, str | None]]:
    """Each allocator, a contiguous one with each placement."""
    names = names_in(given["allocator"], "--allocator", ALLOCATORS)
    preset = traffics.preset.placement if traffics.preset else None
    places = names_in(given["placement"] or preset or BUDDY, "--placement", PLACEMENTS)
    for name in names:
        yield from ((name, place) for place in (places if name in CONTIGUOUS else (None,)))


def _samples(given: Mapping[str, Any]) -> list[int]:
    return parse_counts(given["n"], name="--n", high=1024)


def _prefixes(given: Mapping[str, Any]) -> list[int]:
    return parse_counts(given["shared_prefix"], name="--shared-prefix", low=0, high=2**30)


def _said(cases: Any) -> list[str]:
    """Notes on what the rows stand for."""
    said = []
    if any(case.samples > 1 or case.shared_prefix for case in cases):
        said.append(
            "only paged shares: to the other allocators each sample is a request of its own with "
            "the whole prompt"
        )
    if any(case.traffic.rate != "saturated" for case in cases):
        law = next(iter(cases)).settings.step_time
        said.append(
            f"a step takes {law.base_ns:,} ns + {law.token_ns:,} a token + {law.context_ns:,} a "
            "token of context (--step-time): chosen, not measured"
        )
    return said


def _interrupted(rows: int, asked: int, last: Measured) -> KvtoolError:
    row = last.row
    return KvtoolError(
        f"interrupted in row {rows} of {asked}, after {row['completed'] + row['rejected']:,} of its "
        f"{row['requests']:,} requests",
        "what was done so far is above, the last row up to there; run again for the rest",
        code="interrupted",
        exit_code=INTERRUPTED,
    )

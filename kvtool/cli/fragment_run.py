"""The run of `kvtool fragment`: its words as cases, run one by one, and what a picture needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtool.cli.fragment_words import Traffics, pools_of
from kvtool.cli.options import names_in
from kvtool.cli.scheduler_options import MAX_SLOTS, check_rows
from kvtool.errors import INTERRUPTED, KvtoolError, usage_error
from kvtool.fragment import Case, Measured, measure
from kvtool.output import Output
from kvtool.pool import Pool
from kvtool.run import Row
from kvtool.sim.engine import compiles
from kvtool.sim.memory import ALLOCATORS, BUDDY, CONTIGUOUS, PAGED, PLACEMENTS
from kvtool.sim.settings import RECOMPUTE, SWAP, Settings
from kvtool.sim.snapshot import MOST_REQUESTS, memory_map
from kvtool.traffic import one_by_one
from kvtool.units import parse_counts
from kvtool.view.fragment import SHARES, Film

MOST_CASES = 1_000
MOST_FILMS, MOST_BARS = 12, 100
MOST_LISTED = 2**20
"""Blocks that may be listed one by one: where they are shared, and in a map."""
MOST_SAMPLES = 10**7
"""Samples that share are kept in memory, a number each."""


def cases_of(
    given: Mapping[str, Any], traffics: Traffics, grid: Sequence[Mapping[str, Any]]
) -> tuple[list[Case], list[str]]:
    """Every combination of the lists in the order given, and what must be said of them.

    Blocks mean nothing to the contiguous allocators: those run once for each pool.
    """
    pools, notes = pools_of(given, traffics)
    lists = (
        traffics.counts, grid, pools, traffics.rates, _samples(given), _prefixes(given),
        _preemptions(given), list(_allocators(given, traffics)),
    )  # fmt: skip
    check_rows(lists, MOST_CASES)
    cases: dict[Any, Case] = {}
    for count, limits, pool, rate, samples, prefix, preemption, named in itertools.product(*lists):
        case = Case(
            allocator=named[0],
            placement=named[1],
            settings=_settings(named[0], pool, {**limits, **preemption}),
            pool=pool,
            traffic=traffics.traffic(count, rate, limits["max_model_len"]),
            samples=samples,
            shared_prefix=prefix,
        )
        _check_shares(case)
        key = (*named, case.settings, pool, count, rate, samples, prefix)
        cases.setdefault(key, case)
    return list(cases.values()), notes + _said(given, cases.values())


def _settings(allocator: str, pool: Pool, rules: dict[str, Any]) -> Settings:
    """The paged pool in blocks; for the others every token of it counts, and swapping is nothing."""
    size = rules.pop("block_size")
    if allocator == PAGED:
        settings = Settings(num_blocks=pool.num_blocks(size), block_size=size, **rules)
    else:
        rules = {**rules, "preemption": RECOMPUTE, "cpu_blocks": 0}
        settings = Settings(num_blocks=pool.num_tokens(size), block_size=1, **rules)
    if settings.num_slots > MAX_SLOTS:
        raise usage_error(
            f"a pool of {settings.num_slots:,} tokens is too large",
            f"at most {MAX_SLOTS:,} (2^40)",
        )
    return settings


def _check_shares(case: Case) -> None:
    """Refuse what cannot be forked as it is asked for."""
    settings, count = case.settings, case.traffic.num_requests * case.samples
    if not case.shares:
        return
    if case.samples > settings.max_running:
        raise usage_error(
            f"--n {case.samples:,} samples of a request run together, and at most "
            f"{settings.max_running:,} may run",
            "lower --n, or raise --max-num-seqs",
        )
    if count > MOST_SAMPLES:
        raise usage_error(
            f"{count:,} samples that share are too many",
            f"at most {MOST_SAMPLES:,}: lower --num-requests or --n",
        )
    if case.allocator == PAGED and case.shared_prefix > settings.num_slots:
        raise usage_error(
            f"--shared-prefix {case.shared_prefix:,} does not fit into the pool of "
            f"{settings.num_slots:,} tokens",
            "shorten it, or make the pool larger",
        )
    if case.allocator == PAGED and settings.num_blocks > MOST_LISTED:
        raise usage_error(
            f"blocks that are shared are listed one by one, and {settings.num_blocks:,} are too many",
            f"make the pool smaller than {MOST_LISTED:,} blocks, or the blocks larger",
        )
    if settings.preemption == SWAP:
        raise usage_error(
            "--preemption swap: what is shared is computed anew here, never swapped",
            "leave it out, or leave out --n and --shared-prefix",
        )


def run_cases(cases: Sequence[Case], out: Output) -> tuple[list[Measured], KvtoolError | None]:
    """The rows, and what ended them early: an interruption, or the error of a later row."""
    if compiles():
        out.aside("compiling the simulator, once on this machine: about 5 s")
    measured: list[Measured] = []
    for case in cases:
        forked = case.shares and case.allocator == PAGED  # told of requests, not of samples
        count = case.traffic.num_requests * (1 if forked else case.samples)
        try:
            with out.progress(f"{case.allocator} {case.placement or ''}", count) as advance:
                measured.append(measure(case, advance))
        except KeyboardInterrupt:  # while its requests were made
            return measured, _interrupted(len(measured), len(cases))
        except KvtoolError as error:
            if not measured:
                raise
            return measured, error
        if measured[-1].interrupted:
            return measured, _interrupted(len(measured), len(cases), measured[-1].row)
    return measured, None


def check_picture(cases: Sequence[Case]) -> None:
    """Refuse a picture of more bars than anybody could read, before anything is run."""
    if len(cases) > MOST_BARS:
        raise usage_error(
            f"a picture of {len(cases):,} rows has no room for their bars",
            f"ask for at most {MOST_BARS} rows, or write -o rows.csv",
        )


def films_of(
    cases: Sequence[Case], measured: Sequence[Measured], stopped: KvtoolError | None
) -> tuple[list[Film], KvtoolError | None]:
    """What the picture shows of each row: the shares over time, and a map of the pool.

    Of many rows only the bars: a panel for each would be a picture of metres. So too of a run that
    was interrupted, which wants to end.
    """
    bars = [Film() for _ in measured]
    if len(cases) > MOST_FILMS or stopped is not None:
        return bars, stopped
    try:
        return [_film(case, one) for case, one in zip(cases, measured, strict=True)], None
    except KeyboardInterrupt:
        return bars, _interrupted(len(measured), len(cases))


def _film(case: Case, one: Measured) -> Film:
    shares = tuple((sums.steps, tuple(map(sums.share, SHARES))) for sums in one.series)
    listed = case.allocator == PAGED and (case.shares or case.settings.num_blocks > MOST_LISTED)
    return Film(series=shares, regions=None if listed else _regions(case))


def _regions(case: Case) -> tuple[tuple[int, int, int, int], ...]:
    """The map of the same requests without the time stamps, so that they meet in the pool."""
    first = next(one_by_one(case.traffic, case.samples, case.shared_prefix))
    requests = first.first(MOST_REQUESTS)
    requests = replace(requests, arrival_ns=requests.arrival_ns * 0)
    return memory_map(case.allocator, case.placement or "", case.settings, requests)


def _allocators(given: Mapping[str, Any], traffics: Traffics) -> Iterator[tuple[str, str | None]]:
    """Each allocator, a contiguous one with each placement."""
    names = names_in(given["allocator"], "--allocator", ALLOCATORS)
    preset = traffics.preset.placement if traffics.preset else None
    places = names_in(given["placement"] or preset or BUDDY, "--placement", PLACEMENTS)
    for name in names:
        yield from ((name, place) for place in (places if name in CONTIGUOUS else (None,)))


def _preemptions(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How paged preempts: recompute, or swap to each number of CPU blocks."""
    found: list[dict[str, Any]] = []
    sizes = parse_counts(given["cpu_blocks"], name="--cpu-blocks", low=0, high=2**40)
    for how in names_in(given["preemption"], "--preemption", (RECOMPUTE, SWAP)):
        if how == SWAP and not all(sizes):
            raise usage_error("--preemption swap has no blocks to swap to", "add --cpu-blocks 1000")
        for size in sizes if how == SWAP else (0,):
            found.append({"preemption": how, "cpu_blocks": size})
    return found


def _samples(given: Mapping[str, Any]) -> list[int]:
    return parse_counts(given["n"], name="--n", high=1024)


def _prefixes(given: Mapping[str, Any]) -> list[int]:
    return parse_counts(given["shared_prefix"], name="--shared-prefix", low=0, high=2**30)


def _said(given: Mapping[str, Any], cases: Iterable[Case]) -> list[str]:
    """Notes on what the rows stand for, and on options that change nothing."""
    cases, said = list(cases), []
    paged = [case for case in cases if case.allocator == PAGED]
    if any(case.shares for case in cases):
        said.append(
            "only paged shares: to the others each sample is a request with the whole prompt. "
            "Requests that share run as gangs, a prompt in one step: no chunks, no limit of tokens"
        )
    if any(case.traffic.rate != "saturated" for case in cases):
        law = cases[0].settings.step_time
        said.append(
            f"a step takes {law.base_ns:,} ns + {law.token_ns:,} a token + {law.context_ns:,} a "
            "token of context (--step-time): chosen, not measured"
        )
    if any(
        case.settings.preemption == SWAP and not case.settings.step_time.swap_ns for case in paged
    ):
        said.append("swapping takes no time here: --step-time swap_ns=… gives it some")
    idle = {
        "--trace-format": given["trace_format"] and not given["trace"],
        "--cpu-blocks": given["cpu_blocks"] != "0" and "swap" not in str(given["preemption"]),
        "--placement": given["placement"] and not any(case.placement for case in cases),
        "--preemption": given["preemption"] != RECOMPUTE and not paged,
    }
    return said + [f"{option} changes nothing here" for option, true in idle.items() if true]


def _interrupted(rows: int, asked: int, last: Row | None = None) -> KvtoolError:
    """Ctrl-C: in a row that is there as far as it came, or between two."""
    where = f"after {rows:,} of {asked:,} rows"
    if last is not None:
        where = (
            f"in row {rows:,} of {asked:,}, after {last['completed'] + last['rejected']:,} of its "
        )
        where += f"{last['requests']:,} requests"
    return KvtoolError(
        f"interrupted {where}",
        "what was done so far is above; run again for the rest",
        code="interrupted",
        exit_code=INTERRUPTED,
    )

"""The requests of `kvtool simulate`: of a file or made, at the rates asked for, as cases to be run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from kvtool import catalog, sharing
from kvtool.cli import fragment_words
from kvtool.cli.scheduler_options import check_rows
from kvtool.contents import joined, of_blocks
from kvtool.errors import KvtoolError, usage_error
from kvtool.requests import Requests
from kvtool.sharing import Sharing, sharing_of
from kvtool.sim.settings import Settings
from kvtool.trace import read_trace
from kvtool.traffic import AS_TRACED, SATURATED, all_requests, rate_of
from kvtool.units import parse_count, parse_counts

if TYPE_CHECKING:
    from kvtool.contents import Contents
    from kvtool.sim.disaggregated import Split
    from kvtool.slo import Highest
    from kvtool.trace import Trace

MOST_REQUESTS = 1 << 25
"""That are kept: 200 bytes each."""
STATIC, CONTINUOUS, CHUNKED = "static", "continuous", "chunked"
MADE = ("workload", *fragment_words.DISTS, *fragment_words.OF_LENGTHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a row is about. `requests` arrive as `rate` says; `priced_usd` is of all its GPUs an hour."""

    name: str
    is_file: bool
    rate: str
    requests: Requests
    contents: Contents | None
    scheduler: str
    settings: Settings
    model: str | None = None
    gpu: str | None = None
    num_gpus: int | None = None
    priced_usd: float | None = None
    split: Split | None = None
    """Prefill and decode apart; `settings` are then the decode's."""
    bytes_per_token: int | None = None
    """Of the whole model, for what is swapped; 0 if nothing is."""
    step_time_basis: str = "chosen, not measured (name a --gpu, or give --step-time or --calibrate)"
    """What the times of steps rest on."""
    made: Mapping[str, Any] = field(default_factory=dict)
    longer: Callable[[], tuple[Requests, Contents | None]] | None = None
    """Twice as many requests that are made alike, of another seed; None: they are what they are."""
    highest: Highest | None = None
    """How --find-rate came to the rate."""


def of_made(traffics: Any, seed: int) -> list[Case]:
    """The same requests at every rate, those that --find-rate tries among them."""
    cases = []
    check_rows([traffics.counts, traffics.rates])
    for count in traffics.counts:
        check_count(count)
    for count, rate in itertools.product(traffics.counts, dict.fromkeys(traffics.rates)):
        if rate == AS_TRACED:
            raise _not_of_made()
        traffic = traffics.traffic(count, SATURATED, traffics.longest)
        requests = at_rate(all_requests(traffic), rate_of(rate), seed)
        case = _case(traffic.name, False, rate, requests, None, traffic.made)
        cases.append(replace(case, longer=partial(_made_longer, traffics, count)))
    return cases


def _made_longer(traffics: Any, count: int) -> tuple[Requests, None]:
    given = {**traffics.given, "seed": traffics.given["seed"] + 1}
    other = replace(traffics, given=given, made={}, notes=[])
    return all_requests(other.traffic(2 * count, SATURATED, other.longest)), None


def check_count(count: int) -> None:
    """Each request and each step is kept."""
    if count > MOST_REQUESTS:
        raise KvtoolError(
            f"{count:,} requests are more than {MOST_REQUESTS:,}, and each is kept",
            "give fewer --num-requests; kvtool fragment runs them without keeping",
            code="too_large",
        )


def _not_of_made() -> KvtoolError:
    return usage_error(
        "--rate trace is of a file with time stamps", "give --rate saturated or a number"
    )


def shared_workload(given: Mapping[str, Any]) -> Sharing | None:
    """The made workload whose prompts share prefixes, if --workload names one. A name that lengths have too
    means those, with nothing to cache: the same name is the same requests with and without a cache."""
    name, cached, count = given["workload"], given["prefix_caching"], given["num_requests"]
    if name is None:
        return _lengths_alone("made requests") if cached else None
    lengths: KvtoolError | None = None
    try:
        catalog.workload_preset(name)
    except KvtoolError as error:
        lengths = error
    if lengths is None:
        return _lengths_alone(f"--workload {name}") if cached else None
    try:
        shared = sharing_of(name, seed=given["seed"])
    except KvtoolError as error:
        raise (error if "+" in name or ":" in name else lengths) from error
    if count is None:
        return shared
    return replace(shared, num_requests=parse_count(count, name="--num-requests"))


def _lengths_alone(what: str) -> NoReturn:
    raise usage_error(
        f"--prefix-caching: nothing is known to be shared by {what}, of which there are lengths alone",
        "take a --workload of kvtool presets prefixes, such as multi-turn-chat, or requests with segments or "
        "hash_ids",
    )


def of_shared(
    shared: Sharing, given: Mapping[str, Any], notes: list[str]
) -> tuple[list[Case], int]:
    """Its requests at each rate, with what they consist of, and the longest of them."""
    if any(given[name] is not None for name in MADE if name != "workload"):
        raise usage_error(
            f"--workload {shared.name} has lengths of its own", "leave out the other lengths"
        )
    rates = list(dict.fromkeys(map(str.strip, (given["rate"] or SATURATED).split(","))))
    check_rows([rates])
    check_count(shared.num_requests)
    requests, contents = _drawn(shared)
    longer = partial(
        _drawn, replace(shared, num_requests=2 * shared.num_requests, seed=shared.seed + 1)
    )
    if AS_TRACED in rates:
        raise _not_of_made()
    if rates != [SATURATED]:
        notes.append(
            f"{shared.name}: turns come by --rate and do not wait for the answer before them, so that "
            "hits may come early"
        )
    cases = [
        _case(
            shared.name, False, rate,
            at_rate(requests, rate_of(rate), given["seed"]), contents, shared.echo(),
        )
        for rate in rates
    ]  # fmt: skip
    cases = [replace(case, longer=longer) for case in cases]
    return cases, int((requests.prompt_tokens + requests.output_tokens).max()) + 1


def _drawn(shared: Sharing) -> tuple[Requests, Contents]:
    """Its requests and what they consist of."""
    import numpy as np

    parts = list(sharing.chunks(shared))
    firsts = np.cumsum([0, *map(len, parts)]).tolist()
    requests = Requests(
        arrival_ns=np.concatenate([part.arrival_ns for part in parts]),
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
    )
    return requests, joined(
        [of_blocks(part, first=k) for part, k in zip(parts, firsts, strict=False)]
    )


def of_file(given: Mapping[str, Any], notes: list[str]) -> list[Case]:
    trace = read_trace(
        given["requests"], format=given["trace_format"], with_contents=given["prefix_caching"]
    )
    _check_contents(given, trace)
    notes += _notes_of(trace, given["policy"])
    rates = list(dict.fromkeys((given["rate"] or AS_TRACED).split(",")))
    counts = [len(trace.requests)]
    if given["num_requests"] is not None:
        asked = parse_counts(given["num_requests"], name="--num-requests")
        counts = [min(count, len(trace.requests)) for count in asked]
        if trace.contents is not None and min(counts) < len(trace.requests):
            raise usage_error(
                "--num-requests cuts the file, and --prefix-caching knows it whole",
                "cut the file itself: head -n",
            )
    check_rows([counts, rates])
    cases = []
    for count, rate in itertools.product(dict.fromkeys(counts), rates):
        requests = trace.requests.first(count)
        if rate.strip() != AS_TRACED:
            requests = at_rate(requests, rate_of(rate.strip()), given["seed"])
        cases.append(_case(trace.name, True, rate.strip(), requests, trace.contents, {}))
    return cases


def at_rate(requests: Requests, rate: float | None, seed: int) -> Requests:
    """The same requests with Poisson arrivals, so many a second; None: all at the start."""
    import numpy as np

    from kvtool.workload import check_span, poisson_arrivals

    if requests.parent is not None:
        raise usage_error(
            "its requests wait for each other (parent): they have no other arrivals",
            "leave out --rate and --find-rate",
        )
    if rate is None:
        return replace(requests, arrival_ns=np.zeros_like(requests.arrival_ns))
    check_span(len(requests), rate, "raise the rate")
    rng = np.random.default_rng(seed)
    return replace(requests, arrival_ns=poisson_arrivals(rng, len(requests), rate))


def _case(
    name: str, is_file: bool, rate: str, requests: Requests, contents: Contents | None,
    made: Mapping[str, Any],
) -> Case:  # fmt: skip
    return Case(
        name=name, is_file=is_file, rate=rate, requests=requests, contents=contents, made=made,
        scheduler=CHUNKED, settings=Settings(num_blocks=1),
    )  # fmt: skip


def _check_contents(given: Mapping[str, Any], trace: Trace) -> None:
    """Refuse to cache what is not known."""
    if given["prefix_caching"] and trace.contents is None:
        raise KvtoolError(
            f"--prefix-caching: {trace.name} does not say what its prompts consist of",
            "give each line segments and out_stream, take a trace with hash_ids (mooncake, bailian), "
            "or leave out --prefix-caching",
            code="trace",
        )


def _notes_of(trace: Trace, policy: str) -> list[str]:
    notes = [f"{trace.name}: {text}" for text in trace.notes]
    if not trace.has_arrivals:
        notes.append(f"{trace.name}: it has no arrivals, so all requests arrive at once")
    by_priority, there = "priority" in policy.split(","), trace.requests.priority is not None
    if there and not by_priority:
        notes.append(f"{trace.name}: priorities are not looked at by --policy {policy}")
    if by_priority and not there:
        notes.append(f"{trace.name}: all requests have one priority")
    return notes

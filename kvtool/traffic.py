"""The requests that a run is given: a made workload or a trace, and when its requests arrive."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtool.errors import usage_error
from kvtool.requests import Requests
from kvtool.trace import Trace
from kvtool.workload import CHUNK, Workload, check_span, chunks, poisson_arrivals

SATURATED, AS_TRACED = "saturated", "trace"
LONGEST, LONGEST_OF_TRACE = 2048, 2**20
"""max_model_len if nobody says, and the most that a trace's requests make of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """`source()` gives the requests anew, a chunk at a time, in the order of arrival.

    `made`: how the lengths were made, for the rows; empty for a trace.
    """

    name: str
    num_requests: int
    rate: str
    source: Callable[[], Iterator[Requests]]
    made: Mapping[str, Any] = field(default_factory=dict)


def made_traffic(workload: Workload, rate: str) -> Traffic:
    """A made workload: all its requests at the start, or Poisson arrivals of so many a second."""
    if rate == AS_TRACED:
        raise usage_error(
            "--rate trace needs a --trace with time stamps", "give --rate saturated or a number"
        )
    workload = replace(workload, rate=rate_of(rate))
    return Traffic(
        name=workload.name,
        num_requests=workload.num_requests,
        rate=rate,
        source=lambda: chunks(workload),
        made={
            "seed": workload.seed,
            "prompt_dist": workload.prompt.spec,
            "prompt_mean": workload.prompt.mean,
            "prompt_cap": workload.prompt.cap,
            "output_dist": workload.output.spec,
            "output_mean": workload.output.mean,
            "output_cap": workload.output.cap,
        },
    )


def traced_traffic(trace: Trace, rate: str, seed: int) -> Traffic:
    """A trace: all at the start, at its own time stamps, or Poisson arrivals of so many a second."""
    import numpy as np

    requests = trace.requests
    if requests.parent is not None:
        raise usage_error(
            f"{trace.name}: its requests wait for each other (parent)",
            "kvtool simulate replays them; here, give requests with arrivals of their own",
        )
    if rate == AS_TRACED and not trace.has_arrivals:
        raise usage_error(
            f"--rate trace: {trace.name} has no time stamps", "give --rate saturated or a number"
        )
    if rate == AS_TRACED:
        requests = requests.in_order()
    else:
        a_second = rate_of(rate)
        check_span(len(requests), a_second, "raise the --rate")
        rng = np.random.default_rng(seed)
        arrivals = poisson_arrivals(rng, len(requests), a_second)
        requests = replace(requests, arrival_ns=arrivals)
    return Traffic(
        name=trace.name,
        num_requests=len(requests),
        rate=rate,
        made={"seed": seed} if rate not in (SATURATED, AS_TRACED) else {},
        source=lambda: _pieces(requests),
    )


def room_for_longest(trace: Trace) -> int:
    """A max_model_len for a trace: the power of two that holds its longest request."""
    most = int((trace.requests.prompt_tokens + trace.requests.output_tokens).max())
    return min(LONGEST_OF_TRACE, max(LONGEST, 1 << max(0, most - 1).bit_length()))


def rate_of(rate: str) -> float | None:
    """Requests a second as typed; None for saturated."""
    if rate == SATURATED:
        return None
    plain = re.fullmatch(r"[0-9]{0,20}\.?[0-9]{1,20}(e[+-]?[0-9]{1,3})?", rate.lower(), re.ASCII)
    value = float(rate) if plain else 0.0
    if not 1e-6 <= value <= 1e9:
        raise usage_error(
            f"--rate: '{rate}' is no rate",
            "give saturated, trace, or requests a second such as 4 or 0.5",
        )
    return value


def one_by_one(traffic: Traffic, samples: int, shared_prefix: int) -> Iterator[Requests]:
    """The same work without sharing: each sample is a request with the whole prompt."""
    import numpy as np

    for requests in traffic.source():
        yield Requests(
            arrival_ns=np.repeat(requests.arrival_ns, samples),
            prompt_tokens=np.repeat(requests.prompt_tokens + shared_prefix, samples),
            output_tokens=np.repeat(requests.output_tokens, samples),
        )


def all_requests(traffic: Traffic) -> Requests:
    """The requests in one piece."""
    import numpy as np

    pieces = [requests.columns() for requests in traffic.source()]
    names = ("arrival_ns", "prompt_tokens", "output_tokens")
    return Requests(**{name: np.concatenate([one[name] for one in pieces]) for name in names})


def _pieces(requests: Requests) -> Iterator[Requests]:
    import numpy as np

    for start in range(0, len(requests), CHUNK):
        yield requests.take(np.arange(start, min(start + CHUNK, len(requests))))

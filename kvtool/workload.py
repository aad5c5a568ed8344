"""Requests that are made: lengths from two distributions, arrivals from a rate, as chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.errors import usage_error
from kvtool.lengths import Lengths, sampler
from kvtool.requests import SECOND_NS, Requests

if TYPE_CHECKING:
    import numpy as np
    from numpy.random import Generator
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

CHUNK = 1 << 17
MAX_RUN_S = 2**27
"""Seconds that arrivals may span on average, 4 years: no sum of gaps then outgrows 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests to be made; `rate` is of Poisson arrivals a second, None for all at once at 0."""

    name: str
    prompt: Lengths
    output: Lengths
    num_requests: int
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_span(
            self.num_requests,
            self.rate,
            "raise the rate, or leave it out: then all requests are there at the start",
        )

    @property
    def paired(self) -> bool:
        """Both lengths are columns of one file: they are drawn row by row, which keeps what a
        prompt's length says of its output's."""
        return self.prompt.num_columns == 2 and self.prompt.spec == self.output.spec


def check_span(num_requests: int, rate: float | None, hint: str) -> None:
    """Refuse arrivals that go on for longer than a clock in nanoseconds has room for."""
    if rate is not None and not num_requests <= rate * MAX_RUN_S:
        raise usage_error(
            f"{num_requests:,} requests at {rate:g} a second take more than 4 years", hint
        )


def chunks(workload: Workload, size: int = CHUNK) -> Iterator[Requests]:
    """The requests in order of arrival, `size` at a time: the same ones whatever the size."""
    import numpy as np

    seeds = np.random.SeedSequence(workload.seed).spawn(3)
    prompts, outputs, gaps = (np.random.default_rng(seed) for seed in seeds)
    if workload.paired:
        outputs = np.random.default_rng(seeds[0])  # the same draws are the same rows
    prompt, output = sampler(workload.prompt), sampler(workload.output)
    clock = 0
    for start in range(0, workload.num_requests, size):
        count = min(size, workload.num_requests - start)
        arrival_ns = poisson_arrivals(gaps, count, workload.rate, clock)
        clock = int(arrival_ns[-1])
        yield Requests(
            arrival_ns=arrival_ns,
            prompt_tokens=prompt(prompts, count),
            output_tokens=output(outputs, count),
        )


def poisson_arrivals(rng: Generator, count: int, rate: float | None, clock: int = 0) -> Column:
    """Sums of exponential gaps, each a whole number of nanoseconds; the first is after one gap."""
    import numpy as np

    if rate is None:
        return np.zeros(count, dtype=np.int64)
    gaps = np.rint(rng.standard_exponential(count) * (SECOND_NS / rate)).astype(np.int64)
    return clock + np.cumsum(gaps)

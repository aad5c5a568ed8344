"""The highest rate that keeps an objective, as `kvtool simulate --find-rate` looks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from kvtool.cli.simulate_requests import STATIC, Case, at_rate
from kvtool.errors import KvtoolError
from kvtool.requests import SECOND_NS
from kvtool.run import Row
from kvtool.sim.disaggregated import DisaggregatedReplay, replay_disaggregated
from kvtool.sim.replay import Replay, replay
from kvtool.sim.settings import ABORTED, REJECTED
from kvtool.simulate import finished_in, growth_of
from kvtool.simulate_disaggregated import growth_of_disaggregated
from kvtool.slo import Highest, Trial, highest_rate, met

if TYPE_CHECKING:
    from kvtool.slo import Slo

NO_RATE = "no_rate"
BELOW = 1.05
"""How far below a rate that a longer run does not keep the next one is tried."""
Advance = Callable[[float], None]


def replayed(case: Case, advance: Advance) -> Replay:
    """The case, as far as an interrupt lets it come."""
    if case.split is not None:
        return replay_disaggregated(case.requests, case.split, advance)
    if case.scheduler == STATIC:
        from kvtool.sim.static_replay import replay_static

        return replay_static(case.requests, case.settings, advance)
    return replay(case.requests, case.settings, advance, contents=case.contents)


def growth(found: Replay) -> Row:
    """Whether its queue has an end."""
    return (
        growth_of_disaggregated(found)
        if isinstance(found, DisaggregatedReplay)
        else growth_of(found)
    )


def at_highest(case: Case, slo: Slo, seed: int) -> tuple[Case, list[str]]:
    """The case at the highest rate that keeps the objective, and what is to be said of that rate.

    A rate that is found with made requests has to keep it with twice as many others too: what builds
    up slowly is not seen in a short run.
    """
    served = _served(case, seed)
    short = cache(partial(_tried, case, slo, seed))
    if short(None).keeps:
        raise _too_few(case)
    found = highest_rate(short, served)
    if found is None:
        raise _none(case, slo, served)
    if found.refused_rate is None:
        raise _too_few(case)
    runs = f"a run of {len(case.requests):,} requests"
    if case.longer is not None:
        requests, contents = case.longer()
        longer = replace(case, requests=requests, contents=contents)
        runs = f"runs of {len(case.requests):,} and {len(requests):,} requests"
        other = partial(_tried, longer, slo, seed + 1, of_served=True)
        found = _confirmed(found, short, cache(other))
        if found is None:
            raise _none(case, slo, served)
    notes = [f"the rate is that of {runs}; a longer one may keep less"]
    if found.rate > served:
        notes.append(
            f"the rate is above the {served:.4g} requests a second that are served when all wait from the "
            "start: in a long run the queue may grow without end"
        )
    told = f"{found.rate:.10g}"
    requests = at_rate(case.requests, float(told), seed)
    return replace(case, rate=told, requests=requests, highest=found), notes


def _confirmed(
    found: Highest, short: Callable[[float], Trial], longer: Callable[[float], Trial]
) -> Highest | None:
    """The rate if a longer run keeps it too, else the highest below that both keep."""

    def both(rate: float) -> Trial:
        first = short(rate)
        if not first.keeps:
            return first
        second = longer(rate)
        return replace(second, share=min(first.share, second.share))

    at_found = both(found.rate)
    if at_found.keeps:
        return replace(found, share=at_found.share)
    return highest_rate(both, found.rate / BELOW, step=BELOW)


def _tried(
    case: Case, slo: Slo, seed: int, rate: float | None, *, of_served: bool = False
) -> Trial:
    """What becomes of the case at a rate; None: all requests wait from the start. With `of_served`, who is
    never served at any rate is left out: max_model_len may follow from other requests."""
    found = _whole(replace(case, requests=at_rate(case.requests, rate, seed)))
    good, status = met(slo, found), found.outcomes["status"]
    if of_served:
        good = good[(status != REJECTED) & (status != ABORTED)]
    share, grows = float(good.mean()) if len(good) else 0.0, growth(found)["queue_grows"]
    return Trial(keeps=share >= slo.share and not grows, share=share, grows=grows)


def _whole(case: Case) -> Replay:
    """A run to its end: one that was interrupted says nothing of a rate."""
    found = replayed(case, lambda done: None)
    if found.interrupted:
        raise KeyboardInterrupt
    return found


def _served(case: Case, seed: int) -> float:
    """Requests that are served a second if all wait from the start."""
    found = _whole(replace(case, requests=at_rate(case.requests, None, seed)))
    served, end_ns = int(finished_in(found).sum()), int(found.outcomes["finish_ns"].max(initial=0))
    if served and end_ns <= 0:
        raise KvtoolError(
            f"{case.name}: its steps take no time, so that every rate keeps the objective",
            "give --step-time some, or name a --gpu",
            code=NO_RATE,
        )
    if not served:
        raise KvtoolError(
            f"{case.name}: none of its requests is served, at any rate",
            "make the pool larger, or --max-model-len",
            code=NO_RATE,
        )
    return served * SECOND_NS / end_ns


def _too_few(case: Case) -> KvtoolError:
    count = len(case.requests)
    return KvtoolError(
        f"{case.name}: even all at once keep it: {count:,} requests are too few to find a rate",
        "give a longer file" if case.is_file else "give more --num-requests",
        code=NO_RATE,
    )


def _none(case: Case, slo: Slo, served: float) -> KvtoolError:
    return KvtoolError(
        f"{case.name}: no rate keeps the objective for {slo.share:.0%} of requests, not even "
        f"{served / 1000:.3g} a second, at which hardly two run together",
        "a lone request misses it: loosen --slo, take a faster GPU, or another --scheduler",
        code=NO_RATE,
    )

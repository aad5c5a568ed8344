"""The highest rate that keeps an objective, as `kvtool simulate --find-rate` looks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from kvtool.cli.simulate_requests import STATIC, Case, at_rate
from kvtool.errors import KvtoolError
from kvtool.queueing import beyond_capacity, capacity_of, is_doubtful
from kvtool.requests import SECOND_NS
from kvtool.run import Row
from kvtool.sim.disaggregated import DisaggregatedReplay, replay_disaggregated
from kvtool.sim.replay import Replay, replay
from kvtool.sim.settings import ABORTED, LPM, REJECTED
from kvtool.simulate import finished_in, growth_of
from kvtool.simulate_disaggregated import growth_of_disaggregated, most_at_once
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


def most_running(found: Replay) -> int:
    """Requests that ran at once at most."""
    if isinstance(found, DisaggregatedReplay):
        return most_at_once(found)
    return int(found.steps["running"].max(initial=0))


def beyond(case: Case, row: Row, seed: int) -> Row:
    """What is served at most, where the queue of a row may have no end though it does not show; `{}` where
    there is no doubt. It is looked for in a run of the same requests, all of which wait."""
    if case.requests.parent is not None or not is_doubtful(row):
        return {}
    return beyond_capacity(row, _capacity(case, _all_at_once(case, seed)))


def at_highest(case: Case, slo: Slo, seed: int) -> tuple[Case, list[str]]:
    """The case at the highest rate that keeps the objective, and what is to be said of that rate.

    A rate that is found with made requests has to keep it with twice as many others too: what builds
    up slowly is not seen in a short run.
    """
    waiting = _all_at_once(case, seed)
    served = _served(case, waiting)
    short = cache(partial(_tried, case, slo, seed, capacity=_capacity(case, waiting)))
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
        most = _capacity(longer, _all_at_once(longer, seed + 1))
        other = partial(_tried, longer, slo, seed + 1, of_served=True, capacity=most)
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
    case: Case, slo: Slo, seed: int, rate: float | None, *,
    of_served: bool = False, capacity: float | None = None,
) -> Trial:  # fmt: skip
    """What becomes of the case at a rate; None: all requests wait from the start. With `of_served`, who is
    never served at any rate is left out: max_model_len may follow from other requests."""
    try:
        requests = at_rate(case.requests, rate, seed)
    except KvtoolError:  # so slow that the clock does not hold it
        return Trial(keeps=False, share=0.0)
    found = _whole(replace(case, requests=requests))
    good, status = met(slo, found), found.outcomes["status"]
    if of_served:
        good = good[(status != REJECTED) & (status != ABORTED)]
    share, queue = float(good.mean()) if len(good) else 0.0, growth(found)
    grows = rate is not None and beyond_capacity(queue, capacity)["queue_grows"]
    return Trial(keeps=share >= slo.share and not grows, share=share, grows=grows)


def _whole(case: Case) -> Replay:
    """A run to its end: one that was interrupted says nothing of a rate."""
    found = replayed(case, lambda done: None)
    if found.interrupted:
        raise KeyboardInterrupt
    return found


def _all_at_once(case: Case, seed: int) -> Replay:
    return _whole(replace(case, requests=at_rate(case.requests, None, seed)))


def _capacity(case: Case, waiting: Replay) -> float | None:
    """Requests a second that end while all wait; None: too few to tell, or an order that long queues undo."""
    if case.settings.policy == LPM:
        return None
    return capacity_of(waiting.outcomes["finish_ns"][finished_in(waiting)], most_running(waiting))


def _served(case: Case, found: Replay) -> float:
    """Requests a second that are served if all wait from the start."""
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

"""Prefill and decode apart: prompts on instances of one kind, the other tokens on another's.

A request is computed with one output token on a prefill instance. The cache of its prompt is then sent
over that instance's link, one transfer after the other, and the request arrives at a decode instance,
which needs no more of it than blocks. As in DistServe (Zhong et al., OSDI 2024), Splitwise (Patel et
al., ISCA 2024). A prefill's blocks are free when it ends, not when its transfer does; a transfer is not
overlapped with its prefill; and who is preempted on a decode instance is computed anew there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvtool.requests import SECOND_NS, Requests
from kvtool.sim.instances import FastInstance, serve
from kvtool.sim.replay import CACHED, OUTCOMES, Replay, gaps_of, steps_of
from kvtool.sim.settings import CUT, DONE, REJECTED, UNFINISHED, Settings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtool.requests import Column
    from kvtool.sim.replay import Columns

    Which = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Instances of two kinds, each with these settings, and a link for each prefill instance."""

    prefill: Settings
    decode: Settings
    num_prefill: int
    num_decode: int
    bits_per_s: int
    bytes_per_token: int
    """Of the cache, whole model: what is sent for each prompt token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the instances of one kind did."""

    settings: Settings
    steps: Sequence[Columns]
    """Of each instance: kvtool.sim.replay.STEPS, and `begin_ns`."""
    outcomes: Columns
    """OUTCOMES by request; `status` is unfinished for who never came here."""
    chosen: Column
    """The instance of each request; -1: none."""
    gaps: tuple[Column, Column] | None
    preemptions: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledReplay(Replay):
    """A run of both kinds. The outcomes are joined: admission and first token of the prefill instance,
    the end of the last one; steps count on the instance they are of, so `steps` is empty."""

    prefill: Stage
    decode: Stage
    send_ns: Column
    """When a request's transfer began; -1: it was not sent."""
    sent_ns: Column
    """When it had ended."""
    transfer_bytes: int


def replay_pools(
    requests: Requests, pools: Pools, progress: Callable[[int], None] = lambda ended: None
) -> PooledReplay:
    """All of the requests, or as far as an interrupt lets it come."""
    run = _Run(requests, pools)
    interrupted = False
    try:
        run.serve(progress)
    except KeyboardInterrupt:
        interrupted = True
    return run.result(interrupted=interrupted)


class _Run:
    """A run of both kinds, which an interrupt may end anywhere."""

    def __init__(self, requests: Requests, pools: Pools) -> None:
        count, prompts = len(requests), requests.prompt_tokens
        self.requests, self.pools = requests, pools
        self.limits = np.minimum(requests.output_tokens, pools.prefill.max_model_len - prompts)
        self.accepted = (prompts > 0) & (self.limits > 0)
        self.more = np.zeros(count, np.bool_)
        self.before = [
            FastInstance(pools.prefill, count, whole=False) for _ in range(pools.num_prefill)
        ]
        self.after = [
            FastInstance(pools.decode, count, whole=True) for _ in range(pools.num_decode)
        ]
        self.to_prefill, self.to_decode, self.send, self.sent = np.full((4, count), -1, np.int64)

    def serve(self, progress: Callable[[int], None]) -> None:
        """The prefills, the transfers, then the decodes: nothing acts back on what came before it."""
        asked = self.requests
        count = len(asked)
        first = replace(asked, output_tokens=np.ones(count, np.int64))
        serve(self.before, first, _in_order(asked.arrival_ns, self.accepted), self.to_prefill)
        done = _outcomes(self.before, self.to_prefill)
        self.more = (done["status"] == DONE) & (self.limits > 1)
        progress(int(count - self.more.sum()))
        self.send, self.sent = transfers(
            asked, self.pools, done["finish_ns"], self.to_prefill, self.more
        )
        second = replace(asked, arrival_ns=self.sent, prefilled=np.ones(count, np.int64))
        serve(self.after, second, _in_order(self.sent, self.more), self.to_decode, progress)

    def result(self, *, interrupted: bool) -> PooledReplay:
        """What it came to."""
        for one in (*self.before, *self.after):
            one.engine.close(interrupted=interrupted)
        prefill, decode = _stage(self.before, self.to_prefill), _stage(self.after, self.to_decode)
        asked, more = self.requests, self.more
        return PooledReplay(
            arrival_ns=asked.arrival_ns,
            outcomes=_joined(asked, prefill, decode, self.accepted, self.limits, more),
            steps={name: np.zeros(0, np.int64) for name in ("end_ns", "waiting")},
            gaps=_gaps(prefill, decode),
            preemptions=prefill.preemptions + decode.preemptions,
            recomputed_tokens=prefill.recomputed_tokens + decode.recomputed_tokens,
            interrupted=interrupted,
            prefill=prefill,
            decode=decode,
            send_ns=self.send,
            sent_ns=self.sent,
            transfer_bytes=int(asked.prompt_tokens[more].sum()) * self.pools.bytes_per_token,
        )


def transfers(
    requests: Requests, pools: Pools, finish_ns: Column, chosen: Column, more: Which
) -> tuple[Column, Column]:
    """When each transfer begins and ends: a link sends in the order in which prefills end, those of one
    step in the order of arrival, each for whole ns, rounded up."""
    send, sent = np.full(len(requests), -1, np.int64), np.full(len(requests), -1, np.int64)
    free = [0] * pools.num_prefill
    places = np.flatnonzero(more)
    order = places[np.lexsort((places, requests.arrival_ns[places], finish_ns[places]))]
    for place in order.tolist():
        link, bits = (
            int(chosen[place]),
            int(requests.prompt_tokens[place]) * pools.bytes_per_token * 8,
        )
        begin = max(free[link], int(finish_ns[place]))
        free[link] = begin - (-bits * SECOND_NS // pools.bits_per_s)
        send[place], sent[place] = begin, free[link]
    return send, sent


def _in_order(arrival_ns: Column, which: Which) -> Column:
    places = np.flatnonzero(which)
    order: Column = places[np.argsort(arrival_ns[places], kind="stable")]
    return order


def _outcomes(instances: Sequence[FastInstance], chosen: Column) -> Columns:
    """What became of each request where it was sent."""
    found = {name: np.full(len(chosen), -1, np.int64) for name in OUTCOMES}
    found["num_preemptions"][:] = found["generated"][:] = 0
    found["status"][:] = UNFINISHED
    for number, one in enumerate(instances):
        here = chosen == number
        for name in OUTCOMES:
            found[name][here] = one.engine.state.outcomes[name][here]
    return found


def _stage(instances: Sequence[FastInstance], chosen: Column) -> Stage:
    settings = instances[0].engine.settings
    gaps = [gaps_of(one.engine) for one in instances]
    known = [pair for pair in gaps if pair is not None]
    runs = [one.engine.state.run for one in instances]
    return Stage(
        settings=settings,
        steps=[_with_begins(steps_of(one.engine), settings) for one in instances],
        outcomes=_outcomes(instances, chosen),
        chosen=chosen,
        gaps=_together(known) if len(known) == len(gaps) else None,
        preemptions=sum(int(run.preemptions) for run in runs),
        recomputed_tokens=sum(int(run.recomputed) for run in runs),
    )


def _with_begins(steps: Columns, settings: Settings) -> Columns:
    """The steps with when each began: its end less what it took."""
    pairs = zip(steps["scheduled_tokens"].tolist(), steps["context_tokens"].tolist(), strict=True)
    took = [settings.step_time.ns(tokens, context) for tokens, context in pairs]
    return {**steps, "begin_ns": steps["end_ns"] - np.array(took, np.int64)}


def _together(pairs: Sequence[tuple[Column, Column]]) -> tuple[Column, Column]:
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


def _gaps(prefill: Stage, decode: Stage) -> tuple[Column, Column] | None:
    """Those within the decode instances, and the one from the first token to the second, over the link."""
    if decode.gaps is None:
        return None
    second, first = decode.outcomes["first_token_ns"], prefill.outcomes["first_token_ns"]
    there = second >= 0
    return _together([decode.gaps, ((second - first)[there], np.ones(there.sum(), np.int64))])


def _joined(
    requests: Requests,
    prefill: Stage,
    decode: Stage,
    accepted: Which,
    limits: Column,
    more: Which,
) -> Columns:
    """What became of each request: how it ended where it ended, and its first token."""
    one, two = prefill.outcomes, decode.outcomes
    joined = {name: np.where(more, two[name], one[name]) for name in OUTCOMES}
    for name in ("admit_step", "first_token_step", "first_token_ns"):
        joined[name] = one[name].copy()
    joined["num_preemptions"] = one["num_preemptions"] + two["num_preemptions"]
    status = joined["status"]
    status[(status == DONE) & (limits < requests.output_tokens)] = CUT
    status[~accepted] = REJECTED
    joined["generated"][more & (decode.chosen < 0)] = 0
    joined |= {name: np.zeros(len(requests), np.int64) for name in CACHED}
    joined["cached_tokens_first"] = -(joined["admit_step"] < 0).astype(np.int64)
    return joined

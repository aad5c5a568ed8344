"""Prefill and decode apart: prompts on instances of one kind, the other tokens on another's.

A request is computed with one output token on the prefill instance with the fewest outstanding prompt
tokens. The cache of its prompt is then sent over that instance's link, one transfer after the other, and
the request arrives at the decode instance with the fewest outstanding requests, which needs no more of
it than blocks. As in DistServe (Zhong et al., OSDI 2024), Splitwise (Patel et al., ISCA 2024).

No router knows how many tokens a request will want. Pending tokens are Splitwise's measure (join the
shortest queue); requests in flight are vLLM Router's (vllm-project/router, policies/power_of_two.rs), and
DistServe takes the least loaded decode instance. Real ones choose it before the prefill, here it is
chosen when the cache has come.

A prefill's blocks are free when it ends, not when its transfer does; a transfer is not overlapped with its
prefill; and who is preempted on a decode instance is computed anew there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvtool.requests import SECOND_NS, Requests
from kvtool.sim.clock import LATEST_NS
from kvtool.sim.engine import clock_is_full
from kvtool.sim.instances import NUM_REQUESTS, PROMPT_TOKENS, Instances
from kvtool.sim.replay import CACHED, OUTCOMES, Replay, gaps_of, steps_of
from kvtool.sim.settings import CUT, DONE, REJECTED, Settings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtool.requests import Column
    from kvtool.sim.replay import Columns

    Which = NDArray[np.bool_]

Progress = Callable[[float], None]
"""Told how many requests have ended since it was last told, one with a decode by halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
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
    """Of each instance, as in a Replay."""
    outcomes: Columns
    """OUTCOMES by request; `status` is unfinished for who never came here."""
    chosen: Column
    """The instance of each request; -1: none."""
    gaps: tuple[Column, Column] | None
    preemptions: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregatedReplay(Replay):
    """A run of both kinds. The outcomes are joined: admission and first token of the prefill instance,
    the end of the last one; steps count on the instance they are of, so `steps` is empty."""

    prefill: Stage
    decode: Stage
    send_ns: Column
    """When a request's transfer began; -1: it was not sent."""
    sent_ns: Column
    """When it had ended."""
    transfer_bytes: int


def replay_disaggregated(
    requests: Requests, split: Split, progress: Progress = lambda ended: None
) -> DisaggregatedReplay:
    """All of the requests, or as far as an interrupt lets it come."""
    run = _Run(requests, split)
    interrupted = False
    try:
        run.serve(progress)
    except KeyboardInterrupt:
        interrupted = True
    return run.result(interrupted=interrupted)


class _Run:
    """A run of both kinds, which an interrupt may end anywhere."""

    def __init__(self, requests: Requests, split: Split) -> None:
        count, prompts = len(requests), requests.prompt_tokens
        self.requests, self.split = requests, split
        self.limits = np.minimum(requests.output_tokens, split.prefill.max_model_len - prompts)
        self.accepted = (prompts > 0) & (self.limits > 0)
        self.prefill = Instances(split.prefill, split.num_prefill, count, counted=PROMPT_TOKENS)
        self.decode = Instances(split.decode, split.num_decode, count, counted=NUM_REQUESTS)
        self.send, self.sent = np.full((2, count), -1, np.int64)

    def serve(self, progress: Progress) -> None:
        """The prefills, the transfers, then the decodes: nothing acts back on what came before it."""

        def by_halves(ended: int) -> None:
            progress(ended / 2)

        asked = self.requests
        count = len(asked)
        first = replace(asked, output_tokens=np.ones(count, np.int64))
        self.prefill.serve(first, _in_order(asked.arrival_ns, self.accepted), by_halves)
        done = _outcomes(self.prefill)
        sent = (done["status"] == DONE) & (self.limits > 1)
        progress(int((~self.accepted).sum()) + int((self.accepted & ~sent).sum()) / 2)
        self.send, self.sent = transfers(
            asked, self.split, done["finish_ns"], self.prefill.chosen, sent
        )
        second = replace(asked, arrival_ns=self.sent, prefilled=np.ones(count, np.int64))
        self.decode.serve(second, _in_order(self.sent, sent), by_halves)

    def result(self, *, interrupted: bool) -> DisaggregatedReplay:
        """What it came to."""
        for kind in (self.prefill, self.decode):
            kind.close(interrupted=interrupted)
        prefill, decode = _stage(self.prefill), _stage(self.decode)
        asked, sent = self.requests, self.send >= 0
        return DisaggregatedReplay(
            arrival_ns=asked.arrival_ns,
            outcomes=_joined(asked, prefill, decode, self.accepted, self.limits),
            steps={name: np.zeros(0, np.int64) for name in ("end_ns", "waiting")},
            gaps=_gaps(prefill, decode),
            preemptions=prefill.preemptions + decode.preemptions,
            recomputed_tokens=prefill.recomputed_tokens + decode.recomputed_tokens,
            interrupted=interrupted,
            prefill=prefill,
            decode=decode,
            send_ns=self.send,
            sent_ns=self.sent,
            transfer_bytes=int(asked.prompt_tokens[sent].sum()) * self.split.bytes_per_token,
        )


def transfers(
    requests: Requests, split: Split, finish_ns: Column, chosen: Column, which: Which
) -> tuple[Column, Column]:
    """When each transfer begins and ends: a link sends in the order in which prefills end, those of one
    step in the order of arrival, each for whole ns, rounded up."""
    send, sent = np.full((2, len(requests)), -1, np.int64)
    free = [0] * split.num_prefill
    places = np.flatnonzero(which)
    order = places[np.lexsort((places, requests.arrival_ns[places], finish_ns[places]))]
    for place in order.tolist():
        link, tokens = int(chosen[place]), int(requests.prompt_tokens[place])
        bits = tokens * split.bytes_per_token * 8
        begin = max(free[link], int(finish_ns[place]))
        free[link] = begin - (-bits * SECOND_NS // split.bits_per_s)
        if free[link] > LATEST_NS:
            raise clock_is_full()
        send[place], sent[place] = begin, free[link]
    return send, sent


def _in_order(arrival_ns: Column, which: Which) -> Column:
    places = np.flatnonzero(which)
    order: Column = places[np.argsort(arrival_ns[places], kind="stable")]
    return order


def _outcomes(kind: Instances) -> Columns:
    """What became of each request where it was sent."""
    return {name: kind.group.outcomes[name].copy() for name in OUTCOMES}


def _stage(kind: Instances) -> Stage:
    gaps = [gaps_of(one) for one in kind.engines]
    known = [pair for pair in gaps if pair is not None]
    runs = kind.group.runs
    return Stage(
        settings=kind.settings,
        steps=[steps_of(one) for one in kind.engines],
        outcomes=_outcomes(kind),
        chosen=kind.chosen,
        gaps=_together(known) if len(known) == len(gaps) else None,
        preemptions=int(runs["preemptions"].sum()),
        recomputed_tokens=int(runs["recomputed"].sum()),
    )


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
    requests: Requests, prefill: Stage, decode: Stage, accepted: Which, limits: Column
) -> Columns:
    """What became of each request: how it ended where it ended, and its first token. Who wants more than
    that has not ended before a decode instance says so."""
    one, two = prefill.outcomes, decode.outcomes
    needs_decode = accepted & (limits > 1) & (one["status"] == DONE)
    joined = {name: np.where(needs_decode, two[name], one[name]) for name in OUTCOMES}
    for name in ("admit_step", "first_token_step", "first_token_ns"):
        joined[name] = one[name].copy()
    joined["num_preemptions"] = one["num_preemptions"] + two["num_preemptions"]
    status = joined["status"]
    status[(status == DONE) & (limits < requests.output_tokens)] = CUT
    status[~accepted] = REJECTED
    joined |= {name: np.zeros(len(requests), np.int64) for name in CACHED}
    joined["cached_tokens_first"] = -(joined["admit_step"] < 0).astype(np.int64)
    return joined

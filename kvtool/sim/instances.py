"""Instances of one kind that requests are sent to one by one, each a scheduler with its own pool and clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvtool.sim.engine import Engine
from kvtool.sim.settings import Settings
from kvtool.sim.state import QUEUE, Records, records

if TYPE_CHECKING:
    from kvtool.requests import Column, Requests

FOREVER = int(np.iinfo(np.int64).max)


class Instance(Protocol):
    """A scheduler that is told of its requests as time goes on."""

    def advance(self, until_ns: int) -> None:
        """Make every step that begins before this time."""

    def outstanding(self, now_ns: int) -> int:
        """Tokens of the requests here that have not ended by this time, to which it was advanced."""

    def send(self, requests: Requests, place: int) -> None:
        """A request arrives, not before the time to which this was advanced."""


class FastInstance:
    """By the engine that counts blocks. `whole`: output tokens are outstanding too, not prompts alone."""

    def __init__(self, settings: Settings, most: int, *, whole: bool) -> None:
        self.engine = Engine(source=(), num_requests=most, settings=settings, recorded=True)
        self.queue: Records = records(QUEUE, most, 0)
        self.sent = self.tokens = 0
        self.whole = whole

    def advance(self, until_ns: int) -> None:
        """Steps that begin before this time: a later arrival changes none of them."""
        if self.sent:
            self.engine.advance(self.queue[: self.sent], until_ns)

    def outstanding(self, now_ns: int) -> int:
        """What was sent less what has ended; the last step may end later than now."""
        run = self.engine.state.run
        if run.clock <= now_ns:
            ended = run.ended_prompt + run.ended_output * self.whole
        else:
            ended = run.ended_prompt_before + run.ended_output_before * self.whole
        return self.tokens - int(ended)

    def send(self, requests: Requests, place: int) -> None:
        """To the end of the queue: requests come in the order of arrival."""
        line = self.queue[self.sent]
        line.arrival_ns = requests.arrival_ns[place]
        line.prompt, line.output = requests.prompt_tokens[place], requests.output_tokens[place]
        line.index = place
        line.prefilled = 0 if requests.prefilled is None else requests.prefilled[place]
        self.sent += 1
        self.tokens += int(line.prompt) + int(line.output) * self.whole


def serve(
    instances: Sequence[Instance],
    requests: Requests,
    places: Column,
    chosen: Column,
    progress: Callable[[int], None] = lambda sent: None,
) -> None:
    """Send these requests, in the order of arrival, each to the instance with the fewest outstanding
    tokens at that time (the first of equals), and run all to the end. `chosen` is told which got which."""
    for place in places.tolist():
        now, best = int(requests.arrival_ns[place]), 0
        if len(instances) > 1:
            for one in instances:
                one.advance(now)
            loads = [one.outstanding(now) for one in instances]
            best = loads.index(min(loads))
        instances[best].send(requests, place)
        chosen[place] = best
        progress(1)
    for one in instances:
        one.advance(FOREVER)

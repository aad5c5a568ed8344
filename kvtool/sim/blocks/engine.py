"""A run of the fast engine of blocks: room where it runs short, steps and gaps handed over, a place to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtool.contents import Contents
from kvtool.errors import KvtoolError
from kvtool.jit import must_compile
from kvtool.requests import Requests
from kvtool.sim.blocks import kernel
from kvtool.sim.blocks.numbers import END, FRESH
from kvtool.sim.blocks.state import Records, State, grown, new_state
from kvtool.sim.blocks.waiting import CLOCK_IS_FULL
from kvtool.sim.engine import clock_is_full
from kvtool.sim.settings import LPM, RADIX, UNFINISHED, Settings

if TYPE_CHECKING:
    from kvtool.requests import Column

WORK_AT_ONCE = 1 << 24
"""Requests and blocks looked at between two looks at the keyboard and at the progress bar."""
MOST_RECORDED = 1 << 25
"""Steps that are kept: 90 bytes each."""
Progress = Callable[[int], None]
"""Told how many requests have ended since it was last told."""


@dataclass(slots=True, kw_only=True)
class BlocksEngine:
    """A run of requests by their index; with `contents` what they share is cached if settings say so.

    Memory is that of the requests, of the steps, and of the blocks of the pool that were ever taken.
    """

    requests: Requests
    settings: Settings
    contents: Contents | None = None
    progress: Progress = lambda ended: None
    steps: list[Records] = field(default_factory=list)
    gaps: list[Any] = field(default_factory=list)
    interrupted: bool = False
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.state = new_state(self.requests, self.settings, self.contents)

    def run(self) -> BlocksEngine:
        """Until all requests have ended, or the user interrupts: then as far as it has come."""
        try:
            self._run()
        except KeyboardInterrupt:
            self.interrupted = True
            self._hand_over()
        return self

    def _run(self) -> None:
        run, ended = self.state.run, 0
        advance = kernel_of(self.settings)
        while True:
            code = advance(self.state, WORK_AT_ONCE)
            if code == kernel.MORE_ROOM:
                self.state = grown(self.state)
                continue
            self._hand_over()
            self.progress(int(run.ended) - ended)
            ended = int(run.ended)
            if run.stopped == CLOCK_IS_FULL:
                raise clock_is_full()
            if code == kernel.ALL_DONE:
                return
            if run.step > MOST_RECORDED:
                raise KvtoolError(
                    f"the run takes more than {MOST_RECORDED:,} steps, and each is kept",
                    "give it fewer or shorter requests, or more blocks if they preempt each other for ever",
                    code="too_large",
                )

    def _hand_over(self) -> None:
        """Take what is written down."""
        run, steps = self.state.run, self.state.steps
        self.steps.append(steps[: run.steps_kept].copy())
        count = int(run.gaps_kept)
        self.gaps.append(np.stack([steps["gap"][:count], steps["weight"][:count]]))
        run.steps_kept = run.gaps_kept = 0

    def outcome(self, name: str) -> Column:
        """A field of all requests by index; of `generated` what was given to those that have ended."""
        found = self.state.requests
        column = found[name].astype(np.int64)
        return np.where(found.status == UNFINISHED, 0, column) if name == "generated" else column

    def all_steps(self) -> Records:
        """A record for each step."""
        return np.concatenate([self.state.steps[:0], *self.steps]).view(np.recarray)

    def all_gaps(self) -> tuple[Column, Column]:
        """Nanoseconds between two tokens of a request, and how often."""
        gaps, weights = np.concatenate([np.zeros((2, 0), np.int64), *self.gaps], axis=1)
        return gaps, weights

    def free_list(self) -> Iterator[int]:
        """The free blocks from the next one to be taken on, counted from 1 as by vLLM."""
        run, blocks = self.state.run, self.state.blocks
        at = int(blocks[END].next)
        while at != END:
            if at == FRESH:
                yield from range(int(run.numbered) + 1, int(run.num_blocks) + 1)
            else:
                yield at - FRESH
            at = int(blocks[at].next)


def kernel_of(settings: Settings) -> Any:
    """The kernel of a kind of memory and of an order."""
    if settings.prefix_caching and settings.index == RADIX:
        return kernel.advance_radix
    return kernel.advance_sorted if settings.policy == LPM else kernel.advance


def compiles(settings: Settings) -> bool:
    """Whether the first such run on this machine is still to come."""
    return must_compile(kernel_of(settings))

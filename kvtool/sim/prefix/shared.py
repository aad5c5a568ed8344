"""Why a hit rate is what it is: what of the prompts was there before, whatever the cache.

The tokens of a prompt are hits, or they are not for one of four reasons, in this order:
- new: no request before had them after the same tokens.
- rounded: they are shared, but do not fill a block.
- last block: they fill the block of the prompt's last token, which is always computed.
- lost: they would be hits in a cache without end; this one had evicted them, or never held them, because
  the request that had them was rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtool.sim.prefix.blocks import outputs_of
from kvtool.sim.prefix.keys import Ints, Keys
from kvtool.sim.prefix.pool import record
from kvtool.sim.prefix.result import KNOWN as KNOWN_OUTPUTS
from kvtool.sim.prefix.result import NONE
from kvtool.sim.prefix.shared_kernel import KNOWN, add_shared, find_runs
from kvtool.trace_blocks import HashedRequests

MOST_BLOCKS = 1 << 22
"""Different blocks of a trace that are remembered: 200 MiB. Beyond, the reasons are not known."""
RUN = record("start end reused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """Tokens of all prompts, by what a cache of this block size can do with them at best."""

    new: int
    rounded: int
    last_block: int
    findable: int
    """Hits of a cache without end."""
    longest: int
    """The longest prefix that a prompt shares with an earlier one."""

    def __add__(self, other: Reasons) -> Reasons:
        return Reasons(
            new=self.new + other.new,
            rounded=self.rounded + other.rounded,
            last_block=self.last_block + other.last_block,
            findable=self.findable + other.findable,
            longest=max(self.longest, other.longest),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Tokens `start` to `end` of the prompts that begin alike up to there; requests count from 1."""

    start: int
    end: int
    requests: int
    reused_tokens: int
    """Of these tokens, in all requests, those that were there before."""
    first_request: int
    last_request: int


@dataclass(slots=True, kw_only=True)
class Shared:
    """Fed by the chunk, with the keys of its blocks; `outputs`: as a cache holds them (`Cache`)."""

    block_sizes: Sequence[int]
    """Of the caches whose misses are to be explained."""
    outputs: str = NONE
    known: Any = field(default_factory=lambda: np.zeros(1 << 10, KNOWN).view(np.recarray))
    given_up: bool = False
    num_requests: int = 0
    keys: Keys | None = None
    _sums: dict[int, Reasons] = field(default_factory=dict)

    def feed(self, requests: HashedRequests, keys: Keys, of: Ints) -> bool:
        """The next requests; whether their keys must be kept."""
        self.given_up = self.given_up or keys.count > MOST_BLOCKS
        if self.given_up:  # what was remembered of the trace's beginning is no use
            self.known, self.keys = np.zeros(0, KNOWN).view(np.recarray), None
            return False
        self.keys = keys
        if keys.count > len(self.known):
            grown = np.zeros(max(keys.count, 2 * len(self.known)), KNOWN).view(np.recarray)
            grown[: len(self.known)] = self.known
            self.known = grown
        held = requests.prompt_tokens
        if self.outputs == KNOWN_OUTPUTS:
            held = held + outputs_of(requests, self.outputs)
        shared = np.zeros(len(requests), np.int64)
        add_shared(
            self.known, of, requests.starts, requests.prompt_tokens, held,
            requests.block_size, self.num_requests, shared,
        )  # fmt: skip
        self.num_requests += len(requests)
        for size in self.block_sizes:
            more = _reasons(requests.prompt_tokens, shared, size)
            self._sums[size] = more + self._sums[size] if size in self._sums else more
        return True

    def reasons(self, block_size: int) -> Reasons:
        """Of all prompts so far, in blocks of this size."""
        return self._sums[block_size]

    def prefixes(self, most: int) -> list[Prefix]:
        """Those of which most tokens were reused, the most first; a prefix of one stands apart from it."""
        if self.keys is None or self.given_up:
            return []
        count = self.keys.count
        runs = np.zeros(count, RUN).view(np.recarray)
        find_runs(self.known, self.keys.before, count, runs)
        heads = np.flatnonzero(runs.reused)
        order = heads[np.argsort(-runs.reused[heads], kind="stable")][:most]
        return [
            Prefix(
                start=int(runs[key].start),
                end=int(runs[key].end),
                requests=int(self.known[key].requests),
                reused_tokens=int(runs[key].reused),
                first_request=int(self.known[key].first) + 1,
                last_request=int(self.known[key].last) + 1,
            )
            for key in order.tolist()
        ]


def _reasons(tokens: NDArray[np.int64], shared: NDArray[np.int64], block_size: int) -> Reasons:
    full = shared // block_size * block_size
    found = np.minimum(full, (tokens - 1) // block_size * block_size)
    return Reasons(
        new=int((tokens - shared).sum()),
        rounded=int((shared - full).sum()),
        last_block=int((full - found).sum()),
        findable=int(found.sum()),
        longest=int(shared.max(initial=0)),
    )

"""One made workload with shared prefixes: its parameters, and its requests as runs of fresh tokens.

A token is a number that is given once: a run is where it starts and how long it is. Nothing is kept
but the sessions that are live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvtool.lengths import Lengths, sampler

if TYPE_CHECKING:
    import numpy as np
    from numpy.random import Generator, SeedSequence
    from numpy.typing import NDArray

    Column = NDArray[np.int64]
    Floats = NDArray[np.float64]

MOST_NODES = 1 << 16
"""Requests of a session, at most."""
OWN = 2
"""Columns of a request's runs: the prefix, the session's own tokens, then a node a level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The parameters of one workload, as its preset and the overrides give them; lengths in tokens.

    Session: one of `num_prefixes` (None of them: no `prefix`), picked with a weight of k^−zipf for
    the k-th, or with a probability of 1 − `share` a private one of the same length; `session` tokens;
    and a tree of `turns` levels with `branch` children a node, `keep` nodes a level having children.
    """

    preset: str
    tenant: str
    weight: float = 1.0
    num_prefixes: int = 0
    prefix: Lengths | None = None
    zipf: float = 1.0
    share: float = 1.0
    session: Lengths | None = None
    turn: Lengths
    output: Lengths
    turns: int = 1
    branch: int = 1
    keep: int | None = None
    concurrency: int = 64

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes of each level; it ends early when they are more than a session can have."""
        widths, parents = [0] * 0, 1
        for _ in range(self.turns):
            widths.append(parents * self.branch)
            parents = widths[-1] if self.keep is None else min(self.keep, widths[-1])
            if sum(widths) > MOST_NODES:
                break
        return tuple(widths)

    @property
    def requests_per_session(self) -> int:
        """Nodes of the tree."""
        return sum(self.widths)

    @property
    def mean_prompt_tokens(self) -> float:
        """Over the requests of a whole session."""
        before = _mean(self.prefix) + _mean(self.session) + self.turn.mean
        step = self.turn.mean + self.output.mean
        deep = sum(level * width for level, width in enumerate(self.widths))
        return before + step * deep / self.requests_per_session

    @property
    def max_prompt_tokens(self) -> int:
        """With every length at its cap."""
        caps = [lengths.cap for lengths in (self.prefix, self.session) if lengths]
        return sum(caps) + self.turns * self.turn.cap + (self.turns - 1) * self.output.cap

    def echo(self) -> dict[str, object]:
        """The parameters as JSON has them: means in tokens."""
        return {
            "preset": self.preset,
            "num_prefixes": self.num_prefixes,
            "prefix_tokens": _mean(self.prefix),
            "zipf": self.zipf,
            "share": self.share,
            "session_tokens": _mean(self.session),
            "turn_tokens": self.turn.mean,
            "output_tokens": self.output.mean,
            "turns": self.turns,
            "branch": self.branch,
            "keep": self.keep,
            "concurrency": self.concurrency,
        }


class Runs(NamedTuple):
    """Requests as runs of tokens, a row a request: where each starts, how long it is (0: none).

    The last run that there is holds the request's own turn and, at its end, its output.
    """

    firsts: Column
    lengths: Column
    outputs: Column


class Sessions(NamedTuple):
    """Sessions, a row each; `turn`, `output` and `node_first` have a column for each node."""

    prefix_first: Column
    prefix: Column
    own_first: Column
    own: Column
    node_first: Column
    turn: Column
    output: Column

    def take(self, rows: Column) -> Sessions:
        """These rows."""
        return Sessions(*(column[rows] for column in self))

    def followed_by(self, others: Sessions) -> Sessions:
        """Both."""
        import numpy as np

        return Sessions(*(np.concatenate(both) for both in zip(self, others, strict=True)))


def tree(part: Part) -> tuple[Column, Column]:
    """Of each node in breadth-first order its parent (−1: the session) and its level.

    The nodes that are kept lie evenly over their level.
    """
    import numpy as np

    parents, levels = [], []
    above, first = np.full(1, -1, np.int64), 0
    for level, width in enumerate(part.widths):
        parents.append(np.repeat(above, part.branch))
        levels.append(np.full(width, level, np.int64))
        kept = width if part.keep is None else min(part.keep, width)
        above = first + np.arange(kept, dtype=np.int64) * width // kept
        first += width
    return np.concatenate(parents), np.concatenate(levels)


@dataclass(slots=True)
class Stream:
    """The endless requests of a part, taken a few at a time: the same however many.

    `first_token` is the number of its first token; each draw has a generator of its own.
    """

    part: Part
    seed: SeedSequence
    first_token: int
    next_token: int = field(init=False)
    live: Sessions = field(init=False)
    served: Column = field(init=False)
    _shape: tuple[Column, Column] = field(init=False)
    _rngs: dict[str, Generator] = field(init=False)
    _prefixes: tuple[Column, Column, Floats] = field(init=False)

    def __post_init__(self) -> None:
        import numpy as np

        part, nodes = self.part, self.part.requests_per_session
        names = ("slot", "prefix", "pick", "share", "session", "turn", "output")
        seeds = self.seed.spawn(len(names))
        self._rngs = {
            name: np.random.default_rng(one) for name, one in zip(names, seeds, strict=True)
        }
        self._shape = tree(part)
        lengths = self._draw("prefix", part.prefix, part.num_prefixes)
        firsts = self.first_token + np.cumsum(lengths) - lengths
        weights = np.arange(1, part.num_prefixes + 1, dtype=np.float64) ** -part.zipf
        below = np.cumsum(weights)
        self._prefixes = firsts, lengths, below / below[-1] if len(below) else below
        self.next_token = self.first_token + int(lengths.sum())
        self.served = np.zeros(part.concurrency, np.int64)
        flat, wide = np.zeros(part.concurrency, np.int64), np.zeros((part.concurrency, nodes), int)
        self.live = Sessions(flat, flat, flat, flat, wide, wide, wide)

    def take(self, count: int) -> Runs:
        """The next requests, at least one."""
        import numpy as np

        part, nodes = self.part, self.part.requests_per_session
        slots = (self._rngs["slot"].random(count) * part.concurrency).astype(np.int64)
        order = np.argsort(slots, kind="stable")
        by_slot = slots[order]
        starts = np.flatnonzero(np.diff(by_slot, prepend=-1))
        rank = np.arange(count) - np.repeat(starts, np.diff(starts, append=count))
        node_by_slot = (self.served[by_slot] + rank) % nodes
        node = np.empty(count, np.int64)
        node[order] = node_by_slot
        begun = np.flatnonzero(node == 0)
        sessions = self.live.followed_by(self._begin(len(begun)))
        row = np.full(count, -1, np.int64)
        row[begun] = part.concurrency + np.arange(len(begun))
        # What does not begin a session is of the one before it in its slot.
        row_by_slot = row[order]
        row_by_slot[starts] = np.where(
            row_by_slot[starts] < 0, by_slot[starts], row_by_slot[starts]
        )
        known = np.where(row_by_slot >= 0, np.arange(count), 0)
        row_by_slot = row_by_slot[np.maximum.accumulate(known)]
        row[order] = row_by_slot
        ends = np.append(starts[1:], count) - 1
        kept = np.arange(part.concurrency)
        kept[by_slot[ends]] = row_by_slot[ends]
        self.live = sessions.take(kept)
        self.served[by_slot[ends]] = node_by_slot[ends] + 1
        return self._runs(sessions, row, node)

    def _begin(self, count: int) -> Sessions:
        """The next sessions, with all that will be asked and generated in them."""
        import numpy as np

        part = self.part
        prefix_firsts, prefix_lengths, below = self._prefixes
        shape = (count, part.requests_per_session)
        session = self._draw("session", part.session, count)
        turn = self._draw("turn", part.turn, shape[0] * shape[1]).reshape(shape)
        output = self._draw("output", part.output, shape[0] * shape[1]).reshape(shape)
        prefix = private = first = np.zeros(count, np.int64)
        if part.num_prefixes:
            # The last share is 1 but for rounding, and no draw may lie above it.
            pick = np.searchsorted(below[:-1], self._rngs["pick"].random(count), side="right")
            prefix, first = prefix_lengths[pick], prefix_firsts[pick]
            private = np.where(self._rngs["share"].random(count) < part.share, 0, prefix)
        node = turn + output
        size = private + session + node.sum(axis=1)
        base = self.next_token + np.cumsum(size) - size
        self.next_token += int(size.sum())
        own_first = base + private
        return Sessions(
            prefix_first=np.where(private > 0, base, first),
            prefix=prefix,
            own_first=own_first,
            own=session,
            node_first=(own_first + session)[:, None] + np.cumsum(node, axis=1) - node,
            turn=turn,
            output=output,
        )

    def _runs(self, sessions: Sessions, row: Column, node: Column) -> Runs:
        """Walk from each node to the root, all requests at once."""
        import numpy as np

        parents, levels = self._shape
        firsts = np.zeros((len(row), OWN + self.part.turns), np.int64)
        lengths = np.zeros_like(firsts)
        firsts[:, 0], lengths[:, 0] = sessions.prefix_first[row], sessions.prefix[row]
        firsts[:, 1], lengths[:, 1] = sessions.own_first[row], sessions.own[row]
        left, at = np.arange(len(row)), node
        while len(left):
            column, of = OWN + levels[at], row[left]
            firsts[left, column] = sessions.node_first[of, at]
            lengths[left, column] = sessions.turn[of, at] + sessions.output[of, at]
            at = parents[at]
            left, at = left[at >= 0], at[at >= 0]
        return Runs(firsts, lengths, sessions.output[row, node])

    def _draw(self, name: str, lengths: Lengths | None, count: int) -> Column:
        import numpy as np

        if lengths is None:
            return np.zeros(count, np.int64)
        draw: Callable[[Generator, int], Column] = sampler(lengths)
        return draw(self._rngs[name], count)


def _mean(lengths: Lengths | None) -> float:
    return 0.0 if lengths is None else lengths.mean

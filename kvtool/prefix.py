"""The rows of `kvtool prefix`: one prefix cache over one set of prompts each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvtool.pool import Pool
from kvtool.prefix_case import drawn_tree, explain
from kvtool.prefix_worth import SECONDS, Tier, tier_rows, worth
from kvtool.prompts import Prompts
from kvtool.run import Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtool.prefill import Prefill
    from kvtool.sim.prefix.replay import Cache
    from kvtool.sim.prefix.result import HitCurve, PrefixResult
    from kvtool.sim.prefix.shared import Reasons, Shared

    Counts = NDArray[np.int64]

GRID, BELOW = 12, 3
"""Capacities that are replayed where all are asked for, and those among them that not every request
fits into."""
POINTS = 1000
AT_ONCE = 16
"""Caches that are replayed in one reading: each has an entry for each block of the trace."""
MOST_LISTED, MOST_ALONE = 5, 8
"""Prefixes that a row names; tenants that are also replayed by themselves."""
SPAN_BLOCK = 16
_REASONS = ("new_tokens", "rounded_tokens", "last_block_tokens", "lost_tokens", "longest_shared")
_COSTS = ("index_s_per_request", "naming_s_per_request", "index_tried_requests")
_NOT_ASKED: Row = dict.fromkeys((
    "prefill_flops", "saved_flops", "saved_flops_share", *SECONDS, "tiers", "explained", "tree",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A cache without its capacity."""

    index: str
    policy: str
    block_size: int
    cache_outputs: str

    def cache(self, capacity_blocks: int) -> Cache:
        """With it."""
        from kvtool.sim.prefix.replay import Cache

        return Cache(capacity_blocks=capacity_blocks, **asdict(self))

    @property
    def has_curve(self) -> bool:
        """Whether one pass gives the hits at every capacity."""
        return self.index == "hash" and self.policy == "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A capacity: blocks, whatever their size, or tokens."""

    blocks: int | None = None
    tokens: int | None = None

    def num_blocks(self, block_size: int) -> int:
        """Whole blocks of this size; a room that holds none is refused."""
        return Pool(blocks=self.blocks, tokens=self.tokens, source="").num_blocks(block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of each set of prompts."""

    kinds: Sequence[Kind]
    rooms: Sequence[Room]
    all_rooms: bool = False
    """Every capacity at which something changes, in so many points, besides."""
    points: int = POINTS
    model: str | None = None
    bytes_per_token: int | None = None
    """KV cache of one token on one GPU."""
    prefill: Prefill | None = None
    tiers: tuple[Tier, ...] = ()
    with_tree: bool = False
    explained: int | None = None
    """The request to explain, counted from 1; the prompts end with it."""

    @property
    def with_hits(self) -> bool:
        """Whether the hits of each request are needed."""
        return self.prefill is not None or self.explained is not None


def measure(prompts: Prompts, asked: Asked) -> list[Row]:
    """A row a capacity, those of one kind together: the curves first, then replays, some at a time."""
    study = Study(prompts=prompts, asked=asked)
    caches = study.caches()
    found: dict[Kind, dict[int, Row]] = {kind: {} for kind in asked.kinds}
    for first in range(0, len(caches), AT_ONCE):
        some = caches[first : first + AT_ONCE]
        results, alone = study.replay(some), study.replay_alone(some)
        for place, (kind, cache) in enumerate(some):
            row = study.row(kind, cache, results[place])
            for tenant, single in zip(row["tenants"], alone, strict=False):
                tenant["alone_hit_rate"] = single[place].hit_rate
            found[kind][cache.capacity_blocks] = row
    for kind, rows in found.items():
        rows[max(rows)] |= study.costs(kind.cache(max(rows)))
    for kind, curve in study.curves.items():
        for at, blocks in enumerate(curve.capacity_blocks.tolist() if kind in found else ()):
            found[kind].setdefault(blocks, study.curve_row(kind, curve, at))
    return [rows[blocks] for rows in found.values() for blocks in sorted(rows)]


@dataclass(slots=True, kw_only=True)
class Study:
    """What the rows of one set of prompts share: curves, and what of the prompts is shared at all."""

    prompts: Prompts
    asked: Asked
    curves: dict[Kind, HitCurve] = field(default_factory=dict)
    shared: dict[bool, Shared] = field(default_factory=dict)
    """By whether known outputs are cached."""
    reasons: dict[Kind, Reasons | None] = field(default_factory=dict)
    listed: dict[str, list[Row]] = field(default_factory=dict)
    """What is shared most, by which outputs are cached."""
    tokens: Counts | None = None

    def caches(self) -> list[tuple[Kind, Cache]]:
        """Every cache that is replayed."""
        found: dict[tuple[Kind, int], tuple[Kind, Cache]] = {}
        for kind in self.asked.kinds:
            rooms = [room.num_blocks(kind.block_size) for room in self.asked.rooms]
            if self.asked.all_rooms:
                rooms += [max(1, tokens // kind.block_size) for tokens in self._grid(kind)]
            for blocks in rooms:
                found.setdefault((kind, blocks), (kind, kind.cache(blocks)))
        return list(found.values())

    def _grid(self, kind: Kind) -> list[int]:
        """Tokens of the capacities to replay, by the curve of this kind or of one that is like it."""
        from kvtool.sim.prefix.curve import spread

        if not kind.has_curve:
            alike = [
                one for one in self.asked.kinds
                if one.has_curve and one.cache_outputs == kind.cache_outputs
            ]  # fmt: skip
            size = max(SPAN_BLOCK, self.prompts.block_size, kind.block_size)
            like = replace(kind, index="hash", policy="lru", block_size=size)
            kind = alike[0] if alike else like
        if kind not in self.curves:
            self.curves[kind] = self._curve(kind)
        curve = self.curves[kind]
        largest, last = curve.largest_blocks, curve.ceiling_blocks or curve.largest_blocks
        last = max(last, int(curve.capacity_blocks[-1]))
        below = spread(max(1, largest // 8), largest, BELOW + 1)[:-1]
        return [int(one) * kind.block_size for one in (*below, *spread(largest, last, GRID))]

    def _curve(self, kind: Kind) -> HitCurve:
        from kvtool.sim.prefix.curve import hit_curve

        return hit_curve(
            lambda: self.prompts,
            block_size=kind.block_size,
            cache_outputs=kind.cache_outputs,
            points=self.asked.points,
        )

    def replay(self, caches: Sequence[tuple[Kind, Cache]]) -> list[PrefixResult]:
        """All of them in one reading, and beside them what is shared at all."""
        from kvtool.sim.prefix.grid import replay_all
        from kvtool.sim.prefix.result import KNOWN, NONE
        from kvtool.sim.prefix.shared import Shared

        if self.shared:
            watched: list[Shared] = []  # they know it from the first caches
        else:
            sizes = sorted({kind.block_size for kind in self.asked.kinds})
            for kind in self.asked.kinds:
                known = kind.cache_outputs == KNOWN
                self.shared[known] = Shared(block_sizes=sizes, outputs=KNOWN if known else NONE)
            watched = list(self.shared.values())

        def watch(requests: Any, keys: Any, of: Any) -> bool:
            return any([one.feed(requests, keys, of) for one in watched])

        return replay_all(
            [cache for _, cache in caches], self.prompts,
            with_hits=self.asked.with_hits, watch=watch,
        )  # fmt: skip

    def replay_alone(self, caches: Sequence[tuple[Kind, Cache]]) -> list[list[PrefixResult]]:
        """Results of each tenant by itself: what it would find if nobody else used the cache."""
        from kvtool.sim.prefix.blocks import tenants_of
        from kvtool.sim.prefix.grid import replay_all

        count = len(self.prompts.tenants)
        if not 2 <= count <= MOST_ALONE:
            return []
        return [
            replay_all(
                [cache for _, cache in caches],
                (requests.where(tenants_of(requests) == tenant) for requests in self.prompts),
            )
            for tenant in range(count)
        ]

    def row(self, kind: Kind, cache: Cache, result: PrefixResult) -> Row:
        """Of a replay."""
        asked = self.asked
        row = self._echo(kind, cache.capacity_blocks) | {
            "requests": result.requests,
            "rejected": result.rejected,
            "queried_tokens": result.queried_tokens,
            "hit_tokens": result.hit_tokens,
            "hit_rate": result.hit_rate,
            "evicted_blocks": result.evicted_blocks,
            "evicted_leaves": result.evicted_leaves,
            "cached_blocks": result.cached_blocks,
            **self._reasons(kind, result.hit_tokens),
            **dict.fromkeys(_COSTS),
            "index_bytes": result.index_bytes,
            "tenants": self._tenants(result),
            "prefixes": self._prefixes(kind),
            **_NOT_ASKED,
        }
        if asked.prefill is not None and result.hits is not None:
            row |= worth(asked.prefill, self._tokens(), result.hits)
        if asked.tiers and kind.has_curve:
            row["tiers"] = tier_rows(
                self.prompts, cache, asked.tiers, result.queried_tokens, asked.prefill
            )
        if asked.explained is not None and asked.explained <= result.requests:
            row["explained"] = explain(self.prompts, cache, asked.explained)
        if asked.with_tree and kind.index == "radix":
            row["tree"] = drawn_tree(self.prompts, cache)
        return row

    def costs(self, cache: Cache) -> Row:
        """What the index takes a request, tried on the first ones."""
        from kvtool.sim.prefix.costs import seconds_per_request

        return dict(zip(_COSTS, seconds_per_request(cache, next(iter(self.prompts))), strict=True))

    def curve_row(self, kind: Kind, curve: HitCurve, at: int) -> Row:
        """Of a point of a curve: what only a replay tells is null."""
        hits = int(curve.hit_tokens[at])
        return self._echo(kind, int(curve.capacity_blocks[at])) | {
            "requests": curve.requests,
            "rejected": int(curve.rejected[at]),
            "queried_tokens": curve.queried_tokens,
            "hit_tokens": hits,
            "hit_rate": hits / curve.queried_tokens if curve.queried_tokens else 0.0,
            "evicted_blocks": int(curve.evicted_blocks[at]),
            "evicted_leaves": 0,
            "cached_blocks": None,
            **self._reasons(kind, hits),
            **dict.fromkeys(_COSTS),
            "index_bytes": None,
            "tenants": None,
            "prefixes": None,
            **_NOT_ASKED,
        }

    def _echo(self, kind: Kind, blocks: int) -> Row:
        """Everything that a row is about, resolved."""
        made, asked = self.prompts.made, self.asked
        tokens = blocks * kind.block_size
        each = asked.bytes_per_token
        return {
            "workload": self.prompts.name,
            "made": None if made is None else made.echo(),
            "index": kind.index,
            "policy": kind.policy,
            "block_size": kind.block_size,
            "trace_block_size": self.prompts.block_size,
            "capacity_blocks": blocks,
            "capacity_tokens": tokens,
            "capacity_bytes": None if each is None else tokens * each,
            "cache_outputs": kind.cache_outputs,
            "model": asked.model,
            "bytes_per_token": each,
            "gpu": asked.prefill.gpu if asked.prefill else None,
            "efficiency": asked.prefill.efficiency if asked.prefill and asked.prefill.gpu else None,
        }

    def _shared_by(self, kind: Kind) -> Shared | None:
        """None where there was too much to remember."""
        shared = self.shared[kind.cache_outputs == "known"]
        return None if shared.given_up else shared

    def _reasons(self, kind: Kind, hit_tokens: int) -> Row:
        """Why the tokens that are no hits are none: kvtool.sim.prefix.shared."""
        shared = self._shared_by(kind)
        if kind not in self.reasons:
            self.reasons[kind] = None if shared is None else shared.reasons(kind.block_size)
        why = self.reasons[kind]
        if why is None:
            return dict.fromkeys(_REASONS)
        lost = why.findable - hit_tokens
        numbers = (why.new, why.rounded, why.last_block, lost, why.longest)
        return dict(zip(_REASONS, numbers, strict=True))

    def _prefixes(self, kind: Kind) -> list[Row] | None:
        shared = self._shared_by(kind)
        if shared is None:
            return None
        if shared.outputs not in self.listed:
            self.listed[shared.outputs] = [asdict(one) for one in shared.prefixes(MOST_LISTED)]
        return self.listed[shared.outputs]

    def _tokens(self) -> Counts:
        """Of all prompts."""
        import numpy as np

        if self.tokens is None:
            self.tokens = np.concatenate([requests.prompt_tokens for requests in self.prompts])
        return self.tokens

    def _tenants(self, result: PrefixResult) -> list[Row]:
        """Hits by tenant, and what each evicted of whom; empty where there is one."""
        from kvtool.sim.prefix.result import HIT, QUERIED, REJECTED, REQUESTS, TAKEN

        names = self.prompts.tenants
        if len(names) < 2:
            return []
        found = []
        for name, row in zip(names, result.tally, strict=False):
            found.append({
                "tenant": name,
                "requests": row[REQUESTS],
                "rejected": row[REJECTED],
                "queried_tokens": row[QUERIED],
                "hit_tokens": row[HIT],
                "hit_rate": row[HIT] / row[QUERIED] if row[QUERIED] else 0.0,
                "alone_hit_rate": None,
                "evicted_blocks_of": dict(zip(names, row[TAKEN:], strict=False)),
            })  # fmt: skip
        return found

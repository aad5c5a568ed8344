"""What hits are worth: FLOPs and time to the first token saved, and which tiers of memory pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool import prefill as arithmetic
from kvtool.prefill import Prefill
from kvtool.prompts import Prompts
from kvtool.run import Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtool.sim.prefix.replay import Cache
    from kvtool.sim.prefix.result import PrefixResult
    from kvtool.trace_blocks import HashedRequests

    Counts = NDArray[np.int64]

QUANTILES = (0.5, 0.9, 0.99)
SECONDS = tuple(
    f"{name}_prefill_s_{what}"
    for name in ("uncached", "cached")
    for what in ("mean", "p50", "p90", "p99")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Memory below the GPU's: tokens that it holds, bytes of one, and how many bytes a second."""

    name: str
    capacity_bytes: int
    bytes_per_token: int
    """Of all ranks together: they share this memory."""
    bytes_per_s: float


def worth(prefill: Prefill, tokens: Counts, hits: Counts) -> Row:
    """FLOPs that hits save, and on a GPU the time of each request's prefill with them and without.

    `tokens` are those of the prompts, `hits` -1 for requests that were rejected: they count in neither.
    """
    from kvtool.stats import quantile

    served = hits >= 0
    tokens, hits = tokens[served], hits[served]
    whole = arithmetic.flops(prefill, tokens, 0 * hits)
    rest = arithmetic.flops(prefill, tokens, hits)
    total = float(whole.sum())
    row: Row = {
        "prefill_flops": total,
        "saved_flops": total - float(rest.sum()),
        "saved_flops_share": 1 - float(rest.sum()) / total if total else 0.0,
    }
    if prefill.flops_per_s is None or not len(tokens):
        return row
    for name, cached in (("uncached", 0 * hits), ("cached", hits)):
        times = arithmetic.seconds(prefill, tokens, cached)
        row[f"{name}_prefill_s_mean"] = float(times.mean())
        for share in QUANTILES:
            row[f"{name}_prefill_s_p{share * 100:.0f}"] = quantile(times, share)
    return row


def tier_rows(
    prompts: Prompts, cache: Cache, tiers: Sequence[Tier], queried_tokens: int,
    prefill: Prefill | None,
) -> list[Row]:  # fmt: skip
    """Hits by tier, the GPU's first: an entry a tier.

    A block is in one tier. What is evicted from one goes down to the next, and a hit brings a block
    up to the GPU: all tiers together are one LRU list, cut where each is full (DEMOTE: Wong and
    Wilkes, "My cache or yours?", USENIX ATC 2002). Requests that do not fit into the GPU's are
    rejected. Hit rates are of all `queried_tokens`, those of rejected requests included.
    """
    from kvtool.sim.prefix.grid import replay_all

    sizes = [tier.capacity_bytes // (cache.block_size * tier.bytes_per_token) for tier in tiers]
    sizes = [cache.capacity_blocks, *sizes]
    levels = [
        replace(cache, capacity_blocks=sum(sizes[: level + 1])) for level in range(len(sizes))
    ]
    results = replay_all(levels, _fitting(prompts, cache), with_hits=True)
    rows: list[Row] = [{"tier": "gpu", "capacity_blocks": sizes[0], **_hits(results[0])}]
    for level, tier in enumerate(tiers):
        above, result = results[level], results[level + 1]
        rows.append({
            "tier": tier.name,
            "capacity_blocks": sizes[level + 1],
            **_hits(result, above),
            **_moved(tier, result, above, cache.block_size),
        })  # fmt: skip
    if prefill is not None and prefill.flops_per_s is not None:
        _add_times(rows, results, prefill, _tokens(prompts, cache))
    for row in rows:
        row["hit_rate"] = row["hit_tokens"] / queried_tokens if queried_tokens else 0.0
    return rows


def _add_times(
    rows: list[Row], results: Sequence[PrefixResult], prefill: Prefill, tokens: Counts
) -> None:
    """Seconds of computing what a tier found instead, what that saves, and the mean prefill with its
    hits and those of all above, loading included."""
    load_s = before_s = 0.0
    for row, result in zip(rows, results, strict=True):
        assert result.hits is not None, "tiers are replayed with the hits of each request"
        spent_s = float(arithmetic.seconds(prefill, tokens, result.hits).sum())
        if row["load_s"] is not None:
            row["recompute_s"] = before_s - spent_s
            row["saved_s"] = row["recompute_s"] - row["load_s"]
            load_s += row["load_s"]
        row["prefill_s_mean"] = (spent_s + load_s) / max(1, len(tokens))
        before_s = spent_s


def _hits(result: PrefixResult, above: PrefixResult | None = None) -> Row:
    """What a tier adds to those above it; what it would move and save is null for the GPU's own."""
    names = (
        "read_bytes", "written_bytes", "bytes_per_s", "load_s", "write_s", "recompute_s", "saved_s",
        "prefill_s_mean",
    )  # fmt: skip
    hits = result.hit_tokens - (above.hit_tokens if above else 0)
    return {"hit_tokens": hits, "hit_rate": 0.0, **dict.fromkeys(names)}


def _moved(tier: Tier, result: PrefixResult, above: PrefixResult, block_size: int) -> Row:
    """Up: what was found here. Down: what was evicted from above."""
    read = (result.hit_tokens - above.hit_tokens) * tier.bytes_per_token
    return {
        "read_bytes": read,
        "written_bytes": (written := above.evicted_blocks * block_size * tier.bytes_per_token),
        "bytes_per_s": tier.bytes_per_s,
        "load_s": read / tier.bytes_per_s,
        "write_s": written / tier.bytes_per_s,
    }


def _fitting(prompts: Prompts, cache: Cache) -> Iterator[HashedRequests]:
    """The requests that a cache has room for."""
    for requests in prompts:
        fits = _fits(requests, cache)
        yield requests if fits.all() else requests.where(fits)


def _tokens(prompts: Prompts, cache: Cache) -> Counts:
    import numpy as np

    return np.concatenate([requests.prompt_tokens[_fits(requests, cache)] for requests in prompts])


def _fits(requests: HashedRequests, cache: Cache) -> NDArray[np.bool_]:
    from kvtool.sim.prefix.blocks import outputs_of

    held = requests.prompt_tokens + outputs_of(requests, cache.cache_outputs)
    fits: NDArray[np.bool_] = -(-held // cache.block_size) <= cache.capacity_blocks
    return fits

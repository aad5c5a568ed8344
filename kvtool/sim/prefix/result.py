"""What a replay over a prefix cache comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]

HASH, RADIX = "hash", "radix"
POLICIES = ("lru", "lfu", "fifo", "length-aware")
NONE, UNIQUE, KNOWN = "none", "unique", "known"
OUTPUTS = (NONE, UNIQUE, KNOWN)
"""Which outputs are cached: none, or all, each as tokens that no other request has, or as the tokens that
they are, so that the next turn finds them: only a made workload knows these."""
REQUESTS, REJECTED, QUERIED, HIT, TAKEN = range(5)
"""Columns of a tally, a row a tenant: requests, and what became of their tokens; from TAKEN on what it
evicted of each tenant, in blocks (hash) or tokens (radix). A block belongs to who used it last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixResult:
    """One replay: requests one after the other, each looked up, allocated and freed before the next.

    The denominator of the hit rate is all prompt tokens, those of rejected requests included.
    """

    requests: int
    rejected: int
    """Larger than the cache: no hits. vLLM then leaves the cache as it is; SGLang finds out when all is
    evicted that nobody uses."""
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int
    """Blocks that lost what was cached in them; for radix: evicted tokens / block_size."""
    evicted_leaves: int
    """Nodes of the radix tree; 0 for hash."""
    cached_blocks: int
    """What is cached at the end."""
    tally: tuple[tuple[int, ...], ...] = ()
    """The same by tenant: rows of REQUESTS, REJECTED, QUERIED, HIT, and TAKEN from each, in blocks."""
    index_bytes: int = 0
    """What the index keeps at the end, besides K and V: `replay` says of what."""
    cpu_s: float = field(default=0.0, compare=False)
    """Of looking up, inserting and evicting, without reading the requests."""
    hits: Counts | None = None
    """Of each request, in tokens; -1: rejected."""

    @property
    def hit_rate(self) -> float:
        """Hit tokens of queried tokens."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HitCurve:
    """Hit and evicted tokens at each of some capacities, LRU over block hashes.

    `exact_from`: capacities from here on are read off one pass, those below are replayed.
    """

    capacity_blocks: Counts
    block_size: int
    requests: int
    queried_tokens: int
    hit_tokens: Counts
    evicted_blocks: Counts
    rejected: Counts
    exact_from: int
    largest_blocks: int
    """Of the largest request."""
    ceiling_tokens: int
    """Hits of a cache without end."""
    ceiling_blocks: int | None
    """The least capacity that reaches them; None where not all capacities were looked at."""

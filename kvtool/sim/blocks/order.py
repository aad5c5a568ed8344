"""SGLang's order of the queue, longest prefix match (lpm), plainly: managers/schedule_policy.py of 0.5.23.

All that wait are matched in their order, whole blocks of all their tokens, and sorted by the tokens found,
most first; those of one length stay in the order in which they were. Of those that found little and begin
alike, all but the first are put last for this step: once the first is computed, the others find it. Where
more wait than MOST_SORTED nobody is matched, and the order is that of before. Who is preempted waits behind
all others, as managers/scheduler.py appends whom it retracts; who that is, is vLLM's rule.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from kvtool.sim.blocks.numbers import ALIKE_TOKENS, FEW_TOKENS
from kvtool.sim.blocks.pool import CachedPool
from kvtool.sim.blocks.radix_pool import RadixPool
from kvtool.sim.blocks.request import Request
from kvtool.sim.prefix.radix_tree import RadixTree


def by_longest_match(waiting: Iterable[Request], pool: CachedPool | RadixPool) -> list[Request]:
    """The queue in its new order."""
    seen = RadixTree()
    numbers: dict[Hashable, int] = {}
    found: dict[Request, float] = {}
    for request in waiting:
        most = request.num_tokens // pool.block_size
        cached = pool.look_up(request, most).num_blocks * pool.block_size
        found[request] = -min(cached, request.num_tokens - 1)
        if cached > FEW_TOKENS:
            continue
        assert request.token is not None, "what is cached is known"
        spelled = [request.token(k) for k in range(request.num_tokens)]
        tokens = [numbers.setdefault(token, len(numbers)) for token in spelled]
        if seen.match(tokens).length >= ALIKE_TOKENS:
            found[request] = float("inf")
        else:
            seen.insert(tokens)
    return sorted(found, key=lambda request: found[request])

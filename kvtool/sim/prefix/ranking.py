"""Who is evicted first, by each policy: the one place that says it for both fast replays."""

from __future__ import annotations

from kvtool.jit import part
from kvtool.sim.prefix.result import POLICIES

LFU, FIFO, LENGTH_AWARE = (POLICIES.index(name) for name in ("lfu", "fifo", "length-aware"))
"""Policies as the kernels know them: by their place in POLICIES."""
_DEEPEST = 1 << 31
"""More than any depth: between two hit counts there is room for all."""


@part
def rank(policy: int, hits: int, made: int, depth: int) -> int:
    """What goes first is the least; of equals, what was used least recently.

    `hits`: how often it was found; `made`: when it came into the cache; `depth`: how far into its
    prompt it lies, in blocks or tokens. A policy not named here is lru: all are equal.
    """
    if policy == LFU:
        return hits
    if policy == FIFO:
        return made
    if policy == LENGTH_AWARE:
        return (hits + 1) * _DEEPEST - depth
    return 0

"""Entries of a tally, as every replay makes them: kvtool.sim.prefix.result names the columns."""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.prefix.pool import NONE
from kvtool.sim.prefix.result import HIT, QUERIED, REJECTED, REQUESTS


@part
def count_query(tally: Any, tenant: int, tokens: int) -> None:
    """A request came with a prompt of so many tokens."""
    tally[tenant, REQUESTS] += 1
    tally[tenant, QUERIED] += tokens


@part
def count_rejection(tally: Any, tenant: int, hits: Any, request: int) -> None:
    """It is larger than the cache."""
    tally[tenant, REJECTED] += 1
    if len(hits) > 0:
        hits[request] = NONE


@part
def count_hit(tally: Any, tenant: int, hits: Any, request: int, tokens: int) -> None:
    """So many tokens of its prompt were found; `hits` is empty where nobody asks for each."""
    tally[tenant, HIT] += tokens
    if len(hits) > 0:
        hits[request] = tokens

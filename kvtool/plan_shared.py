"""How many requests run at a time where equal blocks of their prompts are held once.

Counted exactly over requests that follow each other, in the order of a trace; each holds half its output,
which nobody shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.capacity import Holder
from kvtool.errors import KvtoolError, usage_error
from kvtool.plan_lengths import limit_of, request_costs, tokens_a_step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtool.requests import Column
    from kvtool.run import Row
    from kvtool.trace_blocks import HashedRequests

BLOCK_SIZE = 16
"""Where an engine has no blocks of its own, what is shared is shared in these."""
MOST_BLOCKS = 2**27
"""Whose sharing is looked for at once: a few GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRow:
    """Requests at a time, of all replicas, where equal blocks are held once; each with half its output."""

    requests: int
    """The most that follow each other and fit, at half the places of the trace at least."""
    unshared: int
    """The same if each held its own."""
    num_requests: int
    """That are served."""
    num_refused: int
    """Requests whose prompt leaves no room for a token under the limit (plan_lengths.limit_of)."""
    whole: bool
    """The trace as a whole fits, on each replica: there may be room for more."""
    block_size: int
    num_blocks: int
    """Of a rank that may be used."""


def shared_concurrency_of(
    holder: Holder, kv_bytes: int, prompts: Iterable[HashedRequests], replicas: int = 1
) -> SharedRow:
    """The largest n such that the distinct blocks of n requests that follow each other fit.

    Full blocks of prompts are shared, but for the one of the last token, which vLLM never hits, and what
    was generated; the median is over all places in the trace. Each replica is taken to serve such a row of
    requests (routing by prefix). KvtoolError where layers do not keep every token alike.
    """
    size, room = _shareable(holder, kv_bytes)
    limit, refused = limit_of(holder), 0

    def served() -> Iterator[HashedRequests]:
        nonlocal refused
        for requests in prompts:
            kept = requests if limit is None else _within(requests, limit)
            refused += len(requests) - len(kept)
            yield kept

    shared, own = _occurrences(served(), size)
    found = _most(lambda n: _held(shared, own, n), room, len(own))
    unshared = _most(lambda n: _windows(shared.each + own, n), room, len(own))
    return SharedRow(
        requests=found * replicas,
        unshared=unshared * replicas,
        num_requests=len(own),
        num_refused=refused,
        whole=found == len(own),
        block_size=size,
        num_blocks=room,
    )


def _within(requests: HashedRequests, limit: int) -> HashedRequests:
    """Those that are served, cut where they are too long. Names of cut outputs are not looked at."""
    import numpy as np

    kept = requests.where(requests.prompt_tokens < limit)
    output = np.minimum(kept.output_tokens, limit - kept.prompt_tokens)
    return replace(kept, output_tokens=output)


def shared_fields(found: SharedRow) -> Row:
    """The same as fields of a row."""
    return {
        "requests": found.num_requests,
        "requests_refused": found.num_refused,
        "max_concurrency_shared": found.requests,
        "max_concurrency_unshared": found.unshared,
        "whole_trace_fits": found.whole,
        "block_size": found.block_size,
        "usable_blocks": found.num_blocks,
    }


def _shareable(holder: Holder, kv_bytes: int) -> tuple[int, int]:
    """Tokens of a block, and how many blocks may be used: vLLM sets one aside."""
    import numpy as np

    size = tokens_a_step(holder)
    size = BLOCK_SIZE if size == 1 else size
    counts = np.array([1, 2, 3, 64, 4096])
    costs = request_costs(holder, counts * size)
    if (costs != counts * costs[0]).any():
        raise KvtoolError(
            f"{holder.subject.name}: its layers do not keep every token alike, so what blocks of it are "
            "shared is not known",
            "take a model with full attention or latents alone, or leave out shared prefixes",
            code="tokens_differ",
        )
    block = holder.row(size).get("bytes_per_block")
    room = kv_bytes // block - 1 if block else kv_bytes // int(costs[0])
    return size, max(0, room)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Blocks that can be shared, in groups: `count` of `request`, last had by the request `before`, or -1."""

    request: Column
    before: Column
    count: Column
    each: Column
    """Of each request."""


def _occurrences(prompts: Iterable[HashedRequests], size: int) -> tuple[_Shared, Column]:
    """Blocks of all requests that others may have too, and how many more each holds for itself alone."""
    import numpy as np

    from kvtool.sim.prefix.blocks import in_blocks_of
    from kvtool.sim.prefix.keys import Keys
    from kvtool.sim.prefix.result import NONE

    keys, ids, each, own = Keys(), [np.zeros(0, np.int32)], [np.zeros(0, np.int64)], []
    for requests in prompts:
        found = in_blocks_of(size, requests, keys.of(requests), cache_outputs=NONE)
        tokens = requests.prompt_tokens
        counts = np.maximum(0, tokens - 1) // size
        places = np.arange(len(found.ids)) - np.repeat(found.starts[:-1], np.diff(found.starts))
        ids.append(found.ids[places < np.repeat(counts, np.diff(found.starts))])
        each.append(counts)
        own.append(-(-(tokens + (requests.output_tokens + 1) // 2) // size) - counts)
        if sum(map(len, ids)) > MOST_BLOCKS:
            raise KvtoolError(
                f"the requests have more than {MOST_BLOCKS:,} blocks of {size} tokens",
                "give fewer requests (--num-requests)",
                code="too_large",
            )
    if not sum(map(len, own)):
        raise usage_error(
            "there are no requests to plan for", "give a workload or a trace with some"
        )
    counts = np.concatenate(each)
    return _groups(np.concatenate(ids), counts), np.concatenate(own)


def _groups(ids: NDArray[np.int32], counts: Column) -> _Shared:
    """Who had each block last: blocks of a request are different ones."""
    import numpy as np

    request = np.repeat(np.arange(len(counts)), counts)
    order = np.argsort(ids, kind="stable")
    same = ids[order][1:] == ids[order][:-1]
    before = np.full(len(ids), -1, np.int64)
    before[order[1:][same]] = request[order[:-1][same]]
    first = np.ones(len(ids), np.bool_)
    first[1:] = (before[1:] != before[:-1]) | (request[1:] != request[:-1])
    starts = np.flatnonzero(first)
    count = np.diff(starts, append=len(ids))
    return _Shared(request[starts], before[starts], count, counts)


def _held(shared: _Shared, own: Column, n: int) -> Column:
    """Distinct blocks of each n requests in a row, by the place of the first.

    A block is new in a window that holds its request but not the one that had it before.
    """
    import numpy as np

    first = np.maximum(np.maximum(shared.before, shared.request - n) + 1, 0)
    size = len(own) + 1
    change = np.bincount(first, shared.count, size)
    change -= np.bincount(shared.request + 1, shared.count, size)
    distinct = np.cumsum(change)[: len(own) - n + 1]
    found: Column = np.rint(distinct).astype(np.int64) + _windows(own, n)
    return found


def _windows(each: Column, n: int) -> Column:
    """Sums of each n in a row."""
    import numpy as np

    below = np.concatenate([[0], np.cumsum(each)])
    sums: Column = below[n:] - below[:-n]
    return sums


def _most(held: Callable[[int], Column], room: int, limit: int) -> int:
    """The largest n whose median fits, by bisection; 0 if not even one request does."""
    import numpy as np

    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.median(held(middle)) <= room else (low, middle - 1)
    return low

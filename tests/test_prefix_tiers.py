"""Tiers of memory against a plain chain of them, and requests explained against replays."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from prefix_cases import cut_up, traces

from kvtool.prefix_case import explain
from kvtool.prefix_worth import Tier, tier_rows
from kvtool.prompts import Prompts
from kvtool.sim.prefix.replay import Cache, replay
from kvtool.trace_blocks import HashedRequests

CALM: dict[str, Any] = {
    "deadline": None, "max_examples": 100,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}  # fmt: skip


def prompts_of(requests: HashedRequests, chunk: int = 7) -> Prompts:
    """Made requests where a trace would be."""
    return Prompts(
        name="made",
        is_trace=True,
        chunks=lambda progress: iter(cut_up(requests, chunk)),
        total=None,
    )


def with_tails(requests: HashedRequests) -> HashedRequests:
    """No prompt of whole blocks, whose last block would be cached twice."""
    size = requests.block_size
    tokens = requests.prompt_tokens - (requests.prompt_tokens % size == 0)
    kept = tokens > 0
    return replace(requests, prompt_tokens=tokens).where(kept)


def chain(requests: HashedRequests, sizes: list[int]) -> tuple[list[int], list[int]]:
    """Hit blocks by tier, and blocks that came down to it: a block is in one tier, the last used on top."""
    size = requests.block_size
    tiers: list[OrderedDict[tuple[int, ...], None]] = [OrderedDict() for _ in sizes]
    hits, down = [0] * len(sizes), [0] * (len(sizes) + 1)
    for index, tokens in enumerate(requests.prompt_tokens.tolist()):
        names = requests.hash_ids[requests.starts[index] : requests.starts[index + 1]].tolist()
        if len(names) > sizes[0]:
            continue
        full = [tuple(names[: end + 1]) for end in range(tokens // size)]
        found = 0
        while found < len(full) and any(full[found] in tier for tier in tiers):
            hits[next(level for level, tier in enumerate(tiers) if full[found] in tier)] += 1
            found += 1
        for tier in tiers:
            for block in full:
                tier.pop(block, None)
        for block in reversed(full):
            tiers[0][block] = None
        room = sizes[0] - 1  # the tail has no hash and takes a block
        for level, tier in enumerate(tiers):
            while len(tier) > (room if level == 0 else sizes[level]):
                block, _ = tier.popitem(last=False)
                down[level + 1] += 1
                if level + 1 < len(tiers):
                    tiers[level + 1][block] = None
    return hits, down


@settings(**CALM)
@given(traces(), st.integers(1, 12), st.lists(st.integers(1, 12), min_size=1, max_size=2))
def test_tiers_are_one_list_cut_where_each_is_full(
    requests: HashedRequests, first: int, lower: list[int]
) -> None:
    requests = with_tails(requests)
    assume(len(requests) and requests.block_size > 1)  # a block of one token has no tail
    size = requests.block_size
    cache = Cache(capacity_blocks=first, block_size=size)
    tiers = [
        Tier(name=f"t{place}", capacity_bytes=blocks * size * 8, bytes_per_token=8, bytes_per_s=1e9)
        for place, blocks in enumerate(lower)
    ]
    found = tier_rows(prompts_of(requests), cache, tiers, 1, None)
    hits, down = chain(requests, [first, *lower])
    assert [row["hit_tokens"] for row in found] == [count * size for count in hits]
    assert [row["written_bytes"] for row in found[1:]] == [
        count * size * 8 for count in down[1 : len(found)]
    ]
    assert [row["read_bytes"] for row in found[1:]] == [row["hit_tokens"] * 8 for row in found[1:]]


@settings(**CALM)
@given(traces(most=15), st.integers(1, 12), st.sampled_from(("hash", "radix")), st.data())
def test_a_request_is_explained_as_it_was_replayed(
    requests: HashedRequests, capacity: int, index: str, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, 9))
    number = data.draw(st.integers(1, len(requests)))
    cache = Cache(capacity_blocks=capacity, block_size=size, index=index)
    found = explain(prompts_of(requests, 4), cache, number)
    hits = replay(cache, [requests], with_hits=True).hits
    assert hits is not None
    assert found["hit_tokens"] == max(0, hits[number - 1])
    assert (found["ended_by"] == "rejected") == (hits[number - 1] < 0)
    assert (
        found["hit_tokens"]
        <= found["findable_tokens"]
        <= found["shared_tokens"]
        <= found["prompt_tokens"]
    )
    if found["ended_by"] == "lost":
        assert found["last_request"] is not None
        assert found["last_request"] < number
    largest = int((-(-requests.prompt_tokens // size)).max())
    if found["needed_blocks"] is not None and found["needed_blocks"] > largest:
        at = [
            int(np.asarray(replay(Cache(capacity_blocks=blocks, block_size=size), [requests], with_hits=True).hits)[number - 1])
            for blocks in (found["needed_blocks"] - 1, found["needed_blocks"])
        ]  # fmt: skip
        assert at[0] < at[1] == found["findable_tokens"]

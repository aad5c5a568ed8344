"""Replays over prefix caches: the fast ones give the plain twins' integers, and both are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefix_cases import caches, cut_up, hashed, traces

from kvtool.sim.prefix import replay as driver
from kvtool.sim.prefix.block_index import BlockIndex
from kvtool.sim.prefix.blocks import outputs_of
from kvtool.sim.prefix.grid import replay_all
from kvtool.sim.prefix.plain import replay_plain, spelled
from kvtool.sim.prefix.replay import Cache, replay, start
from kvtool.sim.prefix.result import HASH, KNOWN, POLICIES, RADIX, PrefixResult
from kvtool.trace_blocks import HashedRequests

CALM: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
FEW, MANY = settings(max_examples=100, **CALM), settings(max_examples=250, **CALM)
EVERYTHING = 1 << 20


def same(one: PrefixResult, other: PrefixResult) -> None:
    """Two results, hit by hit."""
    assert one.hits is not None
    assert other.hits is not None
    assert one.hits.tolist() == other.hits.tolist()
    names = (
        "requests", "rejected", "queried_tokens", "hit_tokens", "evicted_blocks",
        "evicted_leaves", "cached_blocks", "tally",
    )  # fmt: skip
    assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]


@MANY
@given(traces(), caches(HASH))
def test_the_fast_hash_index_is_the_plain_one(requests: HashedRequests, cache: Cache) -> None:
    same(replay(cache, [requests], with_hits=True), replay_plain(cache, requests))


@MANY
@given(traces(), caches(RADIX))
def test_the_fast_radix_tree_is_the_plain_one(requests: HashedRequests, cache: Cache) -> None:
    same(replay(cache, [requests], with_hits=True), replay_plain(cache, requests))


@MANY
@given(traces(spelled=True), st.one_of(caches(HASH), caches(RADIX)))
def test_outputs_that_are_known_are_cached_as_what_they_are(
    requests: HashedRequests, cache: Cache
) -> None:
    for outputs in ("known", "none", "unique"):
        one = replace(cache, cache_outputs=outputs)
        same(replay(one, [requests], with_hits=True), replay_plain(one, requests))


@FEW
@given(traces(), st.one_of(caches(HASH), caches(RADIX)), st.integers(1, 7))
def test_chunks_and_forgotten_keys_change_nothing(
    requests: HashedRequests, cache: Cache, size: int
) -> None:
    forgets_often(requests, cache, size)


def forgets_often(requests: HashedRequests, cache: Cache, size: int) -> None:
    """The same integers in chunks, with keys dropped whenever one can be."""
    whole = replay(cache, [requests], with_hits=True)
    before, driver.FEWEST_KEYS = driver.FEWEST_KEYS, 0
    spared, driver.KEYS_PER_CACHED = driver.KEYS_PER_CACHED, 1
    try:
        same(replay(cache, cut_up(requests, size), with_hits=True), whole)
    finally:
        driver.FEWEST_KEYS, driver.KEYS_PER_CACHED = before, spared


@pytest.mark.parametrize("policy", POLICIES)
def test_an_evicted_block_has_no_name_left_to_forget(policy: str) -> None:
    requests = HashedRequests(
        arrival_ns=np.array([0, 1, 2]), prompt_tokens=np.array([12, 6, 6]),
        output_tokens=np.array([0, 0, 0]), hash_ids=np.array([0, 0, 0, 0]),
        starts=np.array([0, 2, 3, 4]), block_size=6,
    )  # fmt: skip
    cache = Cache(capacity_blocks=1, block_size=12, index=HASH, policy=policy)
    forgets_often(requests, cache, 1)


@FEW
@given(traces(), st.integers(1, 12), st.sampled_from(POLICIES), st.sampled_from((HASH, RADIX)))
def test_without_eviction_a_hit_is_the_longest_common_prefix(
    requests: HashedRequests, size: int, policy: str, index: str
) -> None:
    cache = Cache(capacity_blocks=EVERYTHING, block_size=size, index=index, policy=policy)
    result = replay(cache, [requests], with_hits=True)
    prompts: list[tuple[int, ...]] = []
    for request, hit in zip(spelled(requests, cache_outputs="none"), result.hits, strict=True):
        prompt = request.prompt
        best = 0
        for other in prompts:
            full = other[: len(other) // size * size]
            most = (len(prompt) - 1) // size * size
            while best < most and prompt[: best + size] == full[: best + size]:
                best += size
        assert hit == best
        prompts.append(prompt)
    assert (result.evicted_blocks, result.evicted_leaves, result.rejected) == (0, 0, 0)


@FEW
@given(traces(), st.one_of(caches(HASH), caches(RADIX)))
def test_a_hit_is_a_prefix_that_was_seen_and_leaves_a_token(
    requests: HashedRequests, cache: Cache
) -> None:
    result = replay(cache, [requests], with_hits=True)
    seen: set[tuple[int, ...]] = set()
    for request, hit in zip(spelled(requests, cache_outputs="none"), result.hits, strict=True):
        prompt = request.prompt
        if hit > 0:
            assert hit % cache.block_size == 0
            assert hit < len(prompt)
            assert prompt[:hit] in seen
        if hit >= 0:
            seen |= {prompt[:end] for end in range(len(prompt) + 1)}
    assert result.cached_blocks <= cache.capacity_blocks


@FEW
@given(traces(), st.integers(1, 12))
def test_a_request_larger_than_the_pool_changes_nothing(
    requests: HashedRequests, size: int
) -> None:
    most = int(requests.prompt_tokens.max())
    cache = Cache(capacity_blocks=-(-most // size), block_size=size)
    blocks = list(range(100, 100 + 2 * most + size))
    tokens = cache.capacity_tokens + 1
    large = hashed([(blocks[: -(-tokens // requests.block_size)], tokens)], requests.block_size)
    run, other = start(cache), start(cache)
    for chunk in cut_up(requests, 3):
        run.feed(large)
        run.feed(chunk)
        other.feed(chunk)
    one, two = run.result(), other.result()
    chunks = -(-len(requests) // 3)
    assert (one.rejected, two.rejected) == (chunks, 0)
    assert one.requests == two.requests + chunks
    assert one.queried_tokens == two.queried_tokens + chunks * tokens
    assert (one.hit_tokens, one.evicted_blocks, one.cached_blocks) == (
        two.hit_tokens, two.evicted_blocks, two.cached_blocks,
    )  # fmt: skip


def test_a_request_larger_than_the_tree_leaves_what_it_found() -> None:
    # SGLang evicts before it allocates, and only then sees that there is no room.
    small, large = [([1, 2], 2), ([5, 6], 2)], [([1, 2, 7, 8, 9], 5)]
    cache = Cache(capacity_blocks=4, block_size=1, index=RADIX)
    result = replay(cache, [hashed(small + large + small, 1)], with_hits=True)
    assert result.hits is not None
    assert result.hits.tolist() == [0, 0, -1, 1, 0]
    assert (result.evicted_leaves, result.rejected) == (1, 1)


@settings(max_examples=40, **CALM)
@given(traces(), st.lists(st.one_of(caches(HASH), caches(RADIX)), max_size=6), st.integers(1, 9))
def test_many_replays_at_once_are_each_one(
    requests: HashedRequests, many: list[Cache], size: int
) -> None:
    results = replay_all(many, cut_up(requests, size), threads=2)
    assert results == [replay(cache, [requests]) for cache in many]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("index", [HASH, RADIX])
def test_memory_is_bounded_by_what_is_cached(
    index: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "FEWEST_KEYS", 1000)
    cache = Cache(capacity_blocks=500, block_size=8, index=index, policy=policy)
    run = start(cache)
    most = 0
    for chunk in range(60):
        made = [([-1, chunk * 10**6 + i, -i], 24) for i in range(400)]
        run.feed(hashed(made, 8))
        most = max(most, run.keys.count)
    assert most < 12_000  # of 48,000
    assert run.result().hit_tokens == 8 * (60 * 400 - 1)
    columns = run.block_of if isinstance(run, driver.HashReplay) else run.owner
    assert len(columns) < 24_000


def test_names_mean_nothing_without_what_comes_before() -> None:
    requests = hashed([([1, 2, 9], 3), ([2, 2, 9], 3), ([1, 2, 9], 3)], 1)
    for index in (HASH, RADIX):
        cache = Cache(capacity_blocks=100, block_size=1, index=index)
        result = replay(cache, [requests], with_hits=True)
        assert result.hits is not None
        assert result.hits.tolist() == [0, 0, 2]


def test_an_output_of_one_token_takes_no_slot() -> None:
    for outputs, cached in ((0, 1), (1, 1), (2, 2)):
        requests = hashed([([1], 2)], 2, [outputs])
        cache = Cache(capacity_blocks=9, block_size=2, cache_outputs="unique")
        assert replay(cache, [requests]).cached_blocks == cached


def test_a_prompt_of_whole_blocks_caches_its_last_block_twice() -> None:
    # vLLM computes the last token anew, and the block that it is in with it.
    index = BlockIndex(8)
    for _ in range(2):
        allocation = index.allocate(["a", "b"], 2, 1)
        assert allocation is not None
        index.free(allocation.table)
    assert index.num_cached == 3
    cache = Cache(capacity_blocks=8, block_size=1)
    assert replay(cache, [hashed([([1, 2], 2)] * 2, 1)]).cached_blocks == 3


def test_blocks_in_use_are_not_taken() -> None:
    index = BlockIndex(3)
    first = index.allocate(["a", "b"], 2, 1)
    assert first is not None
    assert index.allocate(["c", "d"], 2, 1) is None
    second = index.allocate(["a", "e"], 2, 1)
    assert second is not None
    assert second.num_hits == 1
    assert [block.ref_count for block in second.table] == [2, 1]
    index.free(first.table)
    index.free(second.table)
    assert index.num_free == 3
    assert (index.num_cached, index.num_evicted) == (3, 0)


def test_of_known_outputs_the_last_token_is_not_cached() -> None:
    # Of two outputs, the last would fill the second block: it was only sampled. Of three, it is the next.
    turns = replace(hashed([([1, 2, 9], 5), ([1, 2, 3], 5)], 2), prompt_tokens=np.array([2, 5]),
                    output_tokens=np.array([2, 1]), spells_outputs=True)  # fmt: skip
    for requests, hit in ((turns, 2), (replace(turns, output_tokens=np.array([3, 1])), 4)):
        assert outputs_of(requests, KNOWN).tolist() == [hit // 2, 0]
        for index in (HASH, RADIX):
            cache = Cache(capacity_blocks=9, block_size=2, index=index, cache_outputs=KNOWN)
            assert replay(cache, [requests]).hit_tokens == hit
    assert outputs_of(turns, "unique").tolist() == [2, 0]
    assert outputs_of(turns, "none").tolist() == [0, 0]


def test_progress_and_long_columns() -> None:
    told: list[int] = []
    requests = hashed([([i, i + 1], 2) for i in range(70_000)], 1)
    cache = Cache(capacity_blocks=100, block_size=1, index=RADIX)
    result = replay(cache, cut_up(requests, 50_000), progress=told.append)
    assert told == [50_000, 20_000]
    assert (result.hit_tokens, result.requests) == (0, 70_000)
    assert np.int64(result.evicted_blocks) == 2 * 70_000 - 100


@pytest.mark.parametrize(
    "wrong", [{"capacity_blocks": 0}, {"block_size": 0}, {"index": "tree"}, {"policy": "mru"}]
)
def test_a_cache_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Cache(**{"capacity_blocks": 1, "block_size": 1, **wrong})

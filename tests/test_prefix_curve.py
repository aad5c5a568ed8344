"""The hit-rate curve: one pass says of each capacity what a replay says of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefix_cases import cut_up, hashed, traces

from kvtool.errors import KvtoolError
from kvtool.sim.prefix import curve as curve_module
from kvtool.sim.prefix.curve import NEVER, hit_curve, spread
from kvtool.sim.prefix.replay import Cache, replay
from kvtool.trace_blocks import HashedRequests

CALM = settings(
    max_examples=120, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


@CALM
@given(traces(), st.integers(1, 12), st.sampled_from(("none", "unique")), st.integers(1, 9))
def test_the_curve_is_a_replay_at_every_capacity(
    requests: HashedRequests, size: int, outputs: str, chunk: int
) -> None:
    most = int(-(-requests.prompt_tokens // size).sum()) + 200
    capacities = [*range(1, min(most, 90)), most]
    curve = hit_curve(
        lambda: cut_up(requests, chunk),
        block_size=size, capacities=capacities, cache_outputs=outputs,
    )  # fmt: skip
    assert curve.capacity_blocks.tolist() == capacities
    for at, capacity in enumerate(capacities):
        cache = Cache(capacity_blocks=capacity, block_size=size, cache_outputs=outputs)
        result = replay(cache, [requests])
        assert result.hit_tokens == curve.hit_tokens[at]
        assert result.evicted_blocks == curve.evicted_blocks[at]
        assert result.rejected == curve.rejected[at]
        assert result.queried_tokens == curve.queried_tokens
        assert result.requests == curve.requests
        if capacity >= (curve.ceiling_blocks or most):
            assert result.hit_tokens == curve.ceiling_tokens


def distinct(seed: int, count: int = 3000) -> HashedRequests:
    """Prompts that end within a block: nothing is cached twice, so that one pass says all."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        depth = int(rng.integers(1, 12))
        shared = int(rng.integers(0, depth + 1))
        family = int(rng.zipf(1.3)) % 500
        blocks = [family * 100 + d for d in range(shared)]
        blocks += [10**6 + index * 100 + d for d in range(depth - shared)]
        made.append((blocks, depth * 16 - int(rng.integers(1, 16))))
    return hashed(made, 16)


@pytest.mark.parametrize("size", [16, 32])
def test_a_long_trace_is_one_pass_from_the_largest_request_up(size: int) -> None:
    requests = distinct(size)
    curve = hit_curve(lambda: [requests], block_size=size, points=200)
    largest = -(-int(requests.prompt_tokens.max()) // size)
    assert curve.exact_from == largest
    assert curve.capacity_blocks[0] == largest
    assert curve.capacity_blocks[-1] == curve.ceiling_blocks
    assert curve.hit_tokens[-1] == curve.ceiling_tokens
    assert curve.hit_tokens[-2] < curve.ceiling_tokens
    for at in range(0, len(curve.capacity_blocks), 23):
        cache = Cache(capacity_blocks=int(curve.capacity_blocks[at]), block_size=size)
        result = replay(cache, [requests])
        assert result.hit_tokens == curve.hit_tokens[at]
        assert result.evicted_blocks == curve.evicted_blocks[at]


def test_a_block_that_is_cached_twice_is_found_where_it_was_first() -> None:
    # Four copies of the second block. Caches that keep the first of them keep the others in vain.
    again, longer, other = ([1, 2], 8), ([1, 2, 3], 11), ([7, 8, 9], 11)
    requests = hashed([again, again, other, again, again, longer, other, longer, again], 4)
    curve = hit_curve(lambda: [requests], block_size=4, capacities=range(1, 20))
    assert curve.exact_from == 3
    for at, capacity in enumerate(range(1, 20)):
        result = replay(Cache(capacity_blocks=capacity, block_size=4), [requests])
        assert result.hit_tokens == curve.hit_tokens[at]
        assert result.evicted_blocks == curve.evicted_blocks[at]


def test_too_many_copies_take_the_long_way() -> None:
    made = [([i % 600], 4) for i in range(3600)] + [([5, 1], 7)]
    requests = hashed(made, 4)
    curve = hit_curve(lambda: [requests], block_size=4, capacities=[2, 600, 4000])
    assert (curve.exact_from, curve.ceiling_blocks) == (NEVER, None)
    assert curve.ceiling_tokens == curve.hit_tokens[-1] == 4
    assert curve.evicted_blocks.tolist() == [3600, 3001, 0]


def test_capacities_are_spread_evenly_by_factor() -> None:
    assert spread(1, 1000, 4).tolist() == [1, 10, 100, 1000]
    assert spread(0, 0, 5).tolist() == [1]
    assert spread(10, 12, 100).tolist() == [10, 11, 12]


def test_a_curve_that_has_to_be_replayed_goes_to_its_ceiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = [([i, i + 900], 2) for i in range(40)]
    requests = hashed([*again, *again, *reversed(again), *again], 1)
    monkeypatch.setattr(curve_module, "MOST_COPIES", 3)
    curve = hit_curve(lambda: [requests], block_size=1, points=1000)
    assert curve.ceiling_blocks is None
    assert len(curve.capacity_blocks) <= curve_module.MOST_REPLAYED
    assert curve.hit_tokens[-1] == curve.ceiling_tokens
    for capacity, hits in zip(curve.capacity_blocks, curve.hit_tokens, strict=True):
        cache = Cache(capacity_blocks=int(capacity), block_size=1)
        assert replay(cache, [requests]).hit_tokens == hits


def test_a_curve_of_too_many_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_module, "MOST_BLOCKS", 10)
    with pytest.raises(KvtoolError, match="too many for a curve"):
        hit_curve(lambda: [hashed([([1, 2], 2)] * 6, 1)], block_size=1)

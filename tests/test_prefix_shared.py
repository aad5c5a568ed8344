"""Why tokens are no hits: the reasons add up, and each is what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefix_cases import caches, cut_up, hashed, traces

from kvtool.sim.prefix import shared as module
from kvtool.sim.prefix.grid import replay_all
from kvtool.sim.prefix.keys import Keys
from kvtool.sim.prefix.plain import spelled
from kvtool.sim.prefix.replay import Cache
from kvtool.sim.prefix.result import HASH, RADIX
from kvtool.sim.prefix.shared import Prefix, Shared
from kvtool.trace_blocks import HashedRequests

CALM: dict[str, Any] = {
    "deadline": None, "max_examples": 120,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}  # fmt: skip
ENDLESS = 1 << 20


class Seen(Shared):
    """With what was found of each request."""

    def feed(self, requests: HashedRequests, keys: Keys, of: Any) -> bool:
        self.found: list[int] = getattr(self, "found", [])
        for index in range(len(requests)):
            one, before = requests.part(index, index + 1), self.num_new()
            kept = super().feed(one, keys, of[requests.starts[index] : requests.starts[index + 1]])
            self.found.append(int(one.prompt_tokens[0]) - self.num_new() + before)
        return kept

    def num_new(self) -> int:
        """Tokens that were new so far."""
        return self.reasons(1).new if self.num_requests else 0


def looked_at(requests: HashedRequests, *many: Cache, outputs: str = "none", chunk: int = 7) -> Any:
    """Results of replays, and what was shared."""
    shared = Seen(block_sizes=(*range(1, 13), 16, 784), outputs=outputs)
    results = replay_all(many, cut_up(requests, chunk), with_hits=True, watch=shared.feed)
    return results, shared


@settings(**CALM)
@given(traces(), st.integers(1, 9))
def test_what_is_shared_is_the_longest_prefix_that_was_there(
    requests: HashedRequests, chunk: int
) -> None:
    _, shared = looked_at(requests, chunk=chunk)
    seen: set[tuple[int, ...]] = {()}
    for request, found in zip(spelled(requests), np.array(shared.found), strict=True):
        prompt = request.prompt
        assert found == max(end for end in range(len(prompt) + 1) if prompt[:end] in seen)
        seen |= {prompt[:end] for end in range(len(prompt) + 1)}


@settings(**CALM)
@given(traces(spelled=True), st.sampled_from(("none", "known")), st.sampled_from((HASH, RADIX)),
       st.integers(1, 12))  # fmt: skip
def test_a_cache_without_end_finds_what_can_be_found(
    requests: HashedRequests, outputs: str, index: str, size: int
) -> None:
    cache = Cache(capacity_blocks=ENDLESS, block_size=size, index=index, cache_outputs=outputs)
    (result,), shared = looked_at(requests, cache, outputs=outputs)
    assert shared.reasons(size).findable == result.hit_tokens


@settings(**CALM)
@given(traces(), st.one_of(caches(HASH), caches(RADIX)))
def test_the_reasons_add_up_and_nothing_is_lost_below_zero(
    requests: HashedRequests, cache: Cache
) -> None:
    (result,), shared = looked_at(requests, cache)
    why = shared.reasons(cache.block_size)
    assert why.new + why.rounded + why.last_block + why.findable == result.queried_tokens
    assert min(why.new, why.rounded, why.last_block, why.findable - result.hit_tokens) >= 0


def test_each_reason_alone() -> None:
    def of(made: HashedRequests, size: int) -> list[int]:
        why = looked_at(made)[1].reasons(size)
        return [why.new, why.rounded, why.last_block, why.findable]

    assert of(hashed([([1, 2], 8), ([3, 4], 8)], 4), 4) == [16, 0, 0, 0]
    # 240 tokens in common are no block of 784 (vllm-project/vllm#54607).
    two = hashed([([1, 2, 3, *range(10, 21)], 1120), ([1, 2, 3, *range(30, 41)], 1120)], 80)
    assert of(two, 784) == [1120 + 880, 240, 0, 0]
    assert of(two, 16) == [2000, 0, 0, 240]
    again = hashed([([1, 2], 8)] * 2, 4)
    assert of(again, 4) == [8, 0, 4, 4]
    assert of(again, 8) == [8, 0, 8, 0]


@settings(**CALM)
@given(traces(), st.integers(1, 9))
def test_the_prefixes_are_the_runs_of_what_is_reused(requests: HashedRequests, chunk: int) -> None:
    _, shared = looked_at(requests, chunk=chunk)
    runs = shared.prefixes(ENDLESS)
    assert sum(run.reused_tokens for run in runs) == int(np.array(shared.found).sum())
    assert [run.reused_tokens for run in runs] == sorted(
        (run.reused_tokens for run in runs), reverse=True
    )
    prompts = [request.prompt for request in spelled(requests)]
    for run in runs:
        prompt = prompts[run.first_request - 1]
        alike = [other for other in prompts if other[: run.start + 1] == prompt[: run.start + 1]]
        assert run.requests == len(alike) >= 2


def test_a_prefix_and_what_goes_on_from_it_stand_apart() -> None:
    made = hashed([([1, 2], 8), ([1, 2, 3], 12), ([1, 2, 3, 4], 14), ([1, 9], 7)], 4)
    assert looked_at(made)[1].prefixes(9) == [
        Prefix(start=0, end=4, requests=4, reused_tokens=12, first_request=1, last_request=4),
        Prefix(start=4, end=8, requests=3, reused_tokens=8, first_request=1, last_request=3),
        Prefix(start=8, end=12, requests=2, reused_tokens=4, first_request=2, last_request=3),
    ]


def test_too_many_blocks_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BLOCKS", 10)
    _, shared = looked_at(hashed([([i, i + 1], 2) for i in range(12)], 1), chunk=3)
    assert shared.given_up
    assert shared.prefixes(9) == []
    assert len(shared.known) == 0

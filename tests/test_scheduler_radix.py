"""vLLM's steps over SGLang's radix tree: fast as plain, nothing lost, and the tree replayed alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blocks_cases import (
    BlocksCase,
    Endless,
    TellingScheduler,
    check_requests,
    drawn_blocks,
    drawn_contents,
    fast_gaps,
    fast_numbers,
    plain_numbers,
    run_blocks,
    run_blocks_plain,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ran import Ran
from sim_cases import requests

from kvtool.contents import Contents, of_blocks, of_segments
from kvtool.sim.blocks import state
from kvtool.sim.blocks.engine import BlocksEngine
from kvtool.sim.blocks.numbers import NO_NAME, ROOT
from kvtool.sim.blocks.radix_pool import RadixPool
from kvtool.sim.blocks.request import Batch
from kvtool.sim.blocks.spelling import plain_requests
from kvtool.sim.prefix.replay import Cache, replay
from kvtool.sim.prefix.result import KNOWN, RADIX
from kvtool.sim.settings import DONE, Settings, StepTime
from kvtool.trace_blocks import HashedRequests

CALM: Any = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
Kvtool = Callable[..., Ran]
UNIT = StepTime(base_ns=1, token_ns=0, context_ns=0)


@st.composite
def drawn_trees(draw: st.DrawFn, policies: tuple[str, ...] = ("fcfs", "priority", "lpm")) -> Any:
    """Any run of synchronous steps, over a tree."""
    case = draw(drawn_blocks())
    policy = draw(st.sampled_from(policies))
    limits = replace(
        case.settings, prefix_caching=True, index="radix", policy=policy, async_scheduling=False
    )
    asked, contents = case.requests, case.contents
    if policy == "priority" and asked.priority is None:
        asked = replace(asked, priority=np.arange(len(asked)) % 3)
    if contents is None:
        contents = draw(drawn_contents(asked.prompt_tokens.tolist(), limits.block_size))
    return BlocksCase(requests=asked, settings=limits, contents=contents)


class CountingScheduler(TellingScheduler):
    """Looks at each block before and after the output of a step."""

    def _process(self, batch: Batch) -> None:
        self._count()
        super()._process(batch)
        self._count()

    def _count(self) -> None:
        pool = self.pool
        assert isinstance(pool, RadixPool)
        own = [block for one in self.running for block in one.table[one.registered :]]
        held = Counter([*pool.free_blocks, *pool.cached.values(), *own])
        assert held == Counter(range(1, pool.num_blocks + 1))
        assert (
            len(pool.cached)
            == pool.tree.num_tokens
            == sum(len(n.tokens) for n in pool.tree.nodes())
        )
        locks: Counter[int] = Counter()
        for one in self.running:
            assert one.node.depth == one.registered <= len(one.table)
            node = one.node
            while node.parent is not None:
                locks[id(node)] += 1
                node = node.parent
            for k in range(one.registered):
                assert one.table[k] == pool.cached[one.key(k)]
        assert {id(n): n.locks for n in pool.tree.nodes() if n.locks} == dict(locks)


def run_counting(case: BlocksCase) -> CountingScheduler:
    """The plain scheduler, its blocks looked at."""
    asked = plain_requests(case.requests, case.settings, case.contents)
    scheduler = CountingScheduler(asked, case.settings, 20_000)
    scheduler.run()
    return scheduler


def check_tree(run: BlocksEngine) -> None:
    """The fast engine's tree: each block in one node, found by its name; leaves in the heap, locks gone."""
    now, tree, nodes, blocks = run.state.run, run.state.tree, run.state.nodes, run.state.blocks
    named = [at for at in range(tree.blocks) if blocks[at].name != NO_NAME]
    found = {int(slot.name): int(slot.block) for slot in run.state.slots if slot.name != NO_NAME}
    assert found == {int(blocks[at].name): at for at in named}
    held: Counter[int] = Counter(int(blocks[at].node) for at in named)
    children: Counter[int] = Counter(int(nodes[at].parent) for at in held)
    for at, count in held.items():
        node, block = nodes[at], int(nodes[at].last)
        assert count == node.end - node.start > 0
        assert nodes[node.parent].end == node.start
        assert node.children == children[at]
        for _ in range(count):
            assert blocks[block].node == at
            block = int(blocks[block].before)
    in_heap = {int(nodes[k].heap) for k in range(tree.heaped)}
    assert in_heap == {at for at in held if not children[at] and not nodes[at].locks}
    if not now.running:
        assert not any(nodes[at].locks for at in held)
        assert tree.evictable == len(named)
        assert now.free_blocks + len(named) == now.num_blocks
    assert nodes[ROOT].locks == 1


def compare(case: BlocksCase, run: Any = run_blocks_plain) -> tuple[Any, BlocksEngine]:
    """Both on the same, integer for integer."""
    try:
        plain = run(case)
    except Endless:
        assume(False)
    fast = run_blocks(case)
    expected, found = plain_numbers(plain), fast_numbers(fast)
    for name, values in expected.items():
        assert found[name] == values, name
    assert fast_gaps(fast) == +plain.gaps
    if case.settings.index == "radix":
        check_tree(fast)
    check_requests(case, fast)
    return plain, fast


@settings(max_examples=150, **CALM)
@given(case=drawn_trees())
def test_any_run_is_that_of_the_plain_scheduler(case: BlocksCase) -> None:
    plain, fast = compare(case)
    # Each token is computed, found or lost, and none is made twice.
    now = fast.state.run
    ended = [one for one in plain.requests if one.status <= 1]
    kept = sum(one.prompt_tokens + one.generated - 1 for one in ended)
    lost = int(now.recomputed) + sum(one.computed for one in plain.requests if one not in ended)
    assert int(fast.all_steps()["scheduled_tokens"].sum()) + int(now.hit + now.rehit) == kept + lost
    made = sum(plain.gaps.values()) + sum(one.first_token_step >= 0 for one in plain.requests)
    assert made == sum(one.generated for one in plain.requests)


@pytest.mark.slow
@settings(max_examples=2000, **CALM)
@given(case=drawn_trees())
def test_any_run_is_that_of_the_plain_scheduler_many_times(case: BlocksCase) -> None:
    compare(case)


@settings(max_examples=60, **CALM)
@given(case=drawn_trees())
def test_no_block_is_lost_and_locks_are_those_of_who_runs(case: BlocksCase) -> None:
    try:
        run_counting(case)
    except Endless:
        assume(False)


@settings(max_examples=40, **CALM)
@given(case=drawn_trees(), work=st.integers(1, 40))
def test_pauses_and_little_room_change_nothing(case: BlocksCase, work: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "FIRST_ROOM", 1)
        patch.setattr(state, "STEPS_KEPT", 1)
        patch.setattr("kvtool.sim.blocks.engine.WORK_AT_ONCE", work)
        compare(case)


# --- one at a time: the tree alone


def one_at_a_time(
    rng: np.random.Generator, *, most_output: int, num_blocks: int
) -> tuple[HashedRequests, BlocksCase]:
    """Requests of named blocks of four tokens that do not overlap, each computed in one step."""
    count, size = 60, 4
    ids: list[list[int]] = []
    for _ in range(count):  # from the start or from an earlier one, and on with new ones
        before = ids[int(rng.integers(len(ids)))] if ids and rng.random() < 0.8 else []
        kept = before[: int(rng.integers(len(before) + 1))]
        fresh = rng.integers(1000, 1006, int(rng.integers(1, 5))).tolist()
        ids.append([*kept, *fresh][:12])
    outputs = rng.integers(1, most_output, count, endpoint=True)
    tokens = np.array([len(one) * size for one in ids]) - outputs
    hashed = HashedRequests(
        arrival_ns=np.arange(count) * 1000, prompt_tokens=tokens, output_tokens=outputs,
        hash_ids=np.array([one for some in ids for one in some]),
        starts=np.cumsum([0, *map(len, ids)]), block_size=size, spells_outputs=True,
    )  # fmt: skip
    case = BlocksCase(
        requests=requests(tokens, outputs, hashed.arrival_ns),
        settings=Settings(
            num_blocks=num_blocks, block_size=size, max_model_len=1000, prefix_caching=True,
            index="radix", step_time=UNIT,
        ),
        contents=of_blocks(hashed),
    )  # fmt: skip
    return hashed, case


@settings(max_examples=30, **CALM)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(12, 60))
def test_one_at_a_time_without_outputs_it_is_the_replayed_tree(seed: int, blocks: int) -> None:
    rng = np.random.default_rng(seed)
    hashed, case = one_at_a_time(rng, most_output=1, num_blocks=blocks)
    run = run_blocks(case)
    cache = Cache(capacity_blocks=blocks, block_size=4, index=RADIX, cache_outputs=KNOWN)
    alone = replay(cache, [hashed], with_hits=True)
    assert (run.outcome("status") == DONE).all()
    assert run.outcome("cached_tokens_first").tolist() == alone.hits.tolist()
    assert int(run.state.run.evicted) == alone.evicted_blocks
    assert int(run.state.tree.evictable) == alone.cached_blocks


@settings(max_examples=20, **CALM)
@given(seed=st.integers(0, 2**32 - 1))
def test_one_at_a_time_with_outputs_hits_are_the_replayed_tree_s_while_nothing_goes(
    seed: int,
) -> None:
    # An output is a leaf of its own here, and goes before its prompt: not so where a replay inserts both.
    hashed, case = one_at_a_time(np.random.default_rng(seed), most_output=3, num_blocks=1000)
    run = run_blocks(case)
    cache = Cache(capacity_blocks=1000, block_size=4, index=RADIX, cache_outputs=KNOWN)
    alone = replay(cache, [hashed], with_hits=True)
    assert run.outcome("cached_tokens_first").tolist() == alone.hits.tolist()
    assert int(run.state.run.evicted) == alone.evicted_blocks == 0


# --- rules by hand


def play(
    pairs: list[tuple[int, int]], segments: list[list[int]], **limits: Any
) -> tuple[TellingScheduler, BlocksEngine]:
    """Requests, (prompt, output) each, on a few blocks of four; a step takes 1 ns."""
    arrivals = limits.pop("arrivals", None)
    limits = {"num_blocks": 8, "block_size": 4, "max_model_len": 100, "step_time": UNIT, **limits}
    flat = np.array([number for one in segments for number in one], np.int64)
    contents: Contents = of_segments(
        np.array([len(one) // 3 for one in segments]), flat, np.arange(50, 50 + len(pairs))
    )
    case = BlocksCase(
        requests=requests([a for a, _ in pairs], [b for _, b in pairs], arrivals),
        settings=Settings(**{"prefix_caching": True, "index": "radix", **limits}),
        contents=contents,
    )
    return compare(case)


def test_nothing_is_found_in_the_step_that_computes_it() -> None:
    same = [[1, 0, 9], [1, 0, 9]]
    _, run = play([(9, 2), (9, 2)], same)
    assert run.outcome("cached_tokens_first").tolist() == [0, 0]  # by vLLM's hash: 0, 8
    # Both computed two blocks; once they are the tree's, the second's own copies are free.
    assert run.all_steps()["used_blocks"].tolist() == [6, 4]
    _, run = play([(9, 2), (9, 2)], same, arrivals=[0, 1])
    assert run.outcome("cached_tokens_first").tolist() == [0, 8]


def test_a_chunk_is_found_once_it_is_computed() -> None:
    _, run = play(
        [(16, 1), (16, 1)], [[1, 0, 16], [1, 0, 8, 2, 0, 8]], arrivals=[0, 1], max_batched_tokens=12
    )
    assert run.outcome("cached_tokens_first").tolist() == [0, 8]


def test_an_output_goes_before_its_prompt() -> None:
    pairs = [(8, 5), (8, 1), (12, 1)]
    segments = [[1, 0, 8], [2, 0, 8], [1, 0, 8, 50, 0, 4]]
    _, run = play(pairs, segments, num_blocks=4, arrivals=[0, 10, 20])
    # Two blocks of prompt and one of output are cached; the second needs one block more than is free. The
    # third finds the prompt, and evicts the second, which is one leaf of two blocks.
    assert run.outcome("cached_tokens_first").tolist() == [0, 0, 8]
    assert run.all_steps()["evictions"].tolist()[-2:] == [1, 2]


def test_a_victim_finds_its_prompt_and_not_what_it_generated() -> None:
    plain, run = play([(8, 12), (8, 12)], [[1, 0, 8], [2, 0, 8]], num_blocks=7)
    assert [index for _, index in plain.preemptions] == [1]
    found = run.outcome("cached_tokens_after_preemption").tolist()
    assert found[0] == 0
    assert found[1] <= 8


# --- the command

MADE = ("simulate", "--num-blocks", "2000", "--workload", "agent", "--num-requests", "200")


def test_indexes_and_policies_are_lists_and_say_what_they_rest_on(kvtool: Kvtool) -> None:
    ran = kvtool(
        *MADE, "--prefix-caching", "--index", "hash,radix", "--policy", "fcfs,lpm", "--json"
    )
    rows, notes = ran.json["rows"], ran.json["notes"]
    named = [(row["index"], row["policy"]) for row in rows]
    assert named == [("hash", "fcfs"), ("hash", "lpm"), ("radix", "fcfs"), ("radix", "lpm")]
    assert all(row["finished"] + row["rejected"] + row["aborted"] == 200 for row in rows)
    for flag in ("--index radix", "--policy lpm"):
        (said,) = [note for note in notes if note.startswith(flag)]
        assert "no engine row to compare with" in said
    shown = kvtool(*MADE, "--prefix-caching", "--index", "hash,radix").out
    assert "with index" in shown


def test_without_a_prefix_cache_there_is_no_index(kvtool: Kvtool) -> None:
    (row,) = kvtool(*MADE, "--json").json["rows"]
    assert row["index"] is None


@pytest.mark.parametrize(
    ("argv", "says", "code"),
    [
        (["--index", "radix"], "--index radix is of a prefix cache", 2),
        (["--policy", "lpm"], "--policy lpm is of a prefix cache", 2),
        (["--index", "tree", "--prefix-caching"], "--index: 'tree' is not known", 2),
        (["--index", "radix", "--prefix-caching", "--async-scheduling"], "one step at a time", 1),
        (["--policy", "lpm", "--prefix-caching", "--async-scheduling"], "one step at a time", 1),
        (["--index", "radix", "--prefix-caching", "--scheduler", "static"], "--scheduler static", 2),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(
    kvtool: Kvtool, argv: list[str], says: str, code: int
) -> None:
    ran = kvtool(*MADE, *argv)
    assert ran.code == code
    assert says in ran.err
    assert len(ran.err.strip().splitlines()) == 2

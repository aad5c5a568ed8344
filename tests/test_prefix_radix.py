"""The radix tree: what it spells, who is locked, who goes, and how it is drawn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prefix_cases import hashed, traces

from kvtool.sim.prefix.drawing import Branch, branch_of_replay, draw
from kvtool.sim.prefix.plain import replay_tree, spelled
from kvtool.sim.prefix.radix_tree import PRIORITIES, Match, Node, RadixTree
from kvtool.sim.prefix.replay import Cache, RadixReplay
from kvtool.sim.prefix.result import RADIX
from kvtool.trace_blocks import HashedRequests

TOKENS = st.lists(st.integers(0, 2), max_size=12).map(tuple)


def spelt(node: Node) -> tuple[int, ...]:
    """The tokens from the root to the end of a node."""
    return (spelt(node.parent) if node.parent else ()) + node.tokens


def whole(tokens: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tokens[: len(tokens) // size * size]


class TreeAgainstAList(RuleBasedStateMachine):
    """The tree holds exactly the prefixes that a list of cached sequences has."""

    size = 1
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(self.size, self.policy)
        self.cached: set[tuple[int, ...]] = set()
        """Each block of each prefix, by the tokens up to its end."""
        self.held: list[Match] = []

    def longest(self, tokens: tuple[int, ...]) -> int:
        tokens = whole(tokens, self.size)
        ends = range(self.size, len(tokens) + 1, self.size)
        return max((end for end in ends if tokens[:end] in self.cached), default=0)

    @rule(tokens=TOKENS)
    def match(self, tokens: tuple[int, ...]) -> None:
        found = self.tree.match(tokens)
        assert found.length == self.longest(tokens)
        assert spelt(found.node) == tokens[: found.length]

    @rule(tokens=TOKENS)
    def insert(self, tokens: tuple[int, ...]) -> None:
        there = self.longest(tokens)
        found = self.tree.insert(tokens)
        assert found.length == there
        tokens = whole(tokens, self.size)
        assert spelt(found.node) == tokens
        self.cached |= {tokens[:end] for end in range(self.size, len(tokens) + 1, self.size)}

    @rule(tokens=TOKENS)
    def match_and_lock(self, tokens: tuple[int, ...]) -> None:
        found = self.tree.match(tokens)
        self.tree.lock(found.node)
        self.held.append(Match(found.length, found.node))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        found = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.tree.unlock(found.node)

    @rule(num_tokens=st.integers(-1, 20))
    def evict(self, num_tokens: int) -> None:
        before = self.tree.num_tokens
        locked = {spelt(found.node) for found in self.held}
        gone = self.tree.evict(num_tokens)
        freed = sum(len(node.tokens) for node in gone)
        assert before - self.tree.num_tokens == freed
        last = len(gone[-1].tokens) if gone else 0
        assert freed - last < max(1, num_tokens)  # whole leaves, and not one too many
        assert freed >= num_tokens or self.tree.num_tokens == self.tree.num_locked
        assert all(self.tree.match(tokens).length == len(tokens) for tokens in locked)
        self.cached = {
            spelt(node)[:end]
            for node in self.tree.nodes()
            for end in range(self.size, node.depth + 1, self.size)
        }

    @invariant()
    def counts_add_up(self) -> None:
        nodes = list(self.tree.nodes())
        assert self.tree.num_tokens == sum(len(node.tokens) for node in nodes)
        assert self.tree.num_tokens == self.size * len(self.cached)
        assert self.tree.num_locked == sum(len(node.tokens) for node in nodes if node.locks)
        for node in nodes:
            assert node.tokens
            assert len(node.tokens) % self.size == 0
            ends = sum(found.node is node for found in self.held)
            assert node.locks == ends + sum(child.locks for child in node.children.values())

    @invariant()
    def children_differ_in_their_first_block(self) -> None:
        for node in [self.tree.root, *self.tree.nodes()]:
            for first, child in node.children.items():
                assert child.tokens[: self.size] == first
                assert child.parent is node

    def teardown(self) -> None:
        for found in self.held:
            self.tree.unlock(found.node)
        assert self.tree.num_locked == 0
        self.tree.evict(1 << 30)
        assert (self.tree.num_tokens, self.tree.root.children) == (0, {})


@pytest.mark.parametrize("policy", PRIORITIES)
@pytest.mark.parametrize("size", [1, 3])
def test_the_tree_is_a_list_of_prefixes(size: int, policy: str) -> None:
    machine = type("Tree", (TreeAgainstAList,), {"size": size, "policy": policy})
    case = machine.TestCase
    case.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
    case().runTest()


def tree_of(*sequences: str, policy: str = "lru") -> RadixTree:
    tree = RadixTree(policy=policy)
    for sequence in sequences:
        tree.insert([ord(one) for one in sequence])
    return tree


def words(nodes: list[Node]) -> list[str]:
    return ["".join(map(chr, node.tokens)) for node in nodes]


def test_edges_split_where_sequences_part() -> None:
    tree = tree_of("tester", "team", "toast")
    assert sorted(words(list(tree.nodes()))) == ["am", "e", "oast", "ster", "t"]
    assert tree.match([ord(one) for one in "testing"]).length == 4
    assert sorted(words(list(tree.nodes()))) == ["am", "e", "er", "oast", "st", "t"]


def test_least_recently_used_leaves_go_first_and_parents_after_them() -> None:
    tree = tree_of("tester", "team", "toast")
    tree.match([ord(one) for one in "tester"])
    assert words(tree.evict(3)) == ["am", "oast"]
    assert words(tree.evict(1)) == ["ster"]
    assert words(tree.evict(9)) == ["e", "t"]


def test_the_rest_of_an_edge_is_as_fresh_as_the_match_that_cut_it() -> None:
    # SGLang stamps the child before it splits it: what was not matched outlives what came before.
    tree = tree_of("abcd", "xy")
    tree.match([ord("a")])
    assert words(tree.evict(1)) == ["xy"]
    assert words(tree.evict(1)) == ["bcd"]


def test_policies_differ() -> None:
    for policy, first in (("lru", "ab"), ("lfu", "xyz"), ("fifo", "ab"), ("length-aware", "xyz")):
        tree = tree_of("ab", "ab", "xyz", "pq", policy=policy)
        assert words(tree.evict(1)) == [first], policy


def test_locked_nodes_and_those_above_them_stay() -> None:
    tree = tree_of("abcd", "abxy")
    found = tree.match([ord(one) for one in "abcd"])
    tree.lock(found.node)
    assert words(tree.evict(100)) == ["xy"]
    assert tree.num_tokens == tree.num_locked == 4
    tree.unlock(found.node)
    assert words(tree.evict(100)) == ["cd", "ab"]
    with pytest.raises(AssertionError):
        tree.unlock(found.node)


def drawn(*words: str, **limits: int) -> list[str]:
    """The lines of a tree of words, a letter a block."""
    run = RadixReplay(cache=Cache(capacity_blocks=99, block_size=1, index=RADIX))
    run.feed(hashed([([ord(one) for one in word], len(word)) for word in words], 1))
    return list(draw(branch_of_replay(run), **limits))


def test_a_tree_is_drawn() -> None:
    words = "tester", "team", "toast", "toad"
    assert drawn(*words) == [
        "13 tokens cached",
        "└─ 1 tokens  4×",
        "   ├─ 1 tokens  2×",
        "   │  ├─ 4 tokens  1×",
        "   │  └─ 2 tokens  1×",
        "   └─ 2 tokens  2×",
        "      ├─ 2 tokens  1×",
        "      └─ 1 tokens  1×",
    ]
    assert drawn(*words, max_depth=2, max_children=1) == [
        "13 tokens cached",
        "└─ 1 tokens  4×",
        "   ├─ 1 tokens  2×",
        "   │  └─ … 2 more with 6 tokens",
        "   └─ … 1 more with 5 tokens",
    ]


def shape(branch: Branch) -> tuple[int, int, list[Any]]:
    """A subtree without its order."""
    return branch.tokens, branch.hits, sorted(map(shape, branch.children))


def plain_shape(node: Node) -> tuple[int, int, list[Any]]:
    """The same of a node of the plain tree."""
    return len(node.tokens), node.hits, sorted(map(plain_shape, node.children.values()))


@settings(max_examples=60, deadline=None)
@given(traces(), st.integers(1, 9), st.integers(1, 40))
def test_the_fast_tree_has_the_same_shape(
    requests: HashedRequests, size: int, capacity: int
) -> None:
    cache = Cache(capacity_blocks=capacity, block_size=size, index=RADIX)
    tree, run = RadixTree(size), RadixReplay(cache=cache)
    replay_tree(cache, tree, list(spelled(requests, cache_outputs="none")))
    run.feed(requests)
    assert plain_shape(tree.root) == shape(branch_of_replay(run))


def test_an_empty_replay_has_an_empty_tree() -> None:
    run = RadixReplay(cache=Cache(capacity_blocks=1, block_size=4, index=RADIX))
    run.feed(hashed([([1], 3)], 4))
    assert list(draw(branch_of_replay(run))) == ["0 tokens cached"]

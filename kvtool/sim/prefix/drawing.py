"""A radix tree as text: its runs, how often each was hit, and which are in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvtool.sim.prefix.radix_kernel import ROOT
from kvtool.sim.prefix.radix_tree import Node, RadixTree
from kvtool.sim.prefix.replay import RadixReplay

SHOWN_TOKENS = 6


@dataclass(slots=True, kw_only=True)
class Branch:
    """A node as it is drawn."""

    tokens: int
    """Of its own run."""
    hits: int
    in_use: int = 0
    begins: str = ""
    """The first tokens of the run, where they are known."""
    children: list[Branch] = field(default_factory=list)
    below: int = 0
    """Tokens of all runs under it."""


def branch_of(tree: RadixTree) -> Branch:
    """The tree with its tokens."""
    branches = {tree.root: Branch(tokens=0, hits=0)}
    for node in tree.nodes():
        assert node.parent is not None, "only the root has no parent"
        branches[node] = _branch(node)
        branches[node.parent].children.append(branches[node])
    _add_up(branches.values())
    return branches[tree.root]


def branch_of_replay(replay: RadixReplay) -> Branch:
    """The tree at the end of a fast replay: lengths, without tokens."""
    nodes = replay.nodes[: replay.tree.numbered]
    live = nodes.end > nodes.start
    for spare in nodes.spare[: replay.tree.spares].tolist():
        live[spare] = False
    order = [at for at in nodes.start.argsort(kind="stable").tolist() if live[at]]
    branches = {ROOT: Branch(tokens=0, hits=0)}
    for at in order:  # parents start earlier than their children
        tokens = int(nodes.end[at] - nodes.start[at])
        branches[at] = Branch(tokens=tokens, hits=int(nodes.hits[at]))
        branches[int(nodes.parent[at])].children.append(branches[at])
    _add_up(branches.values())
    return branches[ROOT]


def draw(root: Branch, *, max_depth: int = 6, max_children: int = 8) -> Iterator[str]:
    """Lines of text, the largest subtrees first; what is left out is counted."""
    yield f"{root.below:,} tokens cached"
    yield from _draw(root, "", max_depth, max_children)


def _draw(branch: Branch, indent: str, depth: int, width: int) -> Iterator[str]:
    children = sorted(branch.children, key=lambda one: -(one.tokens + one.below))
    shown = children[:width] if depth else []
    rest = children[len(shown) :]
    for place, child in enumerate(shown):
        is_last = place == len(shown) - 1 and not rest
        yield f"{indent}{'└─' if is_last else '├─'} {_words(child)}"
        yield from _draw(child, indent + ("   " if is_last else "│  "), depth - 1, width)
    if rest:
        tokens = sum(one.tokens + one.below for one in rest)
        yield f"{indent}└─ … {len(rest):,} more with {tokens:,} tokens"


def _words(branch: Branch) -> str:
    words = [f"{branch.tokens:,} tokens", f"{branch.hits:,}×"]
    if branch.begins:
        words.insert(0, branch.begins)
    if branch.in_use:
        words.append(f"in use by {branch.in_use:,}")
    return "  ".join(words)


def _branch(node: Node) -> Branch:
    begins = " ".join(map(str, node.tokens[:SHOWN_TOKENS]))
    more = " …" if len(node.tokens) > SHOWN_TOKENS else ""
    return Branch(
        tokens=len(node.tokens), hits=node.hits, in_use=node.locks, begins=f"[{begins}{more}]"
    )


def _add_up(branches: Iterable[Branch]) -> None:
    """Tokens below each: children come after their parents."""
    for branch in reversed(list(branches)):
        branch.below = sum(child.tokens + child.below for child in branch.children)

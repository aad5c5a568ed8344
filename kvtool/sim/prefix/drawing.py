"""A radix tree as text: its runs, and how often each was hit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtool.sim.prefix.radix_kernel import ROOT
from kvtool.sim.prefix.replay import RadixReplay


@dataclass(slots=True, kw_only=True)
class Branch:
    """A node as it is drawn."""

    tokens: int
    """Of its own run."""
    hits: int
    children: list[Branch] = field(default_factory=list)
    below: int = 0
    """Tokens of all runs under it."""


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
    for branch in reversed(branches.values()):  # and so come before them
        branch.below = sum(child.tokens + child.below for child in branch.children)
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
        yield f"{indent}{'└─' if is_last else '├─'} {child.tokens:,} tokens  {child.hits:,}×"
        yield from _draw(child, indent + ("   " if is_last else "│  "), depth - 1, width)
    if rest:
        tokens = sum(one.tokens + one.below for one in rest)
        yield f"{indent}└─ … {len(rest):,} more with {tokens:,} tokens"

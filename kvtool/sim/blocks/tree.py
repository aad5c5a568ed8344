"""SGLang's radix tree of the fast engine, compiled: kvtool.sim.prefix.radix_tree over names of blocks.

A name stands for all tokens before a block's end, so the index of blocks by name is the tree's children:
what is kept of a node is the stretch of blocks that it has, from the root `start` to `end`, and its last
one; each block knows its node and the block before it. Leaves that nobody locks are a heap, by the time
when they were last used (`first`) and made (`second`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtool.jit import part
from kvtool.sim.blocks.index import empty, find, put, slot_of
from kvtool.sim.blocks.naming import next_name
from kvtool.sim.blocks.numbers import NO_NAME, NONE, ROOT
from kvtool.sim.blocks.state import State
from kvtool.sim.prefix.heap import push, remove, settle

_wide: Any = np.int64
"""Numba types a variable once: what is read from 32 bits and then counted on has 64."""


@part
def match(s: State, block: int, length: int) -> int:
    """The node where a cached prefix ends, of so many blocks, the last of which is given: the path is
    stamped, and cut there."""
    s.tree.clock += 1
    if length == 0:
        return ROOT
    return end_at(s, _wide(s.blocks[block].node), length)


@part
def end_at(s: State, at: int, length: int) -> int:
    """A prefix of so many blocks ends in this node: stamped, and cut there."""
    stamp(s, at)
    if s.nodes[at].end > length:
        at = split(s, at, length)
    return at


@part
def stamp(s: State, at: int) -> None:
    """A node and all above it are used now."""
    tree, nodes = s.tree, s.nodes
    while at != ROOT:
        node = nodes[at]
        node.first = tree.clock
        if node.place >= 0:
            settle(tree, nodes, at, node.place)
        at = _wide(node.parent)


@part
def new_node(s: State, parent: int, start: int, end: int, last: int) -> int:
    """A node, not yet anybody's child."""
    tree, nodes = s.tree, s.nodes
    if tree.spare_node >= 0:
        at = _wide(tree.spare_node)
        tree.spare_node = nodes[at].parent
    else:
        at = _wide(tree.nodes)
        tree.nodes += 1
    tree.clock += 1
    node = nodes[at]
    node.first = node.second = tree.clock
    node.parent, node.start, node.end, node.last = parent, start, end, last
    node.children = node.locks = 0
    node.place = NONE
    return at


@part
def split(s: State, at: int, length: int) -> int:
    """Cut a node in two: a new one of the blocks before a length, above the one of the rest."""
    nodes, blocks = s.nodes, s.blocks
    lower = nodes[at]
    block = _wide(lower.last)
    for _ in range(lower.end - length):
        block = _wide(blocks[block].before)
    upper = new_node(s, lower.parent, lower.start, length, block)
    nodes[upper].locks, nodes[upper].children = lower.locks, 1
    for _ in range(length - lower.start):
        blocks[block].node = upper
        block = _wide(blocks[block].before)
    s.run.work += lower.end - lower.start
    lower.parent, lower.start = upper, length
    return upper


@part
def enter(s: State, at: int) -> None:
    """A node that is a leaf and in nobody's use can be evicted."""
    node = s.nodes[at]
    if at != ROOT and node.children == 0 and node.locks == 0 and node.place < 0:
        push(s.tree, s.nodes, at)


@part
def leave(s: State, at: int) -> None:
    """A node that is no leaf, or in use, cannot."""
    if s.nodes[at].place >= 0:
        remove(s.tree, s.nodes, at)


@part
def lock(s: State, at: int) -> None:
    """A request uses the prefix that ends here."""
    while at != ROOT:
        node = s.nodes[at]
        if node.locks == 0:
            s.tree.evictable -= node.end - node.start
            leave(s, at)
        node.locks += 1
        at = _wide(node.parent)


@part
def unlock(s: State, at: int) -> None:
    """It no longer does."""
    while at != ROOT:
        node = s.nodes[at]
        node.locks -= 1
        if node.locks == 0:
            s.tree.evictable += node.end - node.start
            enter(s, at)
        at = _wide(node.parent)


@part
def num_evictable(s: State, at: int) -> int:
    """Blocks on the path to a node that nobody locks."""
    count = 0
    while at != ROOT and s.nodes[at].locks == 0:  # above a locked one all are
        count += s.nodes[at].end - s.nodes[at].start
        at = _wide(s.nodes[at].parent)
    return count


@part
def evict(s: State, count: int) -> None:
    """Whole leaves, least recently used first, until so many blocks are free."""
    run, tree, nodes, blocks = s.run, s.tree, s.nodes, s.blocks
    freed = 0
    while freed < count and tree.heaped > 0:
        at = _wide(nodes[0].heap)
        remove(tree, nodes, at)
        node = nodes[at]
        block = _wide(node.last)
        for _ in range(node.end - node.start):
            before = _wide(blocks[block].before)
            empty(s.slots, slot_of(s.slots, blocks[block].name))
            blocks[block].name, blocks[block].before = NO_NAME, tree.spare_block
            tree.spare_block = block
            block = before
        freed += node.end - node.start
        parent = _wide(node.parent)
        node.parent = tree.spare_node
        tree.spare_node = at
        nodes[parent].children -= 1
        enter(s, parent)
    run.free_blocks += freed
    run.evicted += freed
    run.work += freed
    tree.evictable -= freed


@part
def insert(s: State, at: int, node: int, count: int) -> int:
    """So many blocks of a request are in the tree from now on, of which those up to a node are: where
    they end. Its own copies of others that are there, too, are free."""
    run, request = s.run, s.requests[at]
    here = request.registered
    last = _wide(s.nodes[node].last)
    leaf, end = NONE, _wide(node)
    for k in range(here, count):
        name = next_name(s, at)
        block = find(s.slots, name) if leaf < 0 else NONE
        if block >= 0:
            last = _wide(block)
            run.free_blocks += 1
            continue
        if leaf < 0:
            end = fork(s, end, last, here, k)
            leaf = new_node(s, end, k, count, NONE)
            leave(s, end)
            s.nodes[end].children += 1
            s.tree.evictable += count - k
            end = leaf
        last = new_block(s, name, last, leaf)
    if leaf >= 0:
        s.nodes[leaf].last = last
    else:
        end = fork(s, end, last, here, count)
    run.work += count - here
    end = cut_at_prompt(s, end, request.prompt // run.block_size, count)
    s.tree.clock += 1
    stamp(s, end)
    return end


@part
def fork(s: State, node: int, last: int, here: int, length: int) -> int:
    """The node where a path of so many blocks ends that went on from `here`, at a node, to its last block."""
    if length == here:
        return node
    s.tree.clock += 1
    return end_at(s, _wide(s.blocks[last].node), length)


@part
def cut_at_prompt(s: State, end: int, prompt: int, count: int) -> int:
    """SGLang cuts where the prompt ends, so that an output can be evicted without it; the path's end."""
    if 0 < prompt < count:
        at = end
        while s.nodes[at].start >= prompt:
            at = _wide(s.nodes[at].parent)
        if s.nodes[at].end > prompt:
            split(s, at, prompt)
    return end


@part
def new_block(s: State, name: int, before: int, node: int) -> int:
    """A block of a request is the tree's."""
    tree, blocks = s.tree, s.blocks
    if tree.spare_block >= 0:
        at = _wide(tree.spare_block)
        tree.spare_block = blocks[at].before
    else:
        at = _wide(tree.blocks)
        tree.blocks += 1
    blocks[at].name, blocks[at].before, blocks[at].node = name, before, node
    put(s.slots, name, at)
    return at

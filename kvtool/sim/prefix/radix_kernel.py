"""The fast replay of SGLang's rules: kvtool.sim.prefix.radix_tree without a token in memory.

A run of tokens is where it starts and ends and the key of the trace's block that holds its last token:
keys stand for all that comes before, so equal keys are equal prefixes and nothing is compared token by
token. A block of the tree (SGLang: a page) belongs to the key that holds its last token; `owner` is the
deepest node that has blocks of a key. Cached blocks of a prompt are its first ones, so how many there
are is found by bisection, and where they end by `owner`. Replay is sequential: one path is locked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtool.jit import compiled, part
from kvtool.sim.prefix.counting import count_hit, count_query, count_rejection
from kvtool.sim.prefix.heap import push, remove
from kvtool.sim.prefix.pool import NONE, record
from kvtool.sim.prefix.ranking import rank
from kvtool.sim.prefix.result import TAKEN

ROOT = 0
TREE = record(
    "capacity size trace_size spelled policy held clock numbered spares heaped locked tenant"
    " evicted_tokens evicted_leaves"
)
"""`spelled`: keys go on over outputs. `tenant`: whose request runs."""
NODE = record(
    "first second used created hits start end named", "key parent children place tenant spare heap"
)
"""`named`: where the blocks end that have a key (what follows is output); `key`: of the last of them.
`spare` and `heap` are columns of their own: a stack of numbers, and leaves as a heap."""

_wide: Any = np.int64
"""Numba types a variable once: what is read from 32 bits and then counted on has 64."""


@compiled
def replay_radix(
    tree: Any, nodes: Any, owner: Any, tally: Any, parent_key: Any,
    keys: Any, starts: Any, tokens: Any, outputs: Any, tenants: Any, hits: Any,
) -> None:  # fmt: skip
    """Run the requests through the tree; `hits` gets the hit tokens of each, unless it is empty."""
    size = tree.size
    for request in range(len(tokens)):
        length, tenant = tokens[request], tenants[request]
        held = length + outputs[request]
        tree.tenant = tenant
        count_query(tally, tenant, length)
        first = starts[request]
        limit = max(0, length - 1) // size  # the last token is always computed
        cached = num_cached(tree, nodes, owner, keys, first, 0, limit)
        at = match(tree, nodes, owner, keys, first, cached * size)
        tree.locked = at
        if nodes[at].place >= 0:
            remove(tree, nodes, at)
        room = tree.capacity - tree.held + cached * size
        wanted = blocks_for(held, size) * size
        if wanted > tree.capacity:
            # Found out only when all is gone that can go. So it is in the harness of the measured rows,
            # which drives the tree alone; SGLang's server refuses such a request before.
            evict(tree, nodes, owner, tally, parent_key, wanted - room)
            unlock(tree, nodes, at)
            count_rejection(tally, tenant, hits, request)
            continue
        count_hit(tally, tenant, hits, request, cached * size)
        evict(tree, nodes, owner, tally, parent_key, blocks_for(length, size) * size - room)
        if held > length:
            room = tree.capacity - tree.held + cached * size
            evict(tree, nodes, owner, tally, parent_key, wanted - room)
        spelled = held if tree.spelled else length
        insert(tree, nodes, owner, keys, first, at, cached, spelled, held)


@part
def blocks_for(length: int, size: int) -> int:
    """Blocks that hold so many tokens."""
    return (length + size - 1) // size


@part
def key_at(tree: Any, keys: Any, first: int, block: int) -> int:
    """The key that a block of a prompt belongs to."""
    return keys[first + ((block + 1) * tree.size - 1) // tree.trace_size]


@part
def unlock(tree: Any, nodes: Any, at: int) -> None:
    """The path that was in use ends here: if it is a leaf, it can be evicted again."""
    tree.locked = ROOT
    if at != ROOT and nodes[at].children == 0 and nodes[at].place < 0:
        enter(tree, nodes, at)


@part
def num_cached(
    tree: Any, nodes: Any, owner: Any, keys: Any, first: int, low: int, high: int
) -> int:
    """How many blocks of a prompt are in the tree, between what is known to be and the most."""
    while low < high:
        middle = (low + high) // 2
        at = owner[key_at(tree, keys, first, middle)]
        if at >= 0 and nodes[at].named >= (middle + 1) * tree.size:
            low = middle + 1
        else:
            high = middle
    return low


@part
def match(tree: Any, nodes: Any, owner: Any, keys: Any, first: int, length: int) -> int:
    """Stamp the path to the end of a cached prefix, and cut the edge there; the node where it ends."""
    tree.clock += 1
    now = tree.clock
    if length == 0:
        return ROOT
    at = last_node(tree, nodes, owner, keys, first, length)
    stamp(tree, nodes, at, now, 0)
    if nodes[at].end > length:
        at = split(tree, nodes, owner, keys, first, at, length)
    return at


@part
def last_node(tree: Any, nodes: Any, owner: Any, keys: Any, first: int, length: int) -> int:
    """The node in which a cached prefix ends."""
    at = _wide(owner[key_at(tree, keys, first, length // tree.size - 1)])
    while nodes[at].start >= length:
        at = _wide(nodes[at].parent)
    return at


@part
def stamp(tree: Any, nodes: Any, at: int, now: int, hit: int) -> None:
    """A node and all above it are used."""
    while at != ROOT:
        node = nodes[at]
        node.used, node.tenant = now, tree.tenant
        node.hits += hit
        if node.place >= 0:
            remove(tree, nodes, at)
            enter(tree, nodes, at)
        at = node.parent


@part
def enter(tree: Any, nodes: Any, at: int) -> None:
    """A leaf that nobody uses: its turn by the policy."""
    node = nodes[at]
    node.first = rank(tree.policy, node.hits, node.created, node.end)
    node.second = node.used
    push(tree, nodes, at)


@part
def new_node(tree: Any, nodes: Any, parent: int, start: int, end: int, named: int, key: int) -> int:
    """A node, not yet anybody's child."""
    if tree.spares > 0:
        tree.spares -= 1
        at = _wide(nodes[tree.spares].spare)
    else:
        at = tree.numbered
        tree.numbered += 1
    tree.clock += 1
    node = nodes[at]
    node.parent, node.start, node.end, node.named, node.key = parent, start, end, named, key
    node.used = node.created = tree.clock
    node.children, node.place, node.tenant = 0, NONE, tree.tenant
    return at


@part
def split(tree: Any, nodes: Any, owner: Any, keys: Any, first: int, at: int, length: int) -> int:
    """Cut an edge in two: a new node of what comes before a length, above the one of the rest."""
    lower = nodes[at]
    last = (length - 1) // tree.trace_size
    key = keys[first + last]
    upper = new_node(tree, nodes, lower.parent, lower.start, length, length, key)
    nodes[upper].hits, nodes[upper].children = lower.hits, 1
    lower.parent, lower.start = upper, length
    # The keys that have no block further down are the new node's.
    from_key = (nodes[upper].start + tree.size - 1) // tree.trace_size
    next_end = length + tree.size
    until = last + 1
    if next_end <= lower.named and (next_end - 1) // tree.trace_size == last:
        until = last
    for one in range(from_key, until):
        if owner[keys[first + one]] == at:
            owner[keys[first + one]] = upper
    return upper


@part
def evict(tree: Any, nodes: Any, owner: Any, tally: Any, parent_key: Any, num_tokens: int) -> None:
    """Whole leaves, until so many tokens are free."""
    freed = 0
    while freed < num_tokens and tree.heaped > 0:
        at = _wide(nodes[0].heap)
        remove(tree, nodes, at)
        node = nodes[at]
        parent = _wide(node.parent)
        forget(tree, nodes, owner, parent_key, at)
        freed += node.end - node.start
        tally[tree.tenant, TAKEN + node.tenant] += node.end - node.start
        tree.evicted_leaves += 1
        nodes[tree.spares].spare = at
        tree.spares += 1
        nodes[parent].children -= 1
        if nodes[parent].children == 0 and parent != ROOT and parent != tree.locked:
            enter(tree, nodes, parent)
    tree.held -= freed
    tree.evicted_tokens += freed


@part
def forget(tree: Any, nodes: Any, owner: Any, parent_key: Any, at: int) -> None:
    """Take a leaf's blocks from their keys; one that lies in two nodes is left to the upper one."""
    node = nodes[at]
    if node.named <= node.start:
        return
    first = (node.start + tree.size - 1) // tree.trace_size
    last = (node.named - 1) // tree.trace_size
    key = _wide(node.key)
    for one in range(last, first - 1, -1):
        shared = one == first and node.start > 0 and (node.start - 1) // tree.trace_size == one
        if owner[key] == at:
            owner[key] = node.parent if shared else NONE
        key = _wide(parent_key[key])


@part
def insert(
    tree: Any, nodes: Any, owner: Any, keys: Any, first: int,
    at: int, cached: int, length: int, held: int,
) -> None:  # fmt: skip
    """Cache a request's whole blocks below the node where its match ended: `length` tokens of them have
    keys, `held` are there."""
    size = tree.size
    tree.clock += 1
    now = tree.clock
    tree.locked = ROOT
    full, named = held // size * size, length // size * size
    there = num_cached(tree, nodes, owner, keys, first, cached, length // size)
    if there == cached:
        stamp(tree, nodes, at, now, 1)
    else:  # the block of the last token is there too: the path goes on
        cached = there
        at = last_node(tree, nodes, owner, keys, first, cached * size)
        hit = at
        if nodes[at].end > cached * size:  # the rest is stamped, but it is the new node that is hit
            stamp(tree, nodes, at, now, 0)
            at = split(tree, nodes, owner, keys, first, at, cached * size)
            nodes[at].hits += 1
            hit = nodes[at].parent
        stamp(tree, nodes, hit, now, 1)
    if full > cached * size:
        start = cached * size
        key = _wide(keys[first + (named - 1) // tree.trace_size]) if named > start else NONE
        if nodes[at].place >= 0:
            remove(tree, nodes, at)
        leaf = new_node(tree, nodes, at, start, full, named, key)
        nodes[leaf].hits = 1
        nodes[at].children += 1
        tree.held += full - start
        own(tree, owner, keys, first, cached, length // size, leaf)
        enter(tree, nodes, leaf)
    else:
        unlock(tree, nodes, at)


@part
def own(tree: Any, owner: Any, keys: Any, first: int, block: int, until: int, at: int) -> None:
    """A new leaf has these blocks of a prompt: the keys that they belong to are its own."""
    while block < until:
        of = ((block + 1) * tree.size - 1) // tree.trace_size
        owner[keys[first + of]] = at
        block = (of + 1) * tree.trace_size // tree.size

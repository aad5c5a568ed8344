"""SGLang's memory of the fast engine, compiled: kvtool.sim.blocks.radix_pool, whose rules it follows.

Free blocks and those of one request alone are as good as each other, and counted. Only the tree's are
told apart.
"""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.blocks import tree
from kvtool.sim.blocks.index import find
from kvtool.sim.blocks.naming import add_name, follow
from kvtool.sim.blocks.numbers import NONE, ROOT
from kvtool.sim.blocks.state import State


@part
def available(s: State) -> int:
    """Blocks that are free or can be evicted."""
    return s.run.free_blocks + s.tree.evictable


@part
def has_records(s: State, count: int) -> bool:
    """A block that is taken may become the tree's when its step is done, and cannot wait for room then."""
    run = s.run
    run.want_blocks = min(run.num_blocks, run.num_blocks - run.free_blocks + count)
    return run.want_blocks <= len(s.blocks) - 2


@part
def look_up(s: State, name: Any, at: int, most: int) -> int:
    """How many of the first blocks are cached: by bisection, since a tree has all before one that it has.

    The path is stamped, and `found` is where it ends; NONE: no room for names.
    """
    run, names = s.run, s.names
    name(s, at)
    while run.named < most:
        if not add_name(s, at):
            return NONE
        run.work += 1
    first, low, high = run.first_name, 0, most
    while low < high:
        middle = (low + high) // 2
        if find(s.slots, names[first + middle].name) >= 0:
            low = middle + 1
        else:
            high = middle
    last = find(s.slots, names[first + low - 1].name) if low > 0 else NONE
    s.tree.found = tree.match(s, last, low)
    run.work += 1
    return low


@part
def has_room(s: State, hits: int, needed: int) -> bool:
    """Once the hits are locked."""
    return needed - hits <= available(s) - tree.num_evictable(s, s.tree.found)


@part
def hold(s: State, at: int, hits: int) -> None:
    """A request begins with what was found, and locks it."""
    request, mark = s.requests[at], s.marks[at]
    tree.lock(s, s.tree.found)
    mark.node = s.tree.found
    mark.prefill = request.prompt + request.generated
    request.blocks = hits
    follow(s, request, hits)


@part
def take(s: State, at: int, count: int) -> None:
    """So many blocks more for a request; what free ones lack is evicted."""
    run = s.run
    if count > run.free_blocks:
        tree.evict(s, count - run.free_blocks)
    run.free_blocks -= count
    s.requests[at].blocks += count


@part
def schedule(s: State, at: int, tokens: int) -> None:
    """Nothing is found before it has been computed."""


@part
def compute(s: State, at: int, finished: bool) -> None:
    """Tokens of a prefill were computed, or all that ever will be: full blocks of them are the tree's."""
    run, request, mark = s.run, s.requests[at], s.marks[at]
    count = request.computed // run.block_size
    if count > 0 and (finished or request.computed - request.chunk < mark.prefill):
        end = tree.insert(s, at, mark.node, count)
        tree.lock(s, end)
        tree.unlock(s, mark.node)
        mark.node = end


@part
def release(s: State, at: int) -> None:
    """What the tree does not have is free; the rest can be evicted."""
    request, mark = s.requests[at], s.marks[at]
    s.run.free_blocks += request.blocks - request.registered
    tree.unlock(s, mark.node)
    mark.node = ROOT
    request.blocks = request.registered = 0

"""The stack distances of a trace, a run of blocks at a time.

Who had a block last decides how deep it lies. A prompt's blocks go back on the stack in one piece, first
block on top, and later requests take pieces of it from its beginning: what is left of it stays together.
So a stack of requests with a count each stands for the stack of blocks; a prompt meets each older request
in one run of blocks, whose distances are consecutive numbers, and one look at the sums is enough for all.

A prompt of whole blocks computes its last block anew, so a block can be in the cache twice. vLLM finds
the one that was cached first. Until then all copies lie on the stack: the newest with its request, the
others as elders. When the block is found, a cache that still has an elder moves the elder and keeps the
newer copies, which are then never found again; a cache that has not moves a newer one. What stays is a
ghost: it lies on the stacks of the capacities that had the copy before it, and of no smaller ones.
"""

from __future__ import annotations

from typing import Any

from kvtool.jit import compiled, part
from kvtool.sim.prefix.pool import record

MOST_COPIES = 1024
"""Elders, and ghosts, that are kept: a run looks at all of them."""
TOTALS = record("requests queried blocks tail largest on_stack elders ghosts given_up")
"""`blocks`: full ones, of prompts and outputs; `on_stack`: without ghosts; `tail`: whether the last request
left a block without a hash; `largest`: blocks of the largest request; `given_up`: too many copies, or some
whose capacities are no interval: from then on only what a cache without end hits is right."""
COPY = record("id group since")
"""A copy of a block in the stack of a request's blocks; `since`: the least capacity that has it."""


@compiled
def add_distances(
    totals: Any, seen_by: Any, live: Any, tree: Any, steps: Any, elders: Any, ghosts: Any,
    ids: Any, starts: Any, tokens: Any, outputs: Any, size: int,
) -> None:  # fmt: skip
    """Add each hit at the capacities that have it."""
    for request in range(len(tokens)):
        length, held = tokens[request], tokens[request] + outputs[request]
        first, last = starts[request], starts[request + 1]
        limit = first + max(0, length - 1) // size
        found = add_hits(totals, seen_by, tree, steps, elders, ghosts, ids, first, limit, last)
        if found > limit and totals.given_up == 0:
            found = limit
        # Off the stack, once all distances are known.
        lift(totals, seen_by, live, tree, elders, ghosts, ids, first, found)
        for one in range(found, last):
            by = abs(seen_by[ids[one]]) - 1
            seen_by[ids[one]] = totals.requests + 1
            if by >= 0:
                seen_by[ids[one]] = -(totals.requests + 1)
                add_elder(totals, elders, ids[one], by)
        add(tree, live, totals.requests, held // size)
        totals.on_stack += held // size - (found - first)
        totals.blocks += held // size
        totals.tail = held % size > 0
        totals.largest = max(totals.largest, (held + size - 1) // size)
        totals.queried += length
        totals.requests += 1


@part
def add_hits(
    totals: Any, seen_by: Any, tree: Any, steps: Any, elders: Any, ghosts: Any,
    ids: Any, first: int, limit: int, last: int,
) -> int:  # fmt: skip
    """Add the hits of a prompt, those before `limit`; where its blocks end that were seen before."""
    at = first
    while at < last and seen_by[ids[at]] != 0:
        by = abs(seen_by[ids[at]]) - 1
        # On top of this run lie all requests after that one, and the older runs of this prompt.
        distance = totals.on_stack - sum_to(tree, by)
        for one in range(totals.elders):  # who took an elder's place took all before it
            distance += elders[one].group == by
        begin = at
        while at < last and abs(seen_by[ids[at]]) == by + 1:
            if seen_by[ids[at]] < 0 and at < limit:
                date_elders(totals, tree, elders, ghosts, ids[at])
            at += 1
        add_run(totals, steps, ghosts, by, distance + totals.tail, min(at, limit) - begin)
    return at


@part
def lift(
    totals: Any, seen_by: Any, live: Any, tree: Any, elders: Any, ghosts: Any,
    ids: Any, first: int, found: int,
) -> None:  # fmt: skip
    """Take a prompt's blocks off the stack: they are now this request's, the next one on it."""
    at = first
    while at < found:
        by = abs(seen_by[ids[at]]) - 1
        begin = at
        while at < found and abs(seen_by[ids[at]]) == by + 1:
            if seen_by[ids[at]] < 0:
                leave_ghosts(totals, live, tree, elders, ghosts, ids[at], by)
            seen_by[ids[at]] = totals.requests + 1
            at += 1
        add(tree, live, by, begin - at)


@part
def add_run(totals: Any, steps: Any, ghosts: Any, by: int, distance: int, count: int) -> None:
    """Hits of blocks at consecutive distances below the top, ghosts not counted, in one request's run."""
    if count <= 0:
        return
    above = 0
    for one in range(totals.ghosts):
        above += ghosts[one].group >= by
    if above == 0:
        steps[distance + 1] += 1
        steps[distance + 1 + count] -= 1
        return
    for place in range(distance, distance + count):
        # Between the capacities of two ghosts the distance does not change.
        passed, low = 0, 0
        for one in range(totals.ghosts + 1):
            if one < totals.ghosts and ghosts[one].group < by:
                continue
            low = max(low, place + passed + 1)
            if one == totals.ghosts:
                add_interval(steps, low, 0)
                break
            if low < ghosts[one].since:
                add_interval(steps, low, ghosts[one].since)
            low = ghosts[one].since
            passed += 1


@part
def add_interval(steps: Any, low: int, high: int) -> None:
    """A hit from one capacity on, up to below another if that is not 0."""
    steps[low] += 1
    steps[low + 1] -= 1
    if high > 0:
        steps[high] -= 1
        steps[high + 1] += 1


@part
def least_capacity(totals: Any, ghosts: Any, by: int, distance: int) -> int:
    """From where on a block at a distance is cached; -1 if a larger cache has it not."""
    passed, low, least = 0, 0, 0
    for one in range(totals.ghosts + 1):
        if one < totals.ghosts and ghosts[one].group < by:
            continue
        wanted = distance + passed + 1
        if least > 0 and wanted > low:
            return -1
        low = max(low, wanted)
        if one == totals.ghosts:
            break
        if least == 0 and low < ghosts[one].since:
            least = low
        low = ghosts[one].since
        passed += 1
    return least if least > 0 else low


@part
def date_elders(totals: Any, tree: Any, elders: Any, ghosts: Any, name: int) -> None:
    """Since what capacity each elder of a block that was found is cached."""
    for one in range(totals.elders):
        if elders[one].id == name:
            by = elders[one].group
            # A younger copy took all before it: it is the first that is left of its request.
            distance = totals.on_stack - sum_to(tree, by) + totals.tail
            since = least_capacity(totals, ghosts, by, distance)
            elders[one].since = since
            if since < 0:
                totals.given_up = 1


@part
def leave_ghosts(
    totals: Any, live: Any, tree: Any, elders: Any, ghosts: Any, name: int, newest: int
) -> None:
    """A block was found: its copies leave the stack, the younger ones as ghosts of the elder before."""
    kept, since = 0, 0
    for one in range(totals.elders):
        if elders[one].id != name:
            elders[kept].id, elders[kept].group = elders[one].id, elders[one].group
            elders[kept].since = elders[one].since
            kept += 1
            continue
        group = elders[one].group
        add(tree, live, group, -1)
        totals.on_stack -= 1
        if since > 0:
            add_ghost(totals, ghosts, group, since)
        since = elders[one].since
    totals.elders = kept
    if since > 0:
        add_ghost(totals, ghosts, newest, since)


@part
def add_elder(totals: Any, elders: Any, name: int, group: int) -> None:
    """A block is cached once more: the copy that was the newest is an elder."""
    if totals.elders == len(elders):
        totals.given_up = 1
    if totals.given_up:
        return
    elder = elders[totals.elders]
    elder.id, elder.group, elder.since = name, group, 0
    totals.elders += 1


@part
def add_ghost(totals: Any, ghosts: Any, group: int, since: int) -> None:
    """A copy that is never found again, among the others by capacity."""
    if totals.ghosts == len(ghosts):
        totals.given_up = 1
        return
    at = totals.ghosts
    while at > 0 and ghosts[at - 1].since > since:
        ghosts[at].group, ghosts[at].since = ghosts[at - 1].group, ghosts[at - 1].since
        at -= 1
    ghosts[at].group, ghosts[at].since = group, since
    totals.ghosts += 1


@part
def sum_to(tree: Any, index: int) -> int:
    """Blocks of the requests up to this one."""
    total, at = 0, index + 1
    while at > 0:
        total += tree[at]
        at &= at - 1
    return total


@part
def add(tree: Any, live: Any, index: int, blocks: int) -> None:
    """A request has more or fewer blocks."""
    live[index] += blocks
    at = index + 1
    while at < len(tree):
        tree[at] += blocks
        at += at & -at


@compiled
def fill_tree(live: Any, tree: Any) -> None:
    """The sums of counts, in an empty tree."""
    for at in range(1, len(tree)):
        tree[at] += live[at - 1]
        above = at + (at & -at)
        if above < len(tree):
            tree[above] += tree[at]

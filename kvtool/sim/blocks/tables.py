"""The block pool of the fast engine, compiled: the free list, ref counts, tables (R11, R12, R15)."""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.blocks.index import find, gain_name, lose_name
from kvtool.sim.blocks.naming import add_name, follow, next_name
from kvtool.sim.blocks.numbers import END, FRESH, NO_NAME, NONE
from kvtool.sim.blocks.state import State


@part
def blocks_for(run: Any, tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return (tokens + run.block_size - 1) // run.block_size


@part
def available(s: State) -> int:
    """Blocks that no table holds, with a name or without."""
    return s.run.free_blocks


@part
def has_records(s: State, count: int) -> bool:
    """Whether there is room to write down so many blocks more; if not, it is asked for."""
    run = s.run
    run.want_blocks = min(run.num_blocks, run.numbered + count)
    run.want_cells = run.cells_made + max(0, count - run.free_cells)
    return run.want_blocks <= len(s.blocks) - 2 and run.want_cells <= len(s.cells)


@part
def look_up(s: State, name: Any, at: int, most: int) -> int:
    """R10: of the first blocks, at most so many, those that are cached; NONE: no room for names."""
    run, names = s.run, s.names
    name(s, at)
    first = run.first_name
    hits = 0
    while hits < most:
        if hits == run.named and not add_name(s, at):
            return NONE
        block = find(s.slots, names[first + hits].name)
        if block < 0:
            break
        names[first + hits].block = block
        hits += 1
    run.work += hits
    return hits


@part
def has_room(s: State, hits: int, needed: int) -> bool:
    """R8: hits that are in the free list leave it."""
    run = s.run
    needed -= hits
    if needed > run.free_blocks:
        return False
    for k in range(run.first_name, run.first_name + hits):
        needed += s.blocks[s.names[k].block].refs == 0
    return needed <= run.free_blocks


@part
def link(blocks: Any, at: int, before: int) -> None:
    """Put a block into the free list, behind another one or the END."""
    after = blocks[before].next
    blocks[at].previous, blocks[at].next = before, after
    blocks[before].next = blocks[after].previous = at


@part
def unlink(blocks: Any, at: int) -> None:
    """Take a block out of the free list."""
    before, after = blocks[at].previous, blocks[at].next
    blocks[before].next, blocks[after].previous = after, before


@part
def pop(run: Any, blocks: Any, slots: Any) -> int:
    """R11: the block at the head of the free list; if it has a name it loses it."""
    at = blocks[END].next
    run.free_blocks -= 1
    if at == FRESH:
        run.numbered += 1
        if run.numbered == run.num_blocks:
            unlink(blocks, FRESH)
        at = FRESH + run.numbered
        blocks[at].name = NO_NAME
        return at
    unlink(blocks, at)
    if blocks[at].name != NO_NAME:
        run.evicted += 1
        lose_name(blocks, slots, at)
    return at


@part
def hold(run: Any, cells: Any, request: Any, block: int) -> int:
    """A block becomes the last of a request's table: its place."""
    cell = run.free_cell
    if cell >= 0:
        run.free_cell = cells[cell].after
        run.free_cells -= 1
    else:
        cell = run.cells_made
        run.cells_made += 1
    last = request.last_cell
    cells[cell].block, cells[cell].before, cells[cell].after = block, last, NONE
    if last >= 0:
        cells[last].after = cell
    request.last_cell = cell
    request.blocks += 1
    return cell


@part
def take(s: State, at: int, count: int) -> None:
    """R11: so many blocks more for a request."""
    run, blocks, request = s.run, s.blocks, s.requests[at]
    for _ in range(count):
        one = pop(run, blocks, s.slots)
        blocks[one].refs = 1
        cell = hold(run, s.cells, request, one)
        if request.open_cell < 0:
            request.open_cell = cell


@part
def share(s: State, at: int, hits: int) -> None:
    """R11: the first blocks of a request are those that were found for it."""
    run, blocks, request = s.run, s.blocks, s.requests[at]
    for k in range(run.first_name, run.first_name + hits):
        one = s.names[k].block
        if blocks[one].refs == 0:
            unlink(blocks, one)
            run.free_blocks -= 1
        blocks[one].refs += 1
        hold(run, s.cells, request, one)
    follow(s, request, hits)


@part
def register(s: State, at: int, tokens: int) -> None:
    """R12: full blocks of so many tokens can be found from now on."""
    run, request = s.run, s.requests[at]
    while (request.registered + 1) * run.block_size <= tokens:
        cell = request.open_cell
        gain_name(s.blocks, s.slots, s.cells[cell].block, next_name(s, at))
        request.open_cell = s.cells[cell].after
        run.work += 1


@part
def compute(s: State, at: int, finished: bool) -> None:
    """Its blocks have their names since they were scheduled."""


@part
def release(s: State, at: int) -> None:
    """R15: from the last to the first; blocks without a name go to the head, as one group."""
    run, blocks, cells, request = s.run, s.blocks, s.cells, s.requests[at]
    cell, behind = request.last_cell, END
    while cell >= 0:
        one = cells[cell].block
        before = cells[cell].before
        cells[cell].after = run.free_cell
        run.free_cell = cell
        blocks[one].refs -= 1
        if blocks[one].refs == 0:
            if blocks[one].name != NO_NAME:
                link(blocks, one, blocks[END].previous)
            else:
                link(blocks, one, behind)
                behind = one
            run.free_blocks += 1
        cell = before
    run.free_cells += request.blocks
    run.work += request.blocks
    request.blocks = request.registered = 0
    request.last_cell = request.open_cell = NONE

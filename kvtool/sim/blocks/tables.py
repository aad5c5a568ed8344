"""The block pool of the fast engine, compiled: the free list, ref counts, tables (R11, R12, R15)."""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.blocks.index import gain_name, lose_name
from kvtool.sim.blocks.names import SEED, name_of
from kvtool.sim.blocks.numbers import END, FRESH, NO_NAME, NONE
from kvtool.sim.blocks.state import State


@part
def blocks_for(run: Any, tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return (tokens + run.block_size - 1) // run.block_size


@part
def has_records(run: Any, blocks: Any, cells: Any, count: int) -> bool:
    """Whether there is room to write down so many blocks more; if not, it is asked for."""
    run.want_blocks = min(run.num_blocks, run.numbered + count)
    run.want_cells = run.cells_made + max(0, count - run.free_cells)
    return run.want_blocks <= len(blocks) - 2 and run.want_cells <= len(cells)


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
def take(s: State, request: Any, count: int) -> None:
    """R11: so many blocks more for a request."""
    run, blocks = s.run, s.blocks
    for _ in range(count):
        at = pop(run, blocks, s.slots)
        blocks[at].refs = 1
        cell = hold(run, s.cells, request, at)
        if request.open_cell < 0:
            request.open_cell = cell


@part
def share(s: State, request: Any, hits: int) -> None:
    """R11: the first blocks of a request are those that were found for it."""
    run, blocks, names = s.run, s.blocks, s.names
    for k in range(hits):
        at = names[k].block
        if blocks[at].refs == 0:
            unlink(blocks, at)
            run.free_blocks -= 1
        blocks[at].refs += 1
        hold(run, s.cells, request, at)
    request.registered = hits
    if hits > 0:
        request.chain, request.piece = names[hits - 1].name, names[hits - 1].piece
    else:
        request.chain, request.piece = SEED, request.first_piece


@part
def register(s: State, at: int, tokens: int) -> None:
    """R12: full blocks of so many tokens can be found from now on."""
    run, request, names = s.run, s.requests[at], s.names
    while (request.registered + 1) * run.block_size <= tokens:
        k, cell = request.registered, request.open_cell
        if run.named_for == at and k < run.named:
            name, piece = names[k].name, names[k].piece
        else:
            name, piece = name_of(run, request, s.pieces, k, request.piece, request.chain)
        gain_name(s.blocks, s.slots, s.cells[cell].block, name)
        request.chain, request.piece = name, piece
        request.registered = k + 1
        request.open_cell = s.cells[cell].after
        run.work += 1


@part
def release(s: State, request: Any) -> None:
    """R15: from the last to the first; blocks without a name go to the head, as one group."""
    run, blocks, cells = s.run, s.blocks, s.cells
    cell, behind = request.last_cell, END
    while cell >= 0:
        at = cells[cell].block
        before = cells[cell].before
        cells[cell].after = run.free_cell
        run.free_cell = cell
        blocks[at].refs -= 1
        if blocks[at].refs == 0:
            if blocks[at].name != NO_NAME:
                link(blocks, at, blocks[END].previous)
            else:
                link(blocks, at, behind)
                behind = at
            run.free_blocks += 1
        cell = before
    run.free_cells += request.blocks
    run.work += request.blocks
    request.blocks = request.registered = 0
    request.last_cell = request.open_cell = NONE

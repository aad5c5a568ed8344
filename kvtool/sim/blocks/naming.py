"""Names of the blocks of requests, compiled: kept while a request waits, made on while it runs.

Those of the head of the queue are kept from one look to the next; where the queue is sorted by what is
cached (lpm), those of all that wait, a row each.
"""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.blocks.names import SEED, name_of
from kvtool.sim.blocks.numbers import NONE
from kvtool.sim.blocks.state import State


@part
def name_head(s: State, at: int) -> None:
    """The names that follow are of this request: `first_name` and on, of which `named` are known."""
    if s.run.named_for != at:
        s.run.named_for, s.run.named = at, 0


@part
def name_row(s: State, at: int) -> None:
    """The same, where each that waits has a row."""
    run = s.run
    if not run.by_match:
        name_head(s, at)
    elif run.named_for != at:
        if run.named_for >= 0:
            s.marks[run.named_for].named = run.named
        run.named = take_row(s, at)
        run.named_for = at


@part
def take_row(s: State, at: int) -> int:
    """A row for a request that has none, and how many of its names are known.

    Rows are as many as are sorted. Where more wait, heads that find none left share the last one.
    """
    run, mark = s.run, s.marks[at]
    if mark.row < 0:
        mark.named = 0
        if run.free_row >= 0:
            mark.row = run.free_row
            run.free_row = s.names[run.free_row * run.row_names].piece
        elif (run.rows + 2) * run.row_names <= len(s.names):
            mark.row = run.rows
            run.rows += 1
    row = mark.row if mark.row >= 0 else len(s.names) // run.row_names - 1
    run.first_name = row * run.row_names
    return mark.named


@part
def keep_names(s: State, at: int) -> None:
    """A request waits no longer, and has no row."""


@part
def drop_row(s: State, at: int) -> None:
    """A request waits no longer: its row, if it has one, is the next one's."""
    run, mark = s.run, s.marks[at]
    if not run.by_match:
        return
    if run.named_for == at:
        run.named_for = NONE
    if mark.row >= 0:
        s.names[mark.row * run.row_names].piece = run.free_row
        run.free_row = mark.row
        mark.row = NONE


@part
def add_name(s: State, at: int) -> bool:
    """One more name of a request; False: there is no room for it."""
    run, request, names = s.run, s.requests[at], s.names
    place = run.first_name + run.named
    if place == len(names):
        run.want_names = place + 1
        return False
    chain, piece = SEED, request.first_piece
    if run.named > 0:
        chain, piece = names[place - 1].name, names[place - 1].piece
    names[place].name, names[place].piece = name_of(
        run.block_size, request, s.pieces, run.named, piece, chain
    )
    run.named += 1
    return True


@part
def follow(s: State, request: Any, hits: int) -> None:
    """A request goes on behind the blocks that were found for it."""
    request.registered = hits
    if hits > 0:
        last = s.names[s.run.first_name + hits - 1]
        request.chain, request.piece = last.name, last.piece
    else:
        request.chain, request.piece = SEED, request.first_piece


@part
def next_name(s: State, at: int) -> int:
    """The name of the first block that cannot be found yet; from now on it can."""
    run, request = s.run, s.requests[at]
    k = request.registered
    if run.named_for == at and k < run.named:
        known = s.names[run.first_name + k]
        request.chain, request.piece = known.name, known.piece
    else:
        request.chain, request.piece = name_of(
            run.block_size, request, s.pieces, k, request.piece, request.chain
        )
    request.registered = k + 1
    return request.chain

"""What the fast engine of kvtool.sim.blocks works on: integer records, named as they are read.

A request has one record, for what is asked, where it stands and what became of it; so has a block that
was ever taken, a place of a block in a table, and a step that is told. NONE stands for "none" and "not
yet", and for blocks NO_NAME for "cannot be found".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kvtool.errors import KvtoolError
from kvtool.jit import compiled
from kvtool.sim.blocks.index import put
from kvtool.sim.blocks.numbers import END, FRESH, MOST_SORTED, NO_NAME, NONE, ROOT
from kvtool.sim.settings import (
    ABORT_HEAD,
    EOS,
    LPM,
    PRIORITY,
    RADIX,
    UNFINISHED,
    Settings,
    femtoseconds,
)

if TYPE_CHECKING:
    from kvtool.contents import Contents
    from kvtool.requests import Requests

Records: TypeAlias = Any
"""A numpy record or an array of records, which numba reads by attribute."""
STEPS_KEPT = 1 << 16
"""Steps and gaps that are kept before they are handed over."""
MOST_TAKEN = 1 << 27
"""Blocks that may ever be taken, of a pool of any size: 8 GiB with what finds them."""
FIRST_ROOM = 1 << 12
"""Blocks, places in tables and names that there is room for at first."""


def _record(wide: str, narrow: str = "", *arrays: tuple[str, int]) -> np.dtype[np.void]:
    """64 bits for what counts, 32 for what points."""
    fields: list[Any] = [(name, np.int64) for name in wide.split()]
    fields += [(name, np.int64, (size,)) for name, size in arrays]
    return np.dtype(fields + [(name, np.int32) for name in narrow.split()], align=True)


RUN = _record(
    # the settings
    "num_blocks block_size max_model_len max_running token_budget max_batched_tokens chunked_prefill"
    " watermark_blocks full_check threshold adaptive aborts caching by_priority by_match to_eos"
    " most_in_flight"
    " base_ns token_fs context_fs attention_fs request_fs read_ns"
    # time, and who is where: `sorted` known arrivals of which `next_sorted` is next, `pending` later
    # ones, `head` to `arrived` in the order of arrival, or `heaped` by priority, `preempted` in front
    " clock last_end step count sorted next_sorted pending arrived head heaped preempted"
    " first last running in_flight oldest"
    # the pool: blocks that were ever taken, places in tables
    " free_blocks numbered evicted cells_made free_cell free_cells"
    # names of the first blocks of one request, the one that was looked up last; rows of them, if each
    # that waits has one, and the step whose queue is sorted
    " named_for named first_name row_names rows free_row sorted_in"
    # sums over the run
    " ended preemptions recomputed queried hit requery rehit regained stopped steps_kept gaps_kept work"
    # this step; `midway`: its running requests are scheduled, and it waits for room
    " midway budget crowd now_tokens now_context now_beyond now_batch places preempted_before evicted_before"
    " held_up"
    # room that is asked for
    " want_blocks want_cells want_names",
    "",
    # the two steps that may be under way
    ("batch_step", 2), ("batch_end", 2), ("batch_places", 2), ("batch_size", 2),
    # how requests begin that are being sorted
    ("leads", MOST_SORTED),
)  # fmt: skip
REQUEST = _record(
    # each step
    "computed generated prompt output placeholders last_step last_ns in_step chunk"
    # names: of the last block that can be found
    " chain"
    # what is asked; a token beyond the pieces is (out_value, out_shift + its place)
    " arrival_ns priority first_piece last_piece piece out_value out_shift think_ns"
    # what became of it
    " admit_step first_token_step finish_step first_token_ns finish_ns"
    " cached_tokens_first cached_tokens_after_preemption",
    # neighbours among those that run; the table: its length, its last place, how many of its blocks
    # can be found, and the place of the next one
    "next previous blocks last_cell registered open_cell place is_running"
    " num_preemptions lost status first_child next_child",
)
PIECE = _record("value shift end")
"""Tokens of one value: that at place p of the request is (value, shift + p), up to place `end`."""
BLOCK = _record("name", "next previous refs older newer newest")
"""`next` and `previous` in the free list; `older` and `newer` copies, and of the oldest the `newest`."""
SLOT = _record("name block")
CELL = _record("", "block before after")
"""A block's place in a request's table."""
NAME = _record("name piece block")
"""A block of the head: its name, the piece after it, and the block that was found."""
MARK = _record("prefill found lead", "node row named")
"""More of a request, where there is a tree or the queue is sorted by what is cached: tokens to prefill when
it was admitted, tokens that were found, how it begins; the node where its cached blocks end, the row of its
names, and how many there are."""
TREE = _record("clock heaped evictable", "blocks spare_block nodes spare_node found")
"""A radix tree: blocks and nodes that were ever made, those that are free, and where a look-up ended."""
NODE = _record("first second start end", "parent children locks last place heap")
"""`heap` is a column of its own: leaves, in the order of the heap."""
TREE_BLOCK = _record("name", "before node")
"""A block of the tree: the one before it, and whose it is."""
LIST = _record("batch preempted")
"""`batch`: who is in a step, and 1 if it gets a token from it: two steps, one after the other."""
STEP = _record(
    "scheduled_tokens batch running waiting used_blocks context_tokens evictions begin_ns end_ns preemptions held_up"
    " gap weight"
)
"""`gap` and `weight` are a list of their own: ns between two tokens of a request, and how often."""


class State(NamedTuple):
    """Everything that a run knows, so that it can pause and go on."""

    run: Records
    requests: Records
    pieces: Records
    blocks: Records
    """Record 0 ends the free list, 1 stands in it for all blocks never taken, b + 1 is block b."""
    slots: Records
    cells: Records
    names: Records
    queues: Any
    """Numbers of requests, three lists as long as there are requests: the known arrivals; who waits,
    in the order of arrival or as a heap; a heap of those whose parent has ended."""
    lists: Records
    steps: Records
    marks: Records
    """None where nobody needs them: a kernel is compiled for what there is, and sooner."""
    tree: Records
    nodes: Records
    """Of a radix tree, whose `blocks` are TREE_BLOCK; `cells` has none then."""


def new_state(requests: Requests, settings: Settings, contents: Contents | None) -> State:
    """A run that has not begun."""
    count = len(requests)
    most = min(settings.max_running, count)
    blocks = min(settings.num_blocks, FIRST_ROOM) + 2
    run = _run_record(requests, settings)
    run.caching = contents is not None and settings.prefix_caching
    radix = bool(run.caching) and settings.index == RADIX
    state = State(
        run=run,
        requests=_request_records(requests),
        pieces=records(PIECE, 0),
        blocks=records(TREE_BLOCK if radix else BLOCK, blocks),
        slots=records(SLOT, _num_slots(blocks) if run.caching else 1, NO_NAME),
        cells=records(CELL, FIRST_ROOM),
        names=_names(run, requests, settings),
        queues=_queues(requests),
        lists=records(LIST, 2 * most),
        steps=records(STEP, max(STEPS_KEPT, 2 * most + 2), 0),
        marks=records(MARK, count) if radix or run.by_match else None,
        tree=records(TREE, 1, 0)[0] if radix else None,
        nodes=records(NODE, blocks) if radix else None,
    )
    if state.marks is not None:
        state.marks.lead = NO_NAME
    if radix:
        _plant(state)
    else:
        state.blocks[FRESH].name = NO_NAME
        for at, other in ((END, FRESH), (FRESH, END)):
            state.blocks[at].next = state.blocks[at].previous = other
    return _with_pieces(state, contents) if run.caching and contents is not None else state


def _plant(state: State) -> None:
    """A tree of its root alone."""
    state.tree.spare_block = state.tree.spare_node = NONE
    state.tree.nodes = 1
    root = state.nodes[ROOT]
    root.start = root.end = root.children = 0
    root.locks = 1


def _names(run: Records, requests: Requests, settings: Settings) -> Records:
    """Room for the names of the head, or for those of all that are sorted, and one more.

    Memory that is never written to is not taken.
    """
    if not run.by_match:
        return records(NAME, FIRST_ROOM)
    longest = np.minimum(
        requests.prompt_tokens + requests.output_tokens, settings.max_model_len
    ).max(initial=0)
    run.row_names = int(longest) // settings.block_size + 1
    rows = min(len(requests), MOST_SORTED) + 1
    return np.empty(rows * int(run.row_names), NAME).view(np.recarray)


def _run_record(requests: Requests, settings: Settings) -> Records:
    run = records(RUN, 1, 0)[0]
    for name in (
        "num_blocks", "block_size", "max_model_len", "max_running", "token_budget",
        "max_batched_tokens", "chunked_prefill", "watermark_blocks",
    ):  # fmt: skip
        run[name] = getattr(settings, name)
    run.base_ns, run.read_ns = settings.step_time.base_ns, settings.step_time.read_ns
    for name in ("token", "context", "attention", "request"):
        run[f"{name}_fs"] = femtoseconds(getattr(settings.step_time, f"{name}_ns"))
    run.full_check = settings.reserve_full_prompt
    run.threshold = settings.long_prefill_threshold
    run.adaptive = settings.long_prefill_adaptive
    run.aborts = settings.on_stall == ABORT_HEAD
    run.by_priority = settings.policy == PRIORITY
    run.by_match = settings.policy == LPM
    run.to_eos = settings.finish_by == EOS
    run.most_in_flight = 2 if settings.async_scheduling else 1
    run.first = run.last = run.free_cell = run.named_for = run.free_row = run.sorted_in = NONE
    run.free_blocks = settings.num_blocks
    run.count = len(requests)
    run.sorted = int((requests.arrival_ns >= 0).sum())
    return run


def _request_records(requests: Requests) -> Records:
    made = records(REQUEST, len(requests))
    for name in (
        "computed", "generated", "placeholders", "chunk", "priority", "think_ns", "blocks",
        "registered", "is_running", "num_preemptions", "cached_tokens_after_preemption",
        "first_piece", "last_piece",
    ):  # fmt: skip
        made[name] = 0
    made.status[:] = UNFINISHED
    made.prompt[:], made.output[:] = requests.prompt_tokens, requests.output_tokens
    made.arrival_ns[:] = requests.arrival_ns
    if requests.priority is not None:
        made.priority[:] = requests.priority
    waits = np.flatnonzero(requests.arrival_ns < 0)
    if len(waits) and requests.parent is not None:
        if requests.think_ns is not None:
            made.think_ns[:] = requests.think_ns
        order = waits[np.argsort(requests.parent[waits], kind="stable")]
        parents = requests.parent[order]
        same = parents[1:] == parents[:-1]
        made.next_child[order[:-1][same]] = order[1:][same]
        first = np.concatenate([[True], ~same])
        made.first_child[parents[first]] = order[first]
    return made


def _queues(requests: Requests) -> Any:
    """The known arrivals in their order, and room for the other two lists."""
    arrival_ns = requests.arrival_ns
    known = np.flatnonzero(arrival_ns >= 0)
    queues = np.zeros(len(arrival_ns) * (2 if len(known) == len(arrival_ns) else 3), np.int32)
    queues[: len(known)] = known[np.argsort(arrival_ns[known], kind="stable")]
    return queues


def _with_pieces(state: State, contents: Contents) -> State:
    made = records(PIECE, len(contents.value))
    each = np.diff(contents.starts)
    ends = np.cumsum(contents.length)
    before = np.concatenate([[0], ends])[contents.starts]
    made.value[:] = contents.value
    made.end[:] = ends - np.repeat(before[:-1], each)
    made.shift[:] = contents.offset - (made.end - contents.length)
    requests = state.requests
    requests.first_piece[:], requests.last_piece[:] = contents.starts[:-1], contents.starts[1:]
    requests.out_value[:] = contents.out_value
    requests.out_shift[:] = contents.out_offset - np.diff(before)
    return state._replace(pieces=made)


def grown(state: State) -> State:
    """The same state with the room that the run asks for, twice what it had at least."""
    run, caching = state.run, bool(state.run.caching)
    if max(run.want_blocks, run.want_cells, run.want_names) > MOST_TAKEN:
        raise KvtoolError(
            f"more than {MOST_TAKEN:,} blocks would be in use, and each is kept apart",
            "give fewer --num-blocks, larger blocks, or fewer tokens that run at once",
            code="too_large",
        )
    blocks, slots, cells, names = state.blocks, state.slots, state.cells, state.names
    nodes = state.nodes
    if run.want_blocks > len(blocks) - 2:
        most = min(int(run.num_blocks), max(int(run.want_blocks), 2 * len(blocks)))
        blocks = _longer(blocks, most + 2)
        if caching:
            slots = records(SLOT, _num_slots(len(blocks)), NO_NAME)
            if blocks.dtype == TREE_BLOCK:
                nodes = _longer(nodes, len(blocks))
                reindex_tree(blocks, slots, state.tree.blocks)
            else:
                reindex(blocks, slots, run.numbered)
    if run.want_cells > len(cells):
        cells = _longer(cells, max(run.want_cells, 2 * len(cells)))
    if run.want_names > len(names):
        names = _longer(names, max(run.want_names, 2 * len(names)))
    return state._replace(blocks=blocks, slots=slots, cells=cells, names=names, nodes=nodes)


def _num_slots(blocks: int) -> int:
    """A power of two, at most half full."""
    return 1 << (2 * blocks - 1).bit_length()


def _longer(old: Records, count: int) -> Records:
    new = np.empty(int(count), old.dtype).view(np.recarray)
    new[: len(old)] = old
    return new


@compiled
def reindex(blocks: Records, slots: Records, numbered: int) -> None:
    """Put the oldest copy of each name into a new, empty index."""
    for at in range(FRESH + 1, FRESH + 1 + numbered):
        if blocks[at].name != NO_NAME and blocks[at].older < 0:
            put(slots, blocks[at].name, at)


@compiled
def reindex_tree(blocks: Records, slots: Records, made: int) -> None:
    """Put each block of a tree into a new, empty index."""
    for at in range(made):
        if blocks[at].name != NO_NAME:
            put(slots, blocks[at].name, at)


def records(dtype: np.dtype[np.void], count: int, value: int = NONE) -> Records:
    """So many records, each field of the same value; only 0 and -1 fill fields of every width."""
    return np.full(count * dtype.itemsize, value & 0xFF, np.uint8).view(dtype).view(np.recarray)

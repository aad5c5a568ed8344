"""What the fast engine works on: integer records, named as they are read.

A run has one `Run` record, a `Line` for each request that runs or was preempted, and sums over steps.
Every field is an int64; NONE stands for "no line" and "not yet".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvtool.sim.memory import ALLOCATORS, BUDDY, PLACEMENTS
from kvtool.sim.settings import ABORT_HEAD, SWAP, Settings, femtoseconds

Run: TypeAlias = Any
Lines: TypeAlias = Any
Records: TypeAlias = Any
"""A numpy record and arrays of records, which numba reads by attribute."""

PAGED, MAX, POW2, ORACLE, GROW = map(ALLOCATORS.index, ("paged", "max", "pow2", "oracle", "grow"))
"""`run.allocator`: the engine's numbers for the names."""
NONE = -1
CALENDAR = 4096
"""Buckets of the calendar: a power of two; what is due later waits in its bucket for its lap."""
LARGEST_BLOCK = 1 << 16
POINTS = 1024
"""Points of the series over time; when they are full, each two become one."""
STEPS_KEPT = 1 << 16
"""Steps and gaps that are kept before they are handed over."""


def _record(names: str, *arrays: tuple[str, int]) -> np.dtype[np.void]:
    fields: list[Any] = [(name, np.int64) for name in names.split()]
    return np.dtype(fields + [(name, np.int64, (size,)) for name, size in arrays], align=True)


RUN = _record(
    # the settings
    "allocator placement num_slots num_blocks block_size max_model_len max_running most token_budget"
    " max_batched_tokens chunked_prefill watermark_blocks full_check threshold adaptive"
    " swaps cpu_blocks aborts base_ns token_fs context_fs attention_fs request_fs read_ns swap_ns warm_up"
    # where it stands: time, the stream of requests, lists of lines
    " clock step phase head arrived first last running decoding prefilling preempted"
    " free_lines head_line stamp holes"
    # tokens of what runs now: computed, held (and blocks that are free), held and never needed
    " tokens held free_blocks internal cpu_used"
    # sums over the run
    " done cut aborted preemptions recomputed swapped copied scheduled peak stopped"
    " steps_kept gaps_kept width skipped skips measured point_ends"
    # this step: blocks moved before it, arrivals up to when, who is there, tokens, context of those
    # who are not scheduled
    " swapped_before seen_ns crowd now_tokens now_batch now_decoded now_unseen now_context"
    # pairs of a token and one it attends to, beyond one for each token of context
    " now_beyond"
    # how many stand in its lists, which are columns of the lines
    " ended gaps"
    # no step begins from then on; prompts of who has ended, and how many; before this step
    " until_ns ended_prompt ended_requests ended_prompt_before ended_requests_before",
    ("calendar", CALENDAR),
    # how many decoding requests need a block in the steps of each remainder modulo block_size
    ("phases", LARGEST_BLOCK),
)
LINE = _record(
    "index prompt limit output final needed"
    # Since step `since` it decodes, a token a step, from these; NONE: prompt is left to compute.
    " since computed generated chunk skipped stamp next previous"
    # its next event, and its neighbours in the calendar's bucket
    " due later earlier"
    # its region
    " address room"
    # `pad`: slots held that it will never use
    " pad on_cpu last_ns"
    # what is told when it ends
    " admit_step first_token_step first_token_ns num_preemptions status"
    # Lists, a place a line: stacks of lines, lines by their order, and what this step has to tell.
    " free preempted prefilling ended gap hole_at hole_size"
)
QUEUE = _record("arrival_ns prompt output index prefilled")
SUMS = _record("steps token reserved internal external idle running no_seat no_tokens no_memory")
STEP = _record(
    "scheduled_tokens batch running waiting held context_tokens begin_ns end_ns preemptions decoded held_up"
    " gap"
)
OUTCOME = _record(
    "admit_step first_token_step finish_step first_token_ns finish_ns num_preemptions generated"
    " status"
)


class State(NamedTuple):
    """Everything that a run knows, so that it can pause and go on.

    Two records do the work, because every array is several arguments of every compiled function:
    lists have a column of the lines (`free`, `preempted`, `prefilling`, ...).
    """

    run: Run
    lines: Lines
    sums: Records
    """POINTS of a series over all steps, `run.width` steps each; then the steps of the window, and
    those that are not yet added to either."""
    outcomes: Records
    steps: Records


def new_state(
    allocator: str, where: str, settings: Settings, *, warm_up: int, num_recorded: int
) -> State:
    """A run that has not begun. If requests are recorded one by one, so is every step."""
    most = min(settings.max_running, settings.num_slots)
    if settings.block_size > LARGEST_BLOCK:
        raise ValueError(f"block_size is at most {LARGEST_BLOCK:,}")
    lines = records(LINE, max(most, _most_holes(where, settings.num_slots, most)), NONE)
    lines["free"][:most] = np.arange(most)[::-1]
    run = _run_record(allocator, where, settings, warm_up, most)
    sizes = [settings.num_slots]
    if where == BUDDY:  # descending powers of two, so that each is aligned to its size
        sizes = [1 << k for k in reversed(range(sizes[0].bit_length())) if sizes[0] >> k & 1]
    run.holes = len(sizes)
    lines["hole_size"][: len(sizes)] = sizes
    lines["hole_at"][: len(sizes)] = np.cumsum([0, *sizes[:-1]])
    return State(
        run=run,
        lines=lines,
        sums=records(SUMS, POINTS + 2, 0),
        outcomes=records(OUTCOME, num_recorded, NONE, zero=("num_preemptions", "generated")),
        steps=records(STEP, max(STEPS_KEPT, most) if num_recorded else 0, 0),
    )


def _most_holes(where: str, num_slots: int, most: int) -> int:
    """Holes that there can be between so many regions, and one more that `grow` copies to.

    With buddy a region leaves a hole at each level above it that it shares with no other: at level d
    of a tree of D levels at most min(2^d, regions), in all regions × (D - log2 regions + 1), and one
    for each of the powers of two that the pool is cut into.
    """
    if where != BUDDY:
        return most + 2
    levels, regions = num_slots.bit_length(), most + 1
    return min(num_slots, regions * max(1, levels - regions.bit_length() + 1) + levels) + 1


def _run_record(allocator: str, where: str, settings: Settings, warm_up: int, most: int) -> Records:
    run = records(RUN, 1, 0)[0]
    run.allocator = ALLOCATORS.index(allocator)
    run.placement = PLACEMENTS.index(where) if where else 0
    for name in (
        "num_slots", "num_blocks", "block_size", "max_model_len", "max_running", "token_budget",
        "max_batched_tokens", "chunked_prefill", "watermark_blocks", "cpu_blocks",
    ):  # fmt: skip
        run[name] = getattr(settings, name)
    run.full_check = settings.reserve_full_prompt
    run.threshold = settings.long_prefill_threshold
    run.adaptive = settings.long_prefill_adaptive
    run.swaps = settings.preemption == SWAP
    run.aborts = settings.on_stall == ABORT_HEAD
    for name in ("base_ns", "read_ns", "swap_ns"):
        run[name] = getattr(settings.step_time, name)
    for name in ("token", "context", "attention", "request"):
        run[f"{name}_fs"] = femtoseconds(getattr(settings.step_time, f"{name}_ns"))
    run.most = most
    run.until_ns = np.iinfo(np.int64).max
    run.free_blocks = settings.num_blocks
    run.warm_up = warm_up
    run["calendar"][:] = NONE
    run.first = run.last = run.head_line = NONE
    run.free_lines = most
    run.width = 1
    return run


def records(
    dtype: np.dtype[np.void], count: int, value: int, *, zero: Iterable[str] = ()
) -> Records:
    """So many records, each field of the same value but those of `zero`."""
    made = np.full(count * dtype.itemsize // 8, value, np.int64).view(dtype).view(np.recarray)
    for name in zero:
        made[name] = 0
    return made

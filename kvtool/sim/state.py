"""What the fast engine works on: integer records, named as they are read.

A run has one `Run` record, a `Line` for each request that runs or was preempted, and sums over steps.
Every field is an int64; NONE stands for "no line" and "not yet".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from kvtool.sim.memory import ALLOCATORS, PLACEMENTS
from kvtool.sim.settings import ABORT_HEAD, SWAP, Settings

Records = Any
"""A numpy record array, which numba reads by attribute."""

NONE = -1
CALENDAR = 4096
"""Buckets of the calendar: a power of two; what is due later waits in its bucket for its lap."""
POINTS = 1024
"""Points of the series over time; when they are full, each two become one."""
STEPS_KEPT = 1 << 16
"""Steps and gaps that are kept before they are handed over."""


def _record(names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names.split()])


RUN = _record(
    # the settings
    "allocator placement num_slots num_blocks block_size max_model_len max_running token_budget"
    " max_batched_tokens chunked_prefill watermark_blocks full_check threshold adaptive"
    " swaps cpu_blocks aborts base_ns token_ns context_ns warm_up"
    # where it stands: time, the stream of requests, lists of lines
    " clock step head arrived first last first_region running decoding prefilling preempted"
    " free_lines stamp"
    # tokens of what runs now: computed, held, held beyond what will ever be needed
    " tokens held internal cpu_used"
    # sums over the run
    " done cut aborted preemptions recomputed swapped copied scheduled generated peak stopped"
    " steps_kept gaps_kept width skipped skips"
)
LINE = _record(
    "index prompt limit output final"
    # Since step `since` it decodes, a token a step, from these; NONE: prompt is left to compute.
    " since computed generated chunk skipped stamp next previous"
    # its next event, and its neighbours in the calendar's bucket
    " due later earlier"
    # its region, and the regions above and below it
    " address room above below"
    # `pad`: slots held that it will never use
    " pad on_cpu last_ns"
)
SUMS = _record("steps tokens reserved internal external idle running held")
STEP = _record("scheduled_tokens batch running waiting held context_tokens end_ns decoded")
REQUEST = _record(
    "admit_step first_token_step finish_step first_token_ns finish_ns num_preemptions generated"
    " status"
)


class State(NamedTuple):
    """Everything that a run knows, so that it can pause and go on."""

    run: Records
    lines: Records
    free_lines: Any
    preempted: Any
    """A stack of lines: who was preempted last is admitted first."""
    prefilling: Any
    """Lines with prompt left to compute, in the order of admission."""
    phases: Any
    """How many decoding requests need a block in the steps of each remainder modulo block_size."""
    calendar: Any
    due: Any
    holes: Any
    """Buddy: addresses of the free regions of each power of two, `num_holes` of them."""
    num_holes: Any
    sums: Records
    """Over all steps, and over those of the window."""
    series: Records
    per_step: Records
    per_request: Records
    gaps: Any


def new_state(
    allocator: str, where: str, settings: Settings, *, warm_up: int, num_recorded: int
) -> State:
    """A run that has not begun. If requests are recorded one by one, so is every step."""
    most = min(settings.max_running, settings.num_slots)
    orders = settings.num_slots.bit_length()
    kept = STEPS_KEPT if num_recorded else 0
    state = State(
        run=_run_record(allocator, where, settings, warm_up, most),
        lines=_records(LINE, most, NONE),
        free_lines=np.arange(most, dtype=np.int64)[::-1].copy(),
        preempted=np.zeros(most, np.int64),
        prefilling=np.zeros(most, np.int64),
        phases=np.zeros(settings.block_size, np.int64),
        calendar=np.full(CALENDAR, NONE, np.int64),
        due=np.zeros(most, np.int64),
        holes=np.zeros((orders, most + 4), np.int64),
        num_holes=np.zeros(orders, np.int64),
        sums=_records(SUMS, 2, 0),
        series=_records(SUMS, POINTS, 0),
        per_step=_records(STEP, kept, 0),
        per_request=_records(REQUEST, num_recorded, NONE, zero=("num_preemptions", "generated")),
        gaps=np.zeros(kept, np.int64),
    )
    address = 0
    for order in reversed(range(orders)):
        if settings.num_slots >> order & 1:
            state.holes[order, 0] = address
            state.num_holes[order] = 1
            address += 1 << order
    return state


def _run_record(
    allocator: str, where: str, settings: Settings, warm_up: int, most: int
) -> Records:
    run = _records(RUN, 1, 0)
    run[0].allocator = ALLOCATORS.index(allocator)
    run[0].placement = PLACEMENTS.index(where) if where else 0
    for name in (
        "num_slots", "num_blocks", "block_size", "max_model_len", "max_running", "token_budget",
        "max_batched_tokens", "chunked_prefill", "watermark_blocks", "cpu_blocks",
    ):  # fmt: skip
        run[0][name] = getattr(settings, name)
    run[0].full_check = settings.reserve_full_prompt
    run[0].threshold = settings.long_prefill_threshold
    run[0].adaptive = settings.long_prefill_adaptive
    run[0].swaps = settings.preemption == SWAP
    run[0].aborts = settings.on_stall == ABORT_HEAD
    for name in ("base_ns", "token_ns", "context_ns"):
        run[0][name] = getattr(settings.step_time, name)
    run[0].warm_up = warm_up
    run[0].first = run[0].last = run[0].first_region = NONE
    run[0].free_lines = most
    run[0].width = 1
    return run


def _records(
    dtype: np.dtype[np.void], count: int, value: int, *, zero: Iterable[str] = ()
) -> Records:
    records = np.full(count * len(dtype), value, np.int64).view(dtype).view(np.recarray)
    for name in zero:
        records[name] = 0
    return records

"""Static batching with every step and request written down: what kvtool.sim.static_batch only sums up.

A batch is padded to its longest prompt and output and ends as a whole. Each request has its first token
when the batch's prefill ends and its last one when that is generated; its place is free with the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtool.requests import Requests
from kvtool.sim.replay import CACHED, OUTCOMES, Replay
from kvtool.sim.settings import (
    ABORTED,
    CUT,
    DONE,
    NOBODY_WAITS,
    REJECTED,
    UNFINISHED,
    Settings,
)  # fmt: skip
from kvtool.sim.static_batch import Member, StaticBatches, steps_of

Columns = dict[str, NDArray[np.int64]]
STEPS = (
    "scheduled_tokens", "batch", "running", "waiting", "context_tokens", "begin_ns", "end_ns", "held_up",
    "preemptions", "used_blocks", "evictions",
)  # fmt: skip


def replay_static(
    requests: Requests, settings: Settings, progress: Callable[[int], None] = lambda ended: None
) -> Replay:
    """All of the requests, in the order of their arrival."""
    order = np.argsort(requests.arrival_ns, kind="stable")
    batches = StaticBatches(
        source=[requests.take(order)], num_requests=len(requests), settings=settings
    )
    outcomes = _outcomes(requests, settings)
    served = order[outcomes["status"][order] == UNFINISHED]
    arrivals = requests.arrival_ns[served]
    pieces: list[Columns] = []
    gaps: list[NDArray[np.int64]] = []
    first, step, interrupted = 0, 0, False
    try:
        for batch in batches.batches():
            index = served[first : first + len(batch)]
            steps = _steps(batches, batch, arrivals, first)
            _end(outcomes, batch, index, steps, step)
            gaps.append(np.diff(steps["end_ns"]))
            pieces.append(steps)
            first, step = first + len(batch), step + len(steps["end_ns"])
            batches.clock_ns = int(steps["end_ns"][-1])
            progress(len(batch))
    except KeyboardInterrupt:
        interrupted = True
    empty = {name: np.zeros(0, np.int64) for name in STEPS}
    pieces = pieces or [empty]
    live = [piece["batch"][1:] for piece in pieces]
    return Replay(
        arrival_ns=requests.arrival_ns,
        outcomes=outcomes,
        steps={name: np.concatenate([piece[name] for piece in pieces]) for name in STEPS},
        gaps=(np.concatenate([*gaps, empty["end_ns"]]), np.concatenate(live)),
        preemptions=0,
        recomputed_tokens=0,
        interrupted=interrupted,
    )


def _outcomes(requests: Requests, settings: Settings) -> Columns:
    """Nothing has come of any request, but for who is never served: as StaticBatches leaves them out."""
    outcomes = {name: np.full(len(requests), -1, np.int64) for name in (*OUTCOMES, *CACHED)}
    for name in ("num_preemptions", "generated", CACHED[1]):
        outcomes[name][:] = 0
    longest, prompt = settings.max_model_len, requests.prompt_tokens
    limit = np.minimum(requests.output_tokens, longest - prompt)
    rejected = (prompt <= 0) | (prompt >= longest)
    status = outcomes["status"]
    status[:] = UNFINISHED
    status[prompt + limit - 1 > settings.num_slots] = ABORTED
    status[rejected] = REJECTED
    return outcomes


def _steps(
    batches: StaticBatches, batch: list[Member], arrivals: NDArray[np.int64], first: int
) -> Columns:
    """Each step of a batch: every row computes in every one, whether its request is done or not."""
    settings = batches.settings
    outputs = np.array([member.output for member in batch], np.int64)
    count, steps = len(batch), int(outputs.max())
    prompt = max(member.prompt for member in batch)
    place = np.arange(steps, dtype=np.int64)
    tokens, context, took = steps_of(settings.step_time, count, prompt, steps)
    ends = batches.clock_ns + np.cumsum(took)
    begins = ends - took
    here = np.searchsorted(arrivals, begins, side="right") - first - count
    waiting = np.maximum(here, 0)
    held_up = np.where(waiting > 0, batches.closed_by, NOBODY_WAITS)
    blocks = -(-count * (prompt + steps - 1) // settings.block_size)
    return {
        "scheduled_tokens": tokens,
        "batch": count - np.searchsorted(np.sort(outputs), place, side="right"),
        "running": np.full(steps, count, np.int64),
        "waiting": waiting,
        "context_tokens": context,
        "begin_ns": begins,
        "end_ns": ends,
        "held_up": held_up.astype(np.int64),
        "used_blocks": np.full(steps, blocks, np.int64),
        "preemptions": np.zeros(steps, np.int64),
        "evictions": np.zeros(steps, np.int64),
    }


def _end(
    outcomes: Columns, batch: list[Member], index: NDArray[np.int64], steps: Columns, step: int
) -> None:
    """What came of the requests of a batch."""
    outputs = np.array([member.output for member in batch], np.int64)
    ends = steps["end_ns"]
    outcomes["admit_step"][index] = outcomes["first_token_step"][index] = step
    outcomes["first_token_ns"][index] = ends[0]
    outcomes["finish_step"][index] = step + outputs - 1
    outcomes["finish_ns"][index] = ends[outputs - 1]
    outcomes["generated"][index] = outputs
    outcomes["cached_tokens_first"][index] = 0
    outcomes["status"][index] = [CUT if member.cut else DONE for member in batch]

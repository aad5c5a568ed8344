"""Rows of `kvtool simulate --disaggregate`: two kinds of instances and the links between them.

Steps of several instances have no common clock: what is a mean over steps is given for each kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtool.requests import SECOND_NS
from kvtool.simulate import (
    echo_of,
    ends_of,
    finished_in,
    percentiles,
    queue_row,
    rates_of,
    times_of,
)

if TYPE_CHECKING:
    from kvtool.requests import Column, Requests
    from kvtool.run import Row
    from kvtool.sim.disaggregated import PooledReplay, Pools, Stage

BINDS = 0.01
"""Of the mean end-to-end time: from here on what requests wait for longest is said to bind."""
NOT_OF_INSTANCES = (
    "mean_used_blocks", "used_block_steps", "mean_batch", "peak_batch", "waiting_steps",
    "waiting_for_seqs_steps", "waiting_for_tokens_steps", "waiting_for_blocks_steps",
)  # fmt: skip
"""Null: a step is one instance's."""


def row_of_pools(found: PooledReplay, requests: Requests, pools: Pools) -> Row:
    """The row of a run; `num_blocks` is of the smaller pool, and the law of a step the decode's."""
    end_ns = _end_ns(found)
    rates = rates_of(found, end_ns)
    stages = {"prefill": found.prefill, "decode": found.decode}
    counts = {"prefill": pools.num_prefill, "decode": pools.num_decode}
    row: Row = {
        "requests": len(requests),
        **echo_of(pools.decode),
        "num_blocks": min(pools.prefill.num_blocks, pools.decode.num_blocks),
        "steps": sum(len(steps["end_ns"]) for one in stages.values() for steps in one.steps),
        "end_ns": end_ns or 0,
        "preemptions": found.preemptions,
        "recomputed_tokens": found.recomputed_tokens,
        "swapped_blocks": 0,
        "swapped_bytes": 0,
        **dict.fromkeys(("queried_tokens", "hit_tokens", "requery_tokens", "rehit_tokens"), 0),
        "evictions": 0,
        "scheduled_tokens": sum(_total(one, "scheduled_tokens") for one in stages.values()),
        **ends_of(found),
        "larger_than_pool": _larger_than_a_pool(found, requests),
        **dict.fromkeys(NOT_OF_INSTANCES),
        **rates,
        **times_of(found),
        "transfer_bytes": found.transfer_bytes,
        "link_bits_per_s": pools.bits_per_s,
        **_transfers(found, rates["span_s"], pools.num_prefill),
    }
    for name, stage in stages.items():
        row |= {f"{name}_{key}": value for key, value in _of(stage, rates["span_s"], counts[name])}
    return row | _binds(found, row)


def growth_of_pools(found: PooledReplay) -> Row:
    """Who waits, for an instance or a link, in the middle and at the end of the arrivals."""
    import numpy as np

    arrivals = np.sort(found.arrival_ns)
    if len(arrivals) < 2 or arrivals[0] == arrivals[-1] or _end_ns(found) is None:
        return {"arrivals_per_s": None, "queue_mid": None, "queue_end": None, "queue_grows": False}
    begins = _admitted_ns(found.prefill), _admitted_ns(found.decode)
    came, ready = found.arrival_ns, found.prefill.outcomes["first_token_ns"]
    served = found.prefill.chosen >= 0
    sent = found.send_ns >= 0

    def waiting(now: int) -> int:
        at_prefill = served & (came <= now) & ((begins[0] > now) | (begins[0] < 0))
        at_link = sent & (ready <= now) & (found.send_ns > now)
        at_decode = sent & (found.sent_ns <= now) & ((begins[1] > now) | (begins[1] < 0))
        return int((at_prefill | at_link | at_decode).sum())

    middle, last = (waiting(int(arrivals[place])) for place in (len(arrivals) // 2, -1))
    most = sum(
        int(steps["running"].max())
        for stage in (found.prefill, found.decode)
        for steps in stage.steps
        if len(steps["running"])
    )
    return queue_row(arrivals, middle, last, most)


def _end_ns(found: PooledReplay) -> int | None:
    ends = [
        int(steps["end_ns"][-1])
        for stage in (found.prefill, found.decode)
        for steps in stage.steps
        if len(steps["end_ns"])
    ]
    return max(ends, default=None)


def _total(stage: Stage, name: str) -> int:
    return sum(int(steps[name].sum()) for steps in stage.steps)


def _of(stage: Stage, span_s: float, instances: int) -> list[tuple[str, Any]]:
    """Of one kind: its pool and law, the share of the span that its instances made steps in, and means."""
    count = sum(len(steps["end_ns"]) for steps in stage.steps)
    busy_ns = _total(stage, "end_ns") - _total(stage, "begin_ns")
    return [
        ("instances", instances),
        ("num_blocks", stage.settings.num_blocks),
        ("base_ns", stage.settings.step_time.base_ns),
        ("read_ns", stage.settings.step_time.read_ns),
        ("token_ns", stage.settings.step_time.token_ns),
        ("context_ns", stage.settings.step_time.context_ns),
        ("steps", count),
        ("utilisation", busy_ns / SECOND_NS / span_s / instances if span_s else None),
        ("mean_batch", _total(stage, "batch") / count if count else None),
        ("mean_waiting", _total(stage, "waiting") / count if count else None),
        ("mean_used_blocks", _total(stage, "used_blocks") / count if count else None),
        ("preemptions", stage.preemptions),
    ]


def _transfers(found: PooledReplay, span_s: float, links: int) -> Row:
    """From the end of the prefill to that of the transfer: waiting for the link, and sending."""
    there = found.send_ns >= 0
    took = (found.sent_ns - found.prefill.outcomes["finish_ns"])[there]
    sending_ns = int((found.sent_ns - found.send_ns)[there].sum())
    p50, p90, p99 = (
        None if value is None else value / SECOND_NS for value in percentiles(took)
    )  # fmt: skip
    return {
        "transfer_s_p50": p50,
        "transfer_s_p90": p90,
        "transfer_s_p99": p99,
        "link_utilisation": sending_ns / SECOND_NS / span_s / links if span_s else None,
    }


def _admitted_ns(stage: Stage) -> Column:
    """When the step began that first gave a request tokens here; -1: none did."""
    import numpy as np

    begins = np.full(len(stage.chosen), -1, np.int64)
    steps = stage.outcomes["admit_step"]
    for number, made in enumerate(stage.steps):
        here = (stage.chosen == number) & (steps >= 0)
        begins[here] = made["begin_ns"][steps[here]]
    return begins


def _binds(found: PooledReplay, row: Row) -> Row:
    """Mean seconds for which the finished waited for each kind and for the links, and the longest of the
    three, unless it is hardly anything."""
    done = finished_in(found)
    sent = done & (found.send_ns >= 0)
    waits = {
        "prefill": (_admitted_ns(found.prefill) - found.arrival_ns)[done],
        "link": (found.send_ns - found.prefill.outcomes["finish_ns"])[sent],
        "decode": (_admitted_ns(found.decode) - found.sent_ns)[sent],
    }
    whole = (found.outcomes["finish_ns"] - found.arrival_ns)[done].sum()
    longest = max(waits, key=lambda name: waits[name].sum())
    return {
        **{
            f"{name}_wait_s_mean": float(ns.mean()) / SECOND_NS if len(ns) else None
            for name, ns in waits.items()
        },
        "binds": longest if waits[longest].sum() >= BINDS * whole > 0 else None,
    }


def _larger_than_a_pool(found: PooledReplay, requests: Requests) -> int:
    """Of the aborted those that a pool they were sent to cannot hold."""
    import numpy as np

    from kvtool.sim.settings import ABORTED

    aborted = found.outcomes["status"] == ABORTED
    larger = np.zeros(len(requests), bool)
    for stage in (found.prefill, found.decode):
        tokens = requests.prompt_tokens + stage.outcomes["generated"]
        blocks = -(-np.minimum(tokens, stage.settings.max_model_len) // stage.settings.block_size)
        larger |= (stage.outcomes["status"] == ABORTED) & (blocks > stage.settings.num_blocks)
    return int((aborted & larger).sum())

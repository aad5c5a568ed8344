"""Rows of `kvtool simulate --disaggregate`: two kinds of instances and the links between them.

Steps of several instances have no common clock: what is a mean over steps is given for each kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtool.queueing import NO_GROWTH, looks, queue_row
from kvtool.requests import SECOND_NS
from kvtool.simulate import (
    echo_of,
    ends_of,
    finished_in,
    rates_of,
    seconds_of,
    times_of,
)
from kvtool.timeline import OVER_TIME

if TYPE_CHECKING:
    from kvtool.requests import Column, Requests
    from kvtool.run import Row
    from kvtool.sim.disaggregated import DisaggregatedReplay, Split, Stage

DISAGGREGATED = "disaggregated"
"""The scheduler of such a row."""
BINDS = 0.01
"""Of the mean end-to-end time: from here on what requests wait for longest is said to bind."""
NOT_OF_INSTANCES = (
    "mean_used_blocks", "used_block_steps", "mean_batch", "peak_batch", "waiting_steps",
    "waiting_for_seqs_steps", "waiting_for_tokens_steps", "waiting_for_blocks_steps",
    "waiting_for_batch_steps", *OVER_TIME,
)  # fmt: skip
"""Null: a step is one instance's."""
LAW = ("base_ns", "read_ns", "token_ns", "context_ns", "attention_ns", "request_ns")


def row_of_disaggregated(found: DisaggregatedReplay, requests: Requests, split: Split) -> Row:
    """The row of a run; `num_blocks` is of the smaller pool, and the law of a step the decode's."""
    end_ns = _end_ns(found)
    rates = rates_of(found, end_ns)
    stages = {"prefill": found.prefill, "decode": found.decode}
    counts = {"prefill": split.num_prefill, "decode": split.num_decode}
    row: Row = {
        "requests": len(requests),
        **echo_of(split.decode),
        "num_blocks": min(split.prefill.num_blocks, split.decode.num_blocks),
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
        **_second_token(found),
        "transfer_bytes": found.transfer_bytes,
        "link_bits_per_s": split.bits_per_s,
        **_transfers(found, rates["span_s"], split.num_prefill),
    }
    for name, stage in stages.items():
        row |= {f"{name}_{key}": value for key, value in _of(stage, rates["span_s"], counts[name])}
    return row | _binds(found)


def growth_of_disaggregated(found: DisaggregatedReplay) -> Row:
    """Who waits, for an instance or a link, in the middle of the arrivals, at three quarters and at their
    end. Who is aborted waits no longer."""
    import numpy as np

    arrivals = np.sort(found.arrival_ns)
    if len(arrivals) < 2 or arrivals[0] == arrivals[-1] or _end_ns(found) is None:
        return dict(NO_GROWTH)
    came, ready = found.arrival_ns, found.prefill.outcomes["first_token_ns"]
    served, sent = found.prefill.chosen >= 0, found.send_ns >= 0
    left_prefill, left_decode = _left_queue_ns(found.prefill), _left_queue_ns(found.decode)

    def waiting(now: int) -> int:
        at_prefill = served & (came <= now) & (now < left_prefill)
        at_link = sent & (ready <= now) & (now < found.send_ns)
        at_decode = sent & (found.sent_ns <= now) & (now < left_decode)
        return int((at_prefill | at_link | at_decode).sum())

    lengths = [waiting(int(arrivals[place])) for place in looks(len(arrivals))]
    return queue_row(arrivals, lengths, most_at_once(found))


def most_at_once(found: DisaggregatedReplay) -> int:
    """Requests that ran at once at most, over all instances; each at its own time."""
    return sum(
        int(steps["running"].max())
        for stage in (found.prefill, found.decode)
        for steps in stage.steps
        if len(steps["running"])
    )


def _end_ns(found: DisaggregatedReplay) -> int | None:
    ends = [
        int(steps["end_ns"][-1])
        for stage in (found.prefill, found.decode)
        for steps in stage.steps
        if len(steps["end_ns"])
    ]
    return max(ends, default=None)


def _total(stage: Stage, name: str) -> int:
    return sum(int(steps[name].sum()) for steps in stage.steps)


def _sum_s(ns: Column) -> float:
    """Of times in ns, whose sum over requests is soon beyond 64 bits."""
    return float(ns.sum(dtype=float)) / SECOND_NS


def _of(stage: Stage, span_s: float, instances: int) -> list[tuple[str, Any]]:
    """Of one kind: its pool and law, the share of the span that its instances made steps in, and means."""
    count = sum(len(steps["end_ns"]) for steps in stage.steps)
    stepping_s = sum(_sum_s(steps["end_ns"] - steps["begin_ns"]) for steps in stage.steps)
    batch = _total(stage, "batch") / count if count else None
    return [
        ("instances", instances),
        ("num_blocks", stage.settings.num_blocks),
        *((name, getattr(stage.settings.step_time, name)) for name in LAW),
        ("steps", count),
        ("utilisation", stepping_s / span_s / instances if span_s else None),
        ("mean_batch", batch),
        ("seats_used", None if batch is None else batch / stage.settings.max_running),
        ("mean_waiting", _total(stage, "waiting") / count if count else None),
        ("mean_used_blocks", _total(stage, "used_blocks") / count if count else None),
        ("preemptions", stage.preemptions),
    ]


def _second_token(found: DisaggregatedReplay) -> Row:
    """From the first token to the second, of who finished: the link, the transfer, the wait for a decode
    instance and its first step. One gap of many: no percentile of all gaps shows it."""
    second = found.decode.outcomes["first_token_ns"]
    there = finished_in(found) & (second >= 0)
    return seconds_of("second_token", (second - found.outcomes["first_token_ns"])[there])


def _transfers(found: DisaggregatedReplay, span_s: float, links: int) -> Row:
    """From the end of the prefill to that of the transfer: waiting for the link, and sending."""
    there = found.send_ns >= 0
    took = (found.sent_ns - found.prefill.outcomes["finish_ns"])[there]
    sending_s = _sum_s((found.sent_ns - found.send_ns)[there])
    return {
        **seconds_of("transfer", took),
        "link_utilisation": sending_s / span_s / links if span_s else None,
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


def _left_queue_ns(stage: Stage) -> Column:
    """When a request began here, or was aborted without that; the last of all times if neither is known."""
    import numpy as np

    begins, ends = _admitted_ns(stage), stage.outcomes["finish_ns"]
    forever = np.iinfo(np.int64).max
    left: Column = np.where(begins >= 0, begins, np.where(ends >= 0, ends, forever))
    return left


def _binds(found: DisaggregatedReplay) -> Row:
    """Mean seconds for which the finished waited for each kind and for the links, and what took them longest,
    unless it is hardly anything: of the links that is their transfer too."""
    done = finished_in(found)
    sent = done & (found.send_ns >= 0)
    waits = {
        "prefill": (_admitted_ns(found.prefill) - found.arrival_ns)[done],
        "link": (found.send_ns - found.prefill.outcomes["finish_ns"])[sent],
        "decode": (_admitted_ns(found.decode) - found.sent_ns)[sent],
    }
    all_s = _sum_s((found.outcomes["finish_ns"] - found.arrival_ns)[done])
    sums = {name: _sum_s(ns) for name, ns in waits.items()}
    took = sums | {"link": _sum_s((found.sent_ns - found.prefill.outcomes["finish_ns"])[sent])}
    longest = max(took, key=lambda name: took[name])
    return {
        **{
            f"{name}_wait_s_mean": sums[name] / len(ns) if len(ns) else None
            for name, ns in waits.items()
        },
        "binds": longest if took[longest] >= BINDS * all_s > 0 else None,
    }


def _larger_than_a_pool(found: DisaggregatedReplay, requests: Requests) -> int:
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

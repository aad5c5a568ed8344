"""Instances that decode alone, or that decode and compute prompts in the same steps: batches and times
between tokens at a rate, by Little's law (batch = requests a second × seconds that one decodes).

Requests are all alike, and a step takes what the roofline says (kvtool.decode_speed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool import decode_speed

if TYPE_CHECKING:
    from kvtool.decode_speed import Loads, Machine
    from kvtool.plan import PlanCase
    from kvtool.prefill import Prefill

HALVINGS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Instances of one kind of GPU, and the requests that they are to serve.

    `batch`: requests with all their output that one holds; 0: none.
    """

    case: PlanCase
    prefill: Prefill
    loads: Loads
    machine: Machine
    batch: int
    prompt: int
    output: int

    @property
    def instances(self) -> int:
        """Replicas."""
        return self.case.replicas

    @property
    def steps(self) -> int:
        """That a request decodes for: the prefill makes its first token."""
        return self.output - 1


def step_s(kind: Kind, batch: float, chunk: float = 0.0) -> float:
    """Of a step that decodes a batch, half its output there, and computes so many tokens of prompts.

    These are somewhere in their prompts: each attends to half of one, and a step reads the part that is
    there of each prompt that it works on.
    """
    prompt = kind.prompt
    read = max(chunk, (prompt + chunk) / 2) if chunk else 0.0
    return decode_speed.step_s(
        kind.loads, kind.machine, batch=batch, context=round(prompt + kind.output / 2), chunk=chunk,
        attended=round((prompt + 1) / 2), read=round(read),
    )  # fmt: skip


def decoding(kind: Kind, rate: float) -> tuple[float, float]:
    """The batch of an instance that is sent so many prefilled requests a second, and its step in seconds:
    fewer decode faster."""
    return _balance(kind, float(kind.batch), rate, lambda batch: step_s(kind, batch))


def full(kind: Kind) -> tuple[float, float]:
    """The batch of an undivided instance that is never short of requests, and the mean seconds between the
    tokens of one.

    While it decodes, the prompts of a whole batch are computed, in steps that have no room for more tokens:
    where these are all its steps, the batch is what they leave room for.
    """
    budget = kind.case.holder.options.max_batched_tokens
    batch = min(float(kind.batch), budget / (1 + kind.prompt / kind.steps))
    return batch, _mixed_s(kind, batch, budget - batch)


def full_rate(kind: Kind) -> float:
    """Requests a second of all undivided instances; 0 where they hold no whole request."""
    if not kind.batch:
        return 0.0
    batch, tpot_s = full(kind)
    return kind.instances * batch / tpot_s / kind.steps


def mixed(kind: Kind, rate: float) -> tuple[float, float]:
    """As `full`, of an undivided instance that gets so many requests a second: up to what it has of them."""
    batch, tpot_s = full(kind)
    if rate * kind.steps * tpot_s > batch * (1 - 1e-9):
        return batch, tpot_s
    return _balance(kind, batch, rate, lambda one: _as_they_come_s(kind, one))


def mixed_rate_within(kind: Kind, tpot_s: float) -> float:
    """The most requests a second of all undivided instances whose tokens come no later than this."""
    if not kind.batch or _as_they_come_s(kind, 0.0) > tpot_s:
        return 0.0
    top, top_s = full(kind)
    if top_s <= tpot_s:
        return full_rate(kind)
    batch = _largest(top, lambda one: _as_they_come_s(kind, one) <= tpot_s)
    rate = kind.instances * batch / _as_they_come_s(kind, batch) / kind.steps
    return min(rate, full_rate(kind))


def _as_they_come_s(kind: Kind, batch: float) -> float:
    """Mean seconds between tokens where prompts do not queue: one a step, or as many as come in one."""
    budget = kind.case.holder.options.max_batched_tokens
    come = batch * kind.prompt / kind.steps
    return _mixed_s(kind, batch, min(budget - batch, max(float(kind.prompt), come)))


def _mixed_s(kind: Kind, batch: float, chunk: float) -> float:
    """Mean of the steps of a request, in which a batch of prompts is computed, `chunk` tokens in a step."""
    filled = min(float(kind.steps), batch * kind.prompt / chunk)
    alone = kind.steps - filled
    return (filled * step_s(kind, batch, chunk) + alone * step_s(kind, batch)) / kind.steps


def _balance(
    kind: Kind, most: float, rate: float, tpot_s: Callable[[float], float]
) -> tuple[float, float]:
    """The batch at which as many requests end as come, and the seconds between its tokens."""
    batch = _largest(most, lambda one: rate * kind.steps * tpot_s(one) > one)
    return batch, tpot_s(batch)


def _largest(most: float, holds: Callable[[float], bool]) -> float:
    """The largest batch up to `most` for which something holds that holds for all smaller ones."""
    if holds(most):
        return most
    low, high = 0.0, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

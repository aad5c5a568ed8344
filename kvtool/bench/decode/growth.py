"""How the time of one token grows with its context: a power, fitted."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from kvtool.bench.attention.case import KV_DTYPES
from kvtool.bench.decode.blueprint import Blueprint
from kvtool.bench.decode.memory import available_bytes, case_bytes
from kvtool.bench.decode.model import prompts
from kvtool.bench.decode.sessions import Setting, open_session
from kvtool.bench.decode.settings import DecodeCase, DecodeRun
from kvtool.bench.decode.trial import synchronize
from kvtool.run import Row

SAMPLES = 3
"""Steps timed at each context; the fastest counts."""
FEWEST = 3
"""Contexts that make a law."""


def contexts_of(plan: Blueprint, run: DecodeRun) -> list[int]:
    """The contexts asked for that the model may have; [] if too few are left."""
    most = plan.max_context or 1 << 62
    found = [one for one in run.exponent_contexts if 1 < one <= most - SAMPLES]
    return found if len(found) >= FEWEST else []


def growth(setting: Setting, case: DecodeCase, contexts: Sequence[int], seed: int = 0) -> Row:
    """time ∝ context^`time_exponent`, of one token of one sequence; `time_exponent_end` between the
    last two contexts, where the constant part of a step counts least. {} if too few contexts fit.

    Near 1 where everything is computed again, so that a whole output costs the square; near 0 with a
    cache, until reading the cache outweighs reading the weights.
    """
    plan, choice = setting.decoder.plan, setting.decoder.choice
    cases, there = {one: _at(case, one) for one in contexts}, available_bytes(choice.device)
    fit = [
        one
        for one, at in cases.items()
        if sum(case_bytes(plan, at, KV_DTYPES[choice.dtype]).values()) <= there
    ]
    if len(fit) < FEWEST:
        return {}
    times = [_step_s(setting, cases[one], seed) for one in fit]
    return {
        "time_exponent": log_slope(fit, times),
        "time_exponent_end": log_slope(fit[-2:], times[-2:]),
        "exponent_contexts": fit,
    }


def _at(case: DecodeCase, context: int) -> DecodeCase:
    """The case with one sequence whose first decode step sees so many tokens."""
    return replace(
        case, batch=1, prompt_tokens=context - 1, output_tokens=SAMPLES + 1, max_tokens=None
    )


def _step_s(setting: Setting, case: DecodeCase, seed: int) -> float:
    """Seconds of its fastest decode step."""
    session = open_session(setting, case)
    tokens = session.prefill(prompts(setting.decoder, 1, case.prompt_tokens, seed))
    session.record(tokens)
    samples = []
    for _ in range(SAMPLES):
        synchronize(setting.decoder.device)
        clock = time.perf_counter()
        tokens = session.step(tokens)
        synchronize(setting.decoder.device)
        samples.append(time.perf_counter() - clock)
    return min(samples)


def log_slope(lengths: Sequence[float], times: Sequence[float]) -> float | None:
    """The exponent of a power law, by least squares on logarithms; None with fewer than 2 points."""
    if len(lengths) < 2 or min(times) <= 0:
        return None
    x = [math.log(one) for one in lengths]
    y = [math.log(one) for one in times]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - mean_x) ** 2 for one in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread

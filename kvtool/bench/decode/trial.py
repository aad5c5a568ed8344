"""One session run and timed: its prefill, then each of its steps, the device waited for each time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvtool.bench.decode.model import prompts
from kvtool.bench.decode.sessions import Setting, open_session
from kvtool.bench.decode.settings import Advance, DecodeCase

Tensor = torch.Tensor

WARM_UP_STEPS = 2
FIT_SAMPLES = 3
"""Steps timed at each context for the exponent; the fastest counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What a run took, and what it generated: `tokens` [batch, output_tokens], on the CPU."""

    ttft_s: tuple[float, ...]
    """Time to the first token of each repeat or, with continuous batching, of each request."""
    tpot_s: tuple[float, ...]
    """(end-to-end − TTFT) / (output − 1) of each repeat or request."""
    itl_s: tuple[float, ...]
    """Every gap between two tokens."""
    wall_s: float
    """From the first prefill to the last token, of one repeat."""
    tokens: Tensor
    reserved_bytes: int | None
    used_bytes: int
    cuda_graph: bool


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def warm_up(setting: Setting, case: DecodeCase, ids: Tensor) -> None:
    """Kernels compiled, libraries started, memory touched: a prefill and a few steps, thrown away."""
    session = open_session(setting, case)
    tokens = session.prefill(ids)
    session.record(tokens)
    for _ in range(min(WARM_UP_STEPS, case.output_tokens - 1)):
        tokens = session.step(tokens)
    synchronize(setting.decoder.device)


def timed(setting: Setting, case: DecodeCase, ids: Tensor, repeats: int, advance: Advance) -> Timed:
    """The case run `repeats` times, each with a cache of its own."""
    runs = []
    for number in range(repeats):
        runs.append(_once(setting, case, ids))
        advance(f"{case.cache}, batch {case.batch}: run {number + 1} of {repeats}")
    last = runs[-1]
    totals = sorted(one.ttft_s + sum(one.gaps_s) for one in runs)
    return Timed(
        ttft_s=tuple(one.ttft_s for one in runs),
        tpot_s=tuple(sum(one.gaps_s) / len(one.gaps_s) for one in runs),
        itl_s=tuple(gap for one in runs for gap in one.gaps_s),
        wall_s=totals[len(totals) // 2],
        tokens=last.tokens,
        reserved_bytes=last.held_bytes[0],
        used_bytes=last.held_bytes[1],
        cuda_graph=last.cuda_graph,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Once:
    """One repeat, without the session: its cache is free again."""

    ttft_s: float
    gaps_s: tuple[float, ...]
    tokens: Tensor
    held_bytes: tuple[int, int]
    cuda_graph: bool


def _once(setting: Setting, case: DecodeCase, ids: Tensor) -> _Once:
    device = setting.decoder.device
    session = open_session(setting, case)
    synchronize(device)
    clock = time.perf_counter()
    out = [session.prefill(ids)]
    synchronize(device)
    first = time.perf_counter() - clock
    session.record(out[-1])  # once a batch in a server, so not part of a token's time
    gaps = []
    for _ in range(case.output_tokens - 1):
        clock = time.perf_counter()
        out.append(session.step(out[-1]))
        synchronize(device)
        gaps.append(time.perf_counter() - clock)
    return _Once(
        ttft_s=first,
        gaps_s=tuple(gaps),
        tokens=torch.stack(out, 1).cpu(),
        held_bytes=session.held(),
        cuda_graph=session.is_graph(),
    )


def greedy_tokens(setting: Setting, case: DecodeCase, ids: Tensor) -> Tensor:
    """What a case generates [batch, output_tokens], untimed, on the CPU."""
    session = open_session(setting, case)
    out = [session.prefill(ids)]
    session.record(out[-1])
    for _ in range(case.output_tokens - 1):
        out.append(session.step(out[-1]))
    return torch.stack(out, 1).cpu()


def time_exponent(
    setting: Setting, case: DecodeCase, contexts: Sequence[int], seed: int = 0
) -> float | None:
    """How the time of one token of one sequence grows with its context: time ∝ context^exponent.

    Near 1 where everything is computed again, so that a whole output costs the square; near 0 with a
    cache, until reading the cache outweighs reading the weights.
    """
    device, times = setting.decoder.device, []
    for context in contexts:
        one = replace(
            case,
            batch=1,
            prompt_tokens=context - 1,
            output_tokens=FIT_SAMPLES + 1,
            max_tokens=None,
        )
        session = open_session(setting, one)
        tokens = session.prefill(prompts(setting.decoder, 1, one.prompt_tokens, seed))
        session.record(tokens)
        samples = []
        for _ in range(FIT_SAMPLES):
            synchronize(device)
            clock = time.perf_counter()
            tokens = session.step(tokens)
            synchronize(device)
            samples.append(time.perf_counter() - clock)
        times.append(min(samples))
    return log_slope(contexts, times)


def log_slope(lengths: Sequence[float], times: Sequence[float]) -> float | None:
    """The exponent of a power law, by least squares on logarithms; None with fewer than 3 points."""
    if len(lengths) < 3 or min(times) <= 0:
        return None
    x = [math.log(one) for one in lengths]
    y = [math.log(one) for one in times]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - mean_x) ** 2 for one in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread

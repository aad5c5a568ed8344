"""One session run and timed: its prefill, then each of its steps, the device waited for each time."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvtool.bench.decode.cuda_graph import Execution
from kvtool.bench.decode.sessions import Setting, open_session
from kvtool.bench.decode.settings import DecodeCase

Tensor = torch.Tensor

WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What one run took, and what it generated; the cache is free again.

    `tokens` [batch, output_tokens], on the CPU.
    """

    ttft_s: tuple[float, ...]
    """Time to the first token; with continuous batching of each request."""
    tpot_s: tuple[float, ...]
    """(end-to-end − TTFT) / (output − 1), likewise."""
    gaps_s: tuple[float, ...]
    """Every gap between two tokens."""
    wall_s: float
    """From the prefill to the last token."""
    tokens: Tensor
    reserved_bytes: int | None
    used_bytes: int
    execution: Execution
    peak_bytes: int | None = None


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


def timed(setting: Setting, case: DecodeCase, ids: Tensor) -> Timed:
    """The case run once, with a cache of its own."""
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
    reserved, used = session.held()
    return Timed(
        ttft_s=(first,),
        tpot_s=(sum(gaps) / len(gaps),),
        gaps_s=tuple(gaps),
        wall_s=first + sum(gaps),
        tokens=torch.stack(out, 1).cpu(),
        reserved_bytes=reserved,
        used_bytes=used,
        execution=session.execution(),
    )


def greedy_tokens(setting: Setting, case: DecodeCase, ids: Tensor) -> Tensor:
    """What a case generates [batch, output_tokens], untimed, on the CPU."""
    session = open_session(setting, case)
    out = [session.prefill(ids)]
    session.record(out[-1])
    for _ in range(case.output_tokens - 1):
        out.append(session.step(out[-1]))
    return torch.stack(out, 1).cpu()

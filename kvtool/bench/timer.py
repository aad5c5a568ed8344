"""Paired, interleaved timing: every round times each call once, in an order of its own.

A clock that drifts, or a neighbour that wakes up, then meets all calls alike, and the ratio of two
calls is taken round by round. On a GPU a call is captured in a CUDA graph, many times over with the
pools in turn, so that neither launches nor the L2 cache are measured; on a CPU the clocks are the
wall's and the process's own.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtool.bench.device import Device, load_torch

Call = Callable[[int], object]
"""Does the work once, on the pool of that number."""

FEWEST = 5
"""Rounds, however small the budget: fewer have no quantiles."""
CPU_SAMPLE_S, GPU_SAMPLE_S = 0.002, 0.002
"""A sample is at least as long: clocks and launches are then far below it."""
MOST_LAUNCHES = 512
"""Calls in one graph."""


@dataclass(slots=True)
class Samples:
    """Seconds of one call, a number a round; `cpu_s` is empty on a GPU."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sampler:
    """How one sample is taken: seconds (wall, CPU) of one call, averaged over a few."""

    take: Callable[[], tuple[float, float | None]]
    captured: bool
    """Whether it is a CUDA graph."""


def measure(
    calls: Mapping[str, Call],
    *,
    pools: int,
    device: Device,
    rounds: int,
    budget_s: float,
    seed: int,
) -> tuple[dict[str, Samples], tuple[str, ...]]:
    """The samples of every call, and the calls that could not be captured in a graph.

    At most `rounds` rounds, fewer when `budget_s` seconds are over, never fewer than FEWEST.
    """
    started = time.perf_counter()
    make = _graph_sampler if device.is_gpu else _cpu_sampler
    samplers = {name: make(call, pools) for name, call in calls.items()}
    samples = {name: Samples() for name in calls}
    order, shuffle = list(calls), random.Random(seed).shuffle
    for done in range(rounds):
        if done >= FEWEST and time.perf_counter() - started > budget_s:
            break
        shuffle(order)
        for name in order:
            wall_s, cpu_s = samplers[name].take()
            samples[name].wall_s.append(wall_s)
            if cpu_s is not None:
                samples[name].cpu_s.append(cpu_s)
    eager = tuple(name for name, one in samplers.items() if device.is_gpu and not one.captured)
    return samples, eager


def _cpu_sampler(call: Call, pools: int) -> Sampler:
    """Calls on one pool after the other, so often that a sample is long enough to be timed."""
    turn = _turns(pools)
    call(next(turn))  # compiles, and touches what is touched once
    start = time.perf_counter()
    call(next(turn))
    loops = max(1, math.ceil(CPU_SAMPLE_S / max(time.perf_counter() - start, 1e-9)))

    def take() -> tuple[float, float]:
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(loops):
            call(next(turn))
        wall, cpu = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
        return wall / loops / 1e9, cpu / loops / 1e9

    return Sampler(take, captured=False)


def _turns(pools: int) -> Iterator[int]:
    pool = 0
    while True:
        yield pool
        pool = (pool + 1) % pools


def _graph_sampler(call: Call, pools: int) -> Sampler:
    """A CUDA graph of calls on all pools in turn; plain launches where a call cannot be captured."""
    torch = load_torch()
    seconds = _warm_up(torch, call, pools)
    turns = max(1, math.ceil(GPU_SAMPLE_S / max(seconds * pools, 1e-9)))
    loops = min(turns * pools, max(MOST_LAUNCHES // pools, 1) * pools)

    def all_calls() -> None:
        for index in range(loops):
            call(index % pools)

    graph = _capture(torch, all_calls)
    replay = all_calls if graph is None else graph.replay

    def take() -> tuple[float, None]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / loops, None

    take()
    return Sampler(take, captured=graph is not None)


def _warm_up(torch: Any, call: Call, pools: int) -> float:
    """Seconds of a call once everything is compiled."""
    for pool in range(pools):
        call(pool)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for pool in range(pools):
        call(pool)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / pools


def _capture(torch: Any, all_calls: Callable[[], None]) -> Any:
    """The graph of the calls, or None: some libraries decide on the host what to launch."""
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            all_calls()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_calls()
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph

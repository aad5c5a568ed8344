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
CPU_SAMPLE_S, GPU_SAMPLE_S = 0.002, 0.005
"""A sample is at least as long, so that clocks and the ends of a graph are far below it."""
MOST_LAUNCHES = 2048
"""Calls in one graph: a sample of shorter calls is shorter."""
HIDING_CYCLES = 200_000
"""Of the GPU, about 100 µs of waiting, while which the graph's launch arrives: else its latency would
lie between the two events."""


@dataclass(slots=True)
class Samples:
    """Seconds of one call, a number a round; `cpu_s` is empty on a GPU."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sampler:
    """How one sample is taken: seconds (wall, CPU) of one call, averaged over a few."""

    take: Callable[[], tuple[float, float | None]]
    once: Callable[[], object]
    """What is timed, once over all pools at the least: to look at what it leaves."""
    eager: str | None = None
    """Why it is no CUDA graph, on a GPU."""


def samplers(calls: Mapping[str, Call], *, pools: int, device: Device) -> dict[str, Sampler]:
    """Every call ready to be timed: warm, its loops counted, on a GPU captured."""
    make = _graph_sampler if device.is_gpu else _cpu_sampler
    return {name: make(call, pools) for name, call in calls.items()}


def measure(
    ready: Mapping[str, Sampler], *, rounds: int, budget_s: float, seed: int
) -> dict[str, Samples]:
    """The samples of every call, as many of each.

    At most `rounds` rounds, fewer when `budget_s` seconds are over, never fewer than FEWEST.
    """
    started = time.perf_counter()
    samples = {name: Samples() for name in ready}
    order, shuffle = list(ready), random.Random(seed).shuffle
    for done in range(rounds):
        if done >= FEWEST and time.perf_counter() - started > budget_s:
            break
        shuffle(order)
        for name in order:
            wall_s, cpu_s = ready[name].take()
            samples[name].wall_s.append(wall_s)
            if cpu_s is not None:
                samples[name].cpu_s.append(cpu_s)
    return samples


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

    return Sampler(take, lambda: _each(call, pools))


def _turns(pools: int) -> Iterator[int]:
    pool = 0
    while True:
        yield pool
        pool = (pool + 1) % pools


def _each(call: Call, loops: int, pools: int | None = None) -> None:
    """So many calls, the pools in turn."""
    for index in range(loops):
        call(index % (pools or loops))


def _graph_sampler(call: Call, pools: int) -> Sampler:
    """A CUDA graph of calls on all pools in turn; plain launches where a call cannot be captured.

    How long a call takes is told by a graph of one turn: launched one by one, a call of microseconds
    takes what its launch takes on the host.
    """
    torch = load_torch()
    _each(call, pools)  # compiles
    turn, eager = _capture(torch, lambda: _each(call, pools))
    run = turn.replay if turn is not None else lambda: _each(call, pools)
    run()
    turns = max(1, math.ceil(GPU_SAMPLE_S / max(_timed(torch, run), 1e-9)))
    loops = pools * min(turns, max(MOST_LAUNCHES // pools, 1))
    if turn is not None and loops > pools:
        turn, eager = _capture(torch, lambda: _each(call, loops, pools))
    once = turn.replay if turn is not None else lambda: _each(call, loops, pools)
    once()
    return Sampler(lambda: (_timed(torch, once) / loops, None), once, eager)


def _timed(torch: Any, run: Callable[[], object]) -> float:
    """Seconds between two events around what is launched, on the GPU's own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    wait = getattr(torch.cuda, "_sleep", None)
    if wait is not None:
        wait(HIDING_CYCLES)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _capture(torch: Any, all_calls: Callable[[], None]) -> tuple[Any, str | None]:
    """The graph of the calls, or why there is none: some libraries decide on the host what to launch."""
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
    except RuntimeError as error:
        torch.cuda.synchronize()
        return None, " ".join(str(error).split())[:160]
    return graph, None

"""Many replays in one reading of a trace: each kernel runs without Python's lock, so they share the cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvtool.sim.prefix.blocks import InBlocks, ids_per_key, in_blocks_of
from kvtool.sim.prefix.keys import Ints, Keys
from kvtool.sim.prefix.replay import Cache, HashReplay, Progress, RadixReplay, forget, start
from kvtool.sim.prefix.result import PrefixResult
from kvtool.trace_blocks import HashedRequests

Watch = Callable[[HashedRequests, Keys, Ints], bool]
"""Told each chunk with its keys before it is replayed; whether keys must be kept for it."""


def replay_all(
    caches: Sequence[Cache],
    source: Iterable[HashedRequests],
    *,
    threads: int | None = None,
    with_hits: bool = False,
    watch: Watch = lambda requests, keys, of: False,
    progress: Progress = lambda done: None,
) -> list[PrefixResult]:
    """A result a cache, in their order."""
    keys = Keys()
    runs = [start(cache, with_hits=with_hits) for cache in caches]
    for run in runs:
        run.keys = keys
    with ThreadPoolExecutor(threads or num_cores()) as pool:
        for requests in source:
            of = keys.of(requests)
            kept = watch(requests, keys, of)
            for step in [pool.submit(step) for step in steps_of(runs, requests, of)]:
                step.result()
            if not kept:
                forget(keys, runs)
            progress(len(requests))
    return [run.result() for run in runs]


def num_cores() -> int:
    """Cores that this process may use, which can be fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def steps_of(
    runs: Sequence[HashReplay | RadixReplay], requests: HashedRequests, of: Ints
) -> list[Callable[[], None]]:
    """What each run does with a chunk; those of one block size share its blocks."""
    prompts: dict[tuple[int, str], InBlocks] = {}
    steps: list[Callable[[], None]] = []
    for run in runs:
        if isinstance(run, RadixReplay):
            steps.append(partial(run.run, requests, of))
            continue
        size, outputs = run.cache.block_size, run.cache.cache_outputs
        if (size, outputs) not in prompts:
            prompts[size, outputs] = in_blocks_of(size, requests, of, cache_outputs=outputs)
        each = ids_per_key(requests.block_size, size)
        steps.append(partial(run.run, prompts[size, outputs], each))
    return steps

"""Many replays in one reading of a trace: each kernel runs without Python's lock, so they share the cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvtool.sim.prefix.blocks import Prompts, ids_per_key, in_blocks_of
from kvtool.sim.prefix.keys import Keys
from kvtool.sim.prefix.replay import Cache, HashReplay, Progress, RadixReplay, start
from kvtool.sim.prefix.result import UNIQUE, PrefixResult
from kvtool.trace_blocks import HashedRequests


def replay_all(
    caches: Sequence[Cache],
    source: Iterable[HashedRequests],
    *,
    threads: int | None = None,
    progress: Progress = lambda done: None,
) -> list[PrefixResult]:
    """A result a cache, in their order.

    The caches share the keys of the trace's blocks, which are not forgotten as in a single replay:
    memory grows with the different blocks of the trace.
    """
    if not caches:
        return []
    keys = Keys()
    runs = [start(cache) for cache in caches]
    for run in runs:
        run.keys = keys
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        for requests in source:
            for step in [pool.submit(step) for step in _steps(runs, requests, keys)]:
                step.result()
            progress(len(requests))
    return [run.result() for run in runs]


def _steps(
    runs: Sequence[HashReplay | RadixReplay], requests: HashedRequests, keys: Keys
) -> list[Callable[[], None]]:
    """What each run does with a chunk; those of one block size share its blocks."""
    of = keys.of(requests)
    prompts: dict[tuple[int, bool], Prompts] = {}
    steps: list[Callable[[], None]] = []
    for run in runs:
        if isinstance(run, RadixReplay):
            steps.append(partial(run.run, requests, of))
            continue
        size, unique = run.cache.block_size, run.cache.cache_outputs == UNIQUE
        if (size, unique) not in prompts:
            prompts[size, unique] = in_blocks_of(size, requests, of, cache_outputs=unique)
        num_ids = keys.count * ids_per_key(requests.block_size, size)
        steps.append(partial(run.run, prompts[size, unique], num_ids))
    return steps

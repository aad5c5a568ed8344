"""The simulators' speed, against the plain scheduler and vLLM's own: tables, for `make bench`.

`--write` puts the tables into docs/performance.md, which says what they hold and how vLLM comes in;
`--only simulators` or `--only caching` measures one of the two parts; `--quick` does a fraction of the
work, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench_words import Integers, Ran, best_of, digits, head, machine, publish, row

from kvtool import sharing
from kvtool.contents import Contents, joined, of_blocks
from kvtool.lengths import parse_lengths
from kvtool.requests import Requests
from kvtool.sim.blocks.scheduler import CachedScheduler
from kvtool.sim.blocks.spelling import plain_requests
from kvtool.sim.memory import ALLOCATORS, BUDDY, CONTIGUOUS, PAGED, STATIC_BATCH, memory
from kvtool.sim.scheduler import Scheduler
from kvtool.sim.settings import Settings
from kvtool.sim.static_batch import StaticBatches
from kvtool.workload import Workload, chunks

PEER = Path(__file__).parent / "peers/vllm_scheduler.py"
COMMAND = (sys.executable, "-m", "kvtool", "fragment", "--dist", "zipf")
# As in the vLLM paper: the means of ShareGPT, and the 15,728 tokens of OPT-13B's pool.
PROMPT = parse_lengths("zipf", name="prompts", mean=161.31, cap=1024)
OUTPUT = parse_lengths("zipf", name="outputs", mean=337.99, cap=1024)


class Sizes(NamedTuple):
    """Requests of each part; the best of `repeat` runs counts."""

    compared: int = 2_000
    scales: tuple[int, ...] = (10_000, 100_000, 1_000_000, 10_000_000)
    of_allocator: int = 100_000
    repeat: int = 3
    cached: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    compared_cached: int = 1_000


QUICK = Sizes(200, (1_000, 10_000, 100_000), 2_000, 1, (100, 1_000, 10_000), 30)
CACHED = Settings(num_blocks=20_000, max_model_len=32_768, prefix_caching=True)
"""A pool of 320,000 tokens for the workload `chat`."""


def zipf(count: int) -> Iterator[Requests]:
    """So many requests, all there at the start, by the chunk; fewer are the first of more."""
    return chunks(Workload(name="zipf", prompt=PROMPT, output=OUTPUT, num_requests=count))


def pool_of(allocator: str) -> Settings:
    """The same pool for all: blocks, or as many slots."""
    blocks, size = (983, 16) if allocator == PAGED else (983 * 16, 1)
    return Settings(num_blocks=blocks, block_size=size, max_model_len=2048, max_num_seqs=256)


def fast(count: int, allocator: str = PAGED) -> Integers:
    """The engine, on so many requests that are made as it goes; static batching is a loop."""
    from kvtool.sim.engine import Engine  # imports numba, which then reads NUMBA_CACHE_DIR

    given: Any = {"source": zipf(count), "num_requests": count, "settings": pool_of(allocator)}
    where = BUDDY if allocator in CONTIGUOUS else ""
    if allocator == STATIC_BATCH:
        totals = StaticBatches(**given).run().totals()
    else:
        totals = Engine(**given, allocator=allocator, placement=where).run().totals()
    return totals.steps, totals.preemptions, totals.end_ns


def plain(requests: Requests, allocator: str = PAGED) -> Integers:
    """The engine's twin, which looks at each request in each step."""
    settings = pool_of(allocator)
    run = Scheduler(requests, settings, memory(allocator, BUDDY, settings)).run()
    return len(run.steps), len(run.preemptions), run.steps[-1].end_ns


def vllm(requests: Requests, python: str) -> tuple[str, Ran]:
    """vLLM's version, and its scheduler on the same requests, in an interpreter that has it."""
    lengths = {"prompt": requests.prompt_tokens.tolist(), "output": requests.output_tokens.tolist()}
    asked = json.dumps(asdict(pool_of(PAGED)) | lengths)
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([python, PEER], input=asked, capture_output=True, text=True, env=environ)
    if done.returncode != 0:
        raise SystemExit(f"{done.stderr}\nVLLM_PYTHON={python}: exit code {done.returncode}")
    told = json.loads(done.stdout)
    came_to = (told["steps"], told["preemptions"], told["end_ns"])
    return told["version"], Ran(came_to, told["seconds"])


def commands(sizes: Sizes) -> Iterator[str]:
    """Whole runs of the command: a first one compiles, later ones find the machine code."""
    if sizes.repeat > 1:
        yield row("first run: compiles", *command(sizes.repeat, compiles=True), "5.0")
    yield row("later runs", *command(3 * sizes.repeat), "1.0")


def command(repeat: int, *, compiles: bool = False) -> Iterator[str]:
    """The best wall and CPU seconds of runs that must end well, in a child each."""
    runs = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            environ = os.environ | ({"NUMBA_CACHE_DIR": folder} if compiles else {})
            before, start = os.times(), time.perf_counter()
            subprocess.run(COMMAND, check=True, capture_output=True, env=environ)
            wall, spent = time.perf_counter() - start, sum(os.times()[2:4])  # of children
            runs.append((wall, spent - sum(before[2:4])))
    return (digits(min(column)) for column in zip(*runs, strict=True))


def scales(sizes: Sizes) -> Iterator[str]:
    """Ten times the requests: ten times the time, and no more memory."""
    fast(1)  # compiles, or loads what is compiled
    for count in sizes.scales:
        ran = best_of(sizes.repeat, partial(fast, count))
        yield row(*speed(ran, count), digits(ran.wall_s / count * 1e6), digits(ran.grown_mib))


def schedulers(sizes: Sizes) -> Iterator[str]:
    """The engine, the plain scheduler and vLLM's on the first of the same requests."""
    few = next(zipf(sizes.compared))
    engine = best_of(5 * sizes.repeat, partial(fast, len(few)))
    yield row("engine", *speed(engine, len(few)), "–")
    twin = best_of(sizes.repeat, partial(plain, few))
    yield row("plain scheduler", *speed(twin, len(few)), against(twin, engine, "plain"))
    if python := os.environ.get("VLLM_PYTHON"):
        number, peer = vllm(few, python)
        yield row(f"vLLM {number}", *speed(peer, len(few)), against(peer, engine, "vLLM"))
    else:
        yield row("vLLM: not installed: VLLM_PYTHON=/path/to/python make bench", *"–––––––")


def against(slow: Ran, engine: Ran, who: str) -> str:
    """How much longer it takes; that counts only if the answers are the same."""
    if slow.came_to != engine.came_to:
        raise SystemExit(f"{who}: {slow.came_to}, but the engine: {engine.came_to}")
    return f"{slow.wall_s / engine.wall_s:,.0f}×"


def allocators(sizes: Sizes) -> Iterator[str]:
    """Every allocator, with buddy where there is a choice; static batching has no twin."""
    few = next(zipf(sizes.compared))
    for name in ALLOCATORS:
        ran, ratio = best_of(sizes.repeat, partial(fast, sizes.of_allocator, name)), "–"
        if name != STATIC_BATCH:
            engine = best_of(sizes.repeat, partial(fast, len(few), name))
            ratio = against(best_of(1, partial(plain, few, name)), engine, name)
        yield row(name, *speed(ran, sizes.of_allocator), ratio)


class Shared(NamedTuple):
    """Requests that all wait from the start, and what they consist of."""

    requests: Requests
    contents: Contents

    def first(self, count: int) -> Shared:
        return Shared(self.requests.first(count), self.contents.take(np.arange(count)))


def chat(count: int) -> Shared:
    """Conversations that grow by what was asked and answered, and begin with shared prompts."""
    made, first = [], 0
    for chunk in sharing.chunks(sharing.sharing_of("chat", num_requests=count)):
        made.append((chunk.prompt_tokens, chunk.output_tokens, of_blocks(chunk, first=first)))
        first += len(chunk)
    prompts, outputs, contents = zip(*made, strict=True)
    columns = np.concatenate(prompts), np.concatenate(outputs)
    requests = Requests(
        arrival_ns=np.zeros(count, np.int64), prompt_tokens=columns[0], output_tokens=columns[1]
    )
    return Shared(requests, joined(contents))


def fast_cached(made: Shared) -> Integers:
    """The engine that knows which block is which."""
    from kvtool.sim.blocks.engine import BlocksEngine

    run = BlocksEngine(requests=made.requests, settings=CACHED, contents=made.contents).run()
    now = run.state.run
    return tuple(
        map(int, (now.step, now.preemptions, now.last_end, now.hit, now.queried, now.evicted))
    )


def plain_cached(made: Shared) -> Integers:
    """Its twin, which names each block by all tokens before its end."""
    run = CachedScheduler(plain_requests(made.requests, CACHED, made.contents), CACHED)
    run.run()
    found = run.hit_tokens, run.queried_tokens, run.pool.num_evicted
    return len(run.steps), len(run.preemptions), run.steps[-1].end_ns, *found


def caching(sizes: Sizes) -> Iterator[str]:
    """Ten times the requests; the largest run once. Then the first of them, beside the twin."""
    made = chat(sizes.cached[-1])
    few = made.first(sizes.compared_cached)
    fast_cached(made.first(sizes.cached[0]))  # compiles
    for count in sizes.cached:
        some = made.first(count)
        repeat = sizes.repeat if count < sizes.cached[-1] else 1
        ran = best_of(repeat, partial(fast_cached, some))
        yield row("engine", *cached(ran, count), digits(ran.grown_mib), "–")
    engine = best_of(5 * sizes.repeat, partial(fast_cached, few))
    twin = best_of(1, partial(plain_cached, few))
    yield row("engine", *cached(engine, len(few.requests)), digits(engine.grown_mib), "–")
    ratio = against(twin, engine, "plain")
    yield row("plain scheduler", *cached(twin, len(few.requests)), digits(twin.grown_mib), ratio)


def cached(ran: Ran, count: int) -> tuple[str, ...]:
    """The columns of runs with a prefix cache."""
    hit, queried, evicted = ran.came_to[3:]
    return (
        *speed(ran, count), f"{hit / queried:.4f}", f"{evicted:,}",
        digits(ran.wall_s / count * 1e6),
    )  # fmt: skip


def speed(ran: Ran, count: int) -> tuple[str, ...]:
    """The columns that runs have in common."""
    numbers = (f"{one:,}" for one in (round(count / ran.wall_s), *ran.came_to[:2]))
    return f"{count:,}", digits(ran.wall_s), digits(ran.cpu_s), *numbers


RUNS = ("requests", "wall s", "CPU s", "requests/s", "steps", "preempted")
PARTS: dict[str, tuple[tuple[Callable[[Sizes], Iterator[str]], tuple[str, ...]], ...]] = {
    "simulators": (
        (commands, (f"`{' '.join(COMMAND[2:])}`", "wall s", "CPU s", "goal")),
        (scales, (*RUNS, "s a million (goal: 1.0)", "more memory, MiB")),
        (schedulers, ("scheduler", *RUNS, "slower than the engine")),
        (allocators, ("allocator", *RUNS, "its plain twin is slower")),
    ),
    "caching": (
        (caching, (
            "with a prefix cache", *RUNS, "hit rate", "evicted", "s a million (goal: 60)",
            "more memory, MiB", "slower than the engine",
        )),
    ),
}  # fmt: skip
"""The tables by the section of docs/performance.md that they stand in."""


def report(part: str, sizes: Sizes) -> Iterator[str]:
    """Every table of a part, line by line as it is measured."""
    yield machine()
    for measure, columns in PARTS[part]:
        yield from head(*columns)
        yield from measure(sizes)


def main() -> None:
    """Print the tables, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not options.quick:
            os.environ["NUMBA_CACHE_DIR"] = folder  # read when numba is imported
        for part in PARTS if options.only is None else (options.only,):
            section = part if options.write and not options.quick else None
            publish(report(part, QUICK if options.quick else Sizes()), section)


if __name__ == "__main__":
    main()

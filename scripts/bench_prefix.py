"""The prefix caches' speed, against their plain twins and other simulators: tables, for `make bench`.

`--trace FILE` measures a trace of yours too (and again). `--stream-gb 1` is the size of the file that is
streamed at the end, 0 leaves it out. `--write` puts the tables into docs/performance.md, which says what
they hold and how the peers come in; `--quick` does a fraction of the work, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench_traces import write_bytes, write_requests
from bench_words import Integers, Ran, best_of, digits, head, machine, measured, publish, row

from kvtool.trace_blocks import HashedRequests
from kvtool.trace_stream import stream_trace

HERE = Path(__file__).resolve().parent
TRACE_BLOCK = 512
CAPACITY_TOKENS = 10_000 * TRACE_BLOCK
POINTS = 1_000
GOALS = {("hash", 512): "2,000,000", ("radix", 512): "500,000"}
PEERS = {
    "vLLM": ("VLLM_PYTHON", "vllm_prefix.py", (512, 16)),
    "kvlint": ("KVLINT_PYTHON", "kvlint_prefix.py", (512,)),
}
"""Who names its Python, what drives it, in blocks of which sizes."""
OTHER_COMMAND = "KVCACHE_SIMULATOR_PYTHON"


class Twin(NamedTuple):
    """What the plain twins get of a trace, who look at every token: a cache that it overflows."""

    block_size: int
    requests: int
    capacity_tokens: int


class Sizes(NamedTuple):
    """Requests of each part; the best of `repeat` runs counts."""

    made: int = 12_000
    twins: tuple[Twin, ...] = (Twin(512, 300, 300 * 512), Twin(16, 10, 50 * 512))
    peers: int = 2_000
    repeat: int = 3


QUICK = Sizes(200, (Twin(512, 20, 300 * 512), Twin(16, 3, 50 * 512)), 20, repeat=1)


class Trace(NamedTuple):
    """A file that is measured."""

    name: str
    path: Path
    chunks: list[HashedRequests]

    @property
    def requests(self) -> int:
        """In all."""
        return sum(len(chunk) for chunk in self.chunks)


def cache_of(tokens: int, size: int, index: str = "hash", policy: str = "lru") -> Any:
    """A cache of so many tokens."""
    from kvtool.sim.prefix.replay import Cache

    return Cache(capacity_blocks=tokens // size, block_size=size, index=index, policy=policy)


def integers(result: Any) -> Integers:
    """What a replay comes to."""
    return result.hit_tokens, result.evicted_blocks, result.cached_blocks, result.rejected


def replayed(cache: Any, chunks: Sequence[HashedRequests], repeat: int) -> tuple[Ran, float]:
    """The best of some replays, and the least CPU seconds that one was inside the index."""
    from kvtool.sim.prefix.replay import replay

    inside = []

    def run() -> Integers:
        result = replay(cache, chunks)
        inside.append(result.cpu_s)
        return integers(result)

    replay(cache, [chunks[0].first(1)])  # compiles, or loads what is compiled
    return best_of(repeat, run), min(inside)


def loading(sizes: Sizes, traces: Sequence[Trace]) -> Iterator[str]:
    """A trace's file, read and checked."""
    for trace in traces:
        ran = best_of(sizes.repeat, partial(load, trace.path))
        (blocks,) = ran.came_to
        mb = trace.path.stat().st_size / 1e6
        yield row(
            trace.name, f"{trace.requests:,}", f"{blocks:,}", digits(mb), digits(ran.wall_s),
            digits(ran.cpu_s), digits(mb / ran.wall_s),
        )  # fmt: skip


def load(path: Path) -> Integers:
    """Read a file by the chunk; how many blocks it has."""
    return (sum(len(chunk.hash_ids) for chunk in stream_trace(str(path))),)


def replays(sizes: Sizes, traces: Sequence[Trace]) -> Iterator[str]:
    """Every index and policy at one capacity, from hashes as the trace gives them."""
    from kvtool.sim.prefix.result import POLICIES

    for trace in traces:
        tokens = sum(int(chunk.prompt_tokens.sum()) for chunk in trace.chunks)
        for few in sizes.twins:
            size = few.block_size
            for index in ("hash", "radix"):
                for policy in POLICIES:
                    cache = cache_of(CAPACITY_TOKENS, size, index, policy)
                    ran, inside = replayed(cache, trace.chunks, sizes.repeat)
                    rates = (trace.requests / seconds for seconds in (ran.wall_s, inside))
                    yield row(
                        f"{index} {policy}", trace.name, str(size),
                        f"{ran.came_to[0] / tokens:.4f}", digits(ran.wall_s), digits(ran.cpu_s),
                        *(f"{round(rate):,}" for rate in rates), GOALS.get((index, size), "–"),
                        twin(trace, few, cache_of(few.capacity_tokens, size, index, policy)),
                    )  # fmt: skip


def twin(trace: Trace, few: Twin, cache: Any) -> str:
    """How much longer the plain twin takes for the first requests; its answers must be the same."""
    from kvtool.sim.prefix.plain import replay_plain

    first = trace.chunks[0].first(few.requests)
    ours, _ = replayed(cache, [first], 10)
    plain = best_of(1, lambda: integers(replay_plain(cache, first)))
    if plain.came_to != ours.came_to:
        raise SystemExit(f"{cache}: {ours.came_to}, but its plain twin: {plain.came_to}")
    return f"{plain.cpu_s / ours.cpu_s:,.0f}×"


def curves(sizes: Sizes, traces: Sequence[Trace]) -> Iterator[str]:
    """The hit rate at many capacities, from the largest request to where no more comes."""
    from kvtool.sim.prefix.curve import hit_curve

    for trace in traces:
        for size in (one.block_size for one in sizes.twins):
            found = hit_curve(lambda: trace.chunks, block_size=size, points=POINTS)  # noqa: B023
            ran = best_of(sizes.repeat, partial(curve, trace, size))
            again = int((found.capacity_blocks < found.exact_from).sum())
            low, high = found.capacity_blocks[[0, -1]].tolist()
            yield row(
                trace.name, str(size), f"{len(found.capacity_blocks):,}", f"{low:,} – {high:,}",
                str(again), digits(ran.wall_s), digits(ran.cpu_s), "0.1" if size == 512 else "–",
            )  # fmt: skip


def curve(trace: Trace, size: int) -> Integers:
    """Hits at all capacities, summed."""
    from kvtool.sim.prefix.curve import hit_curve

    found = hit_curve(lambda: trace.chunks, block_size=size, points=POINTS)
    return (int(found.hit_tokens.sum()),)


def peers(sizes: Sizes, traces: Sequence[Trace]) -> Iterator[str]:
    """Other caches on the first of the same requests, each in an interpreter that has it."""
    here = {name: os.environ.get(variable) for name, (variable, _, _) in PEERS.items()}
    for trace, size in product(traces, (512, 16)):
        few, cache = trace.chunks[0].first(sizes.peers), cache_of(CAPACITY_TOKENS, size)
        asked = [name for name in PEERS if here[name] and size in PEERS[name][2]]
        if not asked or few.block_size % size:
            continue
        ours, _ = replayed(cache, [few], 5 * sizes.repeat)
        yield peer_row("kvtool", trace, size, few, ours, "–")
        for name in asked:
            number, theirs = peer(str(here[name]), PEERS[name][1], cache, few)
            same = theirs.came_to == ours.came_to
            ratio = f"{theirs.wall_s / ours.wall_s:,.0f}×" if same else "other rules"
            yield peer_row(f"{name} {number}", trace, size, few, theirs, ratio)
    for name, (variable, _, _) in PEERS.items():
        if not here[name]:
            yield missing(name, variable, 9)


def missing(name: str, variable: str, columns: int) -> str:
    """Where a peer would stand, with so many columns beside its name."""
    return row(f"{name}: not installed: {variable}=/path/to/python make bench", *["–"] * columns)


def peer_row(name: str, trace: Trace, size: int, few: HashedRequests, ran: Ran, ratio: str) -> str:
    """What one of them made of the requests."""
    hits, evicted, cached, _ = ran.came_to
    rate = f"{round(len(few) / ran.wall_s):,}"
    counts = (f"{one:,}" for one in (len(few), hits, evicted, cached))
    return row(name, trace.name, str(size), *counts, digits(ran.wall_s), rate, ratio)


def peer(python: str, script: str, cache: Any, requests: HashedRequests) -> tuple[str, Ran]:
    """Its version and its run. It is told what the full blocks are called."""
    asked = {
        "capacity_blocks": cache.capacity_blocks,
        "block_size": cache.block_size,
        "prompt_tokens": requests.prompt_tokens.tolist(),
        "names": full_blocks(requests, cache.block_size),
    }
    done = subprocess.run(
        [python, HERE / "peers" / script], input=json.dumps(asked), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stderr}\n{python} {script}: exit code {done.returncode}")
    told = json.loads(done.stdout)
    names = ("hit_tokens", "evicted_blocks", "cached_blocks", "rejected")
    return told["version"], Ran(tuple(told[name] for name in names), told["seconds"])


def full_blocks(requests: HashedRequests, size: int) -> list[list[int]]:
    """The names of each request's full blocks of a size that divides the trace's."""
    each = requests.block_size // size
    _, dense = np.unique(requests.hash_ids, return_inverse=True)
    names = dense[:, None] * each + np.arange(each)
    firsts = requests.starts[:-1].tolist()
    counts = (requests.prompt_tokens // size).tolist()
    flat = names.reshape(-1)
    return [
        flat[first * each : first * each + count].tolist()
        for first, count in zip(firsts, counts, strict=True)
    ]


def commands(sizes: Sizes, traces: Sequence[Trace]) -> Iterator[str]:
    """Whole runs, from the file to the answer."""
    python = os.environ.get(OTHER_COMMAND)
    for trace in traces:
        for capacity in ("10000", "all"):
            asked = our_command(trace.path, capacity)
            name = f"`kvtool prefix --index hash --capacity {capacity}`"
            yield command_row(asked, name, trace, sizes.repeat)
        if python:
            asked = [python, "-m", "kvcache_sim", "run", "--trace", str(trace.path)]
            # 625 GiB of Llama 3.1 8B are 10,000 blocks of 512 tokens.
            asked += ["--model", "llama-3.1-8b", "--budgets-gib", "625", "--block-size", "512"]
            asked += ["--policies", "lru", "--format", "json", "--no-progress"]
            yield command_row(asked, "kvcache-simulator (other rules)", trace, sizes.repeat)
    if not python:
        yield missing("kvcache-simulator", OTHER_COMMAND, 5)


def our_command(path: Path, capacity: str = "10000") -> list[str]:
    """`kvtool prefix` on a file, as vLLM's cache."""
    asked = ["--index", "hash", "--policy", "lru", "--capacity", capacity, "--json"]
    return [sys.executable, "-m", "kvtool", "prefix", "--trace", str(path), *asked]


def command_row(command: list[str], name: str, trace: Trace, repeat: int) -> str:
    """The best of some runs, after one that may compile; the hit rate is the largest capacity's."""
    told(command)
    runs = [told(command) for _ in range(repeat)]
    least = [min(run[key] for run in runs) for key in ("wall_s", "cpu_s", "peak_mib")]
    return row(name, trace.name, f"{hit_rate(runs[0]['told']):.4f}", *map(digits, least))


def hit_rate(told: dict[str, Any]) -> float:
    """That of the one replay that a command tells of: kvtool's or kvcache-simulator's."""
    if "rows" in told:
        return float(told["rows"][-1]["hit_rate"])
    return float(told["points"][0]["results"]["lru"]["hitRate"])


def told(command: list[str]) -> dict[str, Any]:
    """What a command cost, and the JSON that it printed."""
    ran = measured(command)
    return {**ran, "told": json.loads(ran["output"])}


def streams(size_gb: float, folder: Path) -> Iterator[str]:
    """The first of these commands on a file, and on ones that are a tenth and half as long."""
    path = folder / "long.jsonl"
    for size in (size_gb / 10, size_gb / 2, size_gb):
        write_bytes(path, round(size * 1e9))
        mb = path.stat().st_size / 1e6
        ran = told(our_command(path))
        path.unlink()
        requests = ran["told"]["rows"][0]["requests"]
        yield row(
            digits(mb), f"{requests:,}", digits(ran["wall_s"]), digits(ran["cpu_s"]),
            digits(mb / ran["wall_s"]), f"{round(requests / ran['wall_s']):,}",
            digits(ran["peak_mib"]),
        )  # fmt: skip


def report(sizes: Sizes, given: Sequence[Path], stream_gb: float, folder: Path) -> Iterator[str]:
    """Every table, line by line as it is measured."""
    made = folder / "made.jsonl"
    write_requests(made, sizes.made)
    paths = {"made": made, **{path.stem: path for path in given}}
    traces = [Trace(name, path, list(stream_trace(str(path)))) for name, path in paths.items()]
    both = ("wall s", "CPU s")
    tables = (
        (loading, ("loading", "requests", "blocks", "MB", *both, "MB/s")),
        (replays, ("replay", "trace", "block size", "hit rate", *both, "requests/s",
                   "in the index", "goal", "its plain twin is slower")),
        (curves, ("curve", "block size", "capacities", "blocks", "replayed", *both, "goal")),
        (peers, ("cache", "trace", "block size", "requests", "hit tokens", "evicted", "cached",
                 "wall s", "requests/s", "slower than kvtool")),
        (commands, ("whole run", "trace", "hit rate", *both, "peak MiB")),
    )  # fmt: skip
    yield f"{machine()[:-1]}, load {os.getloadavg()[0]:.2f}."
    for measure, columns in tables:
        yield from head(*columns)
        yield from measure(sizes, traces)
    if stream_gb:
        yield from head("streamed, MB", "requests", *both, "MB/s", "requests/s", "peak MiB")
        yield from streams(stream_gb, folder)


def main() -> None:
    """Print the tables, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--stream-gb", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = min(asked.stream_gb, 0.001) if asked.quick else asked.stream_gb
        lines = report(QUICK if asked.quick else Sizes(), asked.trace, size, Path(folder))
        publish(lines, "prefix" if asked.write and not asked.quick else None)


if __name__ == "__main__":
    main()

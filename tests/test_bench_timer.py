"""Paired sampling: every call in every round, all pools in turn, the budget kept."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from bench_cases import CPU

from kvtool.bench import timer
from kvtool.bench.timer import FEWEST, Samples, measure, samplers

pytest.importorskip("torch")


def measured(calls: Any, *, pools: int = 1, rounds: int = FEWEST, budget_s: float = 60) -> Any:
    """The samples of calls on the CPU."""
    ready = samplers(calls, pools=pools, device=CPU)
    return measure(ready, rounds=rounds, budget_s=budget_s, seed=0)


def test_every_call_has_a_sample_in_every_round_and_reads_every_pool() -> None:
    seen: dict[str, Counter[int]] = {"a": Counter(), "b": Counter()}

    def call(name: str) -> Any:
        def run(pool: int) -> None:
            seen[name][pool] += 1
            time.sleep(0.0005)

        return run

    samples = measured({name: call(name) for name in seen}, pools=3, rounds=8)
    for name in seen:
        assert len(samples[name].wall_s) == len(samples[name].cpu_s) == 8
        assert min(samples[name].wall_s) >= 0.0005
        assert set(seen[name]) == {0, 1, 2}
        assert max(seen[name].values()) - min(seen[name].values()) <= 1


def test_a_sample_is_of_many_calls_where_one_is_short() -> None:
    calls = 0

    def run(pool: int) -> None:
        nonlocal calls
        calls += 1

    measured({"short": run})
    assert calls > 100 * FEWEST


def test_the_budget_ends_the_rounds_but_never_before_the_fewest() -> None:
    samples = measured({"slow": lambda pool: time.sleep(0.01)}, rounds=50, budget_s=0.0)
    assert len(samples["slow"].wall_s) == FEWEST


def test_waiting_is_no_work_of_the_processor() -> None:
    samples = measured({"sleeps": lambda pool: time.sleep(0.02)})
    assert max(samples["sleeps"].cpu_s) < 0.01 < min(samples["sleeps"].wall_s)


def test_the_order_within_a_round_changes() -> None:
    order: list[str] = []
    calls = {
        name: lambda pool, name=name: order.append(name) or time.sleep(0.003) for name in "abc"
    }
    measured(calls, rounds=20)
    rounds = ["".join(order[-60:][k : k + 3]) for k in range(0, 60, 3)]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert len(set(rounds)) > 1


def test_pools_are_taken_in_turn() -> None:
    turns = timer._turns(3)
    assert [next(turns) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


class FakeCuda:
    """As much of torch.cuda as the timer uses, on a clock that runs when something is launched."""

    class OutOfMemoryError(RuntimeError):
        pass

    def __init__(self, *, launch_s: float, refuses: bool = False) -> None:
        self.now, self.launch_s, self.refuses = 0.0, launch_s, refuses
        self.hidden_s = 0.0
        self.recording: list[Any] | None = None
        self.cuda = self

    def _sleep(self, cycles: int) -> None:
        self.hidden_s = cycles / 2e9  # while the GPU waits, a launch arrives

    def launch(self) -> None:
        self.now += max(0.0, self.launch_s - self.hidden_s)
        self.hidden_s = 0.0

    def kernel(self, seconds: float) -> None:
        """A kernel: what it takes, and what its launch takes if it is not part of a graph."""
        if self.recording is not None:
            self.recording.append(seconds)
        else:
            self.launch()
            self.now += seconds

    def Event(self, enable_timing: bool) -> Any:
        fake = self

        class Event:
            def record(self) -> None:
                self.at = fake.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return float(1e3 * (end.at - self.at))

        return Event()

    def CUDAGraph(self) -> Any:
        fake = self

        class Graph:
            kernels: tuple[float, ...] = ()

            def replay(self) -> None:
                fake.launch()
                fake.now += sum(self.kernels)

        return Graph()

    @contextmanager
    def graph(self, made: Any) -> Iterator[None]:
        if self.refuses:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        self.recording = []
        yield
        made.kernels, self.recording = tuple(self.recording), None

    def Stream(self) -> Any:
        return self

    current_stream = Stream

    def wait_stream(self, other: Any) -> None:
        pass

    @contextmanager
    def stream(self, one: Any) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        pass


GPU = replace(CPU, kind="cuda")


def on_gpu(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda, seconds: float) -> tuple[Any, Samples]:
    monkeypatch.setattr(timer, "load_torch", lambda: fake)
    seen: list[int] = []

    def call(pool: int) -> None:
        seen.append(pool)
        fake.kernel(seconds)

    ready = samplers({"call": call}, pools=3, device=GPU)
    assert set(seen) == {0, 1, 2}
    return ready["call"], measure(ready, rounds=FEWEST, budget_s=60, seed=0)["call"]


@pytest.mark.parametrize("kernel_s", [5e-6, 1e-4, 0.02])
def test_a_graph_measures_kernels_and_not_launches(
    monkeypatch: pytest.MonkeyPatch, kernel_s: float
) -> None:
    """Launches of 80 µs, 16 times a kernel of 5 µs: the loops are counted by what a graph takes."""
    fake = FakeCuda(launch_s=80e-6)
    sampler, samples = on_gpu(monkeypatch, fake, kernel_s)
    assert sampler.eager is None
    assert samples.cpu_s == []
    for wall_s in samples.wall_s:
        assert wall_s == pytest.approx(kernel_s, rel=0.02)
    before = fake.now
    sampler.once()
    assert fake.now - before >= 0.95 * timer.GPU_SAMPLE_S


def test_a_call_that_cannot_be_captured_is_launched_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler, samples = on_gpu(monkeypatch, FakeCuda(launch_s=80e-6, refuses=True), 5e-6)
    assert sampler.eager == "operation not permitted when stream is capturing"
    assert samples.wall_s == pytest.approx([85e-6] * FEWEST, rel=0.05)


@pytest.mark.gpu
def test_a_copy_takes_what_torch_says_it_takes() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    from triton.testing import do_bench

    from kvtool.bench.device import find_device

    device = find_device("cuda")
    source = torch.ones(2**28, device="cuda")
    target = torch.empty_like(source)
    ready = samplers({"copy": lambda pool: target.copy_(source)}, pools=1, device=device)
    ours = min(measure(ready, rounds=10, budget_s=5, seed=0)["copy"].wall_s)
    assert ours == pytest.approx(do_bench(lambda: target.copy_(source)) / 1e3, rel=0.05)

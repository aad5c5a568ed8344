"""Decode steps as CUDA graphs, as far as a machine without CUDA can tell: what is replayed, what it
keeps alive, what becomes of a failure, and what is compared with what."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_cases import LLAMA, MISTRAL, case_of, decoder_of, tiny

from kvtool.bench.decode import cuda_graph, row, sessions, uniform
from kvtool.bench.decode.cuda_graph import EAGER, Execution, Replay
from kvtool.bench.decode.kernels import kernels_for
from kvtool.bench.decode.kv_store import KvStore
from kvtool.bench.decode.model import Decoder, prompts
from kvtool.bench.decode.sessions import Setting, open_session
from kvtool.bench.decode.settings import DecodeRun, ModelChoice, Roofs
from kvtool.bench.decode.trial import Timed, greedy_tokens, timed
from kvtool.bench.decode.uniform import uniform_rows
from kvtool.cli.bench_decode_run import _graph_notes
from kvtool.view.bench_decode import sentences, tables

GRAPHS = ("paged", "contiguous", "static")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return decoder_of(LLAMA)


class FakeGraph:
    """Replays by calling, into the tensor that was there when it was recorded."""

    def __init__(self, run: Any, out: torch.Tensor) -> None:
        self.run, self.out = run, out

    def replay(self) -> None:
        self.out.copy_(self.run())


def fake_record(self: Any) -> None:
    self._out = self._run()
    self._rewind()
    self._graph = FakeGraph(self._run, self._out)


@contextmanager
def refused(graph: Any) -> Any:
    yield
    raise RuntimeError("operation not permitted\nwhen stream is capturing")


class Stream:
    def wait_stream(self, other: Any) -> None:
        pass


def fake_cuda(patch: pytest.MonkeyPatch, capture: Any) -> None:
    """What recording asks of torch.cuda."""
    patch.setattr(torch.cuda, "current_stream", Stream)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    patch.setattr(torch.cuda, "CUDAGraph", object)
    patch.setattr(torch.cuda, "graph", capture)


@pytest.mark.parametrize("cache", GRAPHS)
def test_a_replayed_step_reads_the_tensors_that_are_written_to(
    cache: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph.Replay, "_record", fake_record)
    ids, case = prompts(decoder, 3, 21), case_of(cache)
    plain = Setting(decoder=decoder, kernels=kernels_for("cpu"))
    graph = replace(plain, cuda_graph=True)
    eager, replayed = timed(plain, case, ids), timed(graph, case, ids)
    assert (eager.execution, replayed.execution) == (EAGER, Execution(True))
    assert torch.equal(replayed.tokens, eager.tokens)


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_nothing_keeps_a_store_alive_after_its_run(
    cache: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cycle would: the collector comes when it likes, and the warm-up's pool would be counted."""
    made: list[weakref.ref[KvStore]] = []

    class Watched(KvStore):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(weakref.ref(self))

    monkeypatch.setattr(sessions, "KvStore", Watched)
    monkeypatch.setattr(cuda_graph.Replay, "_record", fake_record)
    setting = Setting(decoder=decoder, kernels=kernels_for("cpu"), cuda_graph=True)
    gc.collect()
    gc.disable()
    try:
        greedy_tokens(setting, case_of(cache), prompts(decoder, 3, 21))
        assert [one() for one in made] == [None]
    finally:
        gc.enable()


def test_a_failed_recording_says_why_and_is_called_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_cuda(monkeypatch, refused)
    calls = []
    replay = Replay(lambda: calls.append(1) or len(calls), lambda: None, wanted=True)
    replay.record()
    assert replay.execution == Execution(False, "operation not permitted when stream is capturing")
    before = len(calls)
    replay.record()
    assert len(calls) == before
    assert replay() == before + 1
    fake_cuda(monkeypatch, lambda graph: nullcontext())
    replay = Replay(lambda: torch.zeros(1), lambda: None, wanted=True)
    replay.record()
    assert replay.execution == Execution(True)


def test_a_static_cache_that_cannot_be_a_graph_says_why() -> None:
    setting = Setting(decoder=decoder_of(MISTRAL), kernels=kernels_for("cpu"), cuda_graph=True)
    execution = open_session(setting, case_of("static")).execution()
    assert execution.is_graph is False
    assert "sliding" in str(execution.error)
    plain = replace(setting, cuda_graph=False)
    assert open_session(plain, case_of("static")).execution() == EAGER


def rows_as_on_a_gpu(patch: pytest.MonkeyPatch, *caches: str, **given: Any) -> list[dict[str, Any]]:
    """Rows whose sessions want graphs and whose baselines are those of a GPU."""
    made = uniform.Setting
    patch.setattr(uniform, "Setting", lambda **named: made(**(named | {"cuda_graph": True})))
    patch.setitem(row.BASELINES, "cpu", row.BASELINES["cuda"])
    run = DecodeRun(
        cases=tuple(case_of(one) for one in caches), repeats=3, exponent_contexts=(), **given
    )
    return list(uniform_rows(tiny(LLAMA), ModelChoice(), run, Roofs()))


def test_graphs_are_compared_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph.Replay, "_record", fake_record)
    rows = rows_as_on_a_gpu(monkeypatch, "none", "dynamic", "static", "contiguous", "paged")
    found = {one["cache"]: (one["cuda_graph"], one["baseline"]) for one in rows}
    assert found == {
        "dynamic": (False, "dynamic"),
        "none": (False, "dynamic"),
        "static": (True, "contiguous"),
        "contiguous": (True, "contiguous"),
        "paged": (True, "contiguous"),
    }
    assert all(one["same_tokens"] for one in rows)
    by_cache = {one["cache"]: one for one in rows}
    assert by_cache["paged"]["predicted_gain"] == 1  # it reads what contiguous reads
    assert by_cache["contiguous"]["measured_gain"] == 1
    table = tables(rows)[0]
    assert {"over", "steps are"} <= set(table.columns)
    cells = [dict(zip(table.columns, line, strict=True)) for line in table.rows]
    assert [cell["steps are"] for cell in cells] == ["eager", "eager", *["a graph"] * 3]
    assert any("against dynamic or contiguous" in one for one in sentences(rows, {}))


def test_without_contiguous_a_graph_has_nothing_to_be_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graph.Replay, "_record", fake_record)
    rows = rows_as_on_a_gpu(monkeypatch, "dynamic", "paged")
    assert [one["baseline"] for one in rows] == ["dynamic", None]
    assert rows[1]["measured_gain"] is rows[1]["predicted_gain"] is None


def test_graphs_that_fail_are_compared_with_what_is_eager_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_cuda(monkeypatch, refused)
    rows = rows_as_on_a_gpu(monkeypatch, "dynamic", "contiguous", "paged")
    assert {one["cuda_graph"] for one in rows} == {False}
    assert {one["baseline"] for one in rows} == {"contiguous"}
    notes = _graph_notes(rows)
    assert [note.split(":")[0] for note in notes] == ["contiguous, batch 3", "paged, batch 3"]
    assert all("operation not permitted" in note for note in notes)


def test_what_does_not_say_how_it_runs_has_no_baseline() -> None:
    def ran(is_graph: bool | None) -> list[Timed]:
        return [
            Timed(
                ttft_s=(1.0,), tpot_s=(1.0,), gaps_s=(1.0,), wall_s=1.0,
                tokens=torch.zeros(1), reserved_bytes=0, used_bytes=0,
                execution=Execution(is_graph),
            )
        ]  # fmt: skip

    runs = {
        case_of("dynamic"): ran(False),
        case_of("contiguous"): ran(True),
        case_of("paged"): ran(True),
        case_of("continuous"): ran(None),
    }
    names = row.BASELINES["cuda"]
    found = {one.cache: row._baseline(one, runs, names) for one in runs}
    assert {name: one and one.cache for name, one in found.items()} == {
        "dynamic": "dynamic",
        "contiguous": "contiguous",
        "paged": "contiguous",
        "continuous": None,
    }

"""Many cases: in the same order and with the same rows wherever they run, and kept in a file."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtool import __version__, catalog, config, sweep_workers
from kvtool.errors import KvtoolError
from kvtool.model import ModelShape, read_model
from kvtool.plan import PlanCase
from kvtool.plan_flags import row_of
from kvtool.plan_model import model_for
from kvtool.plan_query import PlanQuery, gpus_named
from kvtool.planning import cases_of
from kvtool.sweep import key_of, swept
from kvtool.sweep_file import KEY

SLOW = Path(__file__).with_name("sweep_interpreted.py")


@dataclass(frozen=True, slots=True)
class Number:
    """A case of the simplest kind."""

    n: int
    tally: str = ""
    """A file that gets a byte for each time the case is computed."""


def doubled(case: Number) -> dict[str, Any]:
    """Its row; every hundredth number has none, and says so as kvtool says it."""
    if case.tally:
        with Path(case.tally).open("ab") as file:
            file.write(b".")
    if case.n % 100 == 99:
        raise KvtoolError(f"{case.n} is odd", "ask for another", code="odd", exit_code=2)
    return {"n": case.n, "double": 2 * case.n, "name": "é\u2028"}


def numbers(count: int, tally: Path | None = None) -> list[Number]:
    return [Number(n, str(tally or "")) for n in range(count)]


def by_number(case: Number) -> str:
    return key_of(case.n)


def shape_of(name: str) -> ModelShape:
    loaded = config.load_config(name)
    return read_model(loaded.config, catalog.class_defaults()["types"])


def plan_cases(*names: str) -> list[PlanCase]:
    found = []
    for name in names:
        query = PlanQuery(
            gpus=gpus_named("h100,l4,a100-80gb"), engines=("vllm",), tps=(1, 8),
            contexts=(1024, 8192, 32768), kv_dtypes=("auto", "fp8"), users=(None, 16),
        )  # fmt: skip
        loaded = config.load_config(name)
        model = model_for(loaded, shape_of(name), query)
        found += list(cases_of(model, query, []))
    return found


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get everything but the first case, however quick it is."""
    pytest.importorskip("joblib")
    monkeypatch.setattr(sweep_workers, "TRIED_S", 0.0)
    monkeypatch.setattr(sweep_workers, "WORTH_S", 0.0)


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("jobs", [1, 2, None])
def test_rows_come_in_the_order_of_the_cases(jobs: int | None) -> None:
    seen: list[float] = []
    found = swept(numbers(250), doubled, jobs=jobs, progress=seen.append)
    assert [row["n"] for row in found.rows] == [n for n in range(250) if n % 100 != 99]
    assert [(e.message, e.hint, e.code, e.exit_code) for e in found.lost] == [
        ("99 is odd", "ask for another", "odd", 2),
        ("199 is odd", "ask for another", "odd", 2),
    ]
    assert sum(seen) == 250
    assert found.reused == 0


@pytest.mark.usefixtures("eager")
def test_plans_in_worker_processes_are_those_of_this_process() -> None:
    cases = plan_cases("llama-3.1-8b", "gemma-3-27b")
    assert len(cases) > 100
    rows = swept(cases, row_of, jobs=2).rows
    assert list(rows) == [row_of(case) for case in cases]


def test_few_seconds_are_spent_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "joblib", None)
    assert len(swept(numbers(1000), doubled, jobs=1).rows) == 990
    assert len(swept(numbers(1000), doubled, jobs=None).rows) == 990
    with pytest.raises(KvtoolError, match="joblib") as caught:
        swept(numbers(1000), doubled, jobs=2)
    assert caught.value.hint == "pip install 'kvtool[sweep]'"
    assert caught.value.code == "missing_extra"


@pytest.mark.usefixtures("eager")
def test_many_seconds_go_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_workers, "WORTH_S", 1.0)
    for jobs, elsewhere in ((2, True), (1, False)):
        rows = swept(numbers(30), where, jobs=jobs).rows
        assert (os.getpid() not in {row["pid"] for row in rows[1:]}) is elsewhere
    rows = swept(numbers(5), where, jobs=2).rows
    assert {row["pid"] for row in rows} == {os.getpid()}


def where(case: Number) -> dict[str, Any]:
    time.sleep(0.05)
    return {"pid": os.getpid()}


def test_a_backend_that_returns_lists_alone_works(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("joblib")  # as ray's does
    monkeypatch.setitem(sweep_workers._CLUSTERS, "multiprocessing", nullcontext)
    found = swept(numbers(100), doubled, backend="multiprocessing")
    assert [row["n"] for row in found.rows] == list(range(99))


# --- the file -------------------------------------------------------------------------------------


def test_a_line_is_a_row_behind_its_key(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    rows = swept(numbers(3), doubled, path=path).rows
    lines = [json.loads(text) for text in path.read_bytes().splitlines()]
    assert [{k: v for k, v in line.items() if k != KEY} for line in lines] == list(rows)
    assert all(KEY not in row for row in rows)
    assert [next(iter(line)) for line in lines] == [KEY] * 3
    assert {line[KEY].rpartition("/")[0] for line in lines} == {f"1/{__version__}"}


def test_a_run_goes_on_where_another_ended(tmp_path: Path) -> None:
    path, tally = tmp_path / "grid.jsonl", tmp_path / "tally"
    cases = numbers(50, tally)
    whole = swept(cases, doubled, key=by_number, path=path)
    finished = path.read_bytes()
    lines = finished.splitlines(keepends=True)
    other = lines[5].replace(f"1/{__version__}/".encode(), b"1/0.0.7/")
    broken = [*lines[20:30], other, *lines[:5], lines[40][:-30]]
    path.write_bytes(b"".join(broken))
    tally.unlink()
    again = swept(cases, doubled, key=by_number, path=path)
    assert tally.stat().st_size == 35
    assert (again.rows, again.reused) == (whole.rows, 15)
    assert path.read_bytes() == finished
    assert again.notes == (
        "grid.jsonl: its last line was cut short, and is left out",
        f"grid.jsonl: 1 rows are of kvtool 0.0.7 (schema 1) and are not used: this is {__version__} (1)",
        "grid.jsonl: 15 of 50 rows were there",
    )


@pytest.mark.parametrize("kept", [0, 1, 9, 40])
def test_a_file_of_one_cut_line_is_a_sweeps(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "grid.jsonl"
    swept(numbers(2), doubled, path=path)
    finished = path.read_bytes()
    path.write_bytes(finished[:kept])
    assert swept(numbers(2), doubled, path=path).reused == 0
    assert path.read_bytes() == finished


def test_a_grid_can_grow_and_rows_of_others_stay(tmp_path: Path) -> None:
    path, tally = tmp_path / "grid.jsonl", tmp_path / "tally"
    swept(numbers(30, tally), doubled, key=by_number, path=path)
    tally.unlink()
    found = swept(numbers(40, tally)[10:], doubled, key=by_number, path=path)
    assert tally.stat().st_size == 10
    assert [row["n"] for row in found.rows] == list(range(10, 40))
    assert "grid.jsonl: 10 rows of other models or options stay in it, at its end" in found.notes
    assert len(path.read_bytes().splitlines()) == 40
    again = swept(numbers(10, tally), doubled, key=by_number, path=path)
    assert (again.reused, tally.stat().st_size) == (10, 10)


def test_a_row_that_is_not_whole_is_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    swept(numbers(3), doubled, path=path)
    lines = path.read_bytes().splitlines(keepends=True)
    nan = lines[1].replace(b'"double": 2', b'"double": NaN')
    path.write_bytes(lines[0].replace(b'"double"', b'"halved"') + nan + lines[2])
    found = swept(numbers(3), doubled, path=path, whole=lambda row: "double" in row)
    assert found.reused == 1
    assert path.read_bytes() == b"".join(lines)


def test_equal_cases_are_computed_once_and_have_a_row_each(tmp_path: Path) -> None:
    tally = tmp_path / "tally"
    one = Number(7, str(tally))
    rows = swept([one, Number(8), one], doubled, path=tmp_path / "g.jsonl").rows
    assert [row["n"] for row in rows] == [7, 8, 7]
    assert tally.stat().st_size == 1


def test_a_case_that_failed_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    for reused in (0, 99):
        found = swept(numbers(100), doubled, path=path)
        assert (len(found.rows), len(found.lost), found.reused) == (99, 1, reused)


@pytest.mark.parametrize("content", [b"arrival,prompt\n1,2\n", b'{"timestamp": 1}\n', b"notes"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(KvtoolError, match="no sweep wrote it"):
        swept(numbers(3), doubled, path=path)
    assert path.read_bytes() == content


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = tmp_path / "grid.jsonl"
    (error,) = swept(numbers(1), partial(sweeping, path), path=path).lost
    assert error.message == f"{path}: another run is writing it"


def sweeping(path: Path, case: Number) -> dict[str, Any]:
    return {"rows": len(swept(numbers(1), doubled, path=path).rows)}


# --- what ends a run ------------------------------------------------------------------------------


@pytest.mark.parametrize(("jobs", "group"), [("1", True), ("2", True), ("2", False)])
def test_an_interrupt_ends_the_workers_and_keeps_whole_lines(
    tmp_path: Path, jobs: str, group: bool
) -> None:
    pytest.importorskip("joblib")
    path = tmp_path / "grid.jsonl"
    command = [sys.executable, str(SLOW), str(path), jobs]
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until = time.monotonic() + 60
    while time.monotonic() < until and lines_in(path) < 40:
        time.sleep(0.02)
    (os.killpg if group else os.kill)(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (130, "")
    code, message, hint = out.splitlines()
    assert (code, hint) == ("interrupted", "run the same again: it goes on from there")
    assert f"{lines_in(path)} rows more are in" in message
    text = path.read_bytes()
    assert text.endswith(b"\n")
    assert 40 <= lines_in(path) < 400
    assert all(json.loads(line)["text"] == "x" * 300 for line in text.splitlines())
    assert not living(run.pid)


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def living(group: int) -> list[str]:
    """Processes of a group, but those that have ended and wait to be reaped."""
    deadline = time.monotonic() + 10
    while True:
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[2] == str(group) and fields[0] != "Z":
                found.append(stat.parent.name)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


@pytest.mark.usefixtures("eager")
def test_a_worker_that_dies_is_said_and_costs_no_row(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    with pytest.raises(KvtoolError) as caught:
        swept(numbers(80), partial(deadly, os.getpid()), jobs=2, path=path)
    assert caught.value.code == "worker_died"
    assert lines_in(path) >= 1


def deadly(parent: int, case: Number) -> dict[str, Any]:
    if os.getpid() != parent and case.n > 70:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"n": case.n}


# --- clusters -------------------------------------------------------------------------------------


def test_dask_gives_the_rows_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("joblib")
    distributed = pytest.importorskip("distributed")
    cases = plan_cases("llama-3.1-8b")
    expected = swept(cases, row_of).rows
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        with distributed.Client(cluster):
            assert swept(cases, row_of, backend="dask").rows == expected
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", cluster.scheduler_address)
        assert swept(cases, row_of, backend="dask").rows == expected


@pytest.mark.slow
def test_dask_sends_cases_to_other_processes(tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    distributed = pytest.importorskip("distributed")
    cases = plan_cases("llama-3.1-8b", "gemma-3-27b")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster, distributed.Client(cluster):  # fmt: skip
        found = swept(cases, row_of, backend="dask", path=tmp_path / "g.jsonl")
        rows = swept(numbers(40), where, backend="dask").rows
    assert found.rows == swept(cases, row_of).rows
    assert os.getpid() not in {row["pid"] for row in rows[sweep_workers.TRIED :]}


def test_no_dask_cluster_is_said_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("joblib")
    pytest.importorskip("distributed")
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    tally = tmp_path / "tally"
    with pytest.raises(KvtoolError, match="no dask cluster is named") as caught:
        swept(numbers(3, tally), doubled, backend="dask")
    assert "DASK_SCHEDULER_ADDRESS" in caught.value.hint
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:9")
    monkeypatch.setattr(sweep_workers, "CONNECT_S", 0.5)
    with pytest.raises(KvtoolError, match=r"no dask scheduler answers at tcp://127\.0\.0\.1:9"):
        swept(numbers(3, tally), doubled, backend="dask")
    assert not tally.exists()


@pytest.mark.parametrize(
    ("backend", "module", "packages"),
    [("dask", "distributed", "'dask[distributed]'"), ("ray", "ray", "ray")],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, backend: str, module: str, packages: str
) -> None:
    pytest.importorskip("joblib")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KvtoolError) as caught:
        swept(numbers(3), doubled, backend=backend)
    assert caught.value.code == "missing_extra"
    assert caught.value.hint == f"pip install 'kvtool[sweep]' {packages}"


@pytest.mark.usefixtures("eager")
def test_workers_of_another_kvtool_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_workers, "__version__", "9.9")  # here, and not in the workers
    with pytest.raises(KvtoolError, match=f"another than this one, 9.9: {__version__}"):
        swept(numbers(100), doubled, jobs=2)


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_names_all_that_a_plan_depends_on() -> None:
    (case, *_) = plan_cases("llama-3.1-8b")
    layout = case.holder.layout
    other = replace(layout.shape, layers=layout.shape.layers[:-1])
    cases = [
        case,
        replace(case, context=case.context + 1),
        replace(case, users=3),
        replace(case, usd_per_hour=1.5),
        replace(case, gpu=replace(case.gpu, bandwidth_gb_s=1.0)),
        replace(case, memory=replace(case.memory, gives=case.memory.gives[1:])),
        replace(case, echo={**case.echo, "expert_parallel": True}),
        replace(case, holder=replace(case.holder, layout=replace(layout, tp=2))),
        replace(case, holder=replace(case.holder, layout=replace(layout, shape=other))),
    ]
    assert len({key_of(one) for one in cases}) == len(cases)
    assert key_of(case) == key_of(pickle.loads(pickle.dumps(case)))
    assert key_of(case, {"b": 1, "a": b"2"}) == key_of(case, {"a": b"2", "b": 1}) != key_of(case)


def test_a_key_is_the_same_in_every_process() -> None:
    code = "from kvtool.sweep import key_of; print(key_of({'b': (1, 2.5), 'a': b'x'}, None, 'é'))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {key_of({"a": b"x", "b": [1, 2.5]}, None, "é")}


def test_what_has_no_stable_name_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        key_of({"a": object()})


def test_a_shape_that_arrives_twice_is_one_shape() -> None:
    shape = shape_of("gemma-3-27b")
    one, two = (pickle.loads(pickle.dumps(shape)) for _ in range(2))
    assert one == shape
    assert hash(one) == hash(shape)
    assert one is two
    assert replace(shape, layers_by="another") != shape

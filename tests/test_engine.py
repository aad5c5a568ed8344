"""The fast engine: vLLM's integers, the plain scheduler's on any run, and what must hold of every run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_cases import (
    ROW_IDS,
    Case,
    Plain,
    adds_up,
    crowded_cases,
    cut_up,
    differences,
    drawn_cases,
    engine,
    engine_outcomes,
    engine_steps,
    requests,
    requests_of,
    rows,
    run_plain,
    settings_of,
    without_series,
)

from kvtool.requests import Requests
from kvtool.sim import engine as driver
from kvtool.sim.engine import Engine
from kvtool.sim.memory import Contiguous
from kvtool.sim.placement import Buddy
from kvtool.sim.scheduler import Scheduler
from kvtool.sim.settings import ABORTED, CUT, DONE, REJECTED, UNFINISHED, Settings, StepTime
from kvtool.sim.state import CALENDAR, POINTS, STEPS_KEPT, new_state
from kvtool.sim.totals import Sums

ROOT = Path(__file__).parents[1]
UNIT = StepTime(base_ns=1, token_ns=0, context_ns=0)
CALM = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
FEW, MANY = settings(max_examples=150, **CALM), settings(max_examples=1500, **CALM)


@pytest.mark.parametrize("name", ROW_IDS)
def test_a_row_is_what_vllm_decided(name: str) -> None:
    row = rows()[name]
    case = Case(requests=requests_of(row), settings=settings_of(row))
    run = engine(case, recorded=True).run()
    assert differences(row, engine_outcomes(case, run), engine_steps(run)) == []
    assert run.totals().preemptions == row["truth"]["totals"]["preemptions"]
    assert run.totals().scheduled_tokens == row["truth"]["totals"]["scheduled_tokens"]
    assert bool(run.state.run.stopped) == row["truth"]["stopped_by_stall"]


def compare(case: Case) -> Engine:
    """A run of both, integer for integer, and what must hold of it."""
    plain, run = run_plain(case), engine(case, recorded=True).run()
    assert engine_steps(run) == plain.steps()
    assert engine_outcomes(case, run) == plain.outcomes()
    assert without_series(run.totals()) == without_series(plain.totals())
    check_sums(case, run)
    check_tokens(plain, run)
    check_requests(case, run)
    return run


def check_sums(case: Case, run: Engine) -> None:
    """Every slot of every step is one of the six, and no limit is passed."""
    totals, steps, limits = run.totals(), run.all_steps(), case.settings
    for sums in (totals.whole, totals.window, *totals.series):
        assert adds_up(sums, limits.num_slots)
    assert sum(totals.series, Sums()) == totals.whole
    assert all(one.steps == totals.series[0].steps for one in totals.series[:-1])
    assert totals.whole.steps == totals.steps == len(steps)
    assert totals.whole.held == steps["held"].sum()
    assert totals.whole.running == steps["running"].sum()
    assert totals.scheduled_tokens == steps["scheduled_tokens"].sum()
    for name, most in (
        ("held", limits.num_slots), ("running", limits.max_running),
        ("scheduled_tokens", limits.token_budget), ("batch", limits.token_budget),
    ):  # fmt: skip
        assert (steps[name] >= 0).all()
        assert (steps[name] <= most).all()
    assert (steps["batch"] <= steps["running"]).all()
    assert (np.diff(steps["end_ns"]) >= 0).all()


def check_tokens(plain: Plain, run: Engine) -> None:
    """Each token is computed once, and once more where it was thrown away; none is made twice."""
    totals, live = run.totals(), plain.scheduler.requests
    ended = [one.status in (DONE, CUT) for one in plain.result.outcomes]
    kept = sum(r.prompt_tokens + r.generated - 1 for r, e in zip(live, ended, strict=True) if e)
    on_cpu = sum(r.computed for r, e in zip(live, ended, strict=True) if not e)
    assert totals.scheduled_tokens == kept + totals.recomputed_tokens + on_cpu
    limits = plain.case.settings
    if limits.preemption == "recompute" or not limits.cpu_blocks:
        assert (on_cpu, totals.swapped_blocks) == (0, 0)
    firsts = sum(one.first_token_step >= 0 for one in plain.result.outcomes)
    resumed = sum(map(len, run.gaps))
    decoded = int(run.all_steps()["decoded"].sum())
    assert firsts + resumed + decoded == sum(r.generated for r in live)


def check_requests(case: Case, run: Engine) -> None:
    """Who came is served in the order of arrival, and what became of everyone is told."""
    outcomes, order = run.state.outcomes, case.requests.in_order()
    longest = case.settings.max_model_len
    accepted = (order.prompt_tokens > 0) & (order.prompt_tokens < longest)
    admitted = outcomes["admit_step"][accepted]
    assert (np.diff(admitted[admitted >= 0]) >= 0).all()
    room = longest - order.prompt_tokens
    for status, generated in ((DONE, order.output_tokens), (CUT, room)):
        those = outcomes["status"] == status
        assert (outcomes["generated"][those] == generated[those]).all()
        assert ((order.output_tokens > room)[those] == (status == CUT)).all()
    totals = run.totals()
    told = [int((outcomes["status"] == status).sum()) for status in range(5)]
    assert told[:4] == [
        totals.completed - totals.cut, totals.cut, totals.prompt_too_long, totals.larger_than_pool,
    ]  # fmt: skip
    assert sum(told) == totals.requests == len(case.requests)
    if case.settings.on_stall == "abort-head":
        assert told[UNFINISHED] == 0
    assert totals.preemptions == outcomes["num_preemptions"].sum()


@FEW
@given(case=drawn_cases())
def test_any_run_is_that_of_the_plain_scheduler(case: Case) -> None:
    compare(case)


@pytest.mark.slow
@MANY
@given(case=drawn_cases())
def test_any_run_is_that_of_the_plain_scheduler_many_times(case: Case) -> None:
    compare(case)


def skip_runs(how: settings) -> int:
    """Crowded runs, and in how many of them somebody got no token."""
    skips = []

    @how
    @given(case=crowded_cases())
    def run(case: Case) -> None:
        skips.append(compare(case).state.run.skips)

    run()
    return sum(count > 0 for count in skips)


def test_who_gets_no_token_comes_a_step_later() -> None:
    assert skip_runs(settings(FEW, max_examples=60)) > 0


@pytest.mark.slow
def test_who_gets_no_token_comes_a_step_later_many_times() -> None:
    assert skip_runs(MANY) > 100


@pytest.mark.parametrize(
    ("placement", "allocator"),
    [(place, name) for place in ("buddy", "first-fit", "best-fit") for name in ("grow", "oracle")],
)
def test_a_long_run_of_regions_is_that_of_the_plain_scheduler(
    placement: str, allocator: str
) -> None:
    rng = np.random.default_rng(len(placement))
    lengths = [np.clip(rng.lognormal(3.5, 1.2, 250), 1, 400).astype(int) for _ in range(2)]
    limits = Settings(num_blocks=1500, block_size=1, max_model_len=800, step_time=UNIT)
    case = Case(
        requests=requests(*lengths), settings=limits, allocator=allocator, placement=placement
    )
    totals = compare(case).totals()
    assert totals.window.external > 0
    assert (totals.copied_tokens > 0, totals.preemptions > 0) == (allocator == "grow",) * 2


def test_a_pool_of_fewer_slots_than_requests_may_run() -> None:
    limits = Settings(num_blocks=3, block_size=1, max_model_len=10, step_time=UNIT)
    case = Case(requests=requests([1] * 9, [1, 2, 3] * 3), settings=limits)
    assert compare(case).totals().peak_running == 3


def test_who_is_aborted_leaves_the_cpu() -> None:
    limits = Settings(
        num_blocks=4,
        block_size=4,
        preemption="swap",
        cpu_blocks=4,
        max_model_len=99,
        step_time=UNIT,
    )
    pairs = requests([7, 7, 7], [30, 8, 8], [0, 40, 40])
    assert compare(Case(requests=pairs, settings=limits)).totals().swapped_blocks == 8


def test_what_is_due_later_than_the_calendar_is_long_waits_for_its_lap() -> None:
    outputs = [2 * CALENDAR + 7, CALENDAR, CALENDAR + 1, 3]
    limits = Settings(num_blocks=1200, max_model_len=10_000, step_time=UNIT)
    run = compare(Case(requests=requests([5, 1, 2, 3], outputs), settings=limits))
    assert run.state.outcomes["finish_step"].tolist() == [output - 1 for output in outputs]


def test_points_of_the_series_are_halved_when_they_are_full() -> None:
    limits = Settings(num_blocks=400, max_model_len=9000, step_time=UNIT)
    for output in (POINTS - 1, POINTS, POINTS + 1, 2 * POINTS + 1, 4 * POINTS + 1):
        case = Case(requests=requests([5, 9], [output, 30]), settings=limits)
        run, plain = compare(case), run_plain(case)
        series = run.totals().series
        assert POINTS // 2 <= len(series) <= POINTS
        width = series[0].steps
        assert width in (1, 2, 4, 8)
        parts = range(0, output, width)
        assert series == tuple(plain.sums(plain.result.steps[at : at + width]) for at in parts)


def test_more_steps_than_the_buffer_keeps_are_all_handed_over() -> None:
    steps = STEPS_KEPT + 5000
    limits = Settings(num_blocks=steps, block_size=1, max_model_len=10**6, step_time=UNIT)
    run = engine(Case(requests=requests([1], [steps]), settings=limits), recorded=True).run()
    assert len(run.steps) > 1
    assert run.all_steps()["end_ns"].tolist() == list(range(1, steps + 1))
    assert run.state.outcomes["generated"].tolist() == [steps]


@pytest.mark.parametrize("recorded", [False, True])
def test_no_requests_are_no_steps(recorded: bool) -> None:
    nothing = requests([], [])
    for source in ([], [nothing], *([] if recorded else [[nothing, nothing]])):
        case = Case(requests=nothing, settings=Settings(num_blocks=1))
        totals = engine(case, source, recorded=recorded).run().totals()
        assert (totals.steps, totals.end_ns, totals.completed) == (0, 0, 0)
        assert totals.measured == Sums()
    case = Case(requests=requests([0, 9000], [1, 1]), settings=Settings(num_blocks=1))
    totals = engine(case, recorded=recorded).run().totals()
    assert (totals.steps, totals.prompt_too_long, totals.rejected) == (0, 2, 2)


# Chunks


def in_chunks(case: Case, sizes: Sequence[int], *, recorded: bool) -> Engine:
    """The run with its requests cut into chunks."""
    return engine(case, cut_up(case.requests.in_order(), sizes), recorded=recorded).run()


def plainer(case: Case) -> Case:
    """The case without the settings under which the requests are wanted in one chunk."""
    limits = replace(case.settings, long_prefill_threshold=0, on_stall="abort-head")
    return replace(case, settings=limits)


@settings(FEW, max_examples=80)
@given(
    case=drawn_cases().map(plainer),
    sizes=st.lists(st.sampled_from((0, 1, 2, 3, 7, 20)), max_size=30),
)
def test_any_cut_into_chunks_gives_the_same_run(case: Case, sizes: list[int]) -> None:
    assert in_chunks(case, sizes, recorded=False).totals() == engine(case).run().totals()


@pytest.mark.parametrize("allocator", ["paged", "oracle"])
def test_requests_one_by_one_give_the_same_run(allocator: str) -> None:
    rng = np.random.default_rng(1)
    case = Case(
        requests=requests(rng.integers(1, 200, 600), rng.integers(1, 200, 600)),
        settings=Settings(num_blocks=200, max_num_seqs=32, max_model_len=512),
        allocator=allocator,
        placement="" if allocator == "paged" else "best-fit",
    )
    assert in_chunks(case, [1] * 600, recorded=False).totals() == engine(case).run().totals()


def test_a_recorded_run_and_a_short_one_come_to_the_same() -> None:
    rng = np.random.default_rng(2)
    case = Case(
        requests=requests(rng.integers(0, 300, 300), rng.integers(1, 200, 300)),
        settings=Settings(num_blocks=60, max_model_len=400),
    )
    assert engine(case, recorded=True).run().totals() == engine(case).run().totals()


def test_who_must_be_known_to_wait_is_given_in_one_chunk() -> None:
    limits = Settings(num_blocks=100, max_num_seqs=1, long_prefill_threshold=1, step_time=UNIT)
    case = Case(requests=requests([1] * 6, [1] * 6), settings=limits)
    for recorded in (False, True):
        with pytest.raises(ValueError, match="one chunk"):
            in_chunks(case, [2, 2, 2], recorded=recorded)
    case = replace(case, settings=replace(limits, long_prefill_threshold=0))
    with pytest.raises(ValueError, match="one chunk"):
        in_chunks(case, [2, 2, 2], recorded=True)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_prompt_that_comes_after_the_stop_is_not_rejected(recorded: bool) -> None:
    limits = Settings(num_blocks=1, block_size=4, max_model_len=8, max_num_seqs=1, on_stall="stop")
    case = Case(requests=requests([6, 6, 8], [1] * 3, [0, 0, 9]), settings=limits)  # 6 never fit
    totals = engine(case, recorded=recorded).run().totals()
    assert totals.prompt_too_long == run_plain(case).totals().prompt_too_long == 0


# Interruption


def check_interrupted(case: Case, run: Engine) -> None:
    """The run is the beginning of the whole run."""
    whole, totals = engine(case, recorded=True).run(), run.totals()
    assert totals.interrupted
    steps, count = engine_steps(whole), totals.steps
    assert engine_steps(run) == {name: column[:count] for name, column in steps.items()}
    check_sums(case, run)
    for got, full in zip(run.state.outcomes, whole.state.outcomes, strict=True):
        if got["status"] in (DONE, CUT, ABORTED, REJECTED):
            assert got == full
            continue
        assert got["status"] == UNFINISHED
        assert (got["generated"], got["finish_step"]) == (0, -1)
        assert not 0 <= full["finish_step"] < count
        for name in ("admit_step", "first_token_step"):
            assert got[name] == (full[name] if full[name] < count else -1)
        assert (got["first_token_ns"] >= 0) == (got["first_token_step"] >= 0)
        assert got["num_preemptions"] <= full["num_preemptions"]
    told = [int((run.state.outcomes["status"] == status).sum()) for status in range(5)]
    assert told[DONE] + told[CUT] == totals.completed
    assert told[REJECTED] == totals.prompt_too_long
    assert told[ABORTED] == totals.larger_than_pool


@settings(FEW, max_examples=60)
@given(
    case=drawn_cases().map(
        lambda case: replace(case, settings=replace(case.settings, on_stall="abort-head"))
    ),
    steps=st.integers(1, 30),
    looks=st.integers(1, 5),
)
def test_an_interrupt_leaves_the_run_as_far_as_it_came(case: Case, steps: int, looks: int) -> None:
    left, ended = looks, 0

    def progress(more: int) -> None:
        nonlocal left, ended
        left, ended = left - 1, ended + more
        if not left:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "STEPS_AT_ONCE", steps)
        run = engine(case, recorded=True, progress=progress).run()
    totals = run.totals()
    assert ended == totals.completed + totals.larger_than_pool
    if left > 0:
        assert not totals.interrupted
        assert totals == engine(case).run().totals()
    else:
        assert totals.steps <= looks * steps
        check_interrupted(case, run)


@pytest.mark.parametrize("chunks", range(7))
def test_an_interrupt_while_requests_are_read_keeps_what_was_done(chunks: int) -> None:
    rng = np.random.default_rng(3)
    limits = Settings(num_blocks=40, max_num_seqs=8, max_model_len=200)
    case = Case(
        requests=requests(rng.integers(0, 99, 90), rng.integers(1, 99, 90)), settings=limits
    )

    def source() -> Iterator[Requests]:
        yield from cut_up(case.requests.in_order(), [15] * chunks)[:-1]
        raise KeyboardInterrupt

    totals = engine(case, source()).run().totals()
    assert totals.interrupted
    assert totals.whole.steps == totals.steps
    assert adds_up(totals.whole, limits.num_slots)
    assert (totals.completed > 0) == (chunks > 2)  # it reads a chunk ahead


def test_progress_is_told_of_everyone_who_ended() -> None:
    told: list[int] = []
    limits = Settings(num_blocks=4, block_size=4, max_model_len=100, step_time=UNIT)
    case = Case(requests=requests([4, 40, 4, 4], [2, 1, 9, 200]), settings=limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "STEPS_AT_ONCE", 3)
        totals = engine(case, progress=told.append).run().totals()
    assert len(told) > 3
    assert sum(told) == totals.completed + totals.larger_than_pool == 4


# Memory


def stream(count: int, size: int, made: list[int]) -> Iterator[Requests]:
    """So many requests in chunks, one alive at a time; `made` counts them."""
    rng = np.random.default_rng(4)
    for _ in range(0, count, size):
        made.append(size)
        yield requests(rng.integers(1, 60, size), rng.integers(1, 60, size))


def test_memory_does_not_grow_with_the_requests() -> None:
    count, size = 200_000, 5000
    limits = Settings(num_blocks=2000, max_model_len=200)
    engine(Case(requests=requests([1], [1]), settings=limits)).run()  # compiled by now
    made: list[int] = []
    tracemalloc.start()
    try:
        run = Engine(source=stream(count, size, made), num_requests=count, settings=limits).run()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    totals = run.totals()
    assert (totals.completed, sum(made)) == (count, count)
    assert peak < 8_000_000
    assert len(run.steps) == len(run.gaps) == len(run.rejected) == 0


def buddy_splitter(most: int) -> Case:
    """Three crowds of short requests that leave few regions behind and many holes between them.

    Each of the long-lived regions splits a block of the pool; short-lived ones of 2, 4, 8 times its
    size fill the halves and leave them as holes. The next crowd does the same on a larger scale.
    """
    pairs, lives, size = [], 0, 16
    for crowd in range(3):
        count, smallest = (most - lives) // 4, size
        for _ in range(count):
            pairs.append((1, size) if crowd == 0 else (smallest - 9, 10))
            pairs += [(smallest, 1), (2 * smallest, 1), (4 * smallest, 1)]
        pairs += [(4 * smallest, 1)] * (most - lives - 4 * count)
        lives, size = lives + count, 8 * smallest
    prompts, outputs = zip(*pairs, strict=True)
    limits = Settings(
        num_blocks=1 << 22, block_size=1, max_model_len=1 << 30, max_num_seqs=most,
        max_batched_tokens=1 << 40, step_time=UNIT,
    )  # fmt: skip
    return Case(
        requests=requests(prompts, outputs),
        settings=limits,
        allocator="oracle",
        placement="buddy",
    )


def most_holes(case: Case) -> int:
    """The most holes that a plain run has at once."""
    most = 0

    class Watched(Buddy):
        def free(self, address: int) -> None:
            super().free(address)
            nonlocal most
            most = max(most, sum(map(len, self._free.values())))

    store = Contiguous(case.allocator, case.placement, case.settings)
    store.placement = Watched(case.settings.num_slots)
    Scheduler(case.requests, case.settings, store).run()
    return most


def test_there_is_a_place_for_every_hole_that_buddies_leave() -> None:
    case = buddy_splitter(256)
    state = new_state("oracle", "buddy", case.settings, warm_up=0, num_recorded=0)
    assert most_holes(case) <= len(state.lines)  # else the engine writes where it must not
    compare(case)


@pytest.mark.slow
def test_machine_code_is_made_anew_when_a_part_of_it_changes(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "presets", "kernels")
    shutil.copytree(ROOT / "kvtool", tmp_path / "kvtool", ignore=ignored)
    program = tmp_path / "peak.py"
    program.write_text(
        "import numpy as np\n"
        "from kvtool.requests import Requests\n"
        "from kvtool.sim.engine import Engine\n"
        "from kvtool.sim.settings import Settings\n"
        "one = np.ones(2, np.int64)\n"
        "made = Requests(arrival_ns=0 * one, prompt_tokens=one, output_tokens=one)\n"
        "limits = Settings(num_blocks=10)\n"
        "run = Engine(source=[made], num_requests=2, settings=limits).run()\n"
        "print(run.totals().peak_running)\n"
    )

    def peak() -> str:
        done = subprocess.run(
            [sys.executable, program], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    assert peak() == "2"
    part = tmp_path / "kvtool/sim/admission.py"
    text = part.read_text("utf-8")
    assert "run.running >= run.max_running" in text
    part.write_text(text.replace("run.running >= run.max_running", "run.running >= 1"), "utf-8")
    assert peak() == "1"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("size", [0, 100])
def test_damaged_machine_code_is_made_anew(tmp_path: Path, suffix: str, size: int) -> None:
    command = [sys.executable, "-m", "kvtool", "fragment", "--num-requests", "9", "--json", "-q"]
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def rows() -> object:
        done = subprocess.run(command, env=environ, capture_output=True, timeout=120, check=True)
        return json.loads(done.stdout)["rows"]

    first = rows()
    files = list(tmp_path.rglob(suffix))
    assert files
    for file in files:
        os.truncate(file, size)
    assert rows() == first
    assert rows() == first

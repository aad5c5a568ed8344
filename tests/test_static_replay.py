"""Static batches written down: the same times and sums as the closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtool.requests import Requests
from kvtool.sim.settings import CUT, DONE, Settings, StepTime
from kvtool.sim.static_batch import StaticBatches
from kvtool.sim.static_replay import replay_static


@st.composite
def cases(draw: st.DrawFn) -> tuple[Requests, Settings]:
    count = draw(st.integers(1, 25))

    def column(low: int, high: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        values = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
        return np.array(values, np.int64)

    requests = Requests(
        arrival_ns=column(0, 400), prompt_tokens=column(0, 14), output_tokens=column(1, 14)
    )
    return requests, Settings(
        num_blocks=draw(st.integers(3, 60)),
        block_size=draw(st.sampled_from((1, 3))),
        max_model_len=draw(st.sampled_from((30, 12))),
        max_num_seqs=draw(st.sampled_from((256, 4, 1))),
        step_time=StepTime(
            base_ns=draw(st.sampled_from((3, 0))), token_ns=draw(st.sampled_from((2, 0))),
            context_ns=draw(st.sampled_from((1, 0))),
            attention_ns=draw(st.sampled_from((0, 0.07, 2))), request_ns=draw(st.sampled_from((0, 0.6))), read_ns=draw(st.sampled_from((0, 9, 40))),
        ),
    )  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_it_is_the_closed_form_step_by_step(case: tuple[Requests, Settings]) -> None:
    requests, limits = case
    found = replay_static(requests, limits)
    order = requests.in_order()
    totals = StaticBatches(source=[order], num_requests=len(order), settings=limits).run().totals()
    status, steps = found.outcomes["status"], found.steps
    assert int(np.isin(status, (DONE, CUT)).sum()) == totals.completed
    assert int((status == CUT).sum()) == totals.cut
    assert len(steps["end_ns"]) == totals.steps
    assert int(steps["scheduled_tokens"].sum()) == totals.scheduled_tokens
    assert int(steps["batch"].sum()) == totals.whole.running
    if totals.steps:
        assert int(steps["end_ns"][-1]) == totals.end_ns
        assert int(steps["running"].max()) == totals.peak_running
    waited = steps["held_up"] > 0
    assert ((steps["waiting"] > 0) == waited).all()
    served = np.isin(status, (DONE, CUT))
    generated = found.outcomes["generated"]
    assert int(generated.sum()) == int(steps["batch"].sum())
    first, last = found.outcomes["first_token_ns"], found.outcomes["finish_ns"]
    assert (requests.arrival_ns[served] <= first[served]).all()
    assert (first[served] <= last[served]).all()
    assert found.gaps is not None
    assert int(found.gaps[1].sum()) == int((generated[served] - 1).sum())


def test_a_batch_ends_with_its_longest_and_others_wait() -> None:
    requests = Requests(
        arrival_ns=np.array([0, 0, 5]), prompt_tokens=np.array([4, 2, 3]),
        output_tokens=np.array([3, 1, 2]),
    )  # fmt: skip
    law = StepTime(base_ns=10, token_ns=0, context_ns=0)
    limits = Settings(num_blocks=100, block_size=1, max_model_len=50, step_time=law)
    found = replay_static(requests, limits)
    assert found.outcomes["first_token_ns"].tolist() == [10, 10, 40]
    assert found.outcomes["finish_ns"].tolist() == [30, 10, 50]
    assert found.steps["waiting"].tolist() == [0, 1, 1, 0, 0]
    assert found.steps["batch"].tolist() == [2, 1, 1, 1, 1]
    alone = replay_static(replace(requests, arrival_ns=np.array([0, 0, 900])), limits)
    assert alone.outcomes["first_token_ns"].tolist() == [10, 10, 910]

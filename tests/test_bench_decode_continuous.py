"""transformers' own continuous batching: what it says of itself, and that Ctrl-C ends it at once."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from decode_cases import LLAMA, case_of, decoder_of

from kvtool.bench.decode import continuous
from kvtool.bench.decode.continuous import timed_continuous, warm_up_continuous
from kvtool.bench.decode.cuda_graph import EAGER, Execution
from kvtool.bench.decode.model import prompts
from kvtool.errors import KvtoolError


@pytest.mark.parametrize(
    ("decided", "is_graph"),
    [
        ((True, True), True),
        ((False, False), False),
        ((True, False), None),
        (True, True),
        (None, None),
    ],
)
def test_whether_it_is_a_graph_is_its_own_word(decided: Any, is_graph: bool | None) -> None:
    manager = SimpleNamespace(continuous_batching_config=SimpleNamespace(use_cuda_graph=decided))
    assert continuous._execution(manager) == Execution(is_graph)


def test_another_version_may_not_tell() -> None:
    manager = SimpleNamespace(continuous_batching_config=SimpleNamespace())
    assert continuous._execution(manager) == Execution(None)


def test_on_a_cpu_it_says_that_it_is_none() -> None:
    decoder = decoder_of(LLAMA)
    ids = prompts(decoder, 2, 21)
    warm_up_continuous(decoder, case_of("continuous", batch=2), ids)
    run = timed_continuous(decoder, case_of("continuous", batch=2), ids)
    assert run.execution == EAGER
    assert run.tokens.shape == (2, 12)
    assert len(run.ttft_s) == len(run.tpot_s) == 2
    assert len(run.gaps_s) == 2 * 11
    assert 0 < max(run.ttft_s) < run.wall_s


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_an_end_stops_its_thread_at_once(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would generate all 400 tokens first."""
    decoder = decoder_of(LLAMA)
    before, passes = set(threading.enumerate()), []
    decoder.module.register_forward_hook(lambda *given: passes.append(1))

    def interrupted(manager: Any, prompts: Any, output: int) -> Any:
        manager.add_requests(inputs=prompts, max_new_tokens=output)
        raise kind

    monkeypatch.setattr(continuous, "_results", interrupted)
    case = case_of("continuous", output_tokens=400)
    with pytest.raises(kind):
        timed_continuous(decoder, case, prompts(decoder, 3, 21))
    assert set(threading.enumerate()) == before
    assert len(passes) < 200


def test_a_thread_that_has_ended_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(LLAMA)
    monkeypatch.setattr(continuous, "_results", lambda manager, prompts, output: [])
    with pytest.raises(KvtoolError, match="not finished") as caught:
        timed_continuous(decoder, case_of("continuous"), prompts(decoder, 3, 21))
    assert caught.value.code == "continuous_failed"

"""`kvtool simulate --find-rate`: the rate that is found holds in longer runs, and what was tried is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtool.cli import simulate_rate
from kvtool.cli.simulate_rate import at_highest
from kvtool.cli.simulate_requests import CHUNKED, Case
from kvtool.errors import KvtoolError
from kvtool.requests import Requests
from kvtool.sim.settings import Settings, StepTime
from kvtool.slo import Highest, Trial, parse_slo

CHAT = ("--model", "llama-3-8b", "--gpu", "h100", "--workload", "chat", "--num-requests", "300")
SLO = ("--slo", "ttft=500ms,tpot=20ms", "--find-rate")
FOUND = ("found_rate", "found_rate_met_share", "refused_rate", "refused_rate_met_share",
         "refused_rate_queue_grows")  # fmt: skip


def case_of(count: int, **more: Any) -> Case:
    """Requests of one token, one at a time, 10 ms each: 100 a second."""
    requests = Requests(
        arrival_ns=np.zeros(count, np.int64), prompt_tokens=np.full(count, 4),
        output_tokens=np.full(count, 1),
    )  # fmt: skip
    law = StepTime(base_ns=10_000_000, token_ns=0, context_ns=0)
    settings = Settings(num_blocks=9, block_size=4, max_model_len=16, max_num_seqs=1, step_time=law)
    return Case(
        name="made", is_file=False, rate="saturated", requests=requests, contents=None,
        scheduler=CHUNKED, settings=settings, **more,
    )  # fmt: skip


def test_what_was_tried_is_in_the_row(kvtool: Callable[..., Any]) -> None:
    ran = kvtool("simulate", *CHAT, *SLO, "--json")
    (row,) = ran.json["rows"]
    assert row["found_rate"] == float(row["rate"])
    assert row["found_rate"] < row["refused_rate"] <= row["found_rate"] * 1.01
    assert 0.99 <= row["found_rate_met_share"] <= row["slo_met_share"]
    assert row["refused_rate_met_share"] < 0.99 or row["refused_rate_queue_grows"]
    assert "that of runs of 300 and 600 requests" in " ".join(ran.json["notes"])
    (row,) = kvtool("simulate", *CHAT, *SLO[:2], "--rate", "4", "--json").json["rows"]
    assert [row[name] for name in FOUND] == [None] * 5


def test_the_rate_is_one_that_twice_as_many_requests_keep() -> None:
    """Alone they keep a rate above what is served: the queue of a short run is never long."""
    slo = parse_slo("ttft=2s")
    case = case_of(300)
    alone, notes = at_highest(case, slo, 0)
    assert alone.highest is not None
    assert alone.highest.rate > 110
    assert any("is above the 100 requests a second that are served" in text for text in notes)
    assert any("that of a run of 300 requests" in text for text in notes)
    more = case_of(600).requests
    found, notes = at_highest(replace(case, longer=lambda: (more, None)), slo, 0)
    assert found.highest is not None
    assert found.highest.rate < alone.highest.rate * 0.95
    assert any("that of runs of 300 and 600 requests" in text for text in notes)
    for requests, seed in ((case.requests, 0), (more, 1)):
        at_found, at_refused = (
            simulate_rate._tried(replace(case, requests=requests), slo, seed, rate)
            for rate in (found.highest.rate, found.highest.refused_rate)
        )
        assert at_found.keeps
    assert found.highest.refused_grows or not at_refused.keeps
    assert found.rate == f"{found.highest.rate:g}"


def test_both_runs_have_to_keep_it_and_the_smaller_share_is_told() -> None:
    def short(rate: float) -> Trial:
        return Trial(keeps=rate <= 9 or rate == 10, share=0.991 if rate < 8.95 else 0.992)

    found = Highest(
        rate=10.0, share=0.992, refused_rate=10.1, refused_share=0.5, refused_grows=False
    )
    for longest, rate, share in ((11.0, 10.0, 0.992), (9.8, 9.0, 0.992), (8.0, 8.0, 0.991)):
        both = simulate_rate._confirmed(
            found, short, lambda rate, most=longest: Trial(keeps=rate <= most, share=0.999)
        )
        assert both is not None
        assert rate / 1.01 <= both.rate <= rate
        assert both.share == share
        assert both.refused_rate is not None
        assert rate < both.refused_rate <= both.rate * 1.01


@pytest.mark.parametrize("words", [("chat",), ("agent", "--prefix-caching")])
def test_twice_as_many_are_others_that_are_made_alike(
    kvtool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    cases: list[Case] = []

    def asked(case: Case, slo: Any, seed: int) -> Any:
        cases.append(case)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtool.cli.simulate_run.at_highest", asked)
    kvtool("simulate", *CHAT[:4], *CHAT[6:], *SLO, "--workload", *words)
    (case,) = cases
    assert case.longer is not None
    more, contents = case.longer()
    assert (len(case.requests), len(more)) == (300, 600)
    assert (contents is None) is (case.contents is None)
    assert more.output_tokens[:300].tolist() != case.requests.output_tokens.tolist()
    assert more.prompt_tokens.mean() == pytest.approx(case.requests.prompt_tokens.mean(), rel=0.3)


def test_a_rate_that_keeps_it_is_not_searched_again() -> None:
    asked: list[int] = []

    def longer() -> tuple[Requests, None]:
        asked.append(1)
        return case_of(20).requests, None

    slo = parse_slo("ttft=90ms")
    alone, _ = at_highest(case_of(2000), slo, 0)
    found, _ = at_highest(case_of(2000, longer=longer), slo, 0)
    assert (found.rate, asked) == (alone.rate, [1])


def test_an_objective_that_any_rate_keeps_has_no_rate(kvtool: Callable[..., Any]) -> None:
    words = (*CHAT[:-1], "20", "--slo", "ttft=10s,tpot=1s", "--find-rate", "--json")
    ran = kvtool("simulate", *words)
    assert (ran.code, ran.json["rows"], ran.json["error"]["code"]) == (1, [], "no_rate")
    assert "even all at once keep it: 20 requests are too few to find a rate" in ran.err
    assert "give more --num-requests" in ran.err


@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_interrupt_is_no_rate(
    kvtool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """A trial that Ctrl-C ended has fewer answers than it would have: it says nothing of a rate."""
    _interrupted(monkeypatch, after)
    ran = kvtool("simulate", *CHAT, *SLO, "--json")
    assert (ran.code, ran.json["rows"], ran.json["error"]["code"]) == (130, [], "interrupted")
    assert "interrupted while the rate of chunked was looked for" in ran.err


def test_rows_before_an_interrupt_are_kept(
    kvtool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*CHAT, *SLO, "--max-num-seqs", "64,128", "--json")
    first, _ = kvtool("simulate", *words).json["rows"]
    tries: list[int] = []
    whole = simulate_rate.replayed

    def counted(case: Case, advance: Any) -> Any:
        tries.append(case.settings.max_num_seqs)
        return whole(case, advance)

    monkeypatch.setattr(simulate_rate, "replayed", counted)
    kvtool("simulate", *words)
    monkeypatch.setattr(simulate_rate, "replayed", whole)
    _interrupted(monkeypatch, tries.count(64) + 3)
    ran = kvtool("simulate", *words)
    assert (ran.code, ran.json["error"]["code"]) == (130, "interrupted")
    assert ran.json["rows"] == [first]
    assert "while the rate of chunked, max num seqs 128 was looked for" in ran.err


def _interrupted(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The trial after so many is interrupted as the engine is: it comes back, and says so."""
    whole, count = simulate_rate.replayed, [0]

    def replayed(case: Case, advance: Any) -> Any:
        count[0] += 1
        found = whole(case, advance)
        return replace(found, interrupted=True) if count[0] == after + 1 else found

    monkeypatch.setattr(simulate_rate, "replayed", replayed)


def test_a_file_has_no_more_requests(kvtool: Callable[..., Any], tmp_path: Path) -> None:
    place = tmp_path / "in.jsonl"
    line = '{"arrival_ns": 0, "prompt_tokens": 40, "output_tokens": 5}\n'
    place.write_text(line * 400)
    words = ("--requests", str(place), "--num-blocks", "100", "--find-rate", "--json")
    ran = kvtool("simulate", *words, "--slo", "ttft=100ms")
    assert ran.json["rows"][0]["found_rate"] > 0
    assert "that of a run of 400 requests" in " ".join(ran.json["notes"])
    ran = kvtool("simulate", *words, "--slo", "ttft=1000s")
    assert "400 requests are too few" in ran.err
    assert "give a longer file" in ran.err


def test_shared_prompts_are_confirmed_with_others(kvtool: Callable[..., Any]) -> None:
    words = (*CHAT[:4], "--workload", "agent", "--num-requests", "60", "--prefix-caching")
    ran = kvtool("simulate", *words, "--slo", "ttft=300ms,tpot=20ms", "--find-rate", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["rows"][0]["found_rate_met_share"] >= 0.99
    assert "that of runs of 60 and 120 requests" in " ".join(ran.json["notes"])


def test_nobody_served_is_no_rate() -> None:
    case = case_of(10)
    small = replace(case, settings=replace(case.settings, max_model_len=4))
    with pytest.raises(KvtoolError, match="none of its requests is served"):
        at_highest(small, parse_slo("ttft=1s"), 0)

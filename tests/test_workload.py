"""Made workloads: the same requests in chunks of any size, arrivals, pairs, and the presets."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from kvtool import catalog
from kvtool.errors import USAGE, KvtoolError
from kvtool.lengths import Lengths, parse_lengths
from kvtool.requests import SECOND_NS, Requests
from kvtool.workload import Workload, chunks


def lengths(spec: str, mean: float | None = None, cap: int = 1024, column: int = 0) -> Lengths:
    return parse_lengths(spec, name="--dist", mean=mean, cap=cap, column=column)


PROMPT, OUTPUT = lengths("lognormal", 161.31), lengths("gamma", 337.99)


def workload(num_requests: int, **other: object) -> Workload:
    base = Workload(name="made", prompt=PROMPT, output=OUTPUT, num_requests=num_requests)
    return replace(base, **other)


def joined(made: Workload, size: int) -> dict[str, np.ndarray]:
    parts = list(chunks(made, size))
    assert all(len(part) == size for part in parts[:-1])
    return {
        name: np.concatenate([part.columns()[name] for part in parts])
        for name in parts[0].columns()
    }


@pytest.mark.parametrize("rate", [None, 2.5])
@pytest.mark.parametrize("size", [1, 3, 256, 999, 1000, 5000])
def test_the_requests_do_not_hang_on_the_size_of_the_chunks(rate: float | None, size: int) -> None:
    made = workload(1000, rate=rate, seed=11)
    (whole,) = chunks(made)
    parts = joined(made, size)
    assert set(parts) == {"arrival_ns", "prompt_tokens", "output_tokens"}
    for name, column in whole.columns().items():
        assert column.dtype == np.int64
        assert np.array_equal(parts[name], column)


def test_a_seed_decides_everything_and_another_seed_changes_it() -> None:
    first, again, other = (joined(workload(500, rate=1, seed=seed), 200) for seed in (5, 5, 6))
    for name, column in first.items():
        assert np.array_equal(column, again[name])
        assert not np.array_equal(column, other[name])


def test_a_column_does_not_hang_on_the_others() -> None:
    base = joined(workload(500, rate=1), 500)
    longer = joined(workload(500, rate=4, output=lengths("fixed:9")), 500)
    assert np.array_equal(base["prompt_tokens"], longer["prompt_tokens"])
    # The same gaps, four times closer: each is off by less than a nanosecond.
    assert np.allclose(base["arrival_ns"], 4 * longer["arrival_ns"], rtol=0, atol=4 * 500)
    more = joined(workload(700, rate=1), 500)
    assert all(np.array_equal(base[name], more[name][:500]) for name in base)


def test_lengths_have_their_means_and_prompts_say_nothing_of_outputs() -> None:
    (made,) = chunks(workload(100_000, seed=1))
    assert made.prompt_tokens.mean() == pytest.approx(161.31, rel=0.015)
    assert made.output_tokens.mean() == pytest.approx(337.99, rel=0.015)
    assert abs(np.corrcoef(made.prompt_tokens, made.output_tokens)[0, 1]) < 0.02
    same = workload(1000, prompt=PROMPT, output=PROMPT)
    assert not same.paired
    (made,) = chunks(same)
    assert not np.array_equal(made.prompt_tokens, made.output_tokens)


def test_arrivals_are_poissons() -> None:
    (made,) = chunks(workload(100_000, rate=20, seed=2))
    gaps = np.diff(made.arrival_ns, prepend=0)
    assert gaps.min() >= 0
    assert made.arrival_ns[0] > 0
    assert gaps.mean() == pytest.approx(SECOND_NS / 20, rel=0.015)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.02)
    seconds = np.bincount(made.arrival_ns // SECOND_NS)[:-1]
    assert seconds.var() == pytest.approx(seconds.mean(), rel=0.1)


def test_without_a_rate_all_arrive_at_the_start() -> None:
    assert not any(part.arrival_ns.any() for part in chunks(workload(1000), 300))


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e-9, float("nan")])
def test_a_rate_that_takes_years_is_refused(rate: float) -> None:
    with pytest.raises(KvtoolError, match="more than 4 years") as caught:
        workload(100, rate=rate)
    assert caught.value.exit_code == USAGE


def test_the_slowest_rate_still_fits_its_clock() -> None:
    for count in (1, 1000):
        slow = workload(count, rate=count / 2**27)
        for seed in range(20):
            arrivals = joined(replace(slow, seed=seed), 100)["arrival_ns"]
            assert (np.diff(arrivals, prepend=0) >= 0).all()


def test_two_columns_of_one_file_stay_together(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text("".join(f"{n},{1000 - n}\n" for n in range(1, 1000)))
    spec = f"empirical:{file}"
    made = workload(5000, prompt=lengths(spec), output=lengths(spec, column=1), seed=3)
    assert made.paired
    parts = joined(made, 700)
    assert (parts["prompt_tokens"] + parts["output_tokens"] == 1000).all()
    assert len(np.unique(parts["prompt_tokens"])) > 900
    other = tmp_path / "other.csv"
    other.write_text(file.read_text())
    apart = replace(made, output=lengths(f"empirical:{other}", column=1))
    assert not apart.paired
    (drawn,) = chunks(apart)
    assert not (drawn.prompt_tokens + drawn.output_tokens == 1000).all()


def test_one_column_for_both_is_drawn_twice(tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("".join(f"{n}\n" for n in range(1, 1000)))
    one = lengths(f"empirical:{file}")
    made = workload(1000, prompt=one, output=one)
    assert not made.paired
    (drawn,) = chunks(made)
    assert not np.array_equal(drawn.prompt_tokens, drawn.output_tokens)


def test_ten_million_requests_are_a_stream() -> None:
    stream = chunks(workload(10**7, rate=100), size=1 << 15)
    next(stream)
    tracemalloc.start()
    before = -1
    for part in itertools.islice(stream, 12):
        assert isinstance(part, Requests)
        assert part.arrival_ns[0] >= before
        before = part.arrival_ns[-1]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * 8 * (1 << 15)  # a dozen columns of one chunk, never the whole


# Presets


@pytest.mark.parametrize("preset", catalog.workload_presets(), ids=lambda preset: preset.id)
def test_every_preset_makes_requests(preset: catalog.WorkloadPreset) -> None:
    sides = [
        parse_lengths(dist, name=preset.id, mean=mean, cap=cap)
        for dist, mean, cap in (
            (preset.prompt_dist, preset.prompt_mean, preset.prompt_cap),
            (preset.output_dist, preset.output_mean, preset.output_cap),
        )
    ]
    made = workload(50_000, prompt=sides[0], output=sides[1], rate=preset.rate)
    (drawn,) = chunks(made)
    assert drawn.prompt_tokens.mean() == pytest.approx(sides[0].mean, rel=0.02)
    assert drawn.output_tokens.mean() == pytest.approx(sides[1].mean, rel=0.02)
    assert preset.source
    assert preset.note


def test_a_workload_answers_to_its_name_in_any_case() -> None:
    paper = catalog.workload_preset("vLLM_paper")
    assert paper is not None
    assert paper in catalog.workload_presets()
    assert (paper.pool_tokens, paper.max_model_len, paper.block_size) == (15_728, 2048, 16)
    assert paper.placement == "buddy"
    with pytest.raises(KvtoolError, match="no workload is called 'chatt'") as caught:
        catalog.workload_preset("chatt")
    assert caught.value.exit_code == USAGE
    assert caught.value.hint == "Did you mean chat? kvtool presets workloads lists them"


def test_no_name_is_shared_with_another_kind() -> None:
    names = [name for kind in catalog.KINDS for name in catalog.preset_ids(kind)]
    assert len(set(names)) == len(names)
    for preset in catalog.workload_presets():
        for name in (preset.id, *preset.aliases):
            assert catalog.preset_text(name)[0] == "workloads"
            assert catalog.workload_preset(name) == preset


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt_caps": 3}, "prompt_caps: Unexpected keyword argument"),
        ({"prompt_cap": "3"}, "prompt_cap: "),
        ({"source": None}, "source: "),
    ],
)
def test_a_wrong_key_is_reported_by_name(change: dict[str, object], named: str) -> None:
    chat = catalog.workload_preset("chat")
    row = {one.name: getattr(chat, one.name) for one in fields(chat)}
    assert catalog.validate(catalog.WorkloadPreset, [row]) == (chat,)
    with pytest.raises(KvtoolError, match=f"preset chat: {named}"):
        catalog.validate(catalog.WorkloadPreset, [row | change])

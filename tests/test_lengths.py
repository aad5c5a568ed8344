"""Lengths: what a spec means, the mean after the cut, and that pieces are the whole."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtool import lengths_file
from kvtool.errors import USAGE, KvtoolError
from kvtool.lengths import DISTRIBUTIONS, Lengths, parse_lengths, sampler

SCALED = [
    "zipf", "zipf:a=1.2", "zipf:a=3", "lognormal", "lognormal:sigma=0.3", "lognormal:sigma=2",
    "uniform", "exponential", "geometric", "gamma", "gamma:shape=0.3", "gamma:shape=90",
    "pareto", "pareto:alpha=1.1",
]  # fmt: skip
OWN = ["fixed:161", "uniform:low=10,high=500"]


def parse(
    spec: str, mean: float | None = None, cap: int = 1024, *, column: int = 0,
    default_mean: float | None = None,
) -> Lengths:  # fmt: skip
    return parse_lengths(
        spec, name="--prompt", mean=mean, cap=cap, default_mean=default_mean, column=column
    )


def draw(lengths: Lengths, count: int, seed: int = 0) -> np.ndarray:
    return sampler(lengths)(np.random.default_rng(seed), count)


def refused(spec: str, mean: float | None = None, cap: int = 1024) -> KvtoolError:
    with pytest.raises(KvtoolError) as caught:
        parse(spec, mean, cap)
    assert "--prompt" in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(("mean", "cap"), [(161.31, 1024), (700, 1024), (4.5, 64), (300, 3000)])
@pytest.mark.parametrize("spec", SCALED)
def test_the_mean_after_the_cut_is_the_mean_asked_for(spec: str, mean: float, cap: int) -> None:
    lengths = parse(spec, mean, cap)
    values = draw(lengths, 200_000, seed=7)
    assert values.dtype == np.int64
    assert values.min() >= 1
    assert values.max() <= cap
    assert lengths.mean == mean
    # 1 %, and what chance alone may do to the mean of so many values
    chance = 4 * values.std() / math.sqrt(len(values))
    assert abs(values.mean() - mean) < max(0.01 * mean, chance)
    assert abs((values == cap).mean() - lengths.clipped_share) < 0.01


@pytest.mark.parametrize("spec", SCALED)
def test_the_mean_is_right_to_a_thousandth_when_chance_is_small(spec: str) -> None:
    values = draw(parse(spec, 400, 1024), 1_000_000)
    assert abs(values.mean() - 400) < 400e-3 + 4 * values.std() / 1000


@pytest.mark.parametrize("spec", [*SCALED, *OWN, "fixed", "empirical:{csv}", "empirical:{cdf}"])
def test_the_same_seed_gives_the_same_values_in_pieces_of_any_size(
    spec: str, tmp_path: Path
) -> None:
    csv, cdf = tmp_path / "a.csv", tmp_path / "a.json"
    csv.write_text("".join(f"{n},{2 * n}\n" for n in range(1, 1000)))
    cdf.write_text("[[10, 0.25], [100, 0.5], [1000, 1]]")
    own = spec in OWN or "{" in spec
    lengths = parse(spec.format(csv=csv, cdf=cdf), None if own else 161.31)
    whole = draw(lengths, 10_000, seed=3)
    again = parse(spec.format(csv=csv, cdf=cdf), None if own else 161.31)
    assert np.array_equal(whole, draw(again, 10_000, seed=3))
    sample, rng = sampler(lengths), np.random.default_rng(3)
    pieces = [sample(rng, count) for count in (1, 7, 992, 1, 4999, 3000, 1000)]
    assert np.array_equal(whole, np.concatenate(pieces))
    if not spec.startswith("fixed"):
        assert not np.array_equal(whole, draw(lengths, 10_000, seed=4))


def test_shapes_are_what_their_names_say() -> None:
    n = 400_000
    cap = 10**9
    lognormal = np.log(draw(parse("lognormal:sigma=0.7", 10_000, cap), n))
    assert lognormal.std() == pytest.approx(0.7, rel=0.01)
    exponential = draw(parse("exponential", 10_000, cap), n)
    assert np.median(exponential) == pytest.approx(10_000 * math.log(2), rel=0.01)
    gamma = draw(parse("gamma:shape=4", 10_000, cap), n)
    assert gamma.std() == pytest.approx(5_000, rel=0.01)
    pareto = draw(parse("pareto:alpha=3", 30_000, cap), n)  # the least is 20,000
    assert pareto.min() == pytest.approx(20_000, rel=1e-3)
    assert (pareto > 40_000).mean() == pytest.approx(1 / 8, rel=0.02)
    uniform = draw(parse("uniform", 50.5, cap), n)
    assert set(np.unique(uniform)) == set(range(1, 101))


def test_zipf_at_a_scale_of_one_is_zipfs_law() -> None:
    a, cap = 1.6, 10_000
    k = np.arange(1, 10**7, dtype=float)
    zeta = (k**-a).sum() + (10**7 - 0.5) ** (1 - a) / (a - 1)
    chance = k[: cap - 1] ** -a / zeta
    mean = (k[: cap - 1] * chance).sum() + cap * (1 - chance.sum())
    lengths = parse("zipf", mean, cap)
    assert lengths.scale == pytest.approx(1, rel=0.01)
    values = draw(lengths, 1_000_000)
    for length in (1, 2, 3, 10):
        assert (values == length).mean() == pytest.approx(chance[length - 1], rel=0.05)
    assert (values > 2000).mean() == pytest.approx(1 - chance[:2000].sum(), rel=0.05)


def test_geometric_is_an_end_with_the_same_chance_after_each_token() -> None:
    values = draw(parse("geometric", 20, 10**6), 400_000)
    for after in (1, 10, 30):
        left = values[values >= after]
        assert (left == after).mean() == pytest.approx(1 / 20, rel=0.04)


def test_lengths_with_a_mean_of_their_own() -> None:
    assert set(draw(parse("fixed:161"), 9)) == {161}
    assert set(draw(parse("fixed:tokens=2k", cap=4096), 9)) == {2048}
    assert set(draw(parse("fixed", 161.31), 9)) == {161}
    assert parse("fixed", 161.31).mean == 161
    assert set(draw(parse("fixed", 1024), 9)) == {1024}
    uniform = parse("uniform:low=5,high=8", default_mean=99)
    assert (uniform.mean, uniform.clipped_share) == (pytest.approx(6.5), 0)
    values, counts = np.unique(draw(uniform, 40_000), return_counts=True)
    assert list(values) == [5, 6, 7, 8]
    assert counts.min() > 9_700
    assert set(draw(parse("uniform:low=7,high=7"), 9)) == {7}


def test_what_the_cap_cuts_is_counted() -> None:
    cut = parse("uniform:low=1,high=2048", cap=1024)
    assert cut.clipped_share == pytest.approx(0.5)
    assert cut.mean == pytest.approx(512.25 + 256, rel=1e-3)
    assert draw(cut, 100_000).mean() == pytest.approx(cut.mean, rel=0.01)
    fixed = parse("fixed:2000")
    assert (fixed.mean, fixed.clipped_share) == (1024, 1)
    assert parse("exponential", 161.31).clipped_share == pytest.approx(0.0017, abs=2e-4)
    assert set(draw(parse("uniform:low=2000,high=3000"), 9)) == {1024}


def test_a_default_mean_counts_when_none_is_given() -> None:
    assert parse("lognormal", default_mean=161.31).mean == 161.31
    assert parse("lognormal", 50, default_mean=161.31).mean == 50
    assert "needs a mean" in refused("lognormal").message


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("zpif", "no distribution 'zpif'", "Did you mean zipf?"),
        ("", "no distribution ''", "lognormal"),
        ("log-normal:sigma=1", "no distribution 'log-normal'", "Did you mean lognormal?"),
        ("lognormal:sgima=1", "does not take 'sgima=1'", "Did you mean sigma?"),
        ("zipf:1.6", "does not take '1.6'", "zipf:a=NUMBER"),
        ("zipf:", "does not take ''", "zipf:a=NUMBER"),
        ("zipf:a=1", "'1' is not a number from 1.01 to 20", "default of 1.6"),
        ("zipf:a=nan", "'nan' is not a number", "1.6"),
        ("zipf:a=", "'' is not a number", "1.6"),
        ("lognormal:sigma=-1", "'-1' is not a number", "default of 1"),
        ("lognormal:sigma=inf", "'inf' is not a number", "default of 1"),
        ("gamma:shape=0", "'0' is not a number", "default of 2"),
        ("pareto:alpha=x", "'x' is not a number", "default of 2.5"),
        ("pareto:alpha=2,alpha=3", "has alpha twice", "once"),
        ("exponential:rate=2", "takes no parameters", "exponential alone"),
        ("geometric:", "takes no parameters", "geometric alone"),
        ("fixed:x", "'x' is not a whole number", "8192"),
        ("fixed:0", "0 is out of range", "1 to"),
        ("fixed:", "'' is not a whole number", "8192"),
        ("uniform:low=1", "is no range", "both ends"),
        ("uniform:low=9,high=3", "is no range", "both ends"),
        ("uniform:low=1.5,high=3", "'1.5' is not a whole number", "8192"),
        ("empirical", "needs a file", "empirical:FILE"),
    ],
)
def test_a_spec_that_means_nothing(spec: str, message: str, hint: str) -> None:
    error = refused(spec)
    assert error.exit_code == USAGE
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    ("spec", "mean", "message"),
    [
        ("zipf", 1024, "cut at 1,024 tokens zipf cannot have a mean of 1,024"),
        ("lognormal", 5000, "cannot have a mean of 5,000"),
        ("uniform", math.inf, "cannot have a mean of inf"),
        ("fixed", 1025, "cannot have a mean of 1,025"),
        ("gamma", 0.5, "0.5 tokens is too small"),
        ("gamma", math.nan, "nan tokens is too small"),
        ("gamma", -3, "-3 tokens is too small"),
        ("fixed:161", 200, "fixed:161 has a mean of its own"),
        ("uniform:low=1,high=9", 7, "has a mean of its own"),
    ],
)
def test_a_mean_that_cannot_be(spec: str, mean: float, message: str) -> None:
    error = refused(spec, mean)
    assert error.exit_code == USAGE
    assert message in error.message


def test_a_mean_that_no_scale_gives_is_an_error_with_the_nearest() -> None:
    # One in 1,200 lies beyond what a float holds: it is cut at the cap, whatever the scale.
    error = refused("zipf:a=1.01", 161.31, 10**6)
    assert "no scale gives" in error.message
    assert "the nearest is" in error.message


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=30),
        st.builds(
            "{}:{}={}".format,
            st.sampled_from([*DISTRIBUTIONS]),
            st.sampled_from(["a", "sigma", "shape", "alpha", "low", "tokens", ""]),
            st.one_of(st.floats().map(str), st.integers().map(str), st.text(max_size=5)),
        ),
        st.builds("empirical:{}".format, st.text(max_size=10)),
    ),
    st.one_of(st.none(), st.floats(), st.floats(1, 1024)),
)
@example("empirical:\0", None)
@example("empirical:\ud800", None)
@example("fixed:" + "9" * 5000, None)
def test_no_text_ends_in_anything_but_lengths_or_an_error(spec: str, mean: float | None) -> None:
    try:
        lengths = parse(spec, mean)
    except KvtoolError:
        return
    values = draw(lengths, 50)
    assert 1 <= values.min() <= values.max() <= 1024
    assert 1 <= lengths.mean <= 1024
    assert 0 <= lengths.clipped_share <= 1


# Files


def test_a_column_is_drawn_with_replacement(tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("\ufefftokens\r\n5\r\n\r\n7\r\n3000\r\n", "utf-8")
    lengths = parse(f"empirical:{file}", default_mean=161)
    assert lengths.mean == pytest.approx((5 + 7 + 1024) / 3)
    assert lengths.clipped_share == pytest.approx(1 / 3)
    assert lengths.num_columns == 1
    values, counts = np.unique(draw(lengths, 30_000), return_counts=True)
    assert list(values) == [5, 7, 1024]
    assert counts.min() > 9_500
    assert np.array_equal(draw(parse(f"empirical:{file}", column=1), 99), draw(lengths, 99))


def test_of_two_columns_the_second_is_the_output(tmp_path: Path) -> None:
    file = tmp_path / "two.csv"
    file.write_text("prompt, output\n10,1\n20,2\n")
    prompt, output = parse(f"empirical:{file}"), parse(f"empirical: {file}", column=1)
    assert (prompt.num_columns, output.num_columns) == (2, 2)
    assert (prompt.mean, output.mean) == (15, 1.5)
    assert np.array_equal(draw(prompt, 99), 10 * draw(output, 99))


def test_a_cumulative_distribution_is_even_between_its_points(tmp_path: Path) -> None:
    file = tmp_path / "cdf.json"
    file.write_text(json.dumps([[4, 0.0], [8, 0.5], [10, 0.5], [2000, 0.9], [4000, 1]]))
    lengths = parse(f"empirical:{file}", cap=2000)
    values = draw(lengths, 200_000)
    assert values.min() == 5
    for length in (5, 6, 7, 8):
        assert (values == length).mean() == pytest.approx(0.125, rel=0.03)
    assert not ((values > 8) & (values <= 10)).any()
    assert (values == 2000).mean() == pytest.approx(0.1, rel=0.03)
    assert lengths.clipped_share == pytest.approx(0.1, rel=1e-3)
    assert lengths.mean == pytest.approx(values.mean(), rel=0.01)
    file.write_text("[[4, 1]]")
    assert set(draw(parse(f"empirical:{file}"), 200)) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("prompt\n", "no line below the header"),
        ("prompt\n5\nsix\n", "line 3 holds 'six'"),
        ("5\nprompt\n", "line 2 holds 'prompt'"),
        ("5,\n6,7\n", "line 1 holds '5,'"),
        ("5,output\n6,7\n", "line 1 holds '5,output'"),
        ("1.5\n", "line 1 holds '1.5'"),
        ("header\n\n1,2,3\n", "line 3 does not have 1 or 2 columns"),
        ("1,2\n3\n", "line 2 does not have as many columns"),
        ("a\n1\n\n0\n", "line 4: tokens are counted from 1"),
        ("1,-2\n", "line 1: tokens are counted from 1"),
        ("9" * 18, "line 1: tokens are counted from 1 to"),
        ("5\n\n" + "9" * 30, "line 3 holds '9999"),
        ("9" * 5000, "line 1 holds"),
        ("{}", "not a list of pairs"),
        ("[]", "not a list of pairs"),
        ("[1, 2]", "entry 1 is not [tokens"),
        ("[[1, 0.5], [2]]", "entry 2 is not [tokens"),
        ("[[1, true]]", "entry 1 is not [tokens"),
        ("[[0, 1]]", "entry 1 is not [tokens"),
        ("[[1.5, 1]]", "entry 1 is not [tokens"),
        ("[[Infinity, 1]]", "entry 1 is not [tokens"),
        ("[[NaN, 1]]", "entry 1 is not [tokens"),
        ("[[1, NaN]]", "entry 1 does not rise"),
        ("[[5, 0.5], [5, 1]]", "entry 2 does not rise"),
        ("[[5, 0.5], [6, 0.4]]", "entry 2 does not rise"),
        ("[[5, 1.5]]", "entry 1 does not rise"),
        ("[[5, 0.5]]", "the last share is 0.5, not 1"),
        ("[[5, 0.5],\n [", "line 2, column 3"),
        ("[" * 100_000, "nested too deeply"),
        ("[[" + "9" * 5000 + ", 1]]", "thousands of digits"),
    ],
)
def test_a_file_that_holds_no_lengths(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "wrong"
    file.write_text(text)
    error = refused(f"empirical:{file}")
    assert why in error.message
    assert "one or two columns" in error.hint
    assert error.code in ("empty", "unreadable")


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(f"empirical:{tmp_path}/none.csv").code == "not_found"
    assert "not a regular file" in refused(f"empirical:{tmp_path}").message
    assert "not a regular file" in refused("empirical:/dev/zero").message
    file = tmp_path / "a.csv"
    file.write_bytes(b"\xff\xfe5\n")
    assert "not valid UTF-8" in refused(f"empirical:{file}").message
    file.write_text("12345\n")
    assert "has a mean of its own" in refused(f"empirical:{file}", 7).message
    monkeypatch.setattr(lengths_file, "MAX_BYTES", 5)
    assert refused(f"empirical:{file}").code == "too_large"


def test_to_import_it_is_cheap() -> None:
    code = "import sys, kvtool.lengths, kvtool.workload; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

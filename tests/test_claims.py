"""Published claims: their commands run, their figures are there, and docs/claims.md is what they give."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtool.catalog import claim_preset, claim_presets

ROOT = Path(__file__).parents[1]
CLAIMS = claim_presets()
PAGE = (ROOT / "docs/claims.md").read_text("utf-8")
QUICK = ("paging-waste", "recompute-or-swap")
COMMANDS = [(claim.id, run, command) for claim in CLAIMS for run, command in claim.runs.items()]


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("claims", ROOT / "scripts/claims.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["claims"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


claims = _script()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_every_figure_is_of_a_run_in_a_known_unit_and_every_run_is_used(claim):
    figures = claims.figures_of(claim)
    assert {one.run for one in figures} | {one.over for one in figures} - {None} == set(claim.runs)
    for one in figures:
        assert one.unit in claims.UNITS
        assert (one.low is None and one.high is None) or one.published != "–"
        assert one.over is not None or not (one.over_where or one.over_within or one.over_field)


@pytest.mark.parametrize(("name", "run", "command"), COMMANDS, ids=lambda word: str(word)[:40])
def test_every_command_runs_and_its_rows_have_what_is_read_of_them(name, run, command):
    few = "800" if "--find-rate" in command else "40"  # of fewer any rate keeps the objective
    rows = claims.rows_of(command, "--num-requests", few)
    for one in claims.figures_of(claim_preset(name)):
        for of, field, where, within in (
            (one.run, one.field, one.where, one.within),
            (one.over, one.over_field or one.field, one.over_where, one.over_within),
        ):
            if of != run:
                continue
            found = [row for row in rows if where.items() <= row.items()]
            assert found, (one.name, where)
            for field_name in (field, *within, *([one.per] if one.per else [])):
                assert isinstance(found[0][field_name], int | float), (one.name, field_name)


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_claim_gives_what_the_page_has(name):
    text, cells = claims.section(claim_preset(name))
    assert claims.without_times(text) in claims.without_times(PAGE)
    assert f"; of its figures, reproduced: {claims.together(cells)}.**" in text
    assert all(f"| {' | '.join(line)} |" in text for line in cells)


@pytest.mark.slow
def test_the_page_is_what_all_claims_give():
    assert claims.without_times(claims.page(CLAIMS)) == claims.without_times(PAGE)


def test_the_page_has_every_claim_its_commands_and_a_link():
    for claim in CLAIMS:
        assert f"\n## {claim.id}: {claim.name}\n" in PAGE
        assert f"(#{claims.anchor(claim)})" in PAGE
        for command in claim.runs.values():
            assert f"\nkvtool {claims.filled(command)}\n" in PAGE


def test_a_law_in_a_command_is_that_of_the_roofline():
    from kvtool.cli.scheduler_options import scheduler_grid
    from kvtool.config import load_config
    from kvtool.prefill import prefill_of
    from kvtool.step_law import law_of

    told = claims.filled("fragment --step-time {law:opt-13b,a100-40gb,fp16},swap_ns=7 --seed 1")
    assert told.startswith("fragment --step-time base_ns=1000000,")
    assert told.endswith(",swap_ns=7 --seed 1")
    words = told.split()[2].removesuffix(",swap_ns=7")
    law = law_of(prefill_of(load_config, "opt-13b", gpu="a100-40gb", dtype="fp16")).step_time
    (typed,) = scheduler_grid({"step_time": words})
    assert typed["step_time"] == law


def test_no_command_has_a_law_typed_out():
    for claim in CLAIMS:
        for command in claim.runs.values():
            assert "read_ns=" not in command
            assert "{" not in claims.filled(command)


def test_a_shell_takes_the_commands_of_the_page_as_they_are():
    for line in PAGE.splitlines():
        if line.startswith("kvtool "):
            assert re.fullmatch(r"[\w .,:=/-]+", line, re.ASCII), line


def figure(**more: Any) -> Any:
    return claims.Figure(**{"name": "f", "run": "a", "field": "x", **more})


ROWS = {
    "a": [{"x": 2, "at": "1", "n": 4, "late": 1.0}, {"x": 6, "at": "2", "n": 2, "late": 3.0}],
    "b": [{"x": 4, "y": 8}],
}


@pytest.mark.parametrize(
    ("more", "value"),
    [
        ({}, 2),
        ({"where": {"at": "2"}}, 6),
        ({"where": {"at": "2"}, "per": "n"}, 3),
        ({"within": {"late": 3.0}}, 6),
        ({"within": {"late": 2.0}}, 2),
        ({"over": "b"}, 0.5),
        ({"over": "b", "over_field": "y"}, 0.25),
        ({"over": "a", "over_where": {"at": "2"}}, 1 / 3),
        ({"over": "a", "over_within": {"late": 3.0}}, 1 / 3),
    ],
)
def test_a_figure_is_a_field_or_a_ratio_of_two(more, value):
    assert figure(**more).value(ROWS) == pytest.approx(value)


def test_a_row_that_is_not_there_ends_the_script_by_name():
    with pytest.raises(SystemExit, match="f: no row of a"):
        figure(where={"at": "3"}).value(ROWS)


@pytest.mark.parametrize(
    ("low", "high", "value", "verdict"),
    [
        (None, None, 1.0, "–"),
        (4.0, 4.0, 3.6, "yes"),
        (4.0, 4.0, 3.59, "no"),
        (4.0, 4.0, 4.4, "yes"),
        (4.0, 4.0, 4.41, "no"),
        (2.0, 4.0, 1.99, "no"),
        (2.0, 4.0, 4.01, "no"),
        (2.0, 4.0, 4.0, "yes"),
        (1.0, 1.1, 1.13, "no"),
        (None, 0.04, 0.0, "yes"),
        (None, 0.04, 0.0401, "no"),
        (2.0, None, 1e9, "yes"),
        (2.0, 4.0, 0.99, "reversed"),
        (4.3, 4.3, 0.5, "reversed"),
        (None, 0.9, 1.01, "reversed"),
        (None, 0.9, 1.004, "no"),
        (0.8, 1.2, 1.3, "no"),
        (None, 1.25, 1.3, "no"),
    ],
)
def test_a_printed_value_may_be_a_tenth_off_and_a_range_or_limit_is_one(low, high, value, verdict):
    assert figure(low=low, high=high, unit="x").verdict(value) == verdict


def test_only_a_ratio_can_be_reversed():
    assert figure(low=2.0, high=4.0, unit="/s").verdict(0.5) == "no"


def test_what_is_reproduced_is_counted_of_what_was_published():
    cells = [("f", "p", "o", verdict) for verdict in ("reversed", "yes", "–", "no", "yes")]
    assert claims.together(cells) == "2 of 4"
    assert claims.together(cells[2:3]) == "0 of 0"


def test_a_figure_says_what_it_assumes():
    assert figure(assumes="5 µs a copy").title == "f (assumes 5 µs a copy)"
    assert figure().title == "f"


def test_values_have_three_digits_and_their_unit():
    shown = [figure(unit=unit).shown(0.05) for unit in ("%", "ms", "x", "")]
    assert shown == ["5.00 %", "50.0 ms", "0.0500x", "0.0500"]
    assert figure(unit="x").shown(1234.5) == "1,234x"


def test_names_are_printed_and_the_page_is_written_whole_or_not_at_all(capsys):
    assert claims.main(["paging-waste"]) == 0
    assert capsys.readouterr().out.startswith("## paging-waste: ")
    assert claims.main(["--write", "paging-waste"]) == 2
    assert "every claim" in capsys.readouterr().err

"""Whole plans against what vLLM printed as it started (tests/data/engine_logs_more.jsonl)."""

from __future__ import annotations

import pytest
from scripts_of import script

MORE = script("accuracy_more")
ROWS = MORE.rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_what_was_printed_is_what_is_planned(row: dict[str, object]) -> None:
    found = MORE.outcome(row)
    assert not found.error
    assert found.weights_off is not None or found.is_inside is not None
    expected = {
        what for what, why in (("weights", MORE.WEIGHTS), ("pool", MORE.POOLS)) if row["id"] in why
    }
    assert {what for what, _ in found.off} == expected

"""Whole plans against what vLLM printed as it started (tests/data/engine_logs_more.jsonl)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def script() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "accuracy_more.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


MORE = script()
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

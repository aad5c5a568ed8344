"""Printed KV pools against the range that kvtool gives, a row each: inside or outside, and why.

python scripts/engine_memory.py               the rows in tests/data
python scripts/engine_memory.py FILE.jsonl    rows of the same form
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from kvtool.units import GIB

TESTS = Path(__file__).parents[1] / "tests" / "test_engine_memory.py"


def main() -> None:
    rules = _rules()
    rows = rules.POOLS + [row for row in rules.PEAKS if "kv_gib" in row]
    if len(sys.argv) > 1:
        rows = [json.loads(line) for line in Path(sys.argv[1]).read_text("utf-8").splitlines()]
    for row in rows:
        print(_line(rules, row))


def _line(rules: ModuleType, row: dict[str, Any]) -> str:
    found = rules.pool(row)
    ends = [one / GIB for one in (found.low, found.best, found.high)]
    ratio = f"{ends[2] / ends[0]:.2f}" if ends[0] > 0 else "-"
    where = "inside" if rules.inside(row["kv_gib"], found) else "OUTSIDE"
    listed = " ".join(f"{one:8.2f}" for one in ends)
    why = row.get("outside", "")
    return f"{rules.name(row):34} {row['kv_gib']:8.2f} {listed} {ratio:>6} {where} {why}".rstrip()


def _rules() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_engine_memory", TESTS)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{TESTS} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()

"""How `kvtool bench decode` looks."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.run import Row
from kvtool.view import Chart, Table


def tables(rows: Sequence[Row]) -> list[Table]:
    return []


def sentences(rows: Sequence[Row]) -> list[str]:
    return []


def charts(rows: Sequence[Row]) -> tuple[Chart, ...]:
    return ()

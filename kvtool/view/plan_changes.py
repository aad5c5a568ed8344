"""What a plan is told to change: what would make it fit, what each lever gains, and at which risk.

A change is shown as it is typed, to be pasted; what it may cost besides is numbered below the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.run import Row
from kvtool.view import Table
from kvtool.view.plan_columns import Column, table
from kvtool.view.plan_words import fits_in_doubt
from kvtool.view.words import number, rate, seconds, share, usd

MOST = 10
"""Of what would make it fit; JSON has all."""
_BETWEEN = re.compile(r";\s+(?![^(]*\))")
"""What parts caveats, but for one inside brackets, which names sources."""

Change = Mapping[str, Any]


def tables(row: Row) -> list[Table]:
    """What would make it fit, or what each lever gains."""
    made = (_ways(row), _levers(row.get("levers"), _numbers(_shown(row))))
    return [one for one in made if one is not None]


def sentences(row: Row) -> list[str]:
    """The caveats of the tables, each once, by its number; why some of the changes have no TPOT."""
    shown = _shown(row)
    said = [f"({place}) {text}." for text, place in _numbers(shown).items()]
    if any(fits_in_doubt(one) for one in _fitting(row)[:MOST]):
        said.append("*: by the best estimate of the memory, not by the lowest.")
    if any(one["tpot_s"] is None for one in shown) and any(one["tpot_s"] for one in shown):
        said.append("Where TPOT is –, the GPU's peak rate in the model's dtype is not known.")
    return said


def _fitting(row: Row) -> list[Change]:
    return [one for one in row.get("alternatives") or () if one["fits"]]


def _shown(row: Row) -> list[Change]:
    return [*_fitting(row)[:MOST], *(row.get("levers") or ())]


def _caveats(change: Change) -> list[str]:
    text = str(change.get("caveat") or "")
    return [one for one in _BETWEEN.split(text) if one]


def _numbers(changes: Sequence[Change]) -> dict[str, int]:
    """Each caveat's number, in the order in which they come."""
    found = dict.fromkeys(text for one in changes for text in _caveats(one))
    return {text: place for place, text in enumerate(found, start=1)}


def _see(changes: Sequence[Change], numbers: Mapping[str, int]) -> Column:
    cells = tuple(", ".join(str(numbers[text]) for text in _caveats(one)) for one in changes)
    return Column(name="see", cells=cells, right=False)


def _ways(row: Row) -> Table | None:
    ways = _fitting(row)
    if not ways:
        return None
    shown = ways[:MOST]
    more = f"; {MOST} of {len(ways):,}" if len(ways) > MOST else ""
    return table(
        [
            Column(name="flags", cells=tuple(one["flags"] for one in shown), right=False),
            _column("requests", [_held(one) for one in shown]),
            _column("TPOT", [seconds(one["tpot_s"]) for one in shown]),
            _column("USD/h", [usd(one["usd_per_hour"]) for one in shown]),
            _see(shown, _numbers(_shown(row))),
        ],
        title=f"What would make it fit: same GPUs first, more of them, then others by price{more}",
    )


def _held(one: Change) -> str:
    """With a star where the lowest estimate of the memory does not hold what is asked."""
    return str(share(one["max_concurrency"])) + "*" * fits_in_doubt(one)


def _levers(rows: Sequence[Change] | None, numbers: Mapping[str, int]) -> Table | None:
    if not rows:
        return None
    saved = [one["tpot_gained_s"] or 0 for one in rows]
    return table(
        [
            Column(name="flags", cells=tuple(one["flags"] for one in rows), right=False),
            _column("requests", [number(one["users"]) for one in rows]),
            _column("gained", [_signed(one["users_gained"]) for one in rows]),
            _column("TPOT", [seconds(one["tpot_s"]) for one in rows]),
            _column("saved", [_saved(one) for one in saved], rank=1),
            _see(rows, numbers),
        ],
        title=f"What each change gains: requests at a time, and TPOT at {_batch(rows)}",
    )


def _saved(gained: float) -> str:
    """Below zero: a token takes longer."""
    return "–" if not gained else seconds(gained) if gained > 0 else f"-{seconds(-gained)}"


def _batch(rows: Sequence[Change]) -> str:
    """The batch at which all of them are compared."""
    batch = rows[0].get("batch")
    return "the same batch" if batch is None else f"a batch of {rate(batch)}"


def _column(name: str, cells: Sequence[str], rank: int = 0) -> Column:
    return Column(name=name, cells=tuple(cells), rank=rank)


def _signed(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:+,.0f}" if abs(value) >= 1e4 else f"{value:+,.4g}"

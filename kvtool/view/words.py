"""Words that several views share: amounts, counts with their noun, and what tells rows apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtool.run import Row
from kvtool.units import format_bytes

APART = ("kv_dtype", "tp", "pp", "dcp", "dp", "block_size")
"""What rows of one model and engine may differ in besides context and batch."""


def counted(count: int, noun: str) -> str:
    """'1 token', '8,192 tokens'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def number(count: int | None) -> str:
    """'8,192', or a dash for what has no number."""
    return "–" if count is None else f"{count:,}"


def amount(count: int | None) -> str:
    """Bytes for people, or a dash for what has no size."""
    return "–" if count is None else format_bytes(count)


def times(batch: int) -> str:
    """' × 16 sequences'; nothing for one."""
    return f" × {batch:,} sequences" if batch > 1 else ""


def ranks(row: Row) -> int:
    """GPUs that a row's cache is spread over."""
    return int(row["tp"] * row["pp"] * row["dp"])


def told_apart(row: Row, rows: Iterable[Row]) -> str:
    """', fp8, tp 8': what this row does not share with the others of its model and engine."""
    alike = [r for r in rows if (r["model"], r["engine"]) == (row["model"], row["engine"])]
    varying = [name for name in APART if len({r[name] for r in alike}) > 1]
    return "".join(f", {word}" for word in words_of(row, varying))


def words_of(row: Row, names: Iterable[str]) -> list[str]:
    """Each named field in words; one without a value is left out."""
    return [_in_words(name, row[name]) for name in names if row[name] is not None]


def _in_words(name: str, value: object) -> str:
    if name in ("engine", "kv_dtype"):
        return str(value)
    if name == "link_bits_per_s" and isinstance(value, int):
        return f"link {value / 1e9:,g} Gb/s"
    return f"{name.replace('_', ' ')} {value}"


def rate(value: float | None) -> str:
    """Three digits, or whole above a hundred."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def millions(value: float | None) -> str:
    """'2.32 M', '12,345', or a dash for no number."""
    if value is None or value < 100_000:
        return rate(value)
    return f"{value / 1e6:,.3g} M"


def seconds(value: float | None) -> str:
    """'1.23 s', '45.6 ms', '789 µs', or a dash for no time."""
    if value is None:
        return "–"
    if value >= 1:
        return f"{value:,.0f} s" if value >= 1000 else f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def share(value: Any) -> str:
    """A concurrency for people."""
    if value is None:
        return "without end"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"


def usd(value: float | None) -> str:
    """Dollars for people."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.3g}"

"""Numbers as people type and read them: token counts, memory, lists and ranges."""

from __future__ import annotations

import re

from kvtool.errors import usage_error

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_COUNT_SUFFIX = {"": 1, "k": 1024, "m": 1024**2}
_MEMORY_SUFFIX = {
    "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
MAX_COUNT = 2**40
MAX_LIST = 1000


def parse_count(text: str, *, name: str, low: int = 1, high: int = MAX_COUNT) -> int:
    """A whole number, `k` = 1024 and `m` = 1024²: '8k' is 8192."""
    match = re.fullmatch(r"([+-]?[0-9]{1,18})([kKmM]?)", text.strip())
    if match is None:
        raise usage_error(
            f"{name}: '{text}' is not a whole number",
            f"write digits, with k (1024) or m (1024²) if you like: {name} 8192 or {name} 8k",
        )
    value = int(match[1]) * _COUNT_SUFFIX[match[2].lower()]
    if not low <= value <= high:
        raise usage_error(f"{name}: {value:,} is out of range", f"{name} takes {low:,} to {high:,}")
    return value


def parse_counts(text: str, *, name: str, low: int = 1, high: int = MAX_COUNT) -> list[int]:
    """A list and ranges of counts: '1,64', '1..64*2' (doubling), '0..100+25', '1..4'."""
    values: list[int] = []
    for part in text.split(","):
        if ".." in part:
            values += _expand(part, name=name, low=low, high=high)
        else:
            values.append(parse_count(part, name=name, low=low, high=high))
        if len(values) > MAX_LIST:
            raise usage_error(f"{name}: more than {MAX_LIST} values", "use a coarser range")
    return values


def _expand(text: str, *, name: str, low: int, high: int) -> list[int]:
    match = re.fullmatch(r"([^.*+]+)\.\.([^.*+]+)(?:([*+])([^*+]+))?", text.strip())
    if match is None:
        raise usage_error(
            f"{name}: '{text}' is not a range", f"write {name} 1..64*2, {name} 1..4 or a list 1,2,4"
        )
    start = parse_count(match[1], name=name, low=low, high=high)
    stop = parse_count(match[2], name=name, low=low, high=high)
    # The step is no value of the option: its bounds do not apply.
    step = parse_count(match[4], name=name, low=0) if match[4] else 1
    doubles = match[3] == "*"
    if start > stop or step < 1 or (doubles and (step < 2 or start < 1)):
        raise usage_error(
            f"{name}: the range '{text}' does not move",
            "a range goes up: start..stop*factor with a factor of 2 or more, or start..stop+step",
        )
    values: list[int] = []
    while start <= stop and len(values) <= MAX_LIST:
        values.append(start)
        start = start * step if doubles else start + step
    return values


def parse_bytes(text: str, *, name: str) -> int:
    """Memory with its unit: '20GiB', '80GB', '123B'. A bare number is refused."""
    match = re.fullmatch(r"([0-9]{1,15})(?:\.([0-9]{1,9}))?\s*([a-zA-Z]+)", text.strip())
    unit = _MEMORY_SUFFIX.get(match[3].lower()) if match else None
    if match is None or unit is None:
        raise usage_error(
            f"{name}: '{text}' is not an amount of memory",
            f"give a number and its unit: {name} 20GiB (2^30), {name} 80GB (10^9) or {name} 123B",
        )
    # In whole numbers: 2.3 * 10**9 in floats is a byte short of 2.3 GB.
    decimals = match[2] or ""
    scale = int("1" + "0" * len(decimals))
    return int(match[1] + decimals) * unit // scale


def parse_seconds(text: str, *, name: str) -> float:
    """A time with its unit, '60s', '5m' or '1h'; a bare number is seconds."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(|s|m|min|h)", text.strip().lower())
    if match is None or not float(match[1]):
        raise usage_error(
            f"{name}: '{text}' is not a time", f"write {name} 60s, {name} 5m or {name} 1h"
        )
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}[match[2]]


def format_seconds(seconds: float) -> str:
    """A time for people: '1.25 s', '3.40 ms', '812 µs'."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:,.3g} {name}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds / 1e-9:.3g} ns"


def format_bytes(count: int) -> str:
    """Bytes for people, in binary units: '2.50 GiB', '320.00 KiB', '512 B'."""
    if abs(count) < KIB:
        return f"{count:,} B"
    for unit, name in ((KIB, "KiB"), (MIB, "MiB"), (GIB, "GiB")):
        if round(abs(count) / unit, 2) < 1024:  # 2**20 - 1 bytes are 1.00 MiB, not 1,024.00 KiB
            return f"{count / unit:,.2f} {name}"
    return f"{count / TIB:,.2f} TiB"

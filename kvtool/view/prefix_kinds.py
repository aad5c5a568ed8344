"""Rows of `kvtool prefix` in groups: those of one cache at several capacities, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.run import Row
from kvtool.units import format_bytes

KIND = ("index", "policy", "block_size", "cache_outputs")
WORDS = {"block_size": "block {:,}", "cache_outputs": "outputs {}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The rows of one cache over one set of prompts, the smallest capacity first."""

    name: str
    prompts: str
    rows: tuple[Row, ...]

    @property
    def replayed(self) -> list[Row]:
        """Rows of replays, which know more than a curve does."""
        return [row for row in self.rows if row["tenants"] is not None]

    @property
    def ceiling(self) -> int | None:
        """Hits of a cache without end, where that is known."""
        last = self.rows[-1]
        if last["lost_tokens"] is None:
            return None
        return int(last["hit_tokens"] + last["lost_tokens"])

    @property
    def has_curve(self) -> bool:
        """Whether there are points between the replays."""
        return len(self.rows) > len(self.replayed)

    @property
    def serving(self) -> list[Row]:
        """Capacities that have room for every request: below them hits are of other requests."""
        return [row for row in self.rows if not row["rejected"]]

    def reaching(self, share: float) -> Row | None:
        """The least capacity with so much of what can be found."""
        if not self.ceiling:
            return None
        wanted = share * self.ceiling
        return next((row for row in self.serving if row["hit_tokens"] >= wanted), None)

    @property
    def knee(self) -> Row | None:
        """Where more memory begins to buy less: the point furthest above the line from nothing to the
        last capacity (Satopää et al., "Finding a Kneedle in a Haystack", 2011). None without a curve."""
        last, rows = self.rows[-1], self.serving
        if not self.has_curve or not rows or not last["hit_tokens"]:
            return None
        return max(
            rows,
            key=lambda row: (
                row["hit_tokens"] / last["hit_tokens"]
                - row["capacity_blocks"] / last["capacity_blocks"]
            ),
        )


def series_of(rows: Sequence[Row]) -> list[Series]:
    """The rows by prompts and cache, in the order of the rows."""
    varying = [name for name in KIND[1:] if len({row[name] for row in rows}) > 1]
    if "block_size" in varying and _follows_index(rows):
        varying.remove("block_size")
    labels = prompts_of(rows)
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row, label in zip(rows, labels, strict=True):
        groups.setdefault((label, *(row[name] for name in KIND)), []).append(row)
    return [
        Series(name=_name(group[0], varying), prompts=str(key[0]), rows=tuple(group))
        for key, group in groups.items()
    ]


def _follows_index(rows: Sequence[Row]) -> bool:
    """Whether each index has one block size: then its name says it all."""
    pairs = {(row["index"], row["block_size"]) for row in rows}
    return len(pairs) == len({index for index, _ in pairs})


def _name(row: Row, varying: Sequence[str]) -> str:
    words = [WORDS.get(name, "{}").format(row[name]) for name in varying]
    return ", ".join([row["index"], *words])


def prompts_of(rows: Sequence[Row]) -> list[str]:
    """What the prompts of each row are: the workload, and the parameters that tell it apart."""
    flat = [_flat(row) for row in rows]
    names = {name for one in flat for name in one if name not in ("workload", "seed")}
    varying = []
    for name in sorted(names):
        by_workload: dict[object, set[str]] = {}
        for row, one in zip(rows, flat, strict=True):
            by_workload.setdefault(row["workload"], set()).add(str(one.get(name)))
        if any(len(values) > 1 for values in by_workload.values()):
            varying.append(name)
    return [
        ", ".join(
            [row["workload"], *(f"{n.replace('_', ' ')} {one[n]:g}" for n in varying if n in one)]
        )
        for row, one in zip(rows, flat, strict=True)
    ]


def _flat(row: Row) -> dict[str, float]:
    made = row["made"] or {"num_requests": row["requests"]}
    return {name: value for name, value in made.items() if type(value) in (int, float)}


def capacity(row: Row) -> str:
    """'10,000 blocks', or the memory where a model says what they take."""
    if row["capacity_bytes"] is not None:
        return format_bytes(row["capacity_bytes"])
    return f"{row['capacity_tokens']:,} tokens"


def by_prompts(many: Sequence[Series]) -> list[list[Series]]:
    """The caches over each set of prompts."""
    groups: dict[str, list[Series]] = {}
    for one in many:
        groups.setdefault(one.prompts, []).append(one)
    return list(groups.values())

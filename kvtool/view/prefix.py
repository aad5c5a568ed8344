"""How `kvtool prefix` looks: hit rates by capacity, why no more, what an index costs and a hit is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtool.run import Row, Run
from kvtool.units import format_bytes, format_seconds
from kvtool.view import Table, View
from kvtool.view.prefix_chart import chart
from kvtool.view.prefix_kinds import Series, by_prompts, capacity, series_of
from kvtool.view.prefix_words import sentences
from kvtool.view.words import number

MOST_LINES = 24
"""Of caches one by one; more are shown by capacity."""
MOST_TENANTS = 12
LEFT = frozenset({"prompts", "cache", "tenant", "tier", "tokens", "radix tree"})
Cells = dict[str, Callable[[Row], str]]


def view(run: Run) -> View:
    """Hit rates first and where the other tokens go, then counts, costs and worth."""
    many = series_of(run.rows)
    lines = [(one, row) for one in many for row in one.replayed]
    tables: list[Table] = []
    where = ""
    if any(len(one.rows) > len(one.replayed) for one in many) or len(lines) > MOST_LINES:
        tables += [_by_capacity(group) for group in by_prompts(many)]
        lines = [(one, one.replayed[-1]) for one in many if one.replayed]
        where = "at the largest capacity: "
    tables.append(_table(many, lines, _shares(), f"{where}where the prompt tokens go"))
    tables.append(_table(many, lines, _counts(run.rows), f"{where}the cache"))
    if len({one.rows[0]["index"] for one in many}) > 1:
        tables.append(_table(many, lines, _costs(), f"{where}the index"))
    if any(row["saved_flops"] is not None for _, row in lines):
        tables.append(_table(many, lines, _worth(lines), f"{where}what the hits are worth"))
    tables += [_tiers(many, one, row) for one, row in lines if row["tiers"]]
    tables += [_tenants(many, one, row) for one, row in lines if row["tenants"]]
    tables += _prefixes(many)
    tables += [_tree(one, row) for one, row in lines if row["tree"]]
    return View(
        tables=tuple(table for table in tables if table.rows),
        sentences=tuple(sentences(many)),
        chart=chart(many),
    )


def _table(
    many: Sequence[Series], lines: Sequence[tuple[Series, Row]], cells: Cells, title: str
) -> Table:
    """A line a cache and capacity."""
    named: dict[str, Callable[[Series], str]] = {"cache": lambda one: one.name}
    if len({one.prompts for one in many}) > 1:
        named = {"prompts": lambda one: one.prompts, **named}
    cells = {"capacity": capacity, **cells}
    columns = (*named, *cells)
    return Table(
        title=title,
        columns=columns,
        rows=tuple(
            (*(cell(one) for cell in named.values()), *(cell(row) for cell in cells.values()))
            for one, row in lines
        ),
        right=frozenset(columns) - LEFT,
    )


def _shares() -> Cells:
    """They add to 100 %."""
    names = {
        "hits": "hit_tokens", "lost": "lost_tokens", "rounded": "rounded_tokens",
        "last block": "last_block_tokens", "new": "new_tokens",
    }  # fmt: skip
    return {title: _share_of(name) for title, name in names.items()}


def _counts(rows: Sequence[Row]) -> Cells:
    cells: Cells = {
        "blocks": lambda row: number(row["capacity_blocks"]),
        "of": lambda row: number(row["block_size"]),
        "hit tokens": lambda row: number(row["hit_tokens"]),
        "evicted": lambda row: number(row["evicted_blocks"]),
    }
    if any(row["evicted_leaves"] for row in rows):
        cells["leaves"] = lambda row: number(row["evicted_leaves"])
    if any(row["rejected"] for row in rows):
        cells["rejected"] = lambda row: number(row["rejected"])
    return cells


def _by_capacity(group: Sequence[Series]) -> Table:
    """Hit rates of several caches over the same prompts, by capacity, and what more memory buys."""
    first = group[0]
    lines: dict[int, list[Row | None]] = {}
    largest = max(row["block_size"] for one in group for row in one.rows[:1])
    for place, one in enumerate(group):
        for row in one.replayed:
            key = row["capacity_tokens"] // largest
            lines.setdefault(key, [None] * len(group))[place] = row
    with_memory = first.rows[0]["capacity_bytes"] is not None
    gains = "a GiB more buys" if with_memory else "of what can be found"
    columns = ("tokens", *(("memory",) if with_memory else ()), *(one.name for one in group), gains)
    rows: list[tuple[str, ...]] = []
    before: Row | None = None
    for key in sorted(lines):
        line = lines[key]
        some = next(row for row in line if row is not None)
        cells = [f"{some['capacity_tokens']:,}"]
        if with_memory:
            cells.append(format_bytes(some["capacity_bytes"]))
        cells += ["–" if row is None else f"{row['hit_rate']:.2%}" for row in line]
        last = _gain(before, line[0]) if with_memory else _share_found(first, line[0])
        rows.append((*cells, last))
        before = line[0] or before
    return Table(
        title=f"{first.prompts}: hit rate by capacity",
        columns=columns,
        rows=tuple(rows),
        right=frozenset(columns),
    )


def _gain(before: Row | None, row: Row | None) -> str:
    """Points of the first cache's hit rate for each GiB since the line above."""
    if before is None or row is None:
        return "–"
    more = (row["capacity_bytes"] - before["capacity_bytes"]) / 2**30
    return f"{(row['hit_rate'] - before['hit_rate']) * 100 / more:.3f} points" if more else "–"


def _share_found(one: Series, row: Row | None) -> str:
    """The first cache's hits, of those that a cache without end finds."""
    return "–" if row is None or not one.ceiling else f"{row['hit_tokens'] / one.ceiling:.1%}"


def _share_of(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if row[name] is None:
            return "–"
        return f"{row[name] / row['queried_tokens']:.2%}" if row["queried_tokens"] else "–"

    return cell


def _costs() -> Cells:
    return {
        "index, a request": lambda row: format_seconds(row["index_s_per_request"]),
        "naming, a request": lambda row: format_seconds(row["naming_s_per_request"]),
        "index memory": lambda row: format_bytes(row["index_bytes"]),
        "a cached token": _each,
    }


def _each(row: Row) -> str:
    tokens = row["cached_blocks"] * row["block_size"]
    return f"{row['index_bytes'] / tokens:.2f} B" if tokens else "–"


def _worth(lines: Sequence[tuple[Series, Row]]) -> Cells:
    cells: Cells = {"FLOPs saved": lambda row: f"{row['saved_flops_share']:.2%}"}
    if any(row["cached_prefill_s_mean"] is not None for _, row in lines):
        for what in ("mean", "p50", "p99"):
            cells[f"{what} prefill"] = _shorter(what)
    return cells


def _shorter(what: str) -> Callable[[Row], str]:
    """'269 ms → 165 ms': without hits, and with them."""

    def cell(row: Row) -> str:
        times = [row[f"{name}_prefill_s_{what}"] for name in ("uncached", "cached")]
        return "–" if None in times else " → ".join(map(format_seconds, times))

    return cell


def _tiers(many: Sequence[Series], one: Series, row: Row) -> Table:
    columns = (
        "tier",
        "blocks",
        "hit rate",
        "read",
        "written",
        "loading",
        "computing instead",
        "saved",
    )
    return Table(
        title=f"{_title(many, one, row)}: by tier",
        columns=columns,
        rows=tuple(
            (
                tier["tier"],
                number(tier["capacity_blocks"]),
                f"{tier['hit_rate']:.2%}",
                *("–" if tier[name] is None else format_bytes(tier[name])
                  for name in ("read_bytes", "written_bytes")),
                *("–" if tier[name] is None else _signed(tier[name])
                  for name in ("load_s", "recompute_s", "saved_s")),
            )
            for tier in row["tiers"]
        ),
        right=frozenset(columns) - LEFT,
    )  # fmt: skip


def _signed(seconds: float) -> str:
    if not seconds:
        return "0 s"
    return format_seconds(seconds) if seconds >= 0 else f"−{format_seconds(-seconds)}"


def _tenants(many: Sequence[Series], one: Series, row: Row) -> Table:
    """A line a tenant: its hits, and in whose place its blocks came."""
    shown = row["tenants"][:MOST_TENANTS]
    names = [tenant["tenant"] for tenant in shown]
    columns = ("tenant", "requests", "prompt tokens", "hit rate",
               *(f"evicted of {name}" for name in names))  # fmt: skip
    return Table(
        title=f"{_title(many, one, row)}: by tenant, and the blocks that each evicted",
        columns=columns,
        rows=tuple(
            (
                tenant["tenant"],
                number(tenant["requests"]),
                number(tenant["queried_tokens"]),
                f"{tenant['hit_rate']:.2%}",
                *(number(tenant["evicted_blocks_of"].get(name, 0)) for name in names),
            )
            for tenant in shown
        ),
        right=frozenset(columns) - LEFT,
    )


def _title(many: Sequence[Series], one: Series, row: Row) -> str:
    words = [one.prompts] if len({other.prompts for other in many}) > 1 else []
    return ", ".join([*words, one.name, f"{row['capacity_blocks']:,} blocks"])


def _prefixes(many: Sequence[Series]) -> list[Table]:
    """Of each set of prompts, by the first cache that was replayed over it."""
    tables = []
    for group in by_prompts(many):
        row = next((row for one in group for row in one.replayed), None)
        if row is None or not row["prefixes"]:
            continue
        shared = row["queried_tokens"] - row["new_tokens"]
        columns = ("tokens", "requests", "first", "last", "tokens reused", "of all reuse")
        tables.append(Table(
            title=f"{group[0].prompts}: what is shared most, whatever the cache",
            columns=columns,
            rows=tuple(
                (
                    f"{one['start']:,} to {one['end']:,}",
                    number(one["requests"]),
                    number(one["first_request"]),
                    number(one["last_request"]),
                    number(one["reused_tokens"]),
                    f"{one['reused_tokens'] / shared:.1%}",
                )
                for one in row["prefixes"]
            ),
            right=frozenset(columns) - LEFT,
        ))  # fmt: skip
    return tables


def _tree(one: Series, row: Row) -> Table:
    return Table(
        title=f"{one.name}, {row['capacity_blocks']:,} blocks",
        columns=("radix tree",),
        rows=tuple((line.replace(" ", "\u00a0"),) for line in row["tree"]),  # kept as they are
    )

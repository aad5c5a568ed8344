"""How `kvtool prefix` looks: hit rates by capacity, why no more, what an index costs and a hit is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvtool.run import Row, Run
from kvtool.units import format_bytes, format_seconds
from kvtool.view import Table, View
from kvtool.view.prefix_chart import chart
from kvtool.view.prefix_kinds import Series, by_prompts, capacity, series_of
from kvtool.view.prefix_words import sentences
from kvtool.view.words import amount, number

MOST_LINES, MOST_PROMPTS = 24, 3
"""Caches that are shown one by one, and sets of prompts whose curves are."""
MOST_TENANTS = 12
LEFT = frozenset({"prompts", "cache", "tenant", "tier", "tokens", "radix tree", "ended by"})
Cells = dict[str, Callable[[Row], str]]
Lines = Sequence[tuple[Series, Row]]


def view(run: Run) -> View:
    """Hit rates first and where the other tokens go, then counts, costs and worth."""
    many = series_of(run.rows)
    groups = by_prompts(many)
    lines = [(one, row) for one in many for row in one.replayed]
    if any(row["explained"] for _, row in lines):
        tables = [_table(many, lines, _EXPLAINED, "")]
    else:
        tables = _tables(run, many, groups, lines)
    return View(
        tables=tuple(table for table in tables if table.rows),
        sentences=tuple(sentences(many)),
        chart=chart(groups),
    )


def _tables(
    run: Run, many: Sequence[Series], groups: Sequence[Sequence[Series]], lines: Lines
) -> list[Table]:
    tables: list[Table] = []
    where = ""
    words = str(run.params.get("capacity", "")).lower().split(",")
    if "all" in map(str.strip, words) or len(lines) > MOST_LINES:
        few = len(groups) <= MOST_PROMPTS
        tables += [_by_capacity(group) for group in groups] if few else []
        tables.append(
            _table(many, [(one, one.rows[-1]) for one in many], _reach(many), "every capacity")
        )
        lines = [(one, one.replayed[-1]) for one in many if one.replayed]
        where = "at the largest capacity: "
    tables.append(_table(many, lines, _SHARES, f"{where}where the prompt tokens go"))
    tables.append(_table(many, lines, _counts(run.rows), f"{where}the cache"))
    if len({one.rows[0]["index"] for one in many}) > 1:
        tables.append(_table(many, lines, _COSTS, f"{where}the index"))
    if any(row["saved_flops"] is not None for _, row in lines):
        tables.append(_table(many, lines, _worth(lines), f"{where}what the hits are worth"))
    tables += [_tiers(many, one, row) for one, row in lines if row["tiers"]]
    tables += [_tenants(many, one, row) for one, row in lines if row["tenants"]]
    tables += _prefixes(groups) if len(groups) <= MOST_PROMPTS else []
    return tables + [_tree(one, row) for one, row in lines if row["tree"]]


def _table(many: Sequence[Series], lines: Lines, cells: Cells, title: str) -> Table:
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


def _share_of(name: str) -> Callable[[Row], str]:
    return lambda row: _of_all(row[name], row)


_SHARES: Cells = {
    "hits": _share_of("hit_tokens"),
    "lost": _share_of("lost_tokens"),
    "rounded": _share_of("rounded_tokens"),
    "last block": _share_of("last_block_tokens"),
    "new": _share_of("new_tokens"),
}
"""They add to 100 %."""


def _explained(name: str) -> Callable[[Row], str]:
    return lambda row: number(row["explained"][name])


_EXPLAINED: Cells = {
    "request": _explained("request"),
    "prompt tokens": _explained("prompt_tokens"),
    "hits": _explained("hit_tokens"),
    "findable": _explained("findable_tokens"),
    "shared": _explained("shared_tokens"),
    "ended by": lambda row: str(row["explained"]["ended_by"]),
}


def _reach(many: Sequence[Series]) -> Cells:
    """The capacities that find so much of what can be found, and the knee."""
    of = {id(one.rows[-1]): one for one in many}
    cells: Cells = {"ceiling": lambda row: _of_all(of[id(row)].ceiling, row)}
    for share in (0.5, 0.9, 0.99):
        cells[f"{share:.0%} of it"] = _at(of, share)
    cells["knee"] = lambda row: capacity(knee) if (knee := of[id(row)].knee) else "–"
    return cells


def _of_all(tokens: int | None, row: Row) -> str:
    """A share of all prompt tokens."""
    known = tokens is not None and row["queried_tokens"]
    return f"{tokens / row['queried_tokens']:.2%}" if known else "–"


def _at(of: Mapping[int, Series], share: float) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = of[id(row)].reaching(share)
        if found is None:
            return "–"
        return capacity(found) if of[id(row)].has_curve else f"≤ {capacity(found)}"

    return cell


def _counts(rows: Sequence[Row]) -> Cells:
    cells: Cells = {
        "blocks": lambda row: number(row["capacity_blocks"]),
        "block size": lambda row: number(row["block_size"]),
        "hit tokens": lambda row: number(row["hit_tokens"]),
        "evicted": lambda row: number(row["evicted_blocks"]),
    }
    if any(row["evicted_leaves"] for row in rows):
        cells["evicted leaves"] = lambda row: number(row["evicted_leaves"])
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
    which = f" ({first.name})" if len(group) > 1 else ""
    columns = [
        "tokens", *(["memory"] if with_memory else []), *(one.name for one in group),
        f"of what can be found{which}", *([f"a GiB more buys{which}"] if with_memory else []),
    ]  # fmt: skip
    rows: list[tuple[str, ...]] = []
    before: Row | None = None
    for key in sorted(lines):
        line = lines[key]
        some = next(row for row in line if row is not None)
        cells = [f"{some['capacity_tokens']:,}"]
        cells += [format_bytes(some["capacity_bytes"])] if with_memory else []
        cells += ["–" if row is None else f"{row['hit_rate']:.2%}" for row in line]
        cells.append(_share_found(first, line[0]))
        cells += [_gain(before, line[0])] if with_memory else []
        rows.append(tuple(cells))
        before = line[0] or before
    return Table(
        title=f"{first.prompts}: hit rate by capacity",
        columns=tuple(columns),
        rows=tuple(rows),
        right=frozenset(columns),
    )


def _gain(before: Row | None, row: Row | None) -> str:
    """Points of the first cache's hit rate for each GiB since the line above."""
    if before is None or row is None:
        return "–"
    more = (row["capacity_bytes"] - before["capacity_bytes"]) / 2**30
    return f"{(row['hit_rate'] - before['hit_rate']) * 100 / more:.4f} points" if more else "–"


def _share_found(one: Series, row: Row | None) -> str:
    """The first cache's hits, of those that a cache without end finds."""
    return "–" if row is None or not one.ceiling else f"{row['hit_tokens'] / one.ceiling:.1%}"


def _known(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)


def _each(row: Row) -> str:
    tokens = row["cached_blocks"] * row["block_size"]
    return f"{row['index_bytes'] / tokens:.2f} B" if tokens else "–"


_COSTS: Cells = {
    "a request": lambda row: _known(row["index_s_per_request"]),
    "naming blocks": lambda row: _known(row["naming_s_per_request"] or None),
    "requests tried": lambda row: number(row["index_tried_requests"]),
    "index memory": lambda row: format_bytes(row["index_bytes"]),
    "a cached token": _each,
}


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
    times = ("load_s", "write_s", "recompute_s", "saved_s", "prefill_s_mean")
    columns = (
        "tier", "blocks", "hit rate", "read", "written", "loading", "writing", "computing", "saved",
        "mean prefill",
    )  # fmt: skip
    return Table(
        title=f"{_title(many, one, row)}: by tier",
        columns=columns,
        rows=tuple(
            (
                tier["tier"],
                number(tier["capacity_blocks"]),
                f"{tier['hit_rate']:.2%}",
                *(amount(tier[name]) for name in ("read_bytes", "written_bytes")),
                *("–" if tier[name] is None else _signed(tier[name]) for name in times),
            )
            for tier in row["tiers"]
        ),
        right=frozenset(columns) - LEFT,
    )


def _signed(seconds: float) -> str:
    if not seconds:
        return "0 s"
    return format_seconds(seconds) if seconds >= 0 else f"−{format_seconds(-seconds)}"


def _tenants(many: Sequence[Series], one: Series, row: Row) -> Table:
    """A line a tenant: its hits, and in whose place its blocks came."""
    shown = row["tenants"][:MOST_TENANTS]
    names = [tenant["tenant"] for tenant in shown]
    columns = ("tenant", "requests", "prompt tokens", "hit rate", "alone",
               *(f"of {name}" for name in names))  # fmt: skip
    return Table(
        title=f"{_title(many, one, row)}: by tenant, by itself, and the blocks that each evicted of whom",
        columns=columns,
        rows=tuple(
            (
                tenant["tenant"],
                number(tenant["requests"]),
                number(tenant["queried_tokens"]),
                f"{tenant['hit_rate']:.2%}",
                "–" if tenant["alone_hit_rate"] is None else f"{tenant['alone_hit_rate']:.2%}",
                *(number(tenant["evicted_blocks_of"].get(name, 0)) for name in names),
            )
            for tenant in shown
        ),
        right=frozenset(columns) - LEFT,
    )


def _title(many: Sequence[Series], one: Series, row: Row) -> str:
    words = [one.prompts] if len({other.prompts for other in many}) > 1 else []
    return ", ".join([*words, one.name, f"{row['capacity_blocks']:,} blocks"])


def _prefixes(groups: Sequence[Sequence[Series]]) -> list[Table]:
    """Of each set of prompts, by the first cache that was replayed over it."""
    tables = []
    for group in groups:
        row = next((row for one in group for row in one.replayed), None)
        if row is None or not row["prefixes"]:
            continue
        shared = row["queried_tokens"] - row["new_tokens"]
        columns = ("tokens", "requests", "first", "last", "tokens reused", "of all reuse")
        tables.append(Table(
            title=f"{group[0].prompts}: what is shared most: runs of tokens, each after all before it",
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

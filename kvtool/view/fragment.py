"""How `kvtool fragment` looks: the shares of the pool by allocator, a verdict, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtool.run import Row, Run
from kvtool.view import Areas, Bars, Panels, Strip, Table, View
from kvtool.view.words import counted, number

SHARES = ("token", "reserved", "internal", "padding", "external", "idle")
MEANING = (
    "█ token, ▓ reserved for later tokens, ▒ internal: held and never used, ░ padding, · external: "
    "free, but the next request does not fit, blank: idle."
)
BAR = "█▓▒░· "
BAR_WIDTH = 24
MOST_POINTS = 300
"""Of a share over time: a picture is a thousand pixels wide."""
VARYING = (
    "workload", "rate", "n", "shared_prefix", "max_model_len", "max_num_seqs", "max_batched_tokens",
    "watermark", "preemption", "cpu_blocks", "block_size", "pool_tokens", "num_blocks", "requests",
)  # fmt: skip
LIMITS = (
    ("waiting_for_seqs_steps", "--max-num-seqs", "max_num_seqs"),
    ("waiting_for_tokens_steps", "--max-batched-tokens", "max_batched_tokens"),
)
OF_PAGED = ("block_size", "watermark", "preemption", "cpu_blocks")
"""What only paged knows."""
DERIVED = ("pool_tokens", "num_blocks", "requests")
"""What may follow from another option that varies: blocks from a block size, requests from n."""
WORST = ("max", "static-batch", "pow2", "grow", "oracle")
"""What paged is set against, the first that was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Film:
    """What a picture shows of a row besides its shares: (steps, shares) over time, and a map."""

    series: tuple[tuple[int, tuple[float, ...]], ...] = ()
    regions: tuple[tuple[int, int, int, int], ...] | None = None


def view(run: Run, films: Sequence[Film] = ()) -> View:
    """A table with a stacked bar in each row, and what it comes to."""
    return View(
        tables=(_shares(run.rows), _counts(run.rows)),
        sentences=(MEANING, *_verdicts(run.rows), *_doubts(run.rows)),
        chart=_picture(run.rows, films) if films else None,
    )


def _shares(rows: Sequence[Row]) -> Table:
    varying = _varying(rows)
    columns = ("allocator", *(name.replace("_", " ") for name in varying), *SHARES, "the pool")
    return Table(
        columns=columns,
        rows=tuple(
            (
                named(row),
                *(_value(row[name]) for name in varying),
                *(f"{row[f'{share}_share']:.1%}" for share in SHARES),
                bar(row),
            )
            for row in rows
        ),
        right=frozenset(columns) - {"allocator", "the pool"},
    )


def _counts(rows: Sequence[Row]) -> Table:
    varying = _varying(rows)
    measures: dict[str, Callable[[Row], str]] = {
        "mean batch": lambda row: f"{row['mean_batch']:.2f}",
        "peak": lambda row: number(row["peak_batch"]),
        "completed": lambda row: number(row["completed"]),
        "rejected": lambda row: number(row["rejected"]),
        "preempted": lambda row: number(row["preemptions"]),
        "steps": lambda row: number(row["steps"]),
    }
    if any(row["n"] > 1 or row["shared_prefix"] for row in rows):
        measures["blocks saved"] = lambda row: f"{row['saved_share']:.1%}"
        measures["copied"] = lambda row: number(row["copied_blocks"])
    columns = ("allocator", *(name.replace("_", " ") for name in varying), *measures)
    return Table(
        title="what ran in it",
        columns=columns,
        rows=tuple(
            (
                named(row),
                *(_value(row[name]) for name in varying),
                *(measure(row) for measure in measures.values()),
            )
            for row in rows
        ),
        right=frozenset(columns) - {"allocator"},
    )


def named(row: Row) -> str:
    """'max, buddy': the allocator and, if it has one, its placement."""
    return ", ".join(filter(None, (row["allocator"], row["placement"])))


def bar(row: Row) -> str:
    """The six shares as so many letters; the largest remainders get what rounding leaves over."""
    exact = [row[f"{share}_share"] * BAR_WIDTH for share in SHARES]
    whole = [int(width) for width in exact]
    by_rest = sorted(range(len(exact)), key=lambda k: exact[k] - whole[k], reverse=True)
    for place in by_rest[: max(0, round(sum(exact)) - sum(whole))]:
        whole[place] += 1
    return "".join(letter * width for letter, width in zip(BAR, whole, strict=True))


def _value(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _varying(rows: Sequence[Row]) -> list[str]:
    """What tells the rows of one allocator apart.

    Of what follows from other options only what the columns so far do not tell: with one block size
    the blocks say no more than the tokens.
    """
    paged = [row for row in rows if row["allocator"] == "paged"]
    others = [row for row in rows if row["allocator"] != "paged"]
    found: list[str] = []
    for name in VARYING:
        for group in (paged, others):
            values: dict[tuple[object, ...], set[object]] = {}
            for row in group:
                known = (row["allocator"], *(row[one] for one in found)) if name in DERIVED else ()
                values.setdefault(known, set()).add(row[name])
            if any(len(several - {None}) > 1 for several in values.values()):
                found.append(name)
                break
    return found


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """Paged against the worst reservation of the same traffic and pool, a line for each set."""
    settings = _settings(rows)
    if len(settings) > 2 and all(len(group) == 1 for group in settings.values()):
        return [_trend(settings)]
    said = []
    for setting, group in settings.items():
        paged = next((row for row in group if row["allocator"] == "paged"), None)
        others = [row for name in WORST for row in group if row["allocator"] == name]
        said.append(f"{setting}{_verdict(paged, others[0] if others else None, group)}")
    return said


def _trend(settings: Mapping[str, Sequence[Row]]) -> str:
    """A sweep of paged alone in one line: the best and the worst of it."""
    rows = {setting.rstrip(": "): group[0] for setting, group in settings.items()}
    best, worst = (pick(rows, key=lambda at: rows[at]["token_share"]) for pick in (max, min))
    return (
        f"paged keeps {rows[best]['token_share']:.1%} of the pool in use at {best} and "
        f"{rows[worst]['token_share']:.1%} at {worst}.{_savings(rows)}"
    )


def _savings(rows: Mapping[str, Row]) -> str:
    most = max(rows, key=lambda at: rows[at]["saved_share"])
    saved = rows[most]["saved_share"]
    return f" Sharing saves up to {saved:.1%} of its blocks, at {most}." if saved > 0 else ""


def _settings(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """A paged row and what the others make of the same traffic and pool, by what sets it apart."""
    varying = _varying(rows)
    paged = [row for row in rows if row["allocator"] == "paged"]
    if not paged:
        return {"": list(rows)}
    shared = [name for name in varying if name not in (*OF_PAGED, *DERIVED)]
    groups: dict[str, list[Row]] = {}
    for lead in paged:
        name = ", ".join(f"{one.replace('_', ' ')} {_value(lead[one])}" for one in varying)
        rest = [
            row
            for row in rows
            if row["allocator"] != "paged"
            and _same_pool(lead, row)
            and all(row[key] in (lead[key], None) for key in shared)
        ]
        groups[f"{name}: " if name else ""] = [lead, *rest]
    return groups


def _same_pool(paged: Row, other: Row) -> bool:
    """Paged rounds the pool down to whole blocks."""
    return 0 <= int(other["pool_tokens"] - paged["pool_tokens"]) < int(paged["block_size"])


def _verdict(paged: Row | None, other: Row | None, group: Sequence[Row]) -> str:
    doing = {
        "max": "reserving the maximum keeps",
        "static-batch": "static batches keep",
        "pow2": "reserving a power of two keeps",
        "grow": "growing regions keep",
        "oracle": "even knowing the output keeps",
    }
    if not any(row["completed"] for row in group):
        return "no request could be served."
    if paged is None:
        best = max(group, key=lambda row: row["token_share"])
        return (
            f"{named(best)} keeps {best['token_share']:.0%} of the pool in use, the most of these."
        )
    text = f"paged keeps {paged['token_share']:.0%} of the pool in use"
    if other is not None:
        text += f" where {doing[other['allocator']]} {other['token_share']:.0%}"
        if other["mean_batch"]:
            text += f": {paged['mean_batch'] / other['mean_batch']:.1f}x the batch"
    if paged["saved_share"] > 0:
        text += f"; sharing saves {paged['saved_share']:.1%} of its blocks"
    return f"{text}."


def _doubts(rows: Sequence[Row]) -> list[str]:
    """What a reader must know before believing the table; what is true of several is said once."""
    said: dict[str, list[str]] = {}
    for row in rows:
        for text in _losses(row):
            said.setdefault(text, []).append(named(row))
    told = [
        f"{'every allocator' if len(names) == len(rows) > 1 else ', '.join(dict.fromkeys(names))}: "
        f"{text}."
        for text, names in said.items()
    ]
    return told + _limits(rows)


def _losses(row: Row) -> list[str]:
    """Requests that were not served as they were asked."""
    longest, said = f"max_model_len {row['max_model_len']:,}", []
    if row["prompt_too_long"]:
        said.append(
            f"{counted(row['prompt_too_long'], 'request')} rejected, because the prompt leaves no "
            f"room below {longest}"
        )
    if row["larger_than_pool"]:
        said.append(
            f"{counted(row['larger_than_pool'], 'request')} rejected, because the whole pool "
            f"({counted(row['pool_tokens'], 'token')}) does not hold what is to be held for one"
        )
    if row["cut"]:
        said.append(f"{counted(row['cut'], 'request')} cut short at {longest}")
    return said


def _limits(rows: Sequence[Row]) -> list[str]:
    """Why a share may say less than it seems to."""
    said = []
    if any(row["whole_run"] and not row["interrupted"] for row in rows):
        said.append(
            "the run is too short to leave warm-up and drain out: the shares are of all its steps."
        )
    for row in rows:
        if row["allocator"] != "paged":
            continue
        steps = row["measured_steps"] or 1
        for name, flag, limit in LIMITS:
            kept_out = (row[name] or 0) / steps
            if kept_out > 0.1:
                said.append(
                    f"paged: in {kept_out:.0%} of the steps {flag} {row[limit]:,} kept the next "
                    "request out, not memory: raise it to see what the pool could hold."
                )
                break
        else:
            said += _idle(row)
    return list(dict.fromkeys(said))


def _idle(row: Row) -> list[str]:
    if row["idle_share"] <= 0.5:
        return []
    if row["peak_batch"] > row["max_num_seqs"] - row["n"]:
        return [
            f"paged: --max-num-seqs {row['max_num_seqs']:,} was reached, so that it, not memory, may "
            "bound the batch."
        ]
    return [
        "most of the pool is idle: this traffic does not need it. A smaller pool, more requests or a "
        "higher --rate show how it fills."
    ]


def _picture(rows: Sequence[Row], films: Sequence[Film]) -> Panels:
    varying = _varying(rows)
    names = [
        ", ".join(filter(None, (named(row), *(_said(row, v) for v in varying)))) for row in rows
    ]
    shares = tuple(tuple(row[f"{share}_share"] for share in SHARES) for row in rows)
    panels: list[Bars | Areas | Strip] = [
        Bars(
            title="shares of the pool, averaged over steps",
            x_label="of the pool's slots",
            parts=SHARES,
            rows=tuple(zip(names, shares, strict=True)),
        )
    ]
    for name, film in zip(names, films, strict=True):
        if film.series:
            panels.append(_areas(name, film))
    for name, row, film in zip(names, rows, films, strict=True):
        if film.regions is not None:
            title = f"{name}: who holds which slots after some requests (pale: held, unused)"
            panels.append(Strip(title=title, length=row["pool_tokens"], pieces=film.regions))
    return Panels(title="Where the KV pool goes", panels=tuple(panels))


def _said(row: Row, name: str) -> str:
    return "" if row[name] is None else f"{name.replace('_', ' ')} {_value(row[name])}"


def _areas(name: str, film: Film) -> Areas:
    """The series with neighbours put together, until there are few enough for a picture."""
    series = list(film.series)
    while len(series) > MOST_POINTS:
        pairs = [series[k : k + 2] for k in range(0, len(series), 2)]
        series = [_together(pair) for pair in pairs]
    x, step = [], 0
    for steps, _ in series:
        x.append(step + steps / 2)
        step += steps
    values = tuple(tuple(shares[part] for _, shares in series) for part in range(len(SHARES)))
    return Areas(
        title=f"{name}: over time", x_label="step", parts=SHARES, x=tuple(x), values=values
    )


def _together(points: Sequence[tuple[int, tuple[float, ...]]]) -> tuple[int, tuple[float, ...]]:
    """The mean of neighbouring points, each as long as its steps."""
    steps = sum(count for count, _ in points)
    columns = zip(*([count * share for share in shares] for count, shares in points), strict=True)
    return steps, tuple(sum(column) / steps for column in columns)

"""What `kvtool fragment` says of its rows: what tells them apart, the verdict, and every doubt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtool.run import Row
from kvtool.view.words import counted

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
MOST_COSTS = 6
"""Rows whose preemptions are told one by one."""
WORST = ("max", "static-batch", "pow2", "grow", "oracle")
"""What paged is set against, the first that was run."""


def sentences(rows: Sequence[Row]) -> list[str]:
    """The pool, the verdicts, what preemption costs, and what bounds the figures."""
    return [*_pools(rows), *_verdicts(rows), *_doubts(rows)]


def named(row: Row) -> str:
    """'max, buddy': the allocator and, if it has one, its placement."""
    return ", ".join(filter(None, (row["allocator"], row["placement"])))


def value_of(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else str(value)


def varying_in(rows: Sequence[Row]) -> list[str]:
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


def labels_of(rows: Sequence[Row]) -> list[str]:
    """Each row by its allocator and what sets it apart: 'paged, block size 32'."""
    varying = varying_in(rows)
    return [", ".join([named(row), *_apart(row, varying)]) for row in rows]


def _apart(row: Row, varying: Sequence[str]) -> list[str]:
    """'block size 32' for each of these that the row has."""
    return [
        f"{name.replace('_', ' ')} {value_of(row[name])}"
        for name in varying
        if row[name] is not None
    ]


def _pools(rows: Sequence[Row]) -> list[str]:
    """What everything is a share of, unless it is a column."""
    paged = [row for row in rows if row["allocator"] == "paged"] or list(rows)
    if len({(row["pool_tokens"], row["num_blocks"], row["max_model_len"]) for row in paged}) > 1:
        return []
    row = paged[0]
    blocks = (
        f" ({row['num_blocks']:,} blocks of {row['block_size']:,})" if row["num_blocks"] else ""
    )
    return [
        f"The pool: {counted(row['pool_tokens'], 'token')}{blocks}; max_model_len "
        f"{row['max_model_len']:,}."
    ]


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
    if rows[best]["token_share"] == rows[worst]["token_share"]:
        return f"paged keeps {rows[best]['token_share']:.1%} of the pool in use in every row."
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
    varying = varying_in(rows)
    paged = [row for row in rows if row["allocator"] == "paged"]
    if not paged:
        return {"": list(rows)}
    shared = [name for name in varying if name not in (*OF_PAGED, *DERIVED)]
    groups: dict[str, list[Row]] = {}
    for lead in paged:
        name = ", ".join(_apart(lead, varying))
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
    if not any(row["completed"] for row in group) and not any(r["interrupted"] for r in group):
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
        unshared = 1 / (1 - paged["saved_share"])
        text += (
            f"; sharing saves {paged['saved_share']:.1%} of the blocks: without it the same samples "
            f"would need {unshared:.2f}x"
        )
    return f"{text}."


def _doubts(rows: Sequence[Row]) -> list[str]:
    """What a reader must know before believing the table; what is true of several is said once."""
    said: dict[str, list[str]] = {}
    for row in rows:
        for text in _losses(row):
            said.setdefault(text, []).append(named(row))
    costs = [
        f"{named(row)}: {counted(row['preemptions'], 'preemption')} cost "
        f"{counted(row['recomputed_tokens'], 'computed token')}, "
        f"{row['recomputed_tokens'] / row['scheduled_tokens']:.1%} of all that were computed."
        for row in rows[:MOST_COSTS]
        if row["recomputed_tokens"]
    ]
    told = [
        f"{'every allocator' if len(names) == len(rows) > 1 else ', '.join(dict.fromkeys(names))}: "
        f"{text}."
        for text, names in said.items()
    ]
    return costs + told + _limits(rows)


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

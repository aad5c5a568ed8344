"""How a run of `kvtool simulate --disaggregate` looks: both kinds of instances, and what binds."""

from __future__ import annotations

from kvtool.run import Row
from kvtool.view import Table
from kvtool.view.words import counted, number, rate, seconds

NAMES = {"prefill": "the prefill instances bind", "link": "the links bind", "decode": "the decode instances bind"}  # fmt: skip


def pools_table(row: Row) -> Table:
    """A line for each kind."""
    columns = (
        "instances of",
        "number",
        "busy",
        "batch",
        "waiting",
        "blocks used",
        "of",
        "preemptions",
    )
    lines = [
        (
            name,
            number(row[f"{name}_instances"]),
            _share(row[f"{name}_utilisation"]),
            *(rate(row[f"{name}_mean_{what}"]) for what in ("batch", "waiting", "used_blocks")),
            number(row[f"{name}_num_blocks"]),
            number(row[f"{name}_preemptions"]),
        )
        for name in ("prefill", "decode")
    ]
    return Table(columns=columns, rows=tuple(lines), right=frozenset(columns[1:]))


def binds_of_pools(row: Row) -> str:
    """Which kind requests wait for longest, and what crossed the links."""
    waits = ", ".join(
        f"{seconds(row[f'{name}_wait_s_mean'])} for {what}"
        for name, what in (
            ("prefill", "a prefill"),
            ("link", "a link"),
            ("decode", "a decode instance"),
        )
    )
    verdict = NAMES[row["binds"]] if row["binds"] else "nothing binds"
    return f"{verdict[0].upper()}{verdict[1:]}: a request waits {waits} on average."


def transfers_of(row: Row) -> str:
    """Bytes over the links, and how long a cache is under way."""
    return (
        f"{row['transfer_bytes'] / 2**30:,.3g} GiB of KV cache are sent, "
        f"{seconds(row['transfer_s_p50'])} each at p50 and {seconds(row['transfer_s_p99'])} at p99 with the wait "
        f"for the link; the links send {_share(row['link_utilisation'])} of the time."
    )


def preempted_of_pools(row: Row) -> str:
    """Who lost its blocks: computed anew where it was."""
    if not row["preemptions"]:
        return "Nobody was preempted."
    return (
        f"{counted(row['preemptions'], 'preemption')} cost {row['recomputed_tokens']:,} computed tokens, on the "
        "instance itself: a decode instance then computes prompts too."
    )


def laws_of(row: Row) -> str:
    """The times are as good as these."""
    laws = "; ".join(
        f"of {name} {row[f'{name}_base_ns']:,} ns + {row[f'{name}_read_ns']:,} + {row[f'{name}_context_ns']:,} a "
        f"token of context or {row[f'{name}_token_ns']:,} a token"
        for name in ("prefill", "decode")
    )
    return f"A step is taken to last, {laws}: not measured. A transfer begins when its prefill has ended."


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"

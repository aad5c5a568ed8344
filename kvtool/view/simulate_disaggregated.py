"""How a run of `kvtool simulate --disaggregate` looks: both kinds of instances, and what binds."""

from __future__ import annotations

from kvtool.run import Row
from kvtool.view import Table
from kvtool.view.simulate_words import law_terms
from kvtool.view.words import counted, number, rate, seconds

SECOND_TOKEN = {"second_token": "token 1 to 2"}
"""A line of the times."""
BINDS = {"prefill": "Prefill instances bind", "link": "Links bind", "decode": "Decode instances bind"}  # fmt: skip
WAITS = {"prefill": "a prefill instance", "link": "a link", "decode": "a decode instance"}
STEPS = {"ttft": "prefill", "tpot": "decode"}
"""Whose steps make these times."""


def kinds_table(row: Row) -> Table:
    """A line for each kind."""
    columns = (
        "instances of", "number", "stepping", "seats used", "batch", "waiting", "blocks used", "of", "preemptions",
    )  # fmt: skip
    lines = [
        (
            name,
            number(row[f"{name}_instances"]),
            *(_share(row[f"{name}_{what}"]) for what in ("utilisation", "seats_used")),
            *(rate(row[f"{name}_mean_{what}"]) for what in ("batch", "waiting", "used_blocks")),
            number(row[f"{name}_num_blocks"]),
            number(row[f"{name}_preemptions"]),
        )
        for name in ("prefill", "decode")
    ]
    return Table(columns=columns, rows=tuple(lines), right=frozenset(columns[1:]))


def binds_of_kinds(row: Row) -> str:
    """What requests wait for longest, or that nothing but steps is slow."""
    waits = {
        name: f"{seconds(row[f'{name}_wait_s_mean'])} for {what}" for name, what in WAITS.items()
    }
    if row["binds"]:
        longest = waits.pop(row["binds"])
        others = ", ".join(waits.values())
        return f"{BINDS[row['binds']]}: a request waits {longest} on average, {others}."
    told = f"request waits {', '.join(waits.values())} on average."
    slow = _slow_steps(row)
    return f"No queue: steps are too slow, {slow}. A {told}" if slow else f"Nothing binds: a {told}"


def _slow_steps(row: Row) -> str:
    """The times that a tenth of the requests miss although hardly anybody waits."""
    missed = [
        f"those of {kind} make a {name.upper()} p90 of {seconds(row[f'{name}_s_p90'])} where --slo asks for "
        f"{seconds(row[f'slo_{name}_s'])}"
        for name, kind in STEPS.items()
        if row[f"slo_{name}_s"] is not None
        and row[f"{name}_s_p90"] is not None
        and row[f"{name}_s_p90"] > row[f"slo_{name}_s"]
    ]
    return ", ".join(missed)


def transfers_of(row: Row) -> str:
    """Bytes over the links, and how long a cache is under way."""
    return (
        f"{rate(row['transfer_bytes'] / 2**30)} GiB of KV cache are sent, "
        f"{seconds(row['transfer_s_p50'])} each at p50 and {seconds(row['transfer_s_p99'])} at p99 with the wait "
        f"for the link; the links send {_share(row['link_utilisation'])} of the time."
    )


def preempted_of_kinds(row: Row) -> str:
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
        f"of {name} {law_terms(row, f'{name}_')}" for name in ("prefill", "decode")
    )  # fmt: skip
    return f"A step takes, {laws}: {row['step_time_basis']}. A transfer begins when its prefill has ended."


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"

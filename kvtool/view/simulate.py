"""How `kvtool simulate` looks: rates and times, who was not served, and what made requests wait."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.run import Row, Run
from kvtool.simulate_disaggregated import DISAGGREGATED
from kvtool.timeline import Timeline
from kvtool.view import Charts, Table, View
from kvtool.view import simulate_words as words
from kvtool.view.simulate_disaggregated import (
    SECOND_TOKEN,
    binds_of_kinds,
    kinds_table,
    laws_of,
    preempted_of_kinds,
    transfers_of,
)
from kvtool.view.simulate_lead import lead_of, lead_of_rows
from kvtool.view.timeline import timeline_chart
from kvtool.view.words import millions, number, rate, seconds

SETTINGS = (
    "scheduler", "rate",
    "link_bits_per_s", "num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_active_seqs",
    "max_batched_tokens", "max_scheduled_tokens", "watermark", "long_prefill_threshold", "preemption",
    "cpu_blocks", "index", "policy",
)  # fmt: skip
"""What the rows of one run may differ in."""


def view(run: Run, lines: Sequence[Timeline] = ()) -> View:
    """One row: its figures and its times. Several: a line each, and which is best."""
    rows, chart = run.rows, timeline_chart(lines, run.rows) if lines else None
    if len(rows) == 1:
        return _of_one(rows[0], chart)
    apart = _apart(rows)
    law = laws_of if rows and rows[0]["scheduler"] == DISAGGREGATED else words.law
    laws = list(dict.fromkeys(law(row) for row in rows))
    said = (*words.best(rows, apart), *(laws if len(laws) == 1 else ()))
    return View(
        tables=(_lines(rows),) if rows else (), lead=tuple(lead_of_rows(rows, apart)),
        sentences=said, chart=chart,
    )  # fmt: skip


def _of_one(row: Row, chart: Charts | None) -> View:
    lead = tuple(lead_of(row))
    if row["scheduler"] != DISAGGREGATED:
        tables = (_figures(row), _times(row))
        return View(tables=tables, lead=lead, sentences=tuple(words.about(row)), chart=chart)
    said = (
        words.goal(row), words.verdict(row), binds_of_kinds(row), transfers_of(row),
        words.unserved(row), preempted_of_kinds(row), laws_of(row),
    )  # fmt: skip
    return View(
        tables=(_figures(row), kinds_table(row), _times(row)), lead=lead,
        sentences=tuple(text for text in said if text), chart=chart,
    )  # fmt: skip


def _figures(row: Row) -> Table:
    cells = {
        "output tokens/s": rate(row["output_tokens_per_s"]),
        "requests/s": rate(row["requests_per_s"]),
        "mean batch": rate(row["mean_batch"]),
        "peak batch": number(row["peak_batch"]),
        "KV used": "–" if row["used_share"] is None else f"{row['used_share']:.1%}",
        "peak blocks": number(row["peak_used_blocks"]),
        "of": number(row["num_blocks"]),
        "queue": rate(row["mean_waiting"]),
        "peak queue": number(row["peak_waiting"]),
        "steps": number(row["steps"]),
        "preemptions": number(row["preemptions"]),
    }
    if row["tokens_per_usd"] is not None:
        cells["tokens/$"] = millions(row["tokens_per_usd"])
    return Table(columns=tuple(cells), rows=(tuple(cells.values()),), right=frozenset(cells))


def _times(row: Row) -> Table:
    columns = ("time", "p50", "p90", "p99")
    return Table(
        columns=columns,
        rows=tuple(
            (label, *(seconds(row[f"{name}_s_{percent}"]) for percent in columns[1:]))
            for name, label in (words.TIMES | SECOND_TOKEN).items()
            if f"{name}_s_p50" in row
        ),
        right=frozenset(columns[1:]),
    )


def _lines(rows: tuple[Row, ...]) -> Table:
    apart = _apart(rows)
    cached = any(row["queried_tokens"] for row in rows)
    goals = any(row["slo_met_share"] is not None for row in rows)
    priced = any(row["tokens_per_usd"] is not None for row in rows)
    paced = any(row["slo_tpot_s"] is not None for row in rows)
    lost = any(row["preemptions"] for row in rows)
    moved = any(row["swapped_blocks"] for row in rows)
    timed = {
        "TTFT p50": "ttft_s_p50", "TTFT p99": "ttft_s_p99", "ITL p50": "itl_s_p50", "ITL p99": "itl_s_p99",
        **({"TPOT p99": "tpot_s_p99"} if paced else {}), "E2E p50": "e2e_s_p50",
    }  # fmt: skip
    columns = (
        *(name.replace("_", " ") for name in apart),
        "tokens/s", "requests/s", "batch", *timed, "peak queue", "preemptions",
        *(["recomputed"] if lost else []), *(["swapped"] if moved else []),
        "not served", *(["hit rate"] if cached else []),
        *(["SLO met", "goodput/s"] if goals else []), *(["tokens/$"] if priced else []),
    )  # fmt: skip
    return Table(
        columns=columns,
        rows=tuple(
            (
                *(_value(name, row[name]) for name in apart),
                *(rate(row[f"{what}_per_s"]) for what in ("output_tokens", "requests")),
                rate(row["mean_batch"]),
                *(seconds(row[name]) for name in timed.values()),
                _peak_queue(row),
                number(row["preemptions"]),
                *([number(row["recomputed_tokens"])] if lost else []),
                *([number(row["swapped_blocks"])] if moved else []),
                number(row["requests"] - row["finished"]),
                *([_hit_rate(row)] if cached else []),
                *(
                    [f"{row['slo_met_share']:.1%}", rate(row["goodput_requests_per_s"])]
                    if goals
                    else []
                ),
                *([millions(row["tokens_per_usd"])] if priced else []),
            )
            for row in rows
        ),
        right=frozenset(columns),
    )


def _peak_queue(row: Row) -> str:
    """Who waited at most; an arrow where that has no end."""
    return number(row["peak_waiting"]) + (" ↑" if row["queue_grows"] else "")


def _value(name: str, value: object) -> str:
    if name == "link_bits_per_s" and isinstance(value, int):
        return f"{value / 1e9:,g} Gb/s"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _apart(rows: tuple[Row, ...]) -> list[str]:
    """The settings that differ; one that only follows another is left out."""
    names = [name for name in SETTINGS if len({row.get(name) for row in rows}) > 1]
    pools = {(row["scheduler"], row["num_blocks"]) for row in rows}
    if len(pools) == len({row["scheduler"] for row in rows}):  # static needs no null block
        names = [name for name in names if name != "num_blocks"]
    follows = {"max_num_active_seqs": "max_num_seqs", "max_scheduled_tokens": "max_batched_tokens"}
    return [
        name
        for name in names
        if name not in follows or any(row[name] != row[follows[name]] for row in rows)
    ]


def _hit_rate(row: Row) -> str:
    queried = row["queried_tokens"]
    return f"{row['hit_tokens'] / queried:.1%}" if queried else "–"

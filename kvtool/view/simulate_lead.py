"""What must be known of a run of `kvtool simulate` before its times are read."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.run import Row
from kvtool.view.words import rate, seconds, words_of

Named = Sequence[str]
"""The settings in which rows differ."""
MOST_SERVED = 0.99
"""Where fewer are served, it is said before the times of those that are."""
MOST_NAMED = 6
"""Rows that a sentence names one by one."""
FEW_ANSWERS = 3
"""Arrivals that last less than so many answers (E2E p50) show how a server fills up, not how it runs."""


def lead_of(row: Row) -> list[str]:
    """What makes the times below mean something else than they seem to."""
    told = (_found_rate(row), _grows(row), _at_once(row), _too_short(row), _of_few(row))
    return [text for text in told if text]


def lead_of_rows(rows: Sequence[Row], apart: Named) -> list[str]:
    """The same of several rows, each with the rows that it is of."""
    told = [f"{named(row, apart)}: {_found_rate(row)}" for row in rows if _found_rate(row)]
    if grows := [row for row in rows if row["queue_grows"]]:
        told.append(
            f"The queue grows without bound with {_which(grows, rows, apart)}: their times are those of a run "
            "of this length."
        )
    if short := [row for row in rows if _too_short(row)]:
        told.append(
            f"Too few requests for a steady state with {_which(short, rows, apart)}: {_more(short[0])}."
        )
    at_once = [_at_once(row) for row in rows if _at_once(row)]
    return [*told, *at_once[:1]]


def _which(some: Sequence[Row], rows: Sequence[Row], apart: Named) -> str:
    """Rows by what they are run with, or how many they are."""
    if len(some) == len(rows):
        return "each of these"
    if len(some) > MOST_NAMED:
        return f"{len(some):,} of these {len(rows):,}"
    return "; ".join(named(row, apart) for row in some)


def _found_rate(row: Row) -> str:
    """The answer of --find-rate."""
    found = row.get("found_rate")
    if found is None:
        return ""
    refused = row.get("refused_rate")
    met, missed = row["found_rate_met_share"], row["refused_rate_met_share"]
    digits = 1 if missed is None or f"{met:.1%}" != f"{missed:.1%}" else 3
    beyond = "" if refused is None else f"; at {refused:.4g} it is {missed:.{digits}%}"
    if refused is not None and row["refused_rate_queue_grows"]:
        beyond = f"; at {refused:.4g} the queue grows without bound"
    return (
        f"The highest rate that keeps the objective: {found:.4g} requests/s, at which {met:.{digits}%} of "
        f"requests meet it{beyond}."
    )


def _grows(row: Row) -> str:
    if not row["queue_grows"]:
        return ""
    most = row["capacity_requests_per_s"]
    served = (
        f"{rate(row['requests_per_s'])} are served"
        if most is None
        else f"{rate(most)} can be served"
    )
    return (
        f"The queue grows without bound: {row['arrivals_per_s']:.3g} requests arrive a second, {served}; "
        f"{row['queue_mid']:,} wait in the middle of the arrivals, {row['queue_end']:,} at their end. Times are "
        "those of a run of this length: take a lower --rate (--slo with --find-rate looks for it), or more GPUs."
    )


def _at_once(row: Row) -> str:
    """Where there are no arrivals, there are no latencies of a server."""
    if row["arrivals_per_s"] is not None or row["requests"] < 2 or not row["finished"]:
        return ""
    return (
        "All requests wait from the start: TTFT and E2E are of a queue of this length (--rate 4 lets them "
        "arrive); throughput and ITL are what counts here."
    )


def _too_short(row: Row) -> str:
    """Arrivals that end before the first answers do."""
    per_s, answer = row["arrivals_per_s"], row["e2e_s_p50"]
    if row["queue_grows"] or not per_s or answer is None or row.get("found_rate"):
        return ""
    lasts = (row["requests"] - 1) / per_s
    if lasts >= FEW_ANSWERS * answer:
        return ""
    return (
        f"The arrivals last {seconds(lasts)} and an answer takes {seconds(answer)} (E2E p50): too short for a "
        f"steady state, {_more(row)}."
    )


def _more(row: Row) -> str:
    return "give more --num-requests" if row["trace"] is None else "take a longer file"


def _of_few(row: Row) -> str:
    asked, finished = row["requests"], row["finished"]
    if not finished or finished >= MOST_SERVED * asked:
        return ""
    return f"Times are of the {finished:,} of {asked:,} requests that are served."


def named(row: Row, apart: Named) -> str:
    return ", ".join(words_of(row, apart)) or "these settings"

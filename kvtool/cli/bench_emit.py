"""What every `kvtool bench` does with what it found: one run, whatever happened, and the gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.errors import INTERRUPTED, KvtoolError
from kvtool.output import PICTURES, Output
from kvtool.run import Row, Run, environment
from kvtool.view.bench import view

BUSY = 1.15
"""Times the CPU time: a quiet machine stays below it."""
ON_A_CPU = "no GPU here: this measures the CPU backend, and says nothing about a GPU"


@dataclass(slots=True, kw_only=True)
class Measured:
    """What a run has found so far, and what ended it early."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: KvtoolError | None = None


def interrupted(rows: int, where: str) -> KvtoolError:
    """Ctrl-C, with what had been measured."""
    kept = "what was measured is kept" if rows else "nothing was measured yet"
    return KvtoolError(
        f"interrupted after {where}",
        f"{kept}; a new run starts from the beginning",
        code="interrupted",
        exit_code=INTERRUPTED,
    )


def emit(
    command: str,
    given: Mapping[str, Any],
    env: Mapping[str, Any],
    measured: Measured,
    notes: Sequence[str],
    out: Output,
) -> None:
    """Everything that was found as one run; a wrong kernel fails it."""
    if env["device"] == "cpu" and given["device"] == "auto":
        notes = [ON_A_CPU, *notes]
    if out.path is not None and out.path.suffix.lower() in PICTURES:
        out.print_result = True  # minutes of measuring are not for a picture alone
    run = Run(
        command=command,
        params={name: _plain(value) for name, value in given.items()},
        rows=tuple(measured.rows),
        notes=(*notes, *_busy(measured.rows), *dict.fromkeys(measured.notes)),
        env=environment() | dict(env),
    )
    out.emit(run, view(run), failed=wrong(measured.rows) or measured.failed)


def _busy(rows: Sequence[Row]) -> list[str]:
    """Whether somebody else had the core while one thread was timed."""
    waits = [
        row["time_s_p50"] / row["cpu_time_s_p50"]
        for row in rows
        if row.get("threads") == 1 and row.get("cpu_time_s_p50")
    ]
    if not waits or max(waits) < BUSY:
        return []
    return [
        f"this machine was busy: a call took up to {max(waits):.1f} times its CPU time; repeat on a "
        "quiet one before quoting a figure"
    ]


def wrong(rows: Sequence[Row]) -> KvtoolError | None:
    """The gate: a provider that computes something else, a cache that changes what is generated."""
    for row in rows:
        if row.get("correct") is False:
            return KvtoolError(
                f"{row['provider']} is wrong: it {_by(row)} (batch {row['batch']}, context "
                f"{row['context_tokens']:,}, block size {row['block_size']})",
                "it gets no speed; --dump-output writes what it was given and what it made of it",
                code="wrong_result",
            )
        if row.get("same_tokens") is False:
            return KvtoolError(
                f"cache {row['cache']} generates other tokens than the dynamic cache",
                "its figures are not to be trusted; please report it with the output of --json",
                code="wrong_result",
            )
    return None


def _by(row: Row) -> str:
    """How a provider is wrong."""
    if row["error_share"] is None:
        return "gives values that are no numbers"
    if row["error_share"] > 1:
        return f"is off by {row['error_share']:.1f} times what rounding allows"
    return f"has a log-sum-exp that is off by {row['max_lse_error']:.3g}"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


@contextmanager
def params_in_errors(given: Mapping[str, Any]) -> Iterator[None]:
    """Errors that know what was asked, as the JSON of a failed run tells it."""
    try:
        yield
    except KvtoolError as error:
        error.params = {name: _plain(value) for name, value in given.items()}
        raise

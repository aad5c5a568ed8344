"""One model after the other: what fails does not lose what the others gave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvtool.errors import KvtoolError

R = TypeVar("R")
Work = Callable[[str, list[KvtoolError]], tuple[list[R], list[str]]]
"""A model as typed, and a list for what fails of it, to its rows and notes."""


def each_model(models: list[str], work: Work[R]) -> tuple[list[R], list[str], KvtoolError | None]:
    """(rows, notes, the first failure, with exit code 1) of every model; raised if there are no rows at all."""
    rows: list[R] = []
    notes: list[str] = []
    failures: list[KvtoolError] = []
    for model in models:
        lost: list[KvtoolError] = []
        try:
            found, said = work(model, lost)
        except KvtoolError as error:
            if len(models) == 1:
                raise
            failures.append(_about(model, error))
            continue
        failures += [_about(model, error) for error in lost]
        rows += found
        notes += said
    if failures and not rows:
        raise _all_of(failures)
    notes += [f"also failed: {error.message}" for error in failures[1:]]
    return rows, notes, _partly(failures[0]) if failures else None


def _partly(error: KvtoolError) -> KvtoolError:
    """Of a run that has rows all the same."""
    return KvtoolError(error.message, error.hint, code=error.code)


def _about(model: str, error: KvtoolError) -> KvtoolError:
    message = error.message
    named = message.startswith((model, Path(model).name))
    return _reworded(error, message if named else f"{model}: {message}")


def _all_of(failures: list[KvtoolError]) -> KvtoolError:
    return _reworded(failures[0], "; ".join(error.message for error in failures))


def _reworded(error: KvtoolError, message: str) -> KvtoolError:
    return KvtoolError(message, error.hint, code=error.code, exit_code=error.exit_code)

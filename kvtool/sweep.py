"""Many cases, one row each: in parallel, and kept in a file from which the next run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path

from kvtool.errors import INTERRUPTED, KvtoolError
from kvtool.run import Row
from kvtool.sweep_file import PREFIX, SweepFile, sweep_file
from kvtool.sweep_workers import BACKENDS, C, Done, Work, outcomes

__all__ = ["BACKENDS", "Swept", "key_of", "swept"]

HEX = 20
"""Of a key's hash: 80 bits, two alike among a million with a probability of 1 in 10^12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What became of the cases."""

    rows: tuple[Row, ...]
    """In the order of the cases, of those that have one; without keys."""
    lost: tuple[KvtoolError, ...]
    """Why others have none, in their order."""
    reused: int
    """Cases whose row was in the file."""
    notes: tuple[str, ...]


def swept(
    cases: Sequence[C],
    work: Work[C],
    *,
    jobs: int | None = 1,
    backend: str | None = None,
    path: Path | None = None,
    key: Callable[[C], str] | None = None,
    whole: Callable[[Row], bool] = bool,
    progress: Callable[[float], None] = lambda steps: None,
) -> Swept:
    """Each case's row. With a path, rows that are there under their key are not computed again.

    `jobs` None: as many as there are CPUs, where that saves time. `backend`: an existing cluster, `dask` or
    `ray`. `work` is a function of a module and cases are plain data, which can be sent. `progress` is told of
    cases as they are done. Ctrl-C ends the workers, and is the KvtoolError `interrupted`; what is in the
    file stays there. A row in the file that is not `whole` is computed anew.
    """
    keys = [PREFIX + (key or key_of)(case) for case in cases]
    with sweep_file(path, whole) as file:
        wanted = {
            one: number for number, one in reversed(list(enumerate(keys)))
        }  # the first of equals
        missing = [number for number in sorted(wanted.values()) if keys[number] not in file.rows]
        sent = [(number, cases[number]) for number in missing]
        reused = sum(one in file.rows for one in keys)
        progress(len(cases) - len(missing))
        failed = _gone_through(
            outcomes(work, sent, jobs=jobs, backend=backend), keys, file, progress
        )
        notes = (*file.notes, *_also(path, file, set(keys), reused, len(cases)))
        there = [one for one in keys if one in file.rows]
        file.finish(there)  # while it is locked
    return Swept(
        rows=tuple(file.rows[one] for one in there),
        lost=tuple(failed[one] for one in keys if one in failed),
        reused=reused,
        notes=notes,
    )


def _gone_through(
    found: Iterable[list[Done]],
    keys: Sequence[str],
    file: SweepFile,
    progress: Callable[[float], None],
) -> dict[str, KvtoolError]:
    """Every outcome, written down as it comes."""
    failed: dict[str, KvtoolError] = {}
    written = 0
    try:
        with closing(found):  # type: ignore[type-var]
            for done in found:
                rows = {keys[number]: row for number, row, _ in done if row is not None}
                file.append(rows)
                written += len(rows)
                for number, _, why in done:
                    if why is not None:
                        message, hint, code, status = why
                        failed[keys[number]] = KvtoolError(
                            message, hint, code=code, exit_code=status
                        )
                progress(len(done))
    except KeyboardInterrupt as end:
        raise _interrupted(file.path, written, len(keys)) from end
    return failed


def _interrupted(path: Path | None, written: int, of: int) -> KvtoolError:
    kept = (
        f": {written:,} rows more are in {path}" if path else f" after {written:,} of {of:,} rows"
    )
    hint = (
        "run the same again: it goes on from there" if path else "-o FILE.jsonl keeps what is done"
    )
    return KvtoolError(f"interrupted{kept}", hint, code="interrupted", exit_code=INTERRUPTED)


def _also(
    path: Path | None, file: SweepFile, keys: set[str], reused: int, of: int
) -> Iterable[str]:
    if path is None:
        return
    others = sum(one not in keys for one in file.rows)
    if others:
        yield f"{path.name}: {others:,} rows of other models or options stay in it, at its end"
    if reused:
        yield f"{path.name}: {reused:,} of {of:,} rows were there"


# --- keys -----------------------------------------------------------------------------------------


def key_of(*parameters: object) -> str:
    """A short hash of what a row depends on: dataclasses, mappings, sequences, numbers, text and bytes.

    The same in every process. It names what a field is called and holds, whatever order a mapping has.
    """
    return _hash([_plain(one) for one in parameters])


def _hash(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HEX]


def _plain(value: object) -> object:
    """As JSON has it; anything else is a TypeError: its text might hold an address in memory."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, bytes):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        try:
            hash(value)
        except TypeError:  # a mapping in it
            return _fields(value)
        return _short(value)  # type: ignore[arg-type]
    raise TypeError(f"a case that can be named has no {type(value).__name__}")


def _fields(value: object) -> object:
    named = {one.name: _plain(getattr(value, one.name)) for one in fields(value)}  # type: ignore[arg-type]
    return [type(value).__name__, named]


@lru_cache(maxsize=1 << 14)
def _short(value: object) -> str:
    """Cases share most of what they consist of: a model's layers, a GPU."""
    return _hash(_fields(value))

"""The files of `kvtool simulate`: a line a request, a line a step, in whole nanoseconds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.errors import usage_error
from kvtool.output import check_file

if TYPE_CHECKING:
    from kvtool.requests import Requests
    from kvtool.sim.replay import Replay

LINES_AT_ONCE = 1 << 16
REQUEST = (
    '{"arrival_ns": %d, "prompt_tokens": %d, "admit_step": %d, "first_token_step": %d, "finish_step": %d, "first_token_ns": %d, '
    '"finish_ns": %d, "num_preemptions": %d, "cached_tokens_first": %d, '
    '"cached_tokens_after_preemption": %d, "generated": %d, "status": "%s"}\n'
)
STEP = (
    '{"scheduled_tokens": %d, "batch": %d, "running": %d, "waiting": %d, "used_blocks": %d, '
    '"context_tokens": %d, "evictions": %d, "end_ns": %d}\n'
)


def check_files(files: dict[str, Path | None], sources: Sequence[str]) -> None:
    """Refuse at once what would fail after the run, or cost a file that is read or also written."""
    named = {flag: path for flag, path in files.items() if path is not None}
    for flag, path in named.items():
        if flag != "-o":  # which has been looked at
            if path.suffix.lower() != ".jsonl":
                raise usage_error(
                    f"{flag} {path}: it is written as JSON lines", "give a name that ends in .jsonl"
                )
            check_file(path)
        if any(_is_read(source, path) for source in sources):
            raise usage_error(
                f"{flag} {path}: it is the file that is read", "choose another name for the result"
            )
    places = {os.path.realpath(path) for path in named.values()}
    if len(places) < len(named):
        raise usage_error(f"{' and '.join(named)} name one file", "give each result its own")


def _is_read(source: str, path: Path) -> bool:
    with suppress(OSError, ValueError):
        read = os.fstat(0) if source == "-" else Path(source).stat()
        return os.path.samestat(read, path.stat())
    return False


def request_lines(found: Replay, requests: Requests) -> Iterator[bytes]:
    """A request a line, by index."""
    from kvtool.sim.settings import STATUSES

    outcomes = found.outcomes
    numbers = [found.arrival_ns, requests.prompt_tokens]
    numbers += [outcomes[name] for name in (
        "admit_step", "first_token_step", "finish_step", "first_token_ns", "finish_ns",
        "num_preemptions", "cached_tokens_first", "cached_tokens_after_preemption", "generated",
    )]  # fmt: skip
    for some in _parts(len(numbers[0])):
        words = [STATUSES[place] for place in outcomes["status"][some].tolist()]
        yield _text(REQUEST, *(column[some].tolist() for column in numbers), words)


def step_lines(found: Replay) -> Iterator[bytes]:
    """A step a line."""
    columns = [found.steps[name] for name in (
        "scheduled_tokens", "batch", "running", "waiting", "used_blocks", "context_tokens",
        "evictions", "end_ns",
    )]  # fmt: skip
    for some in _parts(len(columns[0])):
        yield _text(STEP, *(column[some].tolist() for column in columns))


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + LINES_AT_ONCE) for start in range(0, count, LINES_AT_ONCE))


def _text(template: str, *columns: list[Any]) -> bytes:
    return "".join(map(template.__mod__, zip(*columns, strict=True))).encode()

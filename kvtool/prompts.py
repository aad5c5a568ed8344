"""The prompts of `kvtool prefix`: a trace or a made workload, gone through as often as needed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from kvtool import sharing
from kvtool.errors import KvtoolError
from kvtool.sharing import Sharing
from kvtool.trace_blocks import HashedRequests
from kvtool.trace_stream import HashedTrace, Progress, stream_trace

MOST_KEPT = 1 << 22
"""Names of blocks that are kept between two readings: 32 MiB. A longer file is read again."""


@dataclass(slots=True, kw_only=True)
class Prompts:
    """Requests in the order in which they are served; block size and tenants are known once begun.

    Iterating starts at the first request each time.
    """

    name: str
    is_trace: bool
    chunks: Callable[[Progress], Iterator[HashedRequests]]
    """Gives them anew; told what part has been read: bytes of a file, requests of a workload."""
    total: int | None
    """What the parts come to, if it is known."""
    can_repeat: bool = True
    progress: Progress = lambda done: None
    made: Sharing | None = None
    trace: HashedTrace | None = None
    longest: int = 0
    """Tokens of the longest prompt that was read."""
    _kept: list[HashedRequests] = field(default_factory=list)
    _is_whole: bool = False
    _names: int = 0
    _begun: Iterator[HashedRequests] | None = None

    @property
    def block_size(self) -> int:
        """Tokens of a block that has a name of its own."""
        if not self._kept and self._begun is None:
            chunks = self._read()
            first = next(chunks)
            self._begun = _and_then(first, chunks)
            self._size = first.block_size
        return self._kept[0].block_size if self._kept else self._size

    _size: int = 0

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names by number; none where all requests are one's. Complete after a reading."""
        if self.made is not None:
            return sharing.tenants(self.made)
        return self.trace.tenants if self.trace is not None else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say of the trace, after a reading."""
        return self.trace.notes if self.trace is not None else ()

    def __iter__(self) -> Iterator[HashedRequests]:
        if self._is_whole:
            yield from self._kept
            return
        begun, self._begun = self._begun, None
        yield from begun if begun is not None else self._read()

    def _read(self) -> Iterator[HashedRequests]:
        """All chunks, kept for the next time as long as they are few."""
        if self._names > 0 and not self.can_repeat:
            raise KvtoolError(
                f"{self.name} is too long to be kept, and must be read twice for this",
                "save it to a file and give --trace FILE, or ask for single capacities",
                code="too_large",
            )
        self._kept, self._names = [], 0
        for requests in self.chunks(self.progress):
            self._names += len(requests.hash_ids)
            self.longest = max(self.longest, int(requests.prompt_tokens.max(initial=0)))
            if self._names <= MOST_KEPT:
                self._kept.append(requests)
            else:
                self._kept = []
            yield requests
        self._is_whole = self._names <= MOST_KEPT


def _and_then(first: HashedRequests, rest: Iterator[HashedRequests]) -> Iterator[HashedRequests]:
    yield first
    yield from rest


def traced(
    place: str,
    *,
    num_requests: int | None = None,
    stdin: Any = None,
    **words: Any,
) -> Prompts:
    """The requests of a file, or its first so many; `words` are those of `stream_trace`."""
    opened = stream_trace(place, stdin=stdin, **words)

    def chunks(progress: Progress) -> Iterator[HashedRequests]:
        trace = stream_trace(place, stdin=stdin, progress=progress, **words)
        prompts.trace = trace
        return _first(trace.chunks, num_requests)

    prompts = Prompts(
        name=opened.name,
        is_trace=True,
        chunks=chunks,
        total=opened.num_bytes,
        can_repeat=place != "-",
    )
    return prompts


def made(workload: Sharing) -> Prompts:
    """The requests of a made workload."""

    def chunks(progress: Progress) -> Iterator[HashedRequests]:
        for requests in sharing.chunks(workload):
            progress(len(requests))
            yield requests

    return Prompts(
        name=workload.name, is_trace=False, chunks=chunks, total=workload.num_requests,
        made=workload,
    )  # fmt: skip


def _first(
    chunks: Generator[HashedRequests, None, None], count: int | None
) -> Iterator[HashedRequests]:
    """Up to so many requests."""
    left = count
    with closing(chunks):  # the file too
        for requests in chunks:
            if left is None:
                yield requests
                continue
            yield requests.first(left)
            left -= min(left, len(requests))
            if not left:
                return

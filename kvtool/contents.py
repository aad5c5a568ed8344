"""What tokens requests consist of: by these, blocks of two requests are the same or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.requests import Column
    from kvtool.trace_blocks import HashedRequests

STREAM_BITS = 20
"""A stream's tokens are numbered from stream × 2^20 on."""
UNIQUE = 1 << 40
"""Where outputs that nobody else has begin: no block of a trace has so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Tokens of requests as pieces: (value, offset), (value, offset + 1), …

    Two tokens are the same if both numbers are. Request i has the pieces `starts[i]` to `starts[i + 1]`,
    none of them empty, and beyond these it goes on with (out_value, out_offset), …
    """

    starts: Column
    value: Column
    offset: Column
    length: Column
    out_value: Column
    out_offset: Column

    def __len__(self) -> int:
        return len(self.out_value)

    def take(self, index: Column) -> Contents:
        """Those of the requests at these places, in this order."""
        import numpy as np

        sizes = np.diff(self.starts)[index]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        places = np.repeat(self.starts[index] - starts[:-1], sizes) + np.arange(starts[-1])
        return Contents(
            starts=starts,
            value=self.value[places],
            offset=self.offset[places],
            length=self.length[places],
            out_value=self.out_value[index],
            out_offset=self.out_offset[index],
        )


def of_segments(sizes: Column, flat: Column, out_stream: Column) -> Contents:
    """From runs (stream, first token, length) of the prompts, `sizes` of them a request, and streams
    that the outputs begin."""
    import numpy as np

    stream, offset, length = flat.reshape(-1, 3).T
    kept = length > 0
    owner = np.repeat(np.arange(len(sizes)), sizes)[kept]
    starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(sizes)))])
    return Contents(
        starts=starts.astype(np.int64),
        value=np.zeros(len(owner), np.int64),
        offset=((stream << STREAM_BITS) + offset)[kept],
        length=length[kept],
        out_value=np.zeros(len(sizes), np.int64),
        out_offset=out_stream << STREAM_BITS,
    )


def of_blocks(requests: HashedRequests, *, first: int = 0) -> Contents:
    """From the blocks that a trace names; outputs that it does not spell are nobody else's.

    `first` is the number of the first request, if others came before: equal ones would share outputs.
    """
    import numpy as np

    size, ids, starts = requests.block_size, requests.hash_ids, requests.starts
    number = np.arange(first, first + len(requests))
    if size == 1:
        goes_on = np.zeros(len(ids), np.bool_)
        goes_on[1:] = ids[1:] == ids[:-1] + 1
        goes_on[starts[:-1][starts[:-1] < len(ids)]] = False
        begins = np.flatnonzero(~goes_on)
        return Contents(
            starts=np.searchsorted(begins, starts),
            value=np.zeros(len(begins), np.int64),
            offset=ids[begins],
            length=np.diff(np.append(begins, len(ids))),
            out_value=number + 1,
            out_offset=np.zeros(len(requests), np.int64),
        )
    tokens = requests.prompt_tokens
    if requests.spells_outputs:
        tokens = tokens + requests.output_tokens
    length = np.full(len(ids), size, np.int64)
    some = tokens > 0
    length[starts[1:][some] - 1] -= (-tokens % size)[some]
    return Contents(
        starts=starts,
        value=ids,
        offset=np.zeros(len(ids), np.int64),
        length=length,
        out_value=number,
        out_offset=np.full(len(requests), UNIQUE),
    )


def joined(parts: Sequence[Contents]) -> Contents:
    """The contents of requests that came by the chunk."""
    import numpy as np

    before = np.cumsum([0, *(len(part.value) for part in parts)])
    starts = [part.starts[:-1] + first for part, first in zip(parts, before, strict=False)]
    names = ("value", "offset", "length", "out_value", "out_offset")
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Contents(starts=np.concatenate([*starts, before[-1:]]), **columns)

"""Requests with their blocks: the hashes that a trace gives, in one flat column."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtool.requests import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedRequests:
    """Requests in the order in which they are served, and what their prompts consist of.

    Request i has the blocks `hash_ids[starts[i] : starts[i + 1]]` of `block_size` tokens, the last one
    perhaps not full. Equal hashes after equal blocks mean equal tokens; where hashes differ, so does
    the first token of the block already: how far two different blocks agree, no trace says.

    `tenant` is whose a request is, as a number counted from 0; None: all are one's. `spells_outputs`:
    the blocks go on over the generated tokens, as only a made workload knows them.
    """

    arrival_ns: Column
    prompt_tokens: Column
    output_tokens: Column
    hash_ids: Column
    starts: Column
    block_size: int
    tenant: Column | None = None
    spells_outputs: bool = False

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self) + 1
        assert self.starts[-1] == len(self.hash_ids)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def first(self, count: int) -> HashedRequests:
        """The first so many requests."""
        return self.part(0, min(count, len(self)))

    def where(self, chosen: NDArray[np.bool_]) -> HashedRequests:
        """The requests that are chosen, in their order."""
        import numpy as np

        sizes = np.diff(self.starts)
        starts = np.concatenate([[0], np.cumsum(sizes[chosen])])
        return replace(
            self,
            arrival_ns=self.arrival_ns[chosen],
            prompt_tokens=self.prompt_tokens[chosen],
            output_tokens=self.output_tokens[chosen],
            hash_ids=self.hash_ids[np.repeat(chosen, sizes)],
            starts=starts,
            tenant=None if self.tenant is None else self.tenant[chosen],
        )

    def part(self, first: int, end: int) -> HashedRequests:
        """The requests from one place on, up to another."""
        low, high = int(self.starts[first]), int(self.starts[end])
        return replace(
            self,
            arrival_ns=self.arrival_ns[first:end],
            prompt_tokens=self.prompt_tokens[first:end],
            output_tokens=self.output_tokens[first:end],
            hash_ids=self.hash_ids[low:high],
            starts=self.starts[first : end + 1] - low,
            tenant=None if self.tenant is None else self.tenant[first:end],
        )

"""Requests with their blocks: the hashes that a trace gives, in one flat column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.requests import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedRequests:
    """Requests in the order in which they are served, and what their prompts consist of.

    Request i has the blocks `hash_ids[starts[i] : starts[i + 1]]` of `block_size` tokens, the last one
    perhaps not full. Equal hashes after equal blocks mean equal tokens; where hashes differ, so does
    the first token of the block already: how far two different blocks agree, no trace says.
    """

    arrival_ns: Column
    prompt_tokens: Column
    output_tokens: Column
    hash_ids: Column
    starts: Column
    block_size: int

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self) + 1
        assert self.starts[-1] == len(self.hash_ids)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def first(self, count: int) -> HashedRequests:
        """The first so many requests."""
        count = min(count, len(self))
        return HashedRequests(
            arrival_ns=self.arrival_ns[:count],
            prompt_tokens=self.prompt_tokens[:count],
            output_tokens=self.output_tokens[:count],
            hash_ids=self.hash_ids[: int(self.starts[count])],
            starts=self.starts[: count + 1],
            block_size=self.block_size,
        )

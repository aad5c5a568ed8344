"""Requests as columns: what traces and workloads give, and what the simulators take."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Columns of one length, a request an entry, in the order of their index.

    `output_tokens` are the tokens that the request generates. `arrival_ns` counts from the start of
    the run; it need not rise with the index. A request whose arrival is -1 arrives `think_ns` after
    the finish of request `parent`. `prefilled` is 1 where the cache of the prompt and the first output
    token come with the request, which then wants a second one at least; else 0.
    """

    arrival_ns: Column
    prompt_tokens: Column
    output_tokens: Column
    priority: Column | None = None
    parent: Column | None = None
    think_ns: Column | None = None
    prefilled: Column | None = None

    def __post_init__(self) -> None:
        lengths = {len(column) for column in self.columns().values()}
        assert len(lengths) == 1, f"columns of different lengths: {lengths}"

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def columns(self) -> dict[str, Column]:
        """The columns that there are, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: column for name, column in values.items() if column is not None}

    def first(self, count: int) -> Requests:
        """The first so many requests."""
        return Requests(**{name: column[:count] for name, column in self.columns().items()})

    def in_order(self) -> Requests:
        """The requests by arrival, those of one time by index."""
        import numpy as np

        return self.take(np.argsort(self.arrival_ns, kind="stable"))

    def take(self, index: Column) -> Requests:
        """The requests at these places, in this order."""
        return Requests(**{name: column[index] for name, column in self.columns().items()})

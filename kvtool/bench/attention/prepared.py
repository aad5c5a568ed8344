"""A provider made ready for one case: a call, and where its output lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtool.bench.timer import Call


class Missing(Exception):
    """Why a provider has no row for this case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A provider ready for one case."""

    run: Call
    output: Callable[[int], Any]
    """batch × query_heads × head_dim: the memory that the call on a pool wrote last."""
    lse: Callable[[int], Any] | None = None
    """[batch, query_heads], the natural logarithm of the sum of exponentials, where it is returned."""
    answers_empty: bool = True
    """Whether an empty sequence gets zeros; its mean of nothing is NaN to some."""
    extra_bytes: int = 0
    """Moved beside K, V, queries and output: tables, partial results, gathered copies."""
    num_splits: int | None = None
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None

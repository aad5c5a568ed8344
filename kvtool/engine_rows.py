"""One entry an engine: how its row is made, and what it says besides.

The words for people stand in view/engines.py (MEANING), its own options in cli/size_words.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtool.engines import ENGINES
from kvtool.errors import KvtoolError
from kvtool.query import Query
from kvtool.run import Row
from kvtool.size_row import Case, Subject, size_row


def no_notes(row: Row, query: Query, case: Case) -> list[str]:
    """An engine that needs no words."""
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRows:
    """How an engine answers."""

    row: Callable[[Subject, Query, Case], Row]
    notes: Callable[[Row, Query, Case], list[str]] = no_notes
    model_dtype: bool = False
    """True where K and V are in the model's dtype, whatever the checkpoint says of its cache."""
    one_process: bool = False
    """True where there are no ranks to split over."""


def tensors(subject: Subject, query: Query, case: Case) -> Row:
    """The row of an engine that holds tensors."""
    if ROWS[case.engine].one_process and case.dp > 1:
        raise KvtoolError(
            f"--engine {case.engine} sizes one process", "leave out --dp", code="not_in_engine"
        )
    sequence = ENGINES[case.engine](
        case.layout,
        context=case.context,
        encoder=case.encoder,
        prompt=case.prompt,
        cache=case.cache,
    )
    return size_row(subject, case, sequence, per_layer=query.per_layer)


def blocks(subject: Subject, query: Query, case: Case) -> Row:
    """The row of vLLM, which reserves blocks."""
    from kvtool.reserve_row import reserve_row

    return reserve_row(subject, case, query.vllm)


def block_notes(row: Row, query: Query, case: Case) -> list[str]:
    """What vLLM decides by itself."""
    from kvtool.reserve_row import notes_of

    return notes_of(row, case, query.vllm)


ROWS = {
    "ideal": EngineRows(row=tensors),
    "transformers": EngineRows(row=tensors, model_dtype=True, one_process=True),
    "vllm": EngineRows(row=blocks, notes=block_notes),
}

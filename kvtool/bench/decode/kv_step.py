"""One forward pass over a store: into which slots its new tokens go, and what its queries see."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvtool.bench.decode.kv_store import KvStore

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor


@dataclass(slots=True)
class Step:
    """One forward pass: where its new tokens go, and what its queries see.

    `slots` int64 [batch × tokens]; for a decode step also `block_table` int32 [batch, max_blocks],
    `lengths` int32 [batch], the new token included, and the longest context that may come, which
    decides how a kernel cuts its work.
    """

    store: KvStore
    slots: Tensor
    block_table: Tensor | None = None
    lengths: Tensor | None = None
    max_context: int = 0
    lanes: Tensor | None = None
    """int64 [sequences]: the row of each, where rows are lanes and some are idle, of length 0."""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """Window → the mask of a prefill, made once for all layers."""


def prefill_step(store: KvStore, sequences: Sequence[Hashable]) -> Step:
    """The step that fills every slot of sequences of equal length."""
    slots = np.concatenate([store.slots(one) for one in sequences])
    return Step(store, torch.from_numpy(slots).to(store.data.device))


def decode_step(
    store: KvStore, sequences: Sequence[Hashable], *, max_context: int, width: int = 0
) -> Step:
    """The step of one token of each sequence, whose slots are there (`KvStore.append`).

    `width`: entries of a block table, if they are to be more than the longest sequence has.
    """
    lengths = np.array([store.pool.num_tokens(one) for one in sequences], dtype=np.int32)
    width = max(width, store.pool.blocks_for(int(lengths.max())))
    table = np.full((len(sequences), width), -1, dtype=np.int32)
    for row, sequence in enumerate(sequences):
        blocks = store.pool.block_table(sequence)
        table[row, : len(blocks)] = blocks
    size, last = store.pool.block_size, lengths - 1
    slots = table[np.arange(len(sequences)), last // size].astype(np.int64) * size + last % size
    lanes = None
    in_order = np.array_equal(table[:, 0], np.arange(len(sequences)))
    if store.contiguous and store.kernels.in_order and not in_order:
        lanes = table[:, 0].astype(np.int64)
        slots, table, lengths = (
            _spread(values, lanes, idle)
            for values, idle in ((slots, -1), (table, -1), (lengths, 0))
        )

    def placed(values: Array) -> Tensor:
        return torch.from_numpy(values).to(store.data.device)

    return Step(
        store,
        placed(slots),
        placed(table),
        placed(lengths),
        max_context,
        None if lanes is None else placed(lanes),
    )


def _spread(values: Array, lanes: Array, idle: int) -> Array:
    """Each sequence's values in the row of its lane."""
    rows = np.full((int(lanes.max()) + 1, *values.shape[1:]), idle, dtype=values.dtype)
    rows[lanes] = values
    return rows

"""One forward pass over a store: into which slots its new tokens go, and what its queries see."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvtool.bench.decode.kv_store import KvStore

Tensor = torch.Tensor


@dataclass(slots=True)
class Step:
    """One forward pass: where its new tokens go, and what its queries see.

    `slots` int64 [batch × tokens]; for a decode step also `block_table` int32 [batch, max_blocks],
    `lengths` int32 [batch], the new token included, and the longest context that may come.
    """

    store: KvStore
    slots: Tensor
    block_table: Tensor | None = None
    lengths: Tensor | None = None
    max_context: int = 0
    lanes: Tensor | None = None
    """Contiguous: the reservation of each sequence, if they are not 0, 1, … to the last."""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """Window → the mask of a prefill, made once for all layers."""


def prefill_step(store: KvStore, sequences: Sequence[Hashable]) -> Step:
    """The step that fills every slot of sequences of equal length."""
    slots = np.concatenate([store.slots(one) for one in sequences])
    return Step(store, torch.from_numpy(slots).to(store.data.device))


def decode_step(store: KvStore, sequences: Sequence[Hashable], *, width: int = 0) -> Step:
    """The step of one token of each sequence, whose slots are there (`KvStore.append`).

    `width`: entries of a block table, if they are to be more than the longest sequence has.
    """
    lengths = np.array([store.pool.num_tokens(one) for one in sequences], dtype=np.int32)
    longest = int(lengths.max())
    width = max(width, store.pool.blocks_for(longest))
    table = np.full((len(sequences), width), -1, dtype=np.int32)
    for row, sequence in enumerate(sequences):
        blocks = store.pool.block_table(sequence)
        table[row, : len(blocks)] = blocks
    size, last = store.pool.block_size, lengths - 1
    slots = table[np.arange(len(sequences)), last // size].astype(np.int64) * size + last % size
    lanes = table[:, 0].astype(np.int64) if store.contiguous else None
    if lanes is not None and np.array_equal(lanes, np.arange(store.pool.num_blocks)):
        lanes = None
    device = store.data.device
    return Step(
        store,
        torch.from_numpy(slots).to(device),
        torch.from_numpy(table).to(device),
        torch.from_numpy(lengths).to(device),
        longest,
        None if lanes is None else torch.from_numpy(lanes).to(device),
    )

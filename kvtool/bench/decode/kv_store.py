"""K and V in physical blocks, handed out by the allocator that `kvtool fragment` measures.

One tensor of blocks for all layers and one `BlockPool`, so that a block number means the same in
every layer. Blocks of `max_model_len` tokens, one a sequence, make it a contiguous cache.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from kvtool.bench.decode.blueprint import Heads
from kvtool.bench.decode.kernels import Kernels
from kvtool.sim.block_pool import BlockPool


class KvStore:
    """K and V of every layer: `data` is [layers, 2, blocks, kv_heads, block_size, head_dim].

    Sequences are known by any key. What the pool says is carried out here, in every layer at once.
    """

    def __init__(
        self,
        heads: Heads,
        kernels: Kernels,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        contiguous: bool = False,
    ) -> None:
        self.heads = heads
        self.kernels = kernels
        self.contiguous = contiguous
        self.pool = BlockPool(num_blocks, block_size)
        inner = (heads.kv_heads, block_size)
        if kernels.tokens_first:
            inner = (block_size, heads.kv_heads)
        shape = (heads.num_layers, 2, num_blocks, *inner, heads.head_dim)
        data = torch.empty(shape, dtype=dtype, device=device)
        self.data = data.transpose(3, 4) if kernels.tokens_first else data
        self.copies = 0
        """Blocks copied on write, so far."""

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return self.heads.token_bytes(self.data.dtype.itemsize) * self.pool.block_size

    @property
    def held_bytes(self) -> int:
        """Of the blocks that are taken: what nobody else can use."""
        return (self.pool.num_blocks - self.pool.num_free) * self.block_bytes

    def append(self, sequence: Hashable) -> None:
        """Room for one more token of a sequence. Raises OutOfBlocks, and then nothing is changed."""
        used = self.pool.num_tokens(sequence) % self.pool.block_size
        copy = self.pool.append(sequence)
        if copy is not None:
            self.data[:, :, copy.target, :, :used] = self.data[:, :, copy.source, :, :used]
            self.copies += 1

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """A second sequence with the same tokens: shared blocks, or a reservation and a copy."""
        if not self.contiguous:
            self.pool.fork(parent, child)
            return
        tokens = self.pool.num_tokens(parent)
        self.pool.allocate(child, tokens)
        (source,), (target,) = self.pool.block_table(parent), self.pool.block_table(child)
        self.data[:, :, target, :, :tokens] = self.data[:, :, source, :, :tokens]
        self.copies += 1

    def slots(self, sequence: Hashable, first: int = 0) -> np.ndarray[Any, Any]:
        """The slots of a sequence's tokens from position `first` on: block × block_size + offset."""
        size = self.pool.block_size
        table = np.asarray(self.pool.block_table(sequence), dtype=np.int64)
        positions = np.arange(first, self.pool.num_tokens(sequence))
        return np.asarray(table[positions // size] * size + positions % size)

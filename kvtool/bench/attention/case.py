"""A case: one shape of decode attention, and what it must read, write and compute."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvtool.errors import usage_error

PATTERNS = ("sequential", "shuffled", "fragmented")
LAYOUTS = ("nhd", "hnd")
"""The order of a block's axes: tokens, heads, head size; or heads first, so that the tokens of one
head lie together."""
KV_DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of an element."""
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = tuple(2**power for power in range(9))
LSE_BYTES = 4
TABLE_BYTES = 4
"""A block table's entry, int32, as in vLLM and FlashInfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`context_tokens` is the mean of the sequences; `skew` times as many has the longest one."""

    batch: int
    context_tokens: int
    query_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    pattern: str
    kv_dtype: str
    layout: str
    num_splits: int | None
    """None: chosen by the kernel's own rule."""
    num_stages: int | None = None
    """Of our kernels' pipeline; None: from the kernel's own table."""
    skew: int
    threads: int | None
    """Of the CPU; None on a GPU."""
    given_lengths: tuple[int, ...] | None = None
    """Tokens of each sequence where a file gives them."""

    def to_row(self) -> dict[str, Any]:
        """The case, flat, as every row repeats it."""
        flat = asdict(self)
        del flat["given_lengths"]
        return flat

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence: equal ones, or one of skew × context and the rest equal.

        The sum is batch × context whatever the skew, so that the bytes read are the same.
        """
        if self.given_lengths is not None:
            return self.given_lengths
        total = self.batch * self.context_tokens
        if self.skew == 1 or self.batch == 1:
            return (self.context_tokens,) * self.batch
        longest = self.skew * self.context_tokens
        share, more = divmod(total - longest, self.batch - 1)
        return (longest, *(share + (index < more) for index in range(self.batch - 1)))

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each sequence."""
        return tuple(-(-tokens // self.block_size) for tokens in self.lengths)

    @property
    def kv_bytes(self) -> int:
        """K and V of every token, each read once."""
        width = self.kv_heads * self.head_dim * KV_DTYPES[self.kv_dtype]
        return 2 * sum(self.lengths) * width

    @property
    def useful_bytes(self) -> int:
        """What any decode kernel must move: K and V, the queries, the output."""
        queries = self.batch * self.query_heads * self.head_dim * KV_DTYPES[self.kv_dtype]
        return self.kv_bytes + 2 * queries

    @property
    def table_bytes(self) -> int:
        """The entries of the block tables that stand for tokens."""
        return sum(self.blocks) * TABLE_BYTES

    def partial_bytes(self, num_splits: int) -> int:
        """What split results cost: an fp32 row and its log-sum-exp a split, written and read."""
        if num_splits <= 1:
            return 0
        rows = self.batch * self.query_heads * num_splits
        return 2 * rows * (self.head_dim * 4 + LSE_BYTES)

    @property
    def flops(self) -> int:
        """QK^T and PV: two multiply-adds for each query head, token and element."""
        return 4 * sum(self.lengths) * self.query_heads * self.head_dim


def check_block_size(size: int) -> None:
    """Refuse what no kernel is made for. Raises a usage error."""
    if size not in BLOCK_SIZES:
        raise usage_error(
            f"--block-size {size}: the kernels take powers of two from 1 to 256",
            "try --block-size 16; kvtool fragment takes any block size",
        )


def check(case: Case) -> None:
    """Refuse what no kernel here computes. Raises a usage error."""
    check_block_size(case.block_size)
    if case.head_dim not in HEAD_DIMS:
        raise usage_error(
            f"--head-dim {case.head_dim} is not supported by the kernels",
            f"the head sizes are {', '.join(map(str, HEAD_DIMS))}",
        )
    if case.query_heads % case.kv_heads:
        raise usage_error(
            f"--query-heads {case.query_heads} is no multiple of --kv-heads {case.kv_heads}",
            "each KV head serves the same number of query heads",
        )
    if case.skew > 1 and case.skew > case.batch:
        raise usage_error(
            f"--skew {case.skew}: the longest of {case.batch} sequences cannot have more than "
            f"{case.batch} times the mean",
            "lower --skew, or raise --batch",
        )

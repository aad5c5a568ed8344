"""How many requests, tokens and how long a context a rank's memory for the cache holds, engine by engine.

The arithmetic is that of the rows of `kvtool size`: whole tensors of `ideal` and `transformers`, blocks of
vLLM. Bytes are of the fullest rank; requests are those of one replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from kvtool.cache import CacheLayout
from kvtool.engine_rows import ROWS
from kvtool.engines import ideal
from kvtool.errors import KvtoolError
from kvtool.model.shape import ModelShape
from kvtool.query import Query
from kvtool.run import Row
from kvtool.size_row import Case, Subject, VllmOptions

LONGEST = 2**24
"""Tokens that are looked for where the model states no maximum."""
MOST_REQUESTS = 2**20
"""Where a request takes no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A model's cache in an engine, on the ranks of one replica."""

    subject: Subject
    engine: str
    layout: CacheLayout
    options: VllmOptions
    encoder: int | None = 0
    """Encoder tokens of a request; None: as many as its context."""

    def encoder_at(self, context: int) -> int:
        """Encoder tokens of a request of this context."""
        return context if self.encoder is None else self.encoder

    @property
    def kv_dtype(self) -> str:
        """As it is asked for, and shown."""
        return self.options.kv_dtype(self.layout)

    def row(self, context: int, kv_bytes: int | None = None) -> Row:
        """The row of `kvtool size` for one request of this context."""
        case = Case(
            engine=self.engine, context=context, encoder=self.encoder_at(context), batch=1,
            layout=self.layout,
        )  # fmt: skip
        options = replace(self.options, kv_memory=kv_bytes)
        return ROWS[self.engine].row(self.subject, Query(vllm=options), case)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a rank's memory holds of requests of one context. Blocks are None where an engine has none."""

    context: int
    request_bytes: int
    max_concurrency: float
    """Requests of one replica at a time, as vLLM prints it; below 1: not even one."""
    whole_requests: int
    """That really run at a time: of vLLM's blocks one is no request's."""
    kv_tokens: int
    """Concurrency × context, as vLLM prints it."""
    num_blocks: int | None
    bytes_per_block: int | None
    block_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one request takes of a rank, whatever memory there is. Blocks are 0 where an engine has none."""

    request_bytes: int
    blocks: int
    bytes_per_block: int | None
    block_size: int | None


@lru_cache(maxsize=1 << 14)
def needs_of(holder: Holder, context: int) -> Needs:
    """As the engine's row has it; KvtoolError where vLLM refuses the mix of layers."""
    if holder.engine == "ideal":  # its row has far more, and the longest context asks for many
        request = ideal.rank_bytes(holder.layout, context, holder.encoder_at(context))
        size = holder.layout.block_size
        return Needs(request_bytes=request, blocks=0, bytes_per_block=None, block_size=size)
    row = holder.row(context)
    request = row.get("one_request_bytes") or row["per_gpu_bytes"]
    if request is None:
        raise KvtoolError(
            f"{holder.subject.name}: vLLM does not start: {row['reason']}",
            "no memory helps: it refuses this mix of layers with these options (--dcp, --hybrid)",
            code="does_not_fit",
        )
    return Needs(
        request_bytes=request,
        blocks=row.get("blocks_per_request") or 0,
        bytes_per_block=row.get("bytes_per_block"),
        block_size=row["block_size"],
    )


def capacity(holder: Holder, context: int, kv_bytes: int) -> Capacity:
    """Of `kv_bytes`, which may be negative: then nothing is held."""
    needs = needs_of(holder, context)
    request, block = needs.request_bytes, needs.bytes_per_block
    room = max(0, kv_bytes)
    if block:
        held = room // block / needs.blocks
        whole = max(0, room // block - 1) // needs.blocks  # the null block
    elif request:
        held, whole = room / request, room // request
    else:
        held, whole = (math.inf, MOST_REQUESTS) if kv_bytes >= 0 else (0.0, 0)
    return Capacity(
        context=context,
        request_bytes=request,
        max_concurrency=held,
        whole_requests=whole,
        kv_tokens=int(held * context) if math.isfinite(held) else 0,
        num_blocks=room // block if block else None,
        bytes_per_block=block,
        block_size=needs.block_size,
    )


def max_context(holder: Holder, kv_bytes: int, users: int = 1, *, allow_long: bool = False) -> int:
    """The longest context of which so many requests fit together, up to the model's maximum; 0 if not even one
    token does."""
    top = limit_of(holder.layout.shape, allow_long=allow_long)
    return longest(lambda tokens: holds(holder, tokens, kv_bytes, users), top)


def limit_of(shape: ModelShape, *, allow_long: bool) -> int:
    """The longest context that is looked for: the model's maximum, its class's where the config states none."""
    return (
        shape.max_context
        if shape.max_context and shape.positions_end and not allow_long
        else LONGEST
    )


def holds(holder: Holder, context: int, kv_bytes: int, users: int) -> bool:
    """Whether so many requests of this context fit."""
    return least(holder, context, users) <= kv_bytes


def least(holder: Holder, context: int, users: int) -> int:
    """The least memory of a rank in which so many requests of a replica fit; of blocks one is set aside."""
    needs = needs_of(holder, context)
    return users * needs.request_bytes + (needs.bytes_per_block or 0)


def longest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to a limit that fits, by bisection; 0 if none does."""
    if fits(limit):
        return limit
    low, high = 0, limit - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

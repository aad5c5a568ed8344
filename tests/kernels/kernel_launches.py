"""Launches on the meta device, as large as a real case, to be compiled ahead of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvtool.kernels import decode, decode_plan
from kvtool.kernels.launch import Launch

BATCH, CONTEXT = 8, 4096
SM_COUNT = 132


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def decode_launch(
    walk: str,
    *,
    arch: str,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    head_dim: int = 128,
    query_heads: int = 32,
    kv_heads: int = 8,
    window: int = 0,
    **overrides: Any,
) -> Launch:
    """The decode kernel of a Llama-3-8B layer, with the plan of arch; overrides go to the plan."""
    is_paged = walk != "contiguous"
    plan = decode_plan.plan_for(
        head_dim=head_dim, item_bytes=dtype.itemsize, block_size=block_size if is_paged else None,
        arch=arch, sm_count=SM_COUNT, batch=BATCH, query_heads=query_heads, kv_heads=kv_heads,
        max_context=CONTEXT, walk=walk if is_paged else "chunked",
    )  # fmt: skip
    plan = replace(plan, **overrides)
    q = empty(BATCH, query_heads, head_dim, dtype=dtype)
    lengths = empty(BATCH, dtype=torch.int32)
    if is_paged:
        blocks = CONTEXT // block_size
        cache = empty(BATCH * blocks, block_size, kv_heads, head_dim, dtype=dtype)
        table = empty(BATCH, blocks, dtype=torch.int32)
        made = decode.prepare_paged(q, cache, cache, table, lengths, window=window, plan=plan)
    else:
        cache = empty(BATCH, CONTEXT, kv_heads, head_dim, dtype=dtype)
        made = decode.prepare_contiguous(q, cache, cache, lengths, window=window, plan=plan)
    return made.launches[0]

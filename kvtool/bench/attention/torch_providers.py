"""torch's own attention, on the contiguous cache and on a gathered copy: the same on a GPU and a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvtool.bench.attention.data import Data, flat
from kvtool.bench.attention.prepared import Prepared
from kvtool.bench.device import load_torch


def sdpa(data: Data) -> Prepared:
    """torch's scaled_dot_product_attention on the contiguous cache.

    The query heads of a KV head are the rows of its query, [batch, kv_heads, group, head_dim], so that
    K and V are read once: on a CPU twice as fast as enable_gqa, and never slower.
    """
    return _sdpa(data, [(k, v) for k, v in zip(data.k, data.v, strict=True)])


def _sdpa(data: Data, pools: list[tuple[Any, Any]]) -> Prepared:
    torch = load_torch()
    attend = torch.nn.functional.scaled_dot_product_attention
    case = data.case
    group = case.query_heads // case.kv_heads
    q = data.q.view(case.batch, case.kv_heads, group, case.head_dim)
    heads_first = [(k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)) for k, v in pools]
    mask = _mask(data, heads_first[0][0].shape[2])
    outputs: list[Any] = [None] * len(pools)

    def run(pool: int) -> None:
        k, v = heads_first[pool]
        outputs[pool] = attend(q, k, v, attn_mask=mask, scale=data.scale)

    return Prepared(run=run, output=lambda pool: outputs[pool], answers_empty=False)


def _mask(data: Data, longest: int) -> Any:
    """Which positions are tokens, [batch, 1, 1, longest]; None where all of them are."""
    torch = load_torch()
    if min(data.case.lengths) == longest:
        return None
    positions = torch.arange(longest, device=data.q.device)
    return (positions[None, :] < data.lengths[:, None])[:, None, None, :]


def gather_sdpa(data: Data) -> Prepared:
    """The blocks of every sequence gathered into a buffer that is there already, then sdpa on it.

    One index_select of whole rows: a block (nhd), or a head's part of a block (hnd), is one line of
    memory in the pool, and lies in the buffer where sdpa wants it.
    """
    torch = load_torch()
    case = data.case
    per_block = case.kv_heads if case.layout == "hnd" else 1
    index = _rows_of_blocks(data, per_block)
    width = case.block_size * case.kv_heads * case.head_dim // per_block
    sources = [
        tuple(flat(one).view(-1, width) for one in pair)
        for pair in zip(data.k_cache, data.v_cache, strict=True)
    ]
    shape = (len(index), width)
    buffers = [torch.zeros(shape, dtype=data.q.dtype, device=data.q.device) for _ in range(2)]
    k, v = (_as_tokens(data, buffer)[:, : case.max_context] for buffer in buffers)
    inner = _sdpa(data, [(k, v)] * data.pools)

    def run(pool: int) -> None:
        for source, buffer in zip(sources[pool], buffers, strict=True):
            torch.index_select(source, 0, index, out=buffer)
        inner.run(pool)

    gathered = 2 * sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    return replace(inner, run=run, extra_bytes=gathered + case.table_bytes)


def _rows_of_blocks(data: Data, per_block: int) -> Any:
    """Which rows of the pool make the buffer: sequences, then heads (hnd), then blocks."""
    torch = load_torch()
    blocks = data.table.clamp(min=0).long()
    parts = torch.arange(per_block, device=blocks.device)
    return (blocks[:, None, :] * per_block + parts[None, :, None]).reshape(-1)


def _as_tokens(data: Data, buffer: Any) -> Any:
    """The buffer as [batch, tokens, kv_heads, head_dim]."""
    case = data.case
    if case.layout == "nhd":
        return buffer.view(case.batch, -1, case.kv_heads, case.head_dim)
    return buffer.view(case.batch, case.kv_heads, -1, case.head_dim).permute(0, 2, 1, 3)

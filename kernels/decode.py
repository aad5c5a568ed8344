"""Decode attention over a paged KV cache, and its contiguous twin from the same source.

For each sequence and query head, over the tokens t that it sees (all, or the last `window`):

    s_t = scale · q · k_t        lse = log Σ_t exp(s_t)        out = Σ_t exp(s_t − lse) · v_t

PagedAttention (arXiv 2309.06180) split over the context as in FlashDecoding
(https://pytorch.org/blog/flash-decoding/) with the online softmax of arXiv 1805.02867. The query
heads of one KV head are the rows of one tile, so that K and V are read once.

The walk over blocks is what decides the speed. A block id that is loaded in the iteration that needs
it makes an indirect load, which triton does not overlap with anything. The chunked walk therefore
loads the ids of many tiles at once into registers and takes each tile's from there (`tl.gather`), so
that the inner loop is pipelined as the contiguous one is. The naive walk is kept for comparison.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from . import merge
from .arguments import (
    block_size_is_supported,
    caches_match,
    is_dense,
    refuse_unless,
    results_fit,
    rows_are_aligned,
    same_device,
    shape_is,
    table_fits,
    workspace_fits,
)
from .decode_plan import MIN_TILES, Plan, chunk_ids_for, next_power_of_2, plan_for, rows_for
from .launch import Launch, Prepared, chip_of, is_interpreted
from .options import Options, Pair

MAX_BATCH = 65535  # CUDA's limit for this axis of a grid

Tensor = torch.Tensor

COMPUTE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _fold(
    q, k, v, rows, seen, acc, highest, total, scale,
    D: tl.constexpr, D_PADDED: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the tokens at offsets rows [tile] of K and V into (acc, highest, total)."""
    dims = tl.arange(0, D_PADDED)
    at = rows[:, None] + dims[None, :]
    # Masked loads give zeros: what lies beyond the length, NaN or not, is never read.
    mask = seen[:, None] & (dims < D)[None, :]
    keys = tl.load(k + at, mask=mask, other=0.0).to(COMPUTE)
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    # Each tile has a token that is seen, so this is finite and no -inf is subtracted from -inf.
    new = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    faded = tl.exp2(highest - new)
    values = tl.load(v + at, mask=mask, other=0.0).to(COMPUTE)
    acc = tl.dot(weights.to(COMPUTE), values, acc * faded[:, None], input_precision=PRECISION)
    return acc, new, total * faded + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["stride_table", "window"])
def _decode(
    q, k, v, table, lengths, out, lse, scale, window,
    stride_q_seq, stride_q_head, stride_block, stride_token, stride_head, stride_table,
    D: tl.constexpr, D_PADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr, CHUNK_TILES: tl.constexpr,
    IDS: tl.constexpr, MIN_TILES: tl.constexpr, WALK: tl.constexpr, WINDOWED: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (KV head × row group, split, sequence). scale has log2(e) in it.

    WALK: "chunked" or "naive" over blocks; "contiguous": stride_block is a sequence's stride.
    """
    row_groups: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(0) // row_groups
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + seq)
    start = tl.maximum(length - window, 0) if WINDOWED else 0
    first_tile = start // TILE
    num_tiles = tl.cdiv(length, TILE) - first_tile
    # A short sequence uses fewer splits than a long one beside it.
    per_split = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(1)), MIN_TILES)
    begin = first_tile + split * per_split
    end = tl.minimum(begin + per_split, first_tile + num_tiles)

    member = (tl.program_id(0) % row_groups) * ROWS + tl.arange(0, ROWS)
    head = kv_head * GROUP + member
    dims = tl.arange(0, D_PADDED)
    q_at = seq * stride_q_seq + head.to(tl.int64)[:, None] * stride_q_head + dims[None, :]
    q_mask = (member < GROUP)[:, None] & (dims < D)[None, :]
    queries = tl.load(q + q_at, mask=q_mask, other=0.0).to(COMPUTE)
    # 64 bits from here on: a pool has more than 2^31 elements.
    k += kv_head.to(tl.int64) * stride_head
    v += kv_head.to(tl.int64) * stride_head
    table += seq * stride_table
    acc = tl.zeros((ROWS, D_PADDED), tl.float32)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    offsets = tl.arange(0, TILE)
    if WALK == "chunked":
        for chunk in range(begin, end, CHUNK_TILES):
            first_block = chunk * TILE >> SHIFT
            blocks = first_block + tl.arange(0, IDS)
            ids = tl.load(table + blocks, mask=blocks << SHIFT < length, other=0)
            for tile in range(chunk, tl.minimum(chunk + CHUNK_TILES, end)):
                tokens = tile * TILE + offsets
                block = tl.gather(ids, (tokens >> SHIFT) - first_block, 0).to(tl.int64)
                within = (tokens & (BLOCK_SIZE - 1)).to(tl.int64)
                rows = block * stride_block + within * stride_token
                acc, highest, total = _fold(
                    queries, k, v, rows, (tokens >= start) & (tokens < length),
                    acc, highest, total, scale, D, D_PADDED, COMPUTE, PRECISION,
                )  # fmt: skip
    else:
        for tile in range(begin, end):
            tokens = tile * TILE + offsets
            seen = (tokens >= start) & (tokens < length)
            if WALK == "naive":
                block = tl.load(table + (tokens >> SHIFT), mask=seen, other=0).to(tl.int64)
                within = (tokens & (BLOCK_SIZE - 1)).to(tl.int64)
                rows = block * stride_block + within * stride_token
            else:
                rows = seq * stride_block + tokens.to(tl.int64) * stride_token
            acc, highest, total = _fold(
                queries, k, v, rows, seen,
                acc, highest, total, scale, D, D_PADDED, COMPUTE, PRECISION,
            )  # fmt: skip

    # [split, sequence, query head]: the merge reads a part's LSE first, and no part that has -inf.
    heads = tl.num_programs(0) // row_groups * GROUP
    at = (split * tl.num_programs(2) + seq) * heads + head
    divisor = tl.where(total == 0.0, 1.0, total)
    values = (acc / divisor[:, None]).to(out.dtype.element_ty)
    written = tl.where(split == 0, 1.0, total) != 0.0
    tl.store(out + at[:, None] * D + dims[None, :], values, mask=q_mask & written[:, None])
    # ln 2 makes it natural; highest is -inf where nothing was seen.
    tl.store(lse + at, (highest + tl.log2(divisor)) * 0.6931471805599453, mask=member < GROUP)


def workspace_for(q: Tensor, plan: Plan) -> Pair | None:
    """Room for the results of a plan's splits, fp32; None if it has one. For CUDA graphs.

    ([splits, batch, query_heads, head_dim], [splits, batch, query_heads]); any split that is not
    written is not read either, so it need not be cleared.
    """
    if plan.num_splits == 1:
        return None
    parts = (plan.num_splits, *q.shape[:2])
    return (
        q.new_empty((*parts, q.shape[2]), dtype=torch.float32),
        q.new_empty(parts, dtype=torch.float32),
    )


def _plan(q: Tensor, k: Tensor, block_size: int | None, room: int, options: Options) -> Plan:
    """The plan that was given, or the table's; room: the tokens that a sequence can have."""
    if options.plan is not None:
        return options.plan
    arch, sm_count = chip_of(q.device)
    context = room if options.max_context is None else options.max_context
    return plan_for(
        head_dim=q.shape[2], item_bytes=q.element_size(), block_size=block_size, arch=arch,
        sm_count=sm_count, batch=q.shape[0], query_heads=q.shape[1], kv_heads=k.shape[2],
        max_context=min(context, options.window or context),
    )  # fmt: skip


def _arguments(
    q: Tensor, k: Tensor, strides: tuple[int, ...], table: Tensor | None, plan: Plan, options: Options
) -> dict[str, Any]:  # fmt: skip
    """The kernel's arguments but for the tensors that it reads or writes."""
    head_dim, group = q.shape[2], q.shape[1] // k.shape[2]
    q_strides = rows_are_aligned("q", q)
    scale = head_dim**-0.5 if options.scale is None else float(options.scale)
    size = 1 if table is None else k.shape[1]
    dtype = torch.float32 if is_interpreted(_decode) else q.dtype  # its bf16 is wrong
    return dict(
        scale=scale * math.log2(math.e), window=options.window,
        stride_q_seq=q_strides[0], stride_q_head=q_strides[1], stride_block=strides[0],
        stride_token=strides[1], stride_head=strides[2],
        stride_table=0 if table is None else table.stride(0),
        D=head_dim, D_PADDED=next_power_of_2(head_dim), GROUP=group, ROWS=rows_for(group),
        BLOCK_SIZE=size, SHIFT=size.bit_length() - 1, TILE=plan.tile, CHUNK_TILES=plan.chunk_tiles,
        IDS=chunk_ids_for(tile=plan.tile, chunk_tiles=plan.chunk_tiles, block_size=size),
        MIN_TILES=MIN_TILES, WALK="contiguous" if table is None else plan.walk,
        WINDOWED=options.window > 0, COMPUTE=COMPUTE[dtype],
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
    )  # fmt: skip


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, lengths: Tensor,
    strides: tuple[int, ...], plan: Plan, options: Options,
) -> Prepared:  # fmt: skip
    """The launches of either kernel; without a table, of the contiguous one."""
    batch = q.shape[0]
    refuse_unless(batch <= MAX_BATCH, f"at most {MAX_BATCH} sequences a launch, not {batch}")
    shape_is("lengths", lengths, batch=batch)
    is_dense("lengths", lengths, (torch.int32,))
    out, lse = results_fit(q, options.out, options.lse)
    parts = (out, lse)
    if plan.num_splits > 1:
        parts = options.workspace or workspace_for(q, plan) or parts
        workspace_fits(q, parts, plan.num_splits)
    device = same_device(
        q=q, k=k, v=v, table=table, lengths=lengths, out=out, lse=lse, workspace=parts[0]
    )
    arguments = _arguments(q, k, strides, table, plan, options)
    row_groups = -(-arguments["GROUP"] // arguments["ROWS"])
    tensors = dict(q=q, k=k, v=v, table=lengths if table is None else table, lengths=lengths)
    launch = Launch(
        kernel=_decode,
        grid=(k.shape[2] * row_groups, plan.num_splits, batch),
        arguments=tensors | dict(out=parts[0], lse=parts[1]) | arguments,
        options={"num_warps": plan.num_warps, "num_stages": plan.num_stages},
        device=device,
    )
    launches = (launch,) if batch else ()
    if plan.num_splits > 1:
        launches += merge.prepare(*parts, out=out, lse=lse, num_parts=plan.num_splits).launches
    return Prepared(launches=launches, out=out, lse=lse, plan=plan)


def prepare_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths: Tensor, **options: Any
) -> Prepared:  # fmt: skip
    """Check the arguments of `paged_decode` and build its launches, to run as often as wanted."""
    strides = caches_match(q, k_cache, v_cache, ("k_cache", "v_cache"))
    block_size = k_cache.shape[1]
    block_size_is_supported(block_size)
    table_fits(q, block_table)
    chosen = Options(**options)
    plan = _plan(q, k_cache, block_size, block_table.shape[1] * block_size, chosen)
    return _prepare(q, k_cache, v_cache, block_table, lengths, strides, plan, chosen)


def prepare_contiguous(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **options: Any
) -> Prepared:  # fmt: skip
    """Check the arguments of `contiguous_decode` and build its launches."""
    strides = caches_match(q, k, v, ("k", "v"))
    refuse_unless(k.shape[0] == q.shape[0], f"k holds {k.shape[0]} sequences and q {q.shape[0]}")
    chosen = Options(**options)
    plan = _plan(q, k, None, k.shape[1], chosen)
    return _prepare(q, k, v, None, lengths, strides, plan, chosen)


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths: Tensor, **options: Any
) -> Pair:  # fmt: skip
    """(out like q, lse fp32 [batch, query_heads]) of one new token a sequence.

    q [batch, query_heads, head_dim]; caches as a view [num_blocks, block_size, kv_heads, head_dim];
    block_table int32 [batch, max_blocks], lengths int32 [batch]; options as in Options. Entries past
    a sequence's end or before its window are not followed. An empty sequence gives 0 and -inf.
    Lengths and ids are the caller's word: nothing is read back from the device, and a length beyond
    the table reads what lies there. Refusals are ValueErrors.
    """
    return prepare_paged(q, k_cache, v_cache, block_table, lengths, **options).run()


def contiguous_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **options: Any) -> Pair:
    """`paged_decode` for K and V [batch, max_tokens, kv_heads, head_dim], any strides but the last."""
    return prepare_contiguous(q, k, v, lengths, **options).run()


def contiguous_reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float | None = None, window: int = 0
) -> Pair:  # fmt: skip
    """`contiguous_decode` in plain torch, computed and returned in float64."""
    batch, heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((batch, heads), -torch.inf, dtype=torch.float64, device=q.device)
    for seq, length in enumerate(lengths.tolist()):
        seen = slice(max(0, length - window) if window else 0, length)
        keys, values = (
            part[seq, seen].double().repeat_interleave(heads // k.shape[2], 1) for part in (k, v)
        )
        if length:
            scores = torch.einsum("hd,thd->ht", q[seq].double(), keys) * scale
            lse[seq] = torch.logsumexp(scores, 1)
            out[seq] = torch.einsum("ht,thd->hd", torch.softmax(scores, 1), values)
    return out, lse


def paged_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths: Tensor, *,
    scale: float | None = None, window: int = 0,
) -> Pair:  # fmt: skip
    """`paged_decode` in plain torch, computed and returned in float64."""
    out = [torch.zeros((0, *q.shape[1:]), dtype=torch.float64, device=q.device)]
    lse = [out[0][..., 0]]
    size = k_cache.shape[1]
    for seq, length in enumerate(lengths.tolist()):
        first = max(0, length - window) // size if window else 0
        ids = block_table[seq, : -(-length // size)].long()
        ids[:first] = 0  # freed blocks before the window
        keys, values = (cache[ids].flatten(0, 1)[None] for cache in (k_cache, v_cache))
        done = contiguous_reference(
            q[seq : seq + 1], keys, values, lengths[seq : seq + 1], scale=scale, window=window
        )
        out.append(done[0])
        lse.append(done[1])
    return torch.cat(out), torch.cat(lse)

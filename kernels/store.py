"""Scatter new K and V into the slots of a paged cache.

    cache[slot // block_size, slot % block_size] = token        slot −1: skipped

(PagedAttention's reshape-and-cache, arXiv 2309.06180.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import (
    DTYPES,
    block_size_is_supported,
    effective_strides,
    refuse_unless,
    rows_are_aligned,
    same_device,
    shape_is,
)
from .decode_plan import next_power_of_2
from .launch import Launch

MAX_TOKENS = 2**31 - 1

Tensor = torch.Tensor


@triton.jit(do_not_specialize=["stride_slots"])
def _store(
    k, v, k_cache, v_cache, slots, kv_heads, stride_slots,
    k_token, k_head, v_token, v_head,
    stride_block, stride_token, stride_head,
    D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Program (token, group of HEADS heads)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * stride_slots).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, D_PADDED)
    mask = (heads < tl.where(slot >= 0, kv_heads, 0))[:, None] & (dims < D)[None, :]
    heads = heads.to(tl.int64)[:, None]
    # 64 bits: a pool has more than 2^31 elements.
    to = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_token
    to += heads * stride_head + dims[None, :]
    k_at = token * k_token + heads * k_head + dims[None, :]
    v_at = token * v_token + heads * v_head + dims[None, :]
    tl.store(k_cache + to, tl.load(k + k_at, mask=mask, other=0.0), mask=mask)
    tl.store(v_cache + to, tl.load(v + v_at, mask=mask, other=0.0), mask=mask)


def _checked(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    refuse_unless(k.dim() == 3, "k must be [tokens, kv_heads, head_dim]")
    refuse_unless(k_cache.dim() == 4, "k_cache must be [blocks, block_size, kv_heads, head_dim]")
    tokens, kv_heads, head_dim = k.shape
    num_blocks, block_size = k_cache.shape[:2]
    block_size_is_supported(block_size)
    sizes = dict(kv_heads=kv_heads, head_dim=head_dim)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        shape_is(name, cache, num_blocks=num_blocks, block_size=block_size, **sizes)
    shape_is("v", v, tokens=tokens, **sizes)
    shape_is("slots", slots, tokens=tokens)
    refuse_unless(
        slots.dtype in (torch.int32, torch.int64), f"slots must be int32 or int64: {slots.dtype}"
    )
    refuse_unless(
        k.dtype in DTYPES and {k.dtype, v.dtype, k_cache.dtype} == {v_cache.dtype},
        f"k, v and their caches must have one dtype of fp16, bf16, fp32, not {k.dtype}, "
        f"{v.dtype}, {k_cache.dtype}, {v_cache.dtype}",
    )
    refuse_unless(
        k_cache.data_ptr() != v_cache.data_ptr() or k_cache.is_meta or not k_cache.numel(),
        "k_cache and v_cache must not be one memory",
    )
    refuse_unless(tokens <= MAX_TOKENS, f"at most {MAX_TOKENS} tokens a launch, not {tokens}")


def prepare(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> Launch | None:  # fmt: skip
    """Check the arguments of `store` and build its launch; None if there are no tokens."""
    _checked(k, v, k_cache, v_cache, slots)
    tokens, kv_heads, head_dim = k.shape
    strides = rows_are_aligned("k_cache", k_cache)
    refuse_unless(
        strides == rows_are_aligned("v_cache", v_cache),
        "k_cache and v_cache must have the same strides",
    )
    k_strides, v_strides = rows_are_aligned("k", k), rows_are_aligned("v", v)
    device = same_device(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
    if not tokens:
        return None
    heads = min(8, next_power_of_2(kv_heads))
    arguments = dict(
        k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots, kv_heads=kv_heads,
        stride_slots=effective_strides(slots)[0],
        k_token=k_strides[0], k_head=k_strides[1], v_token=v_strides[0], v_head=v_strides[1],
        stride_block=strides[0], stride_token=strides[1], stride_head=strides[2],
        D=head_dim, D_PADDED=next_power_of_2(head_dim), BLOCK_SIZE=k_cache.shape[1], HEADS=heads,
    )  # fmt: skip
    # One warp: 8 heads of 128 are 4 loads of 16 bytes a thread.
    return Launch(
        kernel=_store, grid=(tokens, -(-kv_heads // heads)), arguments=arguments,
        options={"num_warps": 1, "num_stages": 1}, device=device,
    )  # fmt: skip


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write k, v [tokens, kv_heads, head_dim] to their slots; int32 or int64 [tokens].

    Caches as a view [num_blocks, block_size, kv_heads, head_dim]. A slot below 0 is skipped; two
    tokens with one slot leave either. Slots are the caller's word, as block ids are.
    """
    launch = prepare(k, v, k_cache, v_cache, slots)
    if launch is not None:
        launch.run()


def reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """`store` in plain torch."""
    kept = slots >= 0
    block, offset = slots[kept].long() // k_cache.shape[1], slots[kept].long() % k_cache.shape[1]
    k_cache[block, offset] = k[kept]
    v_cache[block, offset] = v[kept]

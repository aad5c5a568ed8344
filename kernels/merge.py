"""Merge attention results over disjoint sets of tokens by their log-sum-exp.

    lse = log Σ_p exp(lse_p)        out = Σ_p exp(lse_p − lse) · out_p

The parts are softmax-normalised and their LSE is natural, so a part may come from anywhere: a split
of one sequence, or a prefix that many sequences share. (The reduction of FlashDecoding and cascade
attention: https://flashinfer.ai/2024/02/02/cascade-inference.html.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import DTYPES, is_dense, refuse_unless, same_device, shape_is
from .decode_plan import next_power_of_2
from .launch import Launch, Prepared


@triton.jit
def _merge(
    part_out,
    part_lse,
    out,
    lse,
    num_parts,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One (sequence, query head): parts [num_parts, rows, D] into out [rows, D]."""
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0).to(tl.int64)
    dims = tl.arange(0, D_PADDED)
    parts = tl.arange(0, PARTS)
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((D_PADDED,), tl.float32)
    for first in range(0, num_parts, PARTS):
        at = (first + parts).to(tl.int64) * num_rows + row
        logs = tl.load(part_lse + at, mask=first + parts < num_parts, other=float("-inf"))
        new = tl.maximum(highest, tl.max(logs, 0))
        # A part without tokens has -inf and an out that nobody wrote: it is not even read.
        safe = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp(logs - safe)
        seen = (logs > float("-inf"))[:, None] & (dims < D)[None, :]
        values = tl.load(part_out + at[:, None] * D + dims[None, :], mask=seen, other=0.0)
        faded = tl.exp(highest - safe)
        acc = acc * faded + tl.sum(weights[:, None] * values.to(tl.float32), 0)
        total = total * faded + tl.sum(weights, 0)
        highest = new
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    merged = acc / divisor
    tl.store(out + row * D + dims, merged.to(out.dtype.element_ty), mask=dims < D)
    tl.store(lse + row, tl.where(is_empty, float("-inf"), highest + tl.log(divisor)))


def prepare(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_parts: int | None = None,
) -> Prepared:
    """Check the arguments of `merge` and build its launch; num_parts: the first of the parts."""
    refuse_unless(part_out.dim() == 4, "part_out must be [parts, batch, query_heads, head_dim]")
    parts, batch, heads, head_dim = part_out.shape
    shape_is("part_lse", part_lse, parts=parts, batch=batch, query_heads=heads)
    is_dense("part_out", part_out, DTYPES)
    is_dense("part_lse", part_lse, (torch.float32,))
    out = part_out.new_empty((batch, heads, head_dim)) if out is None else out
    lse = part_lse.new_empty((batch, heads)) if lse is None else lse
    shape_is("out", out, batch=batch, query_heads=heads, head_dim=head_dim)
    shape_is("lse", lse, batch=batch, query_heads=heads)
    is_dense("out", out, DTYPES)
    is_dense("lse", lse, (torch.float32,))
    device = same_device(part_out=part_out, part_lse=part_lse, out=out, lse=lse)
    used = parts if num_parts is None else num_parts
    refuse_unless(1 <= used <= parts, f"num_parts must be from 1 to {parts}, not {used}")
    padded = next_power_of_2(head_dim)
    arguments = dict(
        part_out=part_out, part_lse=part_lse, out=out, lse=lse, num_parts=used,
        D=head_dim, D_PADDED=padded, PARTS=min(16, next_power_of_2(used)),
    )  # fmt: skip
    launch = Launch(
        kernel=_merge,
        grid=(batch * heads,),
        arguments=arguments,
        options={"num_warps": 4, "num_stages": 1},
        device=device,
    )
    return Prepared(launches=(launch,) if batch else (), out=out, lse=lse)


def merge(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """part_out [parts, batch, query_heads, head_dim], part_lse [parts, batch, query_heads] fp32.

    Returns out [batch, query_heads, head_dim] and lse [batch, query_heads]. A part whose lse is
    -inf counts for nothing, whatever its out holds; no part at all gives 0 and -inf.
    """
    return prepare(part_out, part_lse, out=out, lse=lse).run()


def reference(part_out: torch.Tensor, part_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge` in plain torch, in float64."""
    logs = part_lse.double()
    lse = torch.logsumexp(logs, 0)
    weights = torch.where(logs == -torch.inf, 0.0, (logs - lse).exp())[..., None]
    values = torch.where(weights == 0, 0.0, part_out.double())
    return (weights * values).sum(0), lse

"""Read every byte of a buffer once and keep nearly nothing: a GPU's roof for reading.

    sums[p] = Σ words of program p's 32 KiB, as integers of 64 bits

Decode reads; a copy's roof says less of it, since it writes as much as it reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import is_dense, refuse_unless, same_device, shape_is
from .launch import Launch

# 32 KiB a program, 4 loads of 16 bytes a thread in flight.
WORDS = 8192


@triton.jit
def _read(words, sums, num_words, WORDS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    values = tl.load(words + at, mask=at < num_words, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(values.to(tl.int64), 0))


def num_sums(x: torch.Tensor) -> int:
    """How many sums `read_sum` writes for x: one for each 32 KiB."""
    return -(-x.numel() * x.element_size() // (4 * WORDS))


def prepare(x: torch.Tensor, *, out: torch.Tensor | None = None) -> Launch:
    """Check the arguments of `read_sum` and build its launch; the sums are arguments["sums"]."""
    refuse_unless(x.is_contiguous(), "x must be contiguous")
    num_bytes = x.numel() * x.element_size()
    refuse_unless(
        num_bytes > 0 and num_bytes % 64 == 0 and x.data_ptr() % 16 == 0,
        f"x must be some multiple of 64 bytes at an address that is one of 16, not {num_bytes}",
    )
    words = x.view(-1).view(torch.int32)
    out = words.new_empty(num_sums(x), dtype=torch.int64) if out is None else out
    shape_is("out", out, sums=num_sums(x))
    is_dense("out", out, (torch.int64,))
    return Launch(
        kernel=_read,
        grid=(out.shape[0],),
        arguments={"words": words, "sums": out, "num_words": words.shape[0], "WORDS": WORDS},
        options={"num_warps": 16, "num_stages": 1},
        device=same_device(x=x, out=out),
    )


def read_sum(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """int64 [num_sums(x)]: the sum of the int32 words of each 32 KiB of x, of any dtype."""
    launch = prepare(x, out=out)
    launch.run()
    return launch.arguments["sums"]


def reference(x: torch.Tensor) -> torch.Tensor:
    """`read_sum` in plain torch."""
    words = x.contiguous().view(-1).view(torch.int32).long()
    padded = torch.nn.functional.pad(words, (0, num_sums(x) * WORDS - words.numel()))
    return padded.view(-1, WORDS).sum(1)

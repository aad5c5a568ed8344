"""Rows made in silence: without transformers' words, the network, or more threads than asked for, and
with fp32 as exact as it says: tokens are compared in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvtool.guard import offline, quiet
from kvtool.run import Row


def hushed(rows: Iterator[Row], threads: int) -> Iterator[Row]:
    """The same rows; between two of them the process is as it was."""
    while True:
        with quiet(), offline(), torch_threads(threads), exact_fp32():
            row = next(rows, None)
        if row is None:
            return
        yield row


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch's threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def exact_fp32() -> Iterator[None]:
    """No TF32 for a while, whatever the environment asks for (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE)."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before[1:]
        torch.set_float32_matmul_precision(before[0])

"""Rows made in silence: without transformers' words, the network, or more threads than asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvtool.guard import offline, quiet
from kvtool.run import Row


def hushed(rows: Iterator[Row], threads: int) -> Iterator[Row]:
    """The same rows; between two of them the process is as it was."""
    while True:
        with quiet(), offline(), torch_threads(threads):
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

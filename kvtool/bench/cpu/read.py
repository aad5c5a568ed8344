"""The CPU's roof: how fast memory can be read by so many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from kvtool.jit import vectorised

_Array = np.ndarray[Any, np.dtype[Any]]
_STREAMS = 8
"""Places read in turn: a core keeps more lines under way from several places than from one."""


def read_sum(array: _Array, threads: int = 1) -> int:
    """Read each byte of a contiguous array once: its sum as int64 words, modulo 2**64.

    Bytes after the last whole word are added one by one.
    """
    raw = array.reshape(-1).view(np.uint8)
    words = raw[: raw.size // 8 * 8].view(np.int64)
    rest = int(raw[words.size * 8 :].sum())
    parts = np.array_split(words, threads)
    found = map(_sum, parts) if threads == 1 else workers(threads).map(_sum, parts)
    return (sum(found) + rest + (1 << 63)) % (1 << 64) - (1 << 63)


@lru_cache
def workers(threads: int) -> ThreadPoolExecutor:
    """Threads that stay: to start one costs as much as a small case."""
    return ThreadPoolExecutor(threads)


def _sum(words: _Array) -> int:
    each = words.size // _STREAMS
    streams = words[: each * _STREAMS].reshape(_STREAMS, each)
    return int(_sum_streams(streams)) + int(words[each * _STREAMS :].sum())


@vectorised
def _sum_streams(x: _Array) -> int:
    total = 0
    for i in range(x.shape[1]):
        total += x[0, i] + x[1, i] + x[2, i] + x[3, i] + x[4, i] + x[5, i] + x[6, i] + x[7, i]
    return total

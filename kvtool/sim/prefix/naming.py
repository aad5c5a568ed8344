"""What an index does with the tokens themselves, which our keys stand for: measured, not believed.

vLLM names every full block of every prompt, hit or not, by the SHA-256 of its tokens and of the name
before it (v1/core/kv_cache_utils.py, hash_block_tokens). SGLang's tree compares the tokens of the path
that it goes down (mem_cache/radix_cache.py, match_prefix). Here only the digest and the comparison are
timed, over tokens of 4 bytes: what an engine's Python does around them comes on top.
"""

from __future__ import annotations

import hashlib
from functools import cache
from time import perf_counter

from kvtool.sim.prefix.replay import HASH_BYTES, TOKEN_BYTES

ROUNDS = 5
SPAN_BYTES = 1 << 20


@cache
def block_naming_s(block_size: int) -> float:
    """Seconds to name one full block: the best of some rounds."""
    content = bytes(HASH_BYTES + TOKEN_BYTES * block_size)
    times = max(1, SPAN_BYTES // len(content) // 4)
    best = float("inf")
    for _ in range(ROUNDS):
        begun = perf_counter()
        for _ in range(times):
            hashlib.sha256(content).digest()
        best = min(best, (perf_counter() - begun) / times)
    return best


@cache
def token_comparing_s() -> float:
    """Seconds to compare one token with one on an edge: the best of some rounds."""
    one, other = bytes(SPAN_BYTES), bytes(bytearray(SPAN_BYTES))
    best = float("inf")
    for _ in range(ROUNDS):
        begun = perf_counter()
        assert one == other
        best = min(best, perf_counter() - begun)
    return best * TOKEN_BYTES / SPAN_BYTES

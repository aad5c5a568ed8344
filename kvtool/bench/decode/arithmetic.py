"""What one forward pass must read and compute, by arithmetic: the other half of every measured share.

Bytes of a decode step: every weight once, and of the cache what its class moves. transformers'
DynamicCache concatenates at each step, so that it reads and writes the cache before attention reads
it: three times. A static cache is read to the end of its reservation. Blocks are read once.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtool.bench.decode.blueprint import Blueprint, Heads
from kvtool.bench.decode.settings import DecodeCase

DYNAMIC_PASSES = 3
"""torch.cat reads and writes what attention then reads (cache_utils.py, DynamicLayer.update)."""


def token_read_bytes(heads: Heads, itemsize: int) -> int:
    """K and V of one token in one layer."""
    return 2 * heads.kv_heads * heads.head_dim * itemsize


def useful_cache_bytes(plan: Blueprint, case: DecodeCase, context: int, itemsize: int) -> int:
    """K and V that a decode step of the batch has to read, each once."""
    seen = plan.heads.seen_tokens(context)
    return case.batch * seen * token_read_bytes(plan.heads, itemsize)


def _none(plan: Blueprint, case: DecodeCase, context: int, itemsize: int) -> int:
    return 0


def _dynamic(plan: Blueprint, case: DecodeCase, context: int, itemsize: int) -> int:
    return DYNAMIC_PASSES * useful_cache_bytes(plan, case, context, itemsize)


def _static(plan: Blueprint, case: DecodeCase, context: int, itemsize: int) -> int:
    return useful_cache_bytes(plan, case, case.reserved_tokens, itemsize)


MOVED: dict[str, Callable[[Blueprint, DecodeCase, int, int], int]] = {
    "none": _none,
    "dynamic": _dynamic,
    "static": _static,
    "contiguous": useful_cache_bytes,
    "paged": useful_cache_bytes,
    "continuous": useful_cache_bytes,
}
"""Bytes of the cache that a decode step moves at the least, at a context, by cache."""


def weights_read(plan: Blueprint, itemsize: int) -> int:
    """Bytes of weights that a step reads, whatever the batch."""
    return plan.read_parameters * itemsize


def predicted_gain(plan: Blueprint, case: DecodeCase, baseline: str, itemsize: int) -> float | None:
    """The most that moving fewer bytes makes a cache faster than the baseline at the same batch, at
    the middle of the output, if both move them as fast. None where bytes do not decide: without a
    cache, or with experts."""
    if "none" in (case.cache, baseline) or not plan.dense:
        return None
    context, weights = middle(case), weights_read(plan, itemsize)
    ours, theirs = (
        weights + MOVED[cache](plan, case, context, itemsize) for cache in (case.cache, baseline)
    )
    return theirs / ours


def middle(case: DecodeCase) -> int:
    """Tokens that the decode step in the middle of the output sees, its own included."""
    return case.prompt_tokens + case.output_tokens // 2


def prefill_flops(plan: Blueprint, batch: int, tokens: int) -> int:
    """Two a multiply-add: matrices for every token, the head for the last, and causal attention."""
    matrices = 2 * plan.linear_parameters * tokens + 2 * plan.head_parameters
    pairs = sum(_pairs(tokens, window) for window in plan.heads.windows)
    return batch * (matrices + 4 * plan.heads.query_heads * plan.heads.head_dim * pairs)


def _pairs(tokens: int, window: int) -> int:
    """Query and key pairs of one layer: each token sees itself and what is before it, or a window."""
    full = min(tokens, window or tokens)
    return full * (full + 1) // 2 + (tokens - full) * full


def decode_flops(plan: Blueprint, batch: int, context: int) -> int:
    """Of one token a sequence, with a cache of `context` tokens, its own included."""
    matrices = 2 * (plan.linear_parameters + plan.head_parameters)
    heads = plan.heads
    seen = heads.seen_tokens(context)
    return batch * (matrices + 4 * heads.query_heads * heads.head_dim * seen)


def step_flops(plan: Blueprint, case: DecodeCase) -> int:
    """Of the decode step in the middle of the output."""
    if case.cache == "none":
        return prefill_flops(plan, case.batch, middle(case))
    return decode_flops(plan, case.batch, middle(case))


def batch_gain(
    weights_bytes: int, sequence_bytes: float, batch: float, other_batch: float
) -> float | None:
    """The most that bytes allow `batch` sequences a step to be faster than `other_batch`, in tokens a
    second, at equal bandwidth: a step reads the weights once, and each sequence's cache."""
    if min(batch, other_batch) <= 0:
        return None
    rate, other = (n / (weights_bytes + n * sequence_bytes) for n in (batch, other_batch))
    return rate / other

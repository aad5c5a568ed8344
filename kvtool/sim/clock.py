"""What a step takes, in the compiled engines: kvtool.sim.settings.StepTime.ns."""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.settings import FS_OF_NS

LATEST_NS = 9.2e18
"""Where 64 bits end."""


@part
def step_ns(run: Any) -> int:
    """Nanoseconds of this step, whose tokens, context and pairs are counted; -1 if no clock has room for it.

    `run.now_beyond` are pairs beyond one for each token of context, which is what a decoding request has.
    """
    tokens, context = run.now_tokens, run.now_context
    pairs = context + run.now_beyond
    longest = float(run.token_fs) * tokens + float(run.context_fs) * context
    longest += float(run.attention_fs) * pairs + float(run.request_fs) * run.now_batch
    if longest / FS_OF_NS + run.read_ns > LATEST_NS:
        return -1
    reading = term(run.context_fs, context)
    computing = term(run.token_fs, tokens) + term(run.attention_fs, pairs)
    computing += term(run.request_fs, run.now_batch)
    if run.read_ns > 0 and tokens > 0:
        return run.base_ns + max(run.read_ns + reading, computing)
    return run.base_ns + reading + computing


@part
def term(each_fs: int, count: int) -> int:
    """Whole ns of so many times so many fs, without a product beyond 64 bits."""
    return each_fs // FS_OF_NS * count + each_fs % FS_OF_NS * count // FS_OF_NS


@part
def beyond(tokens: int, context: int) -> int:
    """kvtool.sim.settings.pairs_of, less one for each token of context."""
    return (tokens - 1) * (2 * context - tokens) // 2

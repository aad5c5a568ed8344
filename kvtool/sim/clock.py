"""What a step takes, in the compiled engines: kvtool.sim.settings.StepTime.ns."""

from __future__ import annotations

from typing import Any

from kvtool.jit import part

LATEST_NS = 9.2e18
"""Where 64 bits end."""


@part
def step_ns(run: Any) -> int:
    """Nanoseconds of this step, whose tokens and context are counted; -1 if no clock has room for it."""
    tokens, context = run.now_tokens, run.now_context
    if float(run.token_ns) * tokens + float(run.context_ns) * context + run.read_ns > LATEST_NS:
        return -1
    reading, computing = run.read_ns + run.context_ns * context, run.token_ns * tokens
    if run.read_ns > 0 and tokens > 0:
        return run.base_ns + max(reading, computing)
    return run.base_ns + run.context_ns * context + computing

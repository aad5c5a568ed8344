"""Drive kvlint's simulator of vLLM's prefix cache: what scripts/bench_prefix.py times.

Run by a Python that has kvlint (`pip install kvlint==0.1.1`); it needs nothing of kvtool. Standard input
and output are those of vllm_prefix.py beside this file. kvlint hashes tokens itself, so a block's tokens
are made of its name, outside the time that counts.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any


def drive(asked: dict[str, Any]) -> dict[str, Any]:
    """One request after the other."""
    from kvlint.sim.vllm_blocks import VLLMBlockSimulator

    size = asked["block_size"]
    simulator = VLLMBlockSimulator(size, asked["capacity_blocks"])
    seconds, hit_tokens = 0.0, 0
    requests = zip(asked["prompt_tokens"], asked["names"], strict=True)
    for index, (tokens, names) in enumerate(requests):
        spelled = [name for name in names for _ in range(size)]
        spelled += [0] * (tokens - len(spelled))
        start = time.perf_counter()
        told = simulator.feed_tokens(str(index), spelled)
        seconds += time.perf_counter() - start
        hit_tokens += told.cached_tokens
    return {
        "seconds": seconds, "hit_tokens": hit_tokens, "evicted_blocks": simulator.evictions,
        "cached_blocks": len(simulator._cache), "rejected": 0,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps({"version": version("kvlint"), **drive(json.load(sys.stdin))}))

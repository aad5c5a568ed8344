"""How kvtool's prefix caches compare with vLLM's and SGLang's own on a trace. Used by scripts/accuracy.py.

A row is one replay: the engine, its cache (`capacity_blocks`, `block_size` of vLLM or `page_size` of
SGLang, whose capacity is in blocks of 512 tokens and in `capacity_tokens`), how many requests of which
trace, and the engine's integers. Traces are not part of kvtool: they are read from a folder, by name.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def covered(row: Row) -> bool:
    """Whether the row is promised: outputs appended at once, or none. Token by token is only tried."""
    return row.get("decode") != "per-token"


def called(row: Row) -> str:
    """The row in words."""
    size = row.get("block_size") or row["page_size"]
    policy = row.get("policy", "lru")
    outputs = row.get("outputs", "none")
    return (
        f"{row['engine']} {policy}, {row['capacity_blocks']:,} blocks, block size {size}, "
        f"outputs {outputs}, {row['requests']:,} requests of {row['trace']}"
    )


def differences(row: Row, traces: Path) -> list[str]:
    """What of a row kvtool counts otherwise."""
    from kvtool.sim.prefix.replay import Cache, replay
    from kvtool.sim.prefix.result import HASH, RADIX

    is_vllm = row["engine"] == "vllm"
    size = row["block_size"] if is_vllm else row["page_size"]
    cache = Cache(
        index=HASH if is_vllm else RADIX,
        capacity_blocks=row["capacity_blocks"] if is_vllm else row["capacity_tokens"] // size,
        block_size=size,
        policy=row.get("policy", "lru"),
        cache_outputs=row.get("outputs", "none"),
    )
    result = replay(cache, [requests_of(traces / row["trace"]).first(row["requests"])])
    own: dict[str, Any] = {
        "requests": result.requests,
        "total_tokens": result.queried_tokens,
        "hit_tokens": result.hit_tokens,
        "rejected": result.rejected,
    }
    if is_vllm:
        own |= {"evictions": result.evicted_blocks, "cached_at_end": result.cached_blocks}
    else:
        held = result.cached_blocks * size
        own |= {
            "evicted_leaves": result.evicted_leaves,
            "evicted_tokens": result.evicted_blocks * size,
            "tree_tokens_end": held,
            "free_end": cache.capacity_tokens - held,
        }
    return [
        f"{name}: {value} and not {row[name]}"
        for name, value in own.items()
        if name in row and row[name] != value
    ]


@lru_cache(maxsize=2)
def requests_of(path: Path) -> Any:
    """A trace in one piece."""
    import numpy as np

    from kvtool.trace_blocks import HashedRequests
    from kvtool.trace_stream import stream_trace

    trace = stream_trace(str(path))
    chunks = list(trace)
    names = ("arrival_ns", "prompt_tokens", "output_tokens", "hash_ids")
    counts = np.concatenate([np.diff(chunk.starts) for chunk in chunks])
    columns = {name: np.concatenate([getattr(one, name) for one in chunks]) for name in names}
    return HashedRequests(
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        block_size=trace.block_size,
        **columns,
    )

"""A case and its data for the tests of `kvtool bench`: small, and with every option overridable."""

from __future__ import annotations

from typing import Any

from kvtool.bench.attention.case import Case
from kvtool.bench.device import Device

CPU = Device(kind="cpu", name="test", free_bytes=2**31, cache_bytes=2**16, processors=1)


def case(**changes: Any) -> Case:
    """Two sequences of 37 tokens, 4 query and 2 KV heads of 64, blocks of 16."""
    given: dict[str, Any] = {
        "batch": 2, "context_tokens": 37, "query_heads": 4, "kv_heads": 2, "head_dim": 64,
        "block_size": 16, "pattern": "sequential", "kv_dtype": "fp32", "layout": "hnd",
        "num_splits": None, "skew": 1, "threads": 1,
    }  # fmt: skip
    return Case(**(given | changes))

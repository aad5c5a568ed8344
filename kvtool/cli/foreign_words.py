"""What engines call an option that has another name here: vLLM, SGLang, llama.cpp and TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

OURS: dict[str, tuple[str, ...]] = {
    "--context": (
        "--max-model-len", "--max_model_len", "--context-length", "--ctx-size", "--num-ctx", "--max-seq-len",
        "--max_seq_len",
    ),
    "--max-model-len": (
        "--max_model_len", "--context-length", "--ctx-size", "--num-ctx", "--max-seq-len", "--max_seq_len",
    ),
    "--tp": ("--tensor-parallel-size", "--tensor-parallelism", "--tp-size", "--tp_size"),
    "--pp": ("--pipeline-parallel-size", "--pp-size", "--pp_size"),
    "--dp": ("--data-parallel-size", "--dp-size"),
    "--dcp": ("--decode-context-parallel-size",),
    "--ep": ("--enable-expert-parallel", "--ep-size", "--ep_size", "--expert-parallel-size"),
    "--batch": ("--max-concurrency", "--concurrency", "--parallel", "--users", "--batch-size"),
    "--max-num-seqs": ("--max-running-requests", "--max-batch-size", "--max_batch_size"),
    "--max-batched-tokens": (
        "--max-num-batched-tokens", "--max_num_tokens", "--max-num-tokens", "--chunked-prefill-size",
    ),
    "--kv-dtype": ("--cache-type-k", "--cache-type-v", "--quant-policy"),
    "--weights-dtype": ("--quantization", "--load-in-4bit", "--load-in-8bit"),
    "--gpu-memory-utilization": (
        "--mem-fraction-static", "--gpu_memory_utilization", "--free_gpu_memory_fraction",
        "--kv_cache_free_gpu_memory_fraction", "--cache-max-entry-count",
    ),
    "--kv-memory": ("--kv-cache-memory-bytes", "--kv-cache-memory", "--kv-cache-size"),
    "--prefix-caching": ("--enable-prefix-caching",),
    "--no-prefix-caching": ("--no-enable-prefix-caching", "--disable-radix-cache"),
    "--no-hybrid": ("--disable-hybrid-kv-cache-manager",),
    "--enforce-eager": ("--disable-cuda-graph",),
    "--tiers": ("--swap-space", "--cpu-offload-gb", "--kv-offloading-size", "--hicache-size", "--hicache-ratio"),
}  # fmt: skip
"""By the name here, the first that a command knows; `--batch` is how many run, `--max-num-seqs` how many may."""


def ours(error: object, params: Iterable[Any]) -> str | None:
    """The name here of the option that a usage error says is not there; None if the command has no such."""
    typed = getattr(error, "option_name", None)
    known = {name for one in params for name in (*one.opts, *one.secondary_opts)}
    return next((name for name, words in OURS.items() if typed in words and name in known), None)

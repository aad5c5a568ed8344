"""Defaults of engines that decide how much they keep, by GPU and version."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.catalog import GpuPreset
from kvtool.engine_memory.usable import torch_total
from kvtool.units import GIB, MIB

Version = tuple[int, ...]


def version_of(text: str | None) -> Version | None:
    """'0.10.1' as (0, 10, 1); None, and what is no version, is None: not known."""
    digits = (text or "").strip().lstrip("~v").split("+")[0].split(".")
    found: list[int] = []
    for one in digits:
        if not one.isdigit():
            break
        found.append(int(one))
    return tuple(found) or None


@dataclass(frozen=True, slots=True)
class Batch:
    """The most tokens and sequences of one step."""

    tokens: int
    sequences: int


V1 = (0, 8)
"""The version whose engine splits prompts into chunks by default."""


def vllm_batch(gpu: GpuPreset, *, server: bool = True, version: Version | None = None) -> Batch:
    """vLLM's max_num_batched_tokens and max_num_seqs where nothing is said.

    vllm/engine/arg_utils.py, get_batch_defaults: GPUs of 70 GiB and more but A100s take 16,384
    tokens (8,192 in a server) and 1,024 sequences, others 8,192 (2,048) and 256. Before 0.8
    (vllm/config.py, SchedulerConfig) 256 sequences, and 2,048 tokens where prompts are split, as they
    are for more than 32,768; where they are not, a step takes a whole prompt, which is for the user to say.
    """
    if version is not None and version < V1:
        return Batch(2048, 256)
    total, _ = torch_total(gpu)
    if total.best >= 70 * GIB and "a100" not in gpu.id:
        return Batch(8192 if server else 16384, 1024)
    return Batch(2048 if server else 8192, 256)


def vllm_utilization(version: Version | None) -> float:
    """gpu_memory_utilization: 0.92 in logs since 0.20, which counts CUDA graphs; 0.9 before."""
    return 0.9 if version is not None and version < (0, 20) else 0.92


def vllm_graph_sizes(sequences: int) -> int:
    """Batch sizes that vLLM captures CUDA graphs for, piecewise and whole.

    As logs of 0.18 to 0.24 list them: 1, 2, 4, then by 8 below 256, then by 16. Up to twice
    max_num_seqs and to 512 is inferred from '51 (largest 512), 35 (256)' and '35 (256), 19 (128)'.
    """
    top = min(2 * sequences, 512)
    return _sizes(top) + _sizes(min(sequences, top))


def _sizes(top: int) -> int:
    listed = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return sum(one <= top for one in listed)


@dataclass(frozen=True, slots=True)
class SglangStep:
    """SGLang's chunked_prefill_size and cuda_graph_max_bs."""

    chunk: int
    graphs: int


_SGLANG = (
    (20, SglangStep(2048, 8), SglangStep(2048, 8)),
    (35, SglangStep(2048, 24), SglangStep(2048, 80)),
    (60, SglangStep(4096, 32), SglangStep(4096, 160)),
    (160, SglangStep(8192, 256), SglangStep(8192, 512)),
)
"""Below so many GiB: with tp below 4, and from 4."""


def sglang_step(gpu: GpuPreset, tp: int) -> SglangStep:
    """sgl-project/sglang srt/server_args.py, _handle_gpu_memory_settings (PR #10975)."""
    total, _ = torch_total(gpu)
    for below, narrow, wide in _SGLANG:
        if total.best < below * GIB:
            return narrow if tp < 4 else wide
    return SglangStep(16384, 512)


def sglang_fraction(gpu: GpuPreset, *, tp: int, pp: int, step: SglangStep | None = None) -> float:
    """mem_fraction_static by SGLang's own rule, to three places.

    The same function: 512 MiB, 1.5 MiB a token of a chunk (of 2,048 at least), 2 MiB a sequence of
    the largest graph and 128 MiB a rank stay out of it; at least 10 GiB on GPUs of more than 60.
    """
    step = step or sglang_step(gpu, tp)
    total, _ = torch_total(gpu)
    whole = total.best / MIB
    kept = 512 + max(step.chunk, 2048) * 1.5 + step.graphs * 2 + tp * pp * 128
    if whole > 60 * 1024:
        kept = max(kept, 10 * 1024)
    return round((whole - kept) / whole, 3)

"""The overhead of each engine, and the range of what is left for the KV cache."""

from __future__ import annotations

from collections.abc import Callable

from kvtool.catalog import GpuPreset
from kvtool.engine_memory import activations, vllm
from kvtool.engine_memory.defaults import Version, version_of
from kvtool.engine_memory.ranges import NOTHING, Line, Overhead, Range, gib
from kvtool.engine_memory.sizes import ModelSizes
from kvtool.engine_memory.vllm import Step
from kvtool.errors import usage_error

Lines = Callable[[ModelSizes, Step, GpuPreset, Version | None], list[Line]]


def overhead(
    engine: str,
    sizes: ModelSizes,
    *,
    tp: int,
    pp: int,
    max_batched_tokens: int,
    max_num_seqs: int,
    gpu: GpuPreset,
    dtype_bytes: int,
    version: str | None = None,
    dp: int = 1,
    eager: bool = False,
) -> Overhead:
    """What `engine` keeps on a rank besides weights and cache.

    `version`: that of the engine, as far as the rules differ; None: not known. `eager`: vLLM captures no
    CUDA graphs.
    """
    if engine not in ENGINES:
        raise usage_error(
            f"nothing is known about the memory of '{engine}'", f"known: {', '.join(ENGINES)}"
        )
    step = Step(
        tokens=max_batched_tokens,
        rows=max_num_seqs,
        tp=tp,
        pp=pp,
        dp=dp if sizes.chosen else 1,
        dtype_bytes=dtype_bytes,
        eager=eager,
    )
    return Overhead(lines=tuple(ENGINES[engine](sizes, step, gpu, version_of(version))))


def kv_range(memory: Range, weights: int, kept: Overhead) -> Range:
    """What is left of `memory` for the cache on a rank; below zero by as much as is missing."""
    more = kept.total
    return Range(
        memory.low - weights - more.high,
        memory.best - weights - more.best,
        memory.high - weights - more.low,
    )


def _sglang(sizes: ModelSizes, step: Step, gpu: GpuPreset, version: Version | None) -> list[Line]:
    """Activations and graphs lie outside mem_fraction_static; what torch does not see lies inside.

    sgl-project/sglang model_runner.py: free after loading − free before × (1 − fraction).
    """
    outside = "outside mem_fraction_static: SGLang leaves 1 − fraction of the free memory to it"
    alone = gib(0.0, 0.3, 1.5)
    if step.tp > 1:
        alone = gib(0.1, 0.8, 3.0)
    words = "driver, NCCL and what loading leaves behind, taken off the free memory: an estimate"
    return [
        Line(name="activations", range=NOTHING, basis=outside),
        Line(name="CUDA graphs", range=NOTHING, basis=outside),
        Line(name="context and communication", range=alone, basis=words),
    ]


UBATCH = 512
"""llama.cpp's default n_ubatch (common/common.h)."""


def _llama_cpp(
    sizes: ModelSizes, step: Step, gpu: GpuPreset, version: Version | None
) -> list[Line]:
    """A compute buffer for n_ubatch tokens in fp32, logits of all of them included.

    Qwen2.5-7B prints 304 MiB, of which the logits are 297 (public log, index-text:68717046901).
    """
    tokens = min(step.tokens, UBATCH)
    logits = activations.logits(sizes, tokens)
    layer = activations.layers(sizes, tokens=tokens, tp=step.tp, dtype_bytes=4)
    routed = activations.experts(sizes, tokens=tokens, tp=step.tp, dtype_bytes=4)
    best = max(logits + activations.hidden(sizes, tokens=tokens, dtype_bytes=4), layer + routed)
    basis = (
        f"compute buffer of {tokens:,} tokens: their fp32 logits, or a layer where that is wider; "
        "masks of a long context or scores without flash attention add to it"
    )
    return [
        Line(name="activations", range=Range(best // 2, best, 3 * best), basis=basis),
        Line(name="CUDA graphs", range=NOTHING, basis="graphs hold no tensors of their own"),
        _driver(),
    ]


def _forward(sizes: ModelSizes, step: Step, gpu: GpuPreset, version: Version | None) -> list[Line]:
    """A forward pass alone: the layers' widest moment; logits of the last rows, at most of all."""
    at = {"tokens": step.tokens, "dtype_bytes": step.dtype_bytes}
    layer = activations.layers(sizes, tp=step.tp, **at)
    layer += activations.experts(sizes, tp=step.tp, **at)
    least = max(layer, activations.logits(sizes, step.rows))
    most = layer + 2 * activations.logits(sizes, step.tokens)
    basis = (
        f"a forward pass of {step.tokens:,} tokens; at most with fp32 logits of all: an estimate"
    )
    return [
        Line(name="activations", range=Range(least // 2, least, max(most, least)), basis=basis),
        Line(name="CUDA graphs", range=NOTHING, basis="none captured"),
        _driver(),
    ]


def _driver() -> Line:
    return Line(
        name="context and communication",
        range=gib(0.2, 0.5, 1.0),
        basis="a CUDA context and libraries: 0.51 GiB before the first tensor (vLLM 0.19, an H100)",
    )


ENGINES: dict[str, Lines] = {
    "vllm": vllm.lines,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
    "transformers": _forward,
    "ideal": _forward,
}

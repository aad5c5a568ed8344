"""vLLM: the peak of its profile run, what the driver and NCCL take, and CUDA graphs.

vllm/v1/worker/gpu_worker.py, determine_available_memory: the KV cache gets total × utilization −
weights − the torch peak of a profile run − the growth of what torch does not allocate, and since
0.20 − an estimate of the CUDA graphs. The run takes max_num_batched_tokens tokens and then samples
max_num_seqs rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.catalog import GpuPreset
from kvtool.engine_memory import activations
from kvtool.engine_memory.defaults import Version, vllm_graph_sizes
from kvtool.engine_memory.ranges import NOTHING, Line, Range, gib
from kvtool.engine_memory.sizes import ModelSizes
from kvtool.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Coefficients of a span of versions, fitted to prints (tests/data/engine_memory.jsonl)."""

    sampler: tuple[float, float, float]
    """fp32 logits of all rows that are alive at once while the sampler runs."""
    fixed: tuple[float, float, float]
    """GiB that the arithmetic leaves out: input buffers, sampling parameters, rotary tables."""
    workspace_stays: bool
    """Whether the experts' workspace is kept while the sampler runs."""
    tower: tuple[float, float, float]
    """GiB that an encoder's profile run adds."""
    words: str


NEW = Regime(
    sampler=(2.5, 3.6, 4.0),
    fixed=(0.0, 0.07, 0.25),
    workspace_stays=True,
    tower=(0.0, 0.2, 1.5),
    words="3.6 × the fp32 logits of max_num_seqs rows (vLLM from 0.17: prints of 0.19 on an H100)",
)
OLD = Regime(
    sampler=(9.2, 9.6, 10.2),
    fixed=(0.0, 0.0, 0.15),
    workspace_stays=False,
    tower=(0.0, 0.5, 5.5),
    words="9.6 × the fp32 logits of max_num_seqs rows (before 0.17, where rows are sorted whole)",
)
CHANGED = (0, 17)
"""llm-d-incubation/llm-d-planner accuracy/accuracy_report.md, part 2: Qwen3-14B's peak fell from
5.64 GiB in 0.16 to 2.23 in 0.17."""
TORCH_ONLY = (0, 6)
"""Before, all that was not free after the run counted (vllm-project/vllm#2031); 0.6 is inferred."""
V1 = (0, 8)
"""Before, only the first rank sampled, and any rank printed: vllm-project/vllm#13061 prints 8.69
GiB beside a pool of the 7.46 that the sampling rank had."""
EXPERT_CHUNK = 32768
"""Tokens that the experts took at once before 0.17 (VLLM_FUSED_MOE_CHUNK_SIZE): from memory."""
GRAPHS_COUNTED = (0, 20)
"""'CUDA graph memory profiling is enabled (default since v0.21.0)' is printed by 0.20 already (a public
log whose banner says 0.20.0; pools of 0.18 and 0.20 on an H200 differ by the graphs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A profile run on one rank."""

    tokens: int
    rows: int
    tp: int
    pp: int
    dtype_bytes: int
    dp: int = 1
    """Replicas that exchange tokens: those of a model with experts."""
    eager: bool = False
    """No CUDA graphs are captured (--enforce-eager)."""


def lines(sizes: ModelSizes, step: Step, gpu: GpuPreset, version: Version | None) -> list[Line]:
    """What vLLM of that version keeps; of any where it is None, 0.32 being the best guess."""
    regimes = [NEW, OLD] if version is None else [OLD if version < CHANGED else NEW]
    peak = _peak(sizes, step, regimes[0])
    for other in regimes[1:]:
        peak = peak | _peak(sizes, step, other)
    words = " or ".join(one.words for one in regimes)
    basis = f"profile run of {step.tokens:,} tokens; the wider of a layer and of {words}"
    if step.tp > 1 and (version is None or version < V1):
        alone = round(0.8 * activations.layers(sizes, **_at(step), tp=step.tp))
        peak = Range(min(peak.low, alone), peak.best, peak.high)
    return [
        Line(name="activations", range=peak, basis=basis),
        _graphs(step, version),
        _context(sizes, step, gpu, version),
    ]


def _peak(sizes: ModelSizes, step: Step, regime: Regime) -> Range:
    """The wider of the layers and the sampler, the experts' workspace, an encoder."""
    at = _at(step)
    layers = activations.layers(sizes, tp=step.tp, **at)
    if not regime.workspace_stays:
        at = {**at, "tokens": min(step.tokens, EXPERT_CHUNK)}
    workspace = activations.experts(sizes, tp=step.tp, **at)
    at = _at(step)
    beside = activations.hidden(sizes, **at)
    rows = activations.logits(sizes, step.rows)
    ends = []
    for index in range(3):
        sampler = regime.sampler[index] * rows + beside + regime.fixed[index] * GIB
        # A stage before the last one has no sampler, and the printing rank may be such a stage.
        sampler = 0 if step.pp > 1 and index == 0 else sampler
        if regime.workspace_stays:
            peak = max(layers, sampler) + workspace
        else:
            peak = max(layers + (workspace, workspace // 2, 0)[2 - index], sampler)
        ends.append(round(peak * (0.8, 1.0, 1.08)[index]))
    whole = Range(*ends)
    return whole + _tower(beside, regime) if sizes.tower else whole


def _at(step: Step) -> dict[str, int]:
    return {"tokens": step.tokens, "dtype_bytes": step.dtype_bytes}


def _tower(beside: int, regime: Regime) -> Range:
    """An encoder's profile run: outputs for a budget of tokens, and its peak (an estimate)."""
    low, best, high = (round(one * GIB) for one in regime.tower)
    return Range(low, best + beside // 2, high + beside)


def _graphs(step: Step, version: Version | None) -> Line:
    """CUDA graphs, counted since 0.20: prints of 0.2 to 2 GiB (86 to 102 sizes: 0.6 to 0.9)."""
    name = "CUDA graphs"
    if step.eager:
        return Line(name=name, range=NOTHING, basis="--enforce-eager captures none")
    if version is not None and version < GRAPHS_COUNTED:
        words = "not counted before vLLM 0.20: they come out of what utilization leaves free"
        return Line(name=name, range=NOTHING, basis=words)
    sizes = vllm_graph_sizes(step.rows)
    best = 0.35 + 0.005 * sizes
    least = 0.0 if version is None else 0.1
    return Line(
        name=name,
        range=gib(least, best, 2.3 * best),
        basis=f"vLLM's own figure for {sizes} batch sizes, by prints of 0.18 to 0.31: an estimate",
    )


def _context(sizes: ModelSizes, step: Step, gpu: GpuPreset, version: Version | None) -> Line:
    """What grows outside torch in the profile run; the CUDA context before it does not count."""
    if step.tp == 1:
        low, best, high = 0.0, 0.25, 0.5
        words = (
            "outside torch: 0.07 to 0.13 GiB in vLLM before 0.18, 0.24 to 0.46 since (prints, tp 1)"
        )
        if version is not None and version < (0, 18):
            best, high = 0.1, 0.5
        if step.pp > 1 or step.dp > 1:
            best, high = best + 0.2, high + 1.0
            words += "; NCCL between stages or replicas besides: an estimate"
    elif _linked(gpu):
        low, best, high = 0.3, 2.1, 3.0
        words = (
            "outside torch with NCCL and all-reduce buffers: 0.95 to 2.2 GiB (prints, tp 2 to 8)"
        )
        if version is not None and version < (0, 11):
            best = 1.0
    else:
        low, best, high = 0.05, 0.3, 1.2
        words = "outside torch with NCCL over PCIe: 0.2 to 0.25 GiB (prints)"
    if version is not None and version < TORCH_ONLY:
        best, high = best + 0.4, high + 1.0
        words += "; before 0.6 with the CUDA context and all that torch had cached"
    if sizes.recurrent:
        best, high = best + 0.8, high + 3.6
        words += "; kernels of recurrent layers as much as 3.8 GiB (a print of 0.18)"
    return Line(name="context and communication", range=gib(low, best, high), basis=words)


def _linked(gpu: GpuPreset) -> bool:
    """Data-centre GPUs that reach each other past the host."""
    words = (gpu.interconnect or "").lower()
    geforce = gpu.id.startswith("rtx")
    return not geforce and ("nvlink" in words or "fabric" in words)

"""The options of `kvtool fragment`: its traffic, its pool, its allocators."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtool.cli.size_options import complete_gpu, complete_kv_dtype, complete_model

TRAFFIC, POOL, ALLOCATORS = "Traffic", "Pool", "Allocators"


def complete_workload(incomplete: str) -> list[str]:
    """Workload presets that start like this."""
    from kvtool.catalog import preset_ids

    return [name for name in preset_ids("workloads") if name.startswith(incomplete)]


WorkloadOpt = Annotated[
    str | None,
    typer.Option(
        "--workload", metavar="NAME", rich_help_panel=TRAFFIC, show_default=False,
        autocompletion=complete_workload,
        help="A preset of lengths (and of a pool, where an experiment has one): chat, vllm-paper.",
    ),
]  # fmt: skip
TraceOpt = Annotated[
    str | None,
    typer.Option(
        "--trace", metavar="FILE", rich_help_panel=TRAFFIC, show_default=False,
        help="Requests from a file, gzip too, or - for standard input.",
    ),
]  # fmt: skip
TraceFormatOpt = Annotated[
    str | None,
    typer.Option(
        "--trace-format", metavar="NAME", rich_help_panel=TRAFFIC, show_default=False,
        help="azure, mooncake, burstgpt, bailian, lengths or kvtool; found out if left out.",
    ),
]  # fmt: skip
DistOpt = Annotated[
    str | None,
    typer.Option(
        "--dist", metavar="DIST", rich_help_panel=TRAFFIC, show_default=False,
        help="Lengths of prompts and outputs: zipf, lognormal:sigma=1, uniform:low=1,high=1024, "
        "fixed:512, exponential, geometric, gamma:shape=2, pareto:alpha=2.5, empirical:FILE.",
    ),
]  # fmt: skip
PromptDistOpt = Annotated[
    str | None,
    typer.Option(
        "--prompt-dist", metavar="DIST", rich_help_panel=TRAFFIC, show_default=False,
        help="The same for prompts alone.",
    ),
]  # fmt: skip
OutputDistOpt = Annotated[
    str | None,
    typer.Option(
        "--output-dist", metavar="DIST", rich_help_panel=TRAFFIC, show_default=False,
        help="The same for outputs alone.",
    ),
]  # fmt: skip
PromptMeanOpt = Annotated[
    float | None,
    typer.Option(
        "--prompt-mean", metavar="TOKENS", rich_help_panel=TRAFFIC, show_default=False,
        help="Mean of the prompts, after the cap. Default: 161.31, as ShareGPT's.",
    ),
]  # fmt: skip
OutputMeanOpt = Annotated[
    float | None,
    typer.Option(
        "--output-mean", metavar="TOKENS", rich_help_panel=TRAFFIC, show_default=False,
        help="Mean of the outputs, after the cap. Default: 337.99, as ShareGPT's.",
    ),
]  # fmt: skip
PromptCapOpt = Annotated[
    str | None,
    typer.Option(
        "--prompt-cap", metavar="TOKENS", rich_help_panel=TRAFFIC, show_default=False,
        help="Longest prompt. Default: 1,024, or half of --max-model-len if that is less.",
    ),
]  # fmt: skip
OutputCapOpt = Annotated[
    str | None,
    typer.Option(
        "--output-cap", metavar="TOKENS", rich_help_panel=TRAFFIC, show_default=False,
        help="Longest output. Default: 1,024, or half of --max-model-len if that is less.",
    ),
]  # fmt: skip
NumRequestsOpt = Annotated[
    str | None,
    typer.Option(
        "--num-requests", metavar="N", rich_help_panel=TRAFFIC, show_default=False,
        help="Requests to make (default 10,000), or the first so many of a trace.",
    ),
]  # fmt: skip
RateOpt = Annotated[
    str | None,
    typer.Option(
        "--rate", metavar="RATE", rich_help_panel=TRAFFIC, show_default=False,
        help="saturated (default: all wait from the start), requests a second (Poisson), or trace, "
        "its own time stamps: saturated,2,4.",
    ),
]  # fmt: skip
SamplesOpt = Annotated[
    str,
    typer.Option(
        "--n", metavar="N", rich_help_panel=TRAFFIC,
        help="Samples of each request, which share its prompt: 2,4,6.",
    ),
]  # fmt: skip
SharedPrefixOpt = Annotated[
    str,
    typer.Option(
        "--shared-prefix", metavar="TOKENS", rich_help_panel=TRAFFIC,
        help="A system prompt of so many tokens before every prompt, cached once.",
    ),
]  # fmt: skip
NumBlocksOpt = Annotated[
    str | None,
    typer.Option(
        "--num-blocks", metavar="N", rich_help_panel=POOL, show_default=False,
        help="The pool in blocks of --block-size. Default: 15,728 tokens (vLLM paper: OPT-13B, "
        "12 GiB); with --max-model-len above 2,048 room for eight of those.",
    ),
]  # fmt: skip
PoolTokensOpt = Annotated[
    str | None,
    typer.Option(
        "--pool-tokens", metavar="N", rich_help_panel=POOL, show_default=False,
        help="The pool in tokens.",
    ),
]  # fmt: skip
ModelOpt = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", rich_help_panel=POOL, show_default=False,
        autocompletion=complete_model,
        help="The pool as memory of this model, with --kv-memory or --gpu.",
    ),
]  # fmt: skip
KvMemoryOpt = Annotated[
    str | None,
    typer.Option(
        "--kv-memory", metavar="MEMORY", rich_help_panel=POOL, show_default=False,
        help="Memory for the cache on each GPU: 12GiB.",
    ),
]  # fmt: skip
GpuOpt = Annotated[
    str | None,
    typer.Option(
        "--gpu", metavar="GPU", rich_help_panel=POOL, show_default=False,
        autocompletion=complete_gpu,
        help="What this GPU has left beside the weights: h100, or h100:8 (tp 8 unless --tp).",
    ),
]  # fmt: skip
WeightsOpt = Annotated[
    str | None,
    typer.Option(
        "--weights", metavar="MEMORY", rich_help_panel=POOL, show_default=False,
        help="The model's weights, with --gpu. Default: counted from its config.",
    ),
]  # fmt: skip
UtilizationOpt = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization", metavar="SHARE", rich_help_panel=POOL, show_default=False,
        help="Of the GPU's memory, for weights and cache. Default: 0.9.",
    ),
]  # fmt: skip
KvDtypeOpt = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype", "--kv-cache-dtype", metavar="DTYPE", rich_help_panel=POOL,
        show_default=False, autocompletion=complete_kv_dtype,
        help="Of the cache, with --model: auto (default), fp8, int8, …",
    ),
]  # fmt: skip
DtypeOpt = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", rich_help_panel=POOL, show_default=False,
        help="Of the model, with --model. Default: its config's.",
    ),
]  # fmt: skip
TpOpt = Annotated[
    str | None,
    typer.Option(
        "--tp", metavar="N", rich_help_panel=POOL, show_default=False,
        help="Tensor-parallel ranks, with --model: the pool is that of one.",
    ),
]  # fmt: skip
AllocatorOpt = Annotated[
    str | None,
    typer.Option(
        "--allocator", metavar="NAMES", rich_help_panel=ALLOCATORS, show_default=False,
        help="paged (blocks on demand), max (reserves max_model_len), pow2 (prompt and output rounded up "
        "to a power of two), oracle (knows the output), grow (doubles, copies), static-batch (padded, "
        "freed together). Default: all.",
    ),
]  # fmt: skip
PlacementOpt = Annotated[
    str | None,
    typer.Option(
        "--placement", metavar="NAMES", rich_help_panel=ALLOCATORS, show_default=False,
        help="Where contiguous regions go: buddy (default), first-fit, best-fit.",
    ),
]  # fmt: skip
PreemptionOpt = Annotated[
    str,
    typer.Option(
        "--preemption", metavar="HOW", rich_help_panel=ALLOCATORS,
        help="Of paged: recompute, or swap to --cpu-blocks; both as a list.",
    ),
]  # fmt: skip
CpuBlocksOpt = Annotated[
    str,
    typer.Option(
        "--cpu-blocks", metavar="N", rich_help_panel=ALLOCATORS,
        help="Blocks on the CPU for --preemption swap; when they are full, recompute.",
    ),
]  # fmt: skip

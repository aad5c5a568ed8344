"""The options of `kvtool plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtool.cli.size_options import (
    ENGINE,
    HARDWARE,
    MODEL,
    OUTPUT,
    WORKLOAD,
    complete_engine,
    complete_gpu,
    complete_kv_dtype,
)

BUDGET, SPEED, GRID = "Memory", "Speed and cost", "Large grids"

GpuOpt = Annotated[
    str | None,
    typer.Option(
        "--gpu", metavar="GPU[:N]", rich_help_panel=HARDWARE, show_default=False,
        help="The GPUs to plan for: h100:8, a list, or all, which ranks what is known.",
        autocompletion=complete_gpu,
    ),
]  # fmt: skip
ContextOpt = Annotated[
    str | None,
    typer.Option(
        "--context", "-c", metavar="TOKENS", rich_help_panel=WORKLOAD, show_default=False,
        help="Tokens of each request: 8k,32k. Default: 8k, or the model's maximum if that is less.",
    ),
]  # fmt: skip
UsersOpt = Annotated[
    str | None,
    typer.Option(
        "--batch", "-b", metavar="N", rich_help_panel=WORKLOAD, show_default=False,
        help="Requests that are to run at a time: 1,64. Default: as many as fit.",
    ),
]  # fmt: skip
MaxSeqsOpt = Annotated[
    str | None,
    typer.Option(
        "--max-num-seqs", metavar="N", rich_help_panel=WORKLOAD, show_default=False,
        help="The most requests that the engine runs at a time; its sampler's memory grows with them. "
        "Default: vLLM's own by GPU and version, 256 or 1,024.",
    ),
]  # fmt: skip
WorkloadOpt = Annotated[
    str | None,
    typer.Option(
        "--workload", metavar="NAME", rich_help_panel=WORKLOAD, show_default=False,
        help="Real lengths in place of one context: a workload of kvtool presets.",
    ),
]  # fmt: skip
TraceOpt = Annotated[
    str | None,
    typer.Option(
        "--trace", metavar="FILE", rich_help_panel=WORKLOAD, show_default=False,
        help="The same, of a file of requests.",
    ),
]  # fmt: skip
NumRequestsOpt = Annotated[
    str | None,
    typer.Option(
        "--num-requests",
        metavar="N",
        rich_help_panel=WORKLOAD,
        show_default=False,
        help="Requests of --workload that are drawn. Default: 10,000.",
    ),
]
WaysOpt = Annotated[
    bool,
    typer.Option(
        "--ways", rich_help_panel=HARDWARE,
        help="Every way to split the GPUs: ranks, stages, replicas, experts spread; best first.",
    ),
]  # fmt: skip
DisaggregateOpt = Annotated[
    str | None,
    typer.Option(
        "--disaggregate", metavar="KINDS", rich_help_panel=HARDWARE, show_default=False,
        help="Prefill and decode apart: prefill=h100:1,decode=h200:1, the GPUs of an instance each by --tp. With "
        "--gpu, whose plan it stands beside, --link, --prompt-tokens and --output-tokens.",
    ),
]  # fmt: skip
LinkOpt = Annotated[
    str | None,
    typer.Option(
        "--link", metavar="RATE", rich_help_panel=HARDWARE, show_default=False,
        help="Over which caches are sent: 400Gb (bits a second), 50GB/s.",
    ),
]  # fmt: skip
PromptOpt = Annotated[
    str | None,
    typer.Option(
        "--prompt-tokens",
        metavar="TOKENS",
        rich_help_panel=WORKLOAD,
        show_default=False,
        help="Of --disaggregate's requests. Default: the mean of --workload or --trace, or 2k.",
    ),
]
OutputTokensOpt = Annotated[
    str | None,
    typer.Option(
        "--output-tokens",
        metavar="TOKENS",
        rich_help_panel=WORKLOAD,
        show_default=False,
        help="The same of their answers. Default: 256.",
    ),
]
TiersOpt = Annotated[
    str | None,
    typer.Option(
        "--tiers", metavar="TIERS", rich_help_panel=BUDGET, show_default=False,
        help="Memory below the GPU's for caches, of a replica: cpu=64GiB@25GB/s (of each GPU's link),disk=1TiB@6GB/s "
        "(of the disk, which its GPUs share): what it holds, and whether loading beats computing.",
    ),
]  # fmt: skip
KvDtypeOpt = Annotated[
    str,
    typer.Option(
        "--kv-dtype", "--kv-cache-dtype", metavar="DTYPE", rich_help_panel=MODEL,
        help="auto, fp8, int4 …; K and V apart as int4/int2; a list is a row each.",
        autocompletion=complete_kv_dtype,
    ),
]  # fmt: skip
EngineOpt = Annotated[
    str,
    typer.Option(
        "--engine", metavar="ENGINE", rich_help_panel=MODEL,
        help="Whose arithmetic: ideal (what the mathematics needs), transformers, vllm, or all.",
        autocompletion=complete_engine,
    ),
]  # fmt: skip
VersionOpt = Annotated[
    str | None,
    typer.Option(
        "--engine-version", metavar="VERSION", rich_help_panel=BUDGET, show_default=False,
        help="vllm: whose rules and defaults decide what it keeps besides weights and cache: 0.7, or any. The pool itself is "
        "0.32's. Default: 0.32.",
    ),
]  # fmt: skip
WeightsOpt = Annotated[
    str | None,
    typer.Option(
        "--weights", metavar="BYTES", rich_help_panel=BUDGET, show_default=False,
        help="Of the whole model: 140GiB; or a folder or Hub id whose safetensors headers say it. "
        "Default: counted from the config.",
    ),
]  # fmt: skip
UtilizationOpt = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory-utilization", metavar="SHARE", rich_help_panel=BUDGET, show_default=False,
        help="vllm: share of a GPU's memory that it may use: 0.9, or a list. Default: 0.9.",
    ),
]  # fmt: skip
WeightsDtypeOpt = Annotated[
    str | None,
    typer.Option(
        "--weights-dtype", metavar="DTYPE", rich_help_panel=BUDGET, show_default=False,
        help="As if its weights were quantised: fp8 (DeepSeek's blocks), int4 (AWQ) or nvfp4, an estimate. "
        "Default: as the checkpoint has them.",
    ),
]  # fmt: skip
ReserveOpt = Annotated[
    str | None,
    typer.Option(
        "--reserve", metavar="BYTES", rich_help_panel=BUDGET, show_default=False,
        help="Memory of each GPU to leave alone: adapters, other processes: 2GiB.",
    ),
]  # fmt: skip
KvMemoryOpt = Annotated[
    str | None,
    typer.Option(
        "--kv-memory", metavar="BYTES", rich_help_panel=BUDGET, show_default=False,
        help="What the engine has for the cache on each GPU, as its log prints it: nothing else is subtracted.",
    ),
]  # fmt: skip
MaxBatchedOpt = Annotated[
    str | None,
    typer.Option(
        "--max-batched-tokens", metavar="TOKENS", rich_help_panel=BUDGET, show_default=False,
        help="Tokens of a step, which decide what activations take. Default: vLLM's own by GPU and version.",
    ),
]  # fmt: skip
PrefixCachingOpt = Annotated[
    bool | None,
    typer.Option(
        "--prefix-caching/--no-prefix-caching", rich_help_panel=ENGINE, show_default=False,
        help="vllm: with it, states keep more blocks a request. Default: without.",
    ),
]  # fmt: skip
EagerOpt = Annotated[
    bool,
    typer.Option(
        "--enforce-eager", rich_help_panel=ENGINE,
        help="vllm: without CUDA graphs, which take memory and make steps faster.",
    ),
]  # fmt: skip
TpOpt = Annotated[
    str | None,
    typer.Option(
        "--tp", metavar="N", rich_help_panel=HARDWARE, show_default=False,
        help="Tensor-parallel ranks: 4, or a list. Default: all GPUs that stages and replicas leave.",
    ),
]  # fmt: skip
PpOpt = Annotated[
    str, typer.Option("--pp", metavar="N", rich_help_panel=HARDWARE, help="Pipeline stages.")
]
DpOpt = Annotated[
    str | None,
    typer.Option(
        "--dp", metavar="N", rich_help_panel=HARDWARE, show_default=False,
        help="Replicas, each with a cache of its own. Default: as many as the GPUs make.",
    ),
]  # fmt: skip
EpOpt = Annotated[
    bool,
    typer.Option(
        "--ep", rich_help_panel=HARDWARE,
        help="Spread experts over the ranks of all replicas (--enable-expert-parallel).",
    ),
]  # fmt: skip
SolveOpt = Annotated[
    str | None,
    typer.Option(
        "--solve", metavar="WHAT", rich_help_panel=WORKLOAD, show_default=False,
        help="Look for the missing one: context, batch, gpus, kv-dtype or utilisation.",
    ),
]  # fmt: skip
PriceOpt = Annotated[
    float | None,
    typer.Option(
        "--price", metavar="USD", rich_help_panel=SPEED, show_default=False,
        help="What a GPU costs an hour. Default: the preset's example, with its date.",
    ),
]  # fmt: skip
CalibrateOpt = Annotated[
    str | None,
    typer.Option(
        "--calibrate", metavar="RUN", rich_help_panel=SPEED, show_default=False,
        help="A saved run of kvtool bench decode on a GPU: the shares of its peaks that it reached, in place of assumed "
        "ones.",
    ),
]  # fmt: skip
EfficiencyOpt = Annotated[
    str | None,
    typer.Option(
        "--efficiency", metavar="SHARE", rich_help_panel=SPEED, show_default=False,
        help="Shares of the peak bandwidth and of the peak rate that a step reaches: 0.8 or 0.8,0.5.",
    ),
]  # fmt: skip
ExplainOpt = Annotated[
    bool,
    typer.Option(
        "--explain", rich_help_panel=OUTPUT, help="What each line of the memory rests on."
    ),
]
LeversOpt = Annotated[
    bool,
    typer.Option(
        "--levers", rich_help_panel=SPEED,
        help="What each change would gain in users and TPOT: dtypes of cache and weights, ranks, context.",
    ),
]  # fmt: skip
JobsOpt = Annotated[
    int,
    typer.Option(
        "--jobs", metavar="N", min=1, max=1024, rich_help_panel=GRID,
        help="Processes for grids of many rows (needs the extra sweep).",
    ),
]  # fmt: skip
BackendOpt = Annotated[
    str | None,
    typer.Option(
        "--backend", metavar="NAME", rich_help_panel=GRID, show_default=False,
        help="dask or ray: hand a grid to a cluster that is there, through joblib.",
    ),
]  # fmt: skip

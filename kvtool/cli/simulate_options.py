"""The options of `kvtool simulate` besides the scheduler's: its requests, its clock, its objectives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli import fragment_options, prefix_options

REQUESTS, CLOCK, GOALS = "Requests", "Time and cost", "Objectives"

RequestsOpt = Annotated[
    str | None,
    typer.Option(
        "--requests", "--trace", metavar="FILE", rich_help_panel=REQUESTS, show_default=False,
        help="Requests with their arrivals, gzip too, or - for standard input.",
    ),
]  # fmt: skip
TraceFormatOpt = Annotated[
    str | None,
    typer.Option(
        "--trace-format", metavar="NAME", rich_help_panel=REQUESTS, show_default=False,
        help="azure, mooncake, burstgpt, bailian, lengths or kvtool; found out if left out.",
    ),
]  # fmt: skip


def complete_workload(incomplete: str) -> list[str]:
    """Names of both kinds."""
    kinds = (fragment_options, prefix_options)
    return [name for kind in kinds for name in kind.complete_workload(incomplete)]


WorkloadOpt = Annotated[
    str | None,
    typer.Option(
        "--workload", metavar="NAME", rich_help_panel=REQUESTS, show_default=False,
        autocompletion=complete_workload,
        help="A preset of lengths: chat, vllm-paper; or of shared prefixes, for --prefix-caching: agent, "
        "multi-turn-chat, few-shot.",
    ),
]  # fmt: skip
RateOpt = Annotated[
    str | None,
    typer.Option(
        "--rate", metavar="RATE", rich_help_panel=REQUESTS, show_default=False,
        help="Requests a second (Poisson), saturated (all wait from the start: default of made requests), "
        "or trace, its own time stamps (default of a file): saturated,2,4.",
    ),
]  # fmt: skip
SchedulerOpt = Annotated[
    str | None,
    typer.Option(
        "--scheduler", metavar="NAMES", rich_help_panel="Scheduler", show_default=False,
        help="static (padded batches that end together), continuous (each step anew, prompts whole), chunked "
        "(prompts in parts, default), or a list.",
    ),
]  # fmt: skip
PreemptionOpt = Annotated[
    str,
    typer.Option(
        "--preemption", metavar="HOW", rich_help_panel="Scheduler",
        help="What becomes of a victim's blocks: recompute, or swap to --cpu-blocks; both as a list.",
    ),
]  # fmt: skip
CpuBlocksOpt = Annotated[
    str | None,
    typer.Option(
        "--cpu-blocks", metavar="N", rich_help_panel="Scheduler", show_default=False,
        help="Blocks on the CPU for --preemption swap; who finds no room there is computed anew.",
    ),
]  # fmt: skip
SwapBandwidthOpt = Annotated[
    str | None,
    typer.Option(
        "--swap-bandwidth", metavar="RATE", rich_help_panel=CLOCK, show_default=False,
        help="At which each GPU moves its share of a swapped block, out or in: 25GB/s. A step waits for it.",
    ),
]  # fmt: skip
DisaggregateOpt = Annotated[
    str | None,
    typer.Option(
        "--disaggregate", metavar="KINDS", rich_help_panel="Prefill and decode apart", show_default=False,
        help="GPUs for prompts and for the other tokens, an instance of the model on each --tp of them "
        "(or /tpN of a kind): prefill=h100:4,decode=h200:4. A request goes to the prefill instance with the fewest "
        "outstanding prompt tokens, then to the decode instance with the fewest requests. Without prefix caching, "
        "swap, pictures and --per-step.",
    ),
]  # fmt: skip
LinkOpt = Annotated[
    str | None,
    typer.Option(
        "--link", metavar="RATES", rich_help_panel="Prefill and decode apart", show_default=False,
        help="Of each prefill instance, however many GPUs it has, over which caches are sent one by one: 400Gb "
        "(bits a second, also 400Gb/s, 400gbps), 50GB/s, or a list.",
    ),
]  # fmt: skip
CalibrateOpt = Annotated[
    str | None,
    typer.Option(
        "--calibrate", metavar="RUN", rich_help_panel=CLOCK, show_default=False,
        help="Fit a step's time to a saved run of kvtool bench decode.",
    ),
]  # fmt: skip
EfficiencyOpt = Annotated[
    float | None,
    typer.Option(
        "--efficiency", metavar="SHARE", rich_help_panel=CLOCK, show_default=False,
        help="Of the GPU's peak that computing reaches. Default: 0.5, an estimate.",
    ),
]  # fmt: skip
PriceOpt = Annotated[
    float | None,
    typer.Option(
        "--price", metavar="USD", rich_help_panel=CLOCK, show_default=False,
        help="Of a GPU for an hour. Default: its preset's.",
    ),
]  # fmt: skip
SloOpt = Annotated[
    str | None,
    typer.Option(
        "--slo", metavar="TIMES", rich_help_panel=GOALS, show_default=False,
        help="What a request must meet: ttft=1s,tpot=50ms,e2e=20s.",
    ),
]  # fmt: skip
SloShareOpt = Annotated[
    float | None,
    typer.Option(
        "--slo-share", metavar="SHARE", rich_help_panel=GOALS, show_default=False,
        help="Of requests that must meet it, for --find-rate. Default: 0.99.",
    ),
]  # fmt: skip
FindRateOpt = Annotated[
    bool,
    typer.Option(
        "--find-rate", rich_help_panel=GOALS,
        help="Find the highest rate (Poisson) that keeps --slo, and show the run at it.",
    ),
]  # fmt: skip
PerRequestOpt = Annotated[
    Path | None,
    typer.Option(
        "--per-request", metavar="FILE", rich_help_panel="Output", show_default=False,
        help="Write what became of each request, a JSON line each, to FILE.jsonl.",
    ),
]  # fmt: skip
PerStepOpt = Annotated[
    Path | None,
    typer.Option(
        "--per-step", metavar="FILE", rich_help_panel="Output", show_default=False,
        help="Write what each step did, a JSON line each, to FILE.jsonl.",
    ),
]  # fmt: skip

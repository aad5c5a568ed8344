"""The options of `kvtool bench`: what is measured, where, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli.size_options import complete_model

CASE, MEASURING, FILES = "Case (lists run every combination)", "Measuring", "Inputs and outputs"

BatchOpt = Annotated[
    str, typer.Option("--batch", "-b", metavar="N", rich_help_panel=CASE, help="Sequences.")
]
ContextOpt = Annotated[
    str,
    typer.Option(
        "--context", "-c", metavar="TOKENS", rich_help_panel=CASE,
        help="Tokens in the cache, the mean of the sequences.",
    ),
]  # fmt: skip
QueryHeadsOpt = Annotated[
    str | None,
    typer.Option(metavar="N", rich_help_panel=CASE, show_default=False, help="Default: 32."),
]
KvHeadsOpt = Annotated[
    str | None,
    typer.Option(metavar="N", rich_help_panel=CASE, show_default=False, help="Default: 8."),
]
HeadDimOpt = Annotated[
    str | None,
    typer.Option(
        metavar="N", rich_help_panel=CASE, show_default=False,
        help="64, 80, 96, 128, 192 or 256. Default: 128.",
    ),
]  # fmt: skip
ModelOpt = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", rich_help_panel=CASE, show_default=False,
        autocompletion=complete_model,
        help="Take the heads of a model: a Hub id, a folder, a config.json, a preset.",
    ),
]  # fmt: skip
BlockSizeOpt = Annotated[
    str,
    typer.Option(
        metavar="TOKENS", rich_help_panel=CASE, help="Tokens of a block: powers of two, 1 to 256."
    ),
]
KvDtypeOpt = Annotated[
    str,
    typer.Option(
        "--kv-dtype", "--kv-cache-dtype", metavar="DTYPE", rich_help_panel=CASE,
        help="fp32, fp16 or bf16. auto: bf16 on a GPU, fp32 on a CPU.",
    ),
]  # fmt: skip
PatternOpt = Annotated[
    str,
    typer.Option(
        metavar="NAME", rich_help_panel=CASE,
        help="Where the blocks lie: sequential, shuffled, or fragmented as an allocator's run left "
        "them.",
    ),
]  # fmt: skip
LayoutOpt = Annotated[
    str,
    typer.Option(
        metavar="NAME", rich_help_panel=CASE,
        help="A block's order: nhd (tokens first) or hnd (heads first). auto: nhd on a GPU, hnd on a "
        "CPU.",
    ),
]  # fmt: skip
SplitsOpt = Annotated[
    str,
    typer.Option(
        metavar="N", rich_help_panel=CASE,
        help="Parts of the context that a GPU works on side by side; 0: by the kernel's rule.",
    ),
]  # fmt: skip
StagesOpt = Annotated[
    str,
    typer.Option(
        metavar="N", rich_help_panel=CASE,
        help="Stages of our GPU kernels' pipeline; 0: from the kernel's own table.",
    ),
]  # fmt: skip
SkewOpt = Annotated[
    str,
    typer.Option(
        metavar="N", rich_help_panel=CASE,
        help="The longest sequence in means; the others are shorter, the sum is the same.",
    ),
]  # fmt: skip
ThreadsOpt = Annotated[
    str, typer.Option(metavar="N", rich_help_panel=CASE, help="Of the CPU.", show_default=True)
]
ProviderOpt = Annotated[
    str | None,
    typer.Option(
        "--provider", metavar="NAME", rich_help_panel=CASE, show_default=False,
        help="Some of paged, contiguous, sdpa, gather-sdpa, flashinfer, flash-attn, vllm. Default: "
        "all that are here. Only if named: paged-naive.",
    ),
]  # fmt: skip
DeviceOpt = Annotated[
    str,
    typer.Option(
        metavar="NAME", rich_help_panel=MEASURING, help="cuda, cpu, or auto: a GPU if there is one."
    ),
]
BudgetOpt = Annotated[
    str,
    typer.Option(
        metavar="TIME", rich_help_panel=MEASURING,
        help="Time for all samples (60s, 5m): fewer rounds when it is short, never fewer than 5.",
    ),
]  # fmt: skip
DryRunOpt = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        rich_help_panel=MEASURING,
        help="List the cases, their memory and time; run none.",
    ),
]
InputsOpt = Annotated[
    Path | None,
    typer.Option(
        "--inputs", metavar="F.npz", rich_help_panel=FILES, show_default=False,
        help="Queries, caches and block table from a file instead of a made case.",
    ),
]  # fmt: skip
DumpOpt = Annotated[
    Path | None,
    typer.Option(
        "--dump-output", metavar="F.npz", rich_help_panel=FILES, show_default=False,
        help="Write the inputs and what each provider made of them, of a single case.",
    ),
]  # fmt: skip

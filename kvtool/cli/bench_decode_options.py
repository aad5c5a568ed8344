"""The options of `kvtool bench decode`: the model, its requests and the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtool.cli.bench_options import MEASURING
from kvtool.cli.size_options import complete_model

MODEL, CASE, RAGGED = "Model", "Case (lists run every combination)", "Requests of different lengths"

ModelOpt = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", rich_help_panel=MODEL, show_default=False,
        autocompletion=complete_model,
        help="A folder (its weights are used), a config.json, a preset or a Hub id. Default: the first "
        "4 layers of smollm2-135m.",
    ),
]  # fmt: skip
LayersOpt = Annotated[
    int | None,
    typer.Option(
        "--layers", metavar="N", min=1, rich_help_panel=MODEL, show_default=False,
        help="Run the first N layers only.",
    ),
]  # fmt: skip
DtypeOpt = Annotated[
    str,
    typer.Option(
        metavar="DTYPE", rich_help_panel=MODEL,
        help="fp32, fp16 or bf16 (one), of weights and cache. auto: bf16 on a GPU, fp32 on a CPU.",
    ),
]  # fmt: skip
RandomOpt = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        rich_help_panel=MODEL,
        help="Random weights, even if the folder has some.",
    ),
]
CacheOpt = Annotated[
    str,
    typer.Option(
        metavar="NAME", rich_help_panel=CASE,
        help="none (all is computed again), dynamic, static (transformers'), contiguous, paged (ours), "
        "continuous (transformers' continuous batching).",
    ),
]  # fmt: skip
BatchOpt = Annotated[
    str,
    typer.Option(
        "--batch", "-b", metavar="N", rich_help_panel=CASE,
        help="Sequences; none runs at the smallest only.",
    ),
]  # fmt: skip
PromptOpt = Annotated[
    str, typer.Option(metavar="TOKENS", rich_help_panel=CASE, help="Tokens of each prompt.")
]
OutputTokensOpt = Annotated[
    str,
    typer.Option(
        metavar="TOKENS",
        rich_help_panel=CASE,
        help="Tokens generated, greedily, with no early stop.",
    ),
]
MaxModelLenOpt = Annotated[
    str | None,
    typer.Option(
        "--max-model-len", metavar="TOKENS", rich_help_panel=CASE, show_default=False,
        help="What static, contiguous and contiguous-max reserve a sequence. Default: what it needs; "
        "for requests of different lengths 4 times their mean.",
    ),
]  # fmt: skip
RequestsOpt = Annotated[
    int,
    typer.Option(
        "--num-requests", metavar="N", min=0, max=100_000, rich_help_panel=RAGGED,
        help="Lognormal lengths around the first --prompt-tokens and --output-tokens, with every "
        "--block-size; 0: none.",
    ),
]  # fmt: skip
SamplesOpt = Annotated[
    int,
    typer.Option(
        "--n", metavar="N", min=1, max=256, rich_help_panel=RAGGED,
        help="Samples a request: forks that share their prompt's blocks.",
    ),
]  # fmt: skip
KvMemoryOpt = Annotated[
    str | None,
    typer.Option(
        "--kv-memory", metavar="BYTES", rich_help_panel=RAGGED, show_default=False,
        help="Memory of the cache, such as 64MiB. Default: 2 reservations of --max-model-len, or one for each of --n.",
    ),
]  # fmt: skip
RepeatsOpt = Annotated[
    int,
    typer.Option(
        "--repeats", metavar="N", min=1, max=100, rich_help_panel=MEASURING,
        help="Rounds, each with a run of every cache in turn; below 3 no gain has an interval.",
    ),
]  # fmt: skip
ThreadsOpt = Annotated[
    int, typer.Option(metavar="N", min=1, max=4096, rich_help_panel=MEASURING, help="Of the CPU.")
]

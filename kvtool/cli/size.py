"""kvtool size MODEL…: how many bytes does the KV cache take?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvtool.cli.options import (
    FormatOpt,
    JsonOpt,
    OutputOpt,
    QuietOpt,
    VerboseOpt,
    output_from,
)

EPILOG = """Examples:

kvtool size llama-3-70b -c 8k -b 1,64

kvtool size Qwen/Qwen3-32B -c 32k --kv-dtype auto,fp8 --tp 4

kvtool size ./config.json --explain

kvtool size gemma-3-27b llama-3.1-70b -o cache.png
"""

_MODEL, _WORKLOAD, _HARDWARE = "Model", "Workload", "Hardware"


def size(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…",
            help="A Hub id, a folder, a config.json, - for standard input, or a preset.",
            show_default=False,
        ),
    ],
    context: Annotated[
        str | None,
        typer.Option(
            "--context", "-c", metavar="TOKENS", rich_help_panel=_WORKLOAD, show_default=False,
            help="Tokens in the cache: 8k,32k or 1k..128k*2. Default: 1, 8k and the model's maximum.",
        ),
    ] = None,
    batch: Annotated[
        str,
        typer.Option("--batch", "-b", metavar="N", rich_help_panel=_WORKLOAD, help="Sequences: 1,64."),
    ] = "1",
    encoder_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", rich_help_panel=_WORKLOAD, show_default=False,
            help="Tokens behind cross-attention (encoder output, image tokens).",
        ),
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(
            "--kv-dtype", "--kv-cache-dtype", metavar="DTYPE", rich_help_panel=_MODEL,
            help="auto, fp8, int4 …; K and V apart as int4/int2; a list is a row each.",
        ),
    ] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", rich_help_panel=_MODEL, show_default=False,
            help="The model's dtype: fp32, fp16 or bf16. Default: the config's, else bf16.",
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="REV", rich_help_panel=_MODEL, show_default=False,
            help="Branch, tag or commit of a Hub repository.",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="ENGINE", rich_help_panel=_MODEL, help="Whose cache: ideal.")
    ] = "ideal",
    assume: Annotated[
        str | None,
        typer.Option(
            metavar="full", rich_help_panel=_MODEL, show_default=False,
            help="Size a model whose layout is not understood as plain full attention.",
        ),
    ] = None,
    allow_long: Annotated[
        bool,
        typer.Option("--allow-long", rich_help_panel=_MODEL, help="Go above the model's maximum."),
    ] = False,
    tp: Annotated[
        str,
        typer.Option(metavar="N", rich_help_panel=_HARDWARE, help="Tensor-parallel ranks."),
    ] = "1",
    pp: Annotated[
        str, typer.Option(metavar="N", rich_help_panel=_HARDWARE, help="Pipeline stages.")
    ] = "1",
    block_size: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", rich_help_panel=_HARDWARE, show_default=False,
            help="Round the tokens held up to whole blocks.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="GPU", rich_help_panel=_HARDWARE, show_default=False,
            help="GPUs whose capacity is drawn in a picture: h100,b200.",
        ),
    ] = None,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", rich_help_panel="Output", help="Every layer's bytes.")
    ] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", rich_help_panel="Output",
            help="The formula, and which key or class default decided each number.",
        ),
    ] = False,
    assert_max_gib: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", rich_help_panel="Output", show_default=False,
            help="Exit 1 if a GPU would hold more than this.",
        ),
    ] = None,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: OutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:  # fmt: skip
    """How many bytes does the KV cache take?"""
    out = output_from(format, json, output, quiet, verbose)
    given: dict[str, Any] = {
        name: value
        for name, value in locals().items()
        if name not in ("out", "format", "json", "output", "quiet", "verbose")
    }
    from kvtool.cli.size_run import gate, query_of, run_size
    from kvtool.view.size import view

    query = query_of(given)
    limit = gate(assert_max_gib)
    run, failed = run_size(given, query, out, picture=_is_picture(output))
    out.emit(run, view(run), failed=failed or limit(run))


def _is_picture(output: Path | None) -> bool:
    return output is not None and output.suffix.lower() in (".png", ".svg")

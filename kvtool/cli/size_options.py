"""The options of `kvtool size`, and the completion of its names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL, WORKLOAD, HARDWARE, ENGINE, OUTPUT = "Model", "Workload", "Hardware", "Engine", "Output"


def complete_model(incomplete: str) -> list[str]:
    """Presets that start like this."""
    from kvtool.catalog import preset_ids

    return [name for name in preset_ids("models") if name.startswith(incomplete)]


def complete_gpu(incomplete: str) -> list[str]:
    """GPUs that start like this."""
    from kvtool.catalog import preset_ids

    return [name for name in preset_ids("gpus") if name.startswith(incomplete)]


def complete_kv_dtype(incomplete: str) -> list[str]:
    """KV dtypes that start like this."""
    from kvtool.dtypes import DTYPES

    return [name for name in ("auto", *DTYPES) if name.startswith(incomplete)]


def complete_engine(incomplete: str) -> list[str]:
    """Engines that start like this."""
    from kvtool.engines import NAMES

    return [name for name in (*NAMES, "all") if name.startswith(incomplete)]


ModelsArg = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL…",
        help="A Hub id, a folder, a config.json, - for standard input, or a preset.",
        show_default=False,
        autocompletion=complete_model,
    ),
]
ContextOpt = Annotated[
    str | None,
    typer.Option(
        "--context", "-c", metavar="TOKENS", rich_help_panel=WORKLOAD, show_default=False,
        help="Tokens in the cache: 8k,32k or 1k..128k*2. Default: 1, 8k and the model's maximum.",
    ),
]  # fmt: skip
BatchOpt = Annotated[
    str,
    typer.Option("--batch", "-b", metavar="N", rich_help_panel=WORKLOAD, help="Sequences: 1,64."),
]
EncoderOpt = Annotated[
    str | None,
    typer.Option(
        "--encoder-tokens", metavar="TOKENS", rich_help_panel=WORKLOAD, show_default=False,
        help="Tokens behind cross-attention (encoder output, image tokens).",
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
DtypeOpt = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", rich_help_panel=MODEL, show_default=False,
        help="The model's dtype: fp32, fp16 or bf16. Default: the config's, else bf16.",
    ),
]  # fmt: skip
RevisionOpt = Annotated[
    str | None,
    typer.Option(
        "--revision", metavar="REV", rich_help_panel=MODEL, show_default=False,
        help="Branch, tag or commit of a Hub repository.",
    ),
]  # fmt: skip
AssumeOpt = Annotated[
    str | None,
    typer.Option(
        "--assume", metavar="full", rich_help_panel=MODEL, show_default=False,
        help="Size a model whose layout is not understood as plain full attention.",
    ),
]  # fmt: skip
AllowLongOpt = Annotated[
    bool, typer.Option("--allow-long", rich_help_panel=MODEL, help="Go above the model's maximum.")
]
DraftOpt = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="MODEL", rich_help_panel=MODEL, show_default=False,
        help="Count the cache of a draft model with it (speculative decoding).",
    ),
]  # fmt: skip
MtpOpt = Annotated[
    str,
    typer.Option(
        "--mtp", metavar="N", rich_help_panel=MODEL,
        help="Count N multi-token-prediction layers with it.",
    ),
]  # fmt: skip
TpOpt = Annotated[
    str, typer.Option("--tp", metavar="N", rich_help_panel=HARDWARE, help="Tensor-parallel ranks.")
]
PpOpt = Annotated[
    str, typer.Option("--pp", metavar="N", rich_help_panel=HARDWARE, help="Pipeline stages.")
]
PpLayersOpt = Annotated[
    str | None,
    typer.Option(
        "--pp-layers", metavar="A/B/…", rich_help_panel=HARDWARE, show_default=False,
        help="Layers of each pipeline stage: 16/32. Default: an even split.",
    ),
]  # fmt: skip
DcpOpt = Annotated[
    str,
    typer.Option(
        "--dcp", metavar="N", rich_help_panel=HARDWARE,
        help="Decode context parallelism: N of the tp ranks share a sequence's tokens.",
    ),
]  # fmt: skip
DpOpt = Annotated[
    str,
    typer.Option(
        "--dp", metavar="N", rich_help_panel=HARDWARE,
        help="Data-parallel attention: N ranks share the sequences, each with a whole cache.",
    ),
]  # fmt: skip
BlockSizeOpt = Annotated[
    str | None,
    typer.Option(
        "--block-size", metavar="TOKENS", rich_help_panel=ENGINE, show_default=False,
        help="Round the tokens held up to whole blocks (vllm: default 16).",
    ),
]  # fmt: skip
GpuOpt = Annotated[
    str | None,
    typer.Option(
        "--gpu", metavar="GPU[:N]", rich_help_panel=HARDWARE, show_default=False,
        help="Say what share of these GPUs it takes, and draw them in a picture: h100,b200:8.",
        autocompletion=complete_gpu,
    ),
]  # fmt: skip
EngineOpt = Annotated[
    str,
    typer.Option(
        "--engine", metavar="ENGINE", rich_help_panel=ENGINE,
        help="Whose cache: ideal (what the mathematics needs), transformers, vllm, or all.",
        autocompletion=complete_engine,
    ),
]  # fmt: skip
CacheOpt = Annotated[
    str,
    typer.Option(
        "--cache", metavar="KIND", rich_help_panel=ENGINE,
        help="transformers: dynamic, or static (the context is the static length).",
    ),
]  # fmt: skip
PromptOpt = Annotated[
    str | None,
    typer.Option(
        "--prompt-tokens", metavar="TOKENS", rich_help_panel=ENGINE, show_default=False,
        help="transformers: how much of the context was prompt. Default: all of it.",
    ),
]  # fmt: skip
MaxModelLenOpt = Annotated[
    str | None,
    typer.Option(
        "--max-model-len", metavar="TOKENS", rich_help_panel=ENGINE, show_default=False,
        help="vllm: the longest request. Default: the context.",
    ),
]  # fmt: skip
MaxBatchedOpt = Annotated[
    str,
    typer.Option(
        "--max-batched-tokens", metavar="TOKENS", rich_help_panel=ENGINE,
        help="vllm: tokens of one step (max_num_batched_tokens).",
    ),
]  # fmt: skip
InFlightOpt = Annotated[
    str | None,
    typer.Option(
        "--batches-in-flight", metavar="N", rich_help_panel=ENGINE, show_default=False,
        help="vllm: steps under way at once. Default: 2 (asynchronous scheduling), pp with stages.",
    ),
]  # fmt: skip
PrefixCachingOpt = Annotated[
    bool,
    typer.Option(
        "--prefix-caching/--no-prefix-caching", rich_help_panel=ENGINE,
        help="vllm: with it, states keep more blocks a request.",
    ),
]  # fmt: skip
HybridOpt = Annotated[
    bool | None,
    typer.Option(
        "--hybrid/--no-hybrid", rich_help_panel=ENGINE, show_default=False,
        help="vllm: the hybrid KV cache manager. Default: on, but for chunked attention.",
    ),
]  # fmt: skip
KvMemoryOpt = Annotated[
    str | None,
    typer.Option(
        "--kv-memory", metavar="BYTES", rich_help_panel=ENGINE, show_default=False,
        help="vllm: memory for the cache on each GPU, as 20GiB: blocks, tokens and concurrency.",
    ),
]  # fmt: skip
LayerSpecsOpt = Annotated[
    Path | None,
    typer.Option(
        "--layer-specs", metavar="FILE", rich_help_panel=ENGINE, show_default=False,
        help="vllm: a JSON list of layer specs in place of a MODEL.",
    ),
]  # fmt: skip
PerLayerOpt = Annotated[
    bool, typer.Option("--per-layer", rich_help_panel=OUTPUT, help="Every layer's bytes.")
]
ExplainOpt = Annotated[
    bool,
    typer.Option(
        "--explain", rich_help_panel=OUTPUT,
        help="The formula, and which key or class default decided each number.",
    ),
]  # fmt: skip
AssertOpt = Annotated[
    float | None,
    typer.Option(
        "--assert-max-gib", metavar="GIB", rich_help_panel=OUTPUT, show_default=False,
        help="Exit 1 if a GPU would hold more than this.",
    ),
]  # fmt: skip

"""kvtool bench decode: whole-model decode, with each kind of cache."""

from __future__ import annotations

from typing import Any

from kvtool.cli import bench_decode_options as d
from kvtool.cli import bench_options as o
from kvtool.cli.options import (
    FormatOpt,
    JsonOpt,
    OutputOpt,
    QuietOpt,
    SeedOpt,
    VerboseOpt,
    output_from,
)

EPILOG = """Examples:

kvtool bench decode

kvtool bench decode --cache none,dynamic,paged --prompt-tokens 256 --output-tokens 64

kvtool bench decode --model llama-3-8b --batch 1,16,64 --prompt-tokens 1k -o decode.json

kvtool bench decode --num-requests 32 --n 4 --kv-memory 64MiB
"""
_NOT_ASKED = ("format", "json", "output", "quiet", "verbose")


def decode(
    model: d.ModelOpt = None,
    layers: d.LayersOpt = None,
    dtype: d.DtypeOpt = "auto",
    random_weights: d.RandomOpt = False,
    cache: d.CacheOpt = "none,dynamic,static,contiguous,paged,continuous",
    batch: d.BatchOpt = "1,4",
    prompt_tokens: d.PromptOpt = "128",
    output_tokens: d.OutputTokensOpt = "16",
    block_size: o.BlockSizeOpt = "16",
    max_model_len: d.MaxModelLenOpt = None,
    num_requests: d.RequestsOpt = 8,
    n: d.SamplesOpt = 1,
    kv_memory: d.KvMemoryOpt = None,
    repeats: d.RepeatsOpt = 3,
    threads: d.ThreadsOpt = 1,
    device: o.DeviceOpt = "auto",
    seed: SeedOpt = 0,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: OutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:
    """Whole-model decode with each kind of cache, then requests batched in one budget of memory."""
    given: dict[str, Any] = {k: v for k, v in locals().items() if k not in _NOT_ASKED}
    out = output_from(format, json, output, quiet, verbose)
    from kvtool.cli.bench_decode_run import run_decode

    run_decode(given, out)

"""kvtool size MODEL…: how many bytes does the KV cache take?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvtool.cli import size_options as o
from kvtool.cli.options import (
    FormatOpt,
    JsonOpt,
    OutputOpt,
    QuietOpt,
    VerboseOpt,
    output_from,
)
from kvtool.errors import KvtoolError

EPILOG = """Examples:

kvtool size llama-3-70b -c 8k -b 1,64

kvtool size Qwen/Qwen3-32B -c 32k --kv-dtype auto,fp8 --tp 4

kvtool size gpt-oss-20b -c 8k --engine all

kvtool size gemma-3-27b llama-3.1-70b -o cache.png
"""

_NOT_ASKED = ("format", "json", "output", "quiet", "verbose")


def size(
    models: o.ModelsArg = None,
    context: o.ContextOpt = None,
    batch: o.BatchOpt = "1",
    encoder_tokens: o.EncoderOpt = None,
    kv_dtype: o.KvDtypeOpt = "auto",
    dtype: o.DtypeOpt = None,
    revision: o.RevisionOpt = None,
    assume: o.AssumeOpt = None,
    allow_long: o.AllowLongOpt = False,
    draft: o.DraftOpt = None,
    mtp: o.MtpOpt = "0",
    tp: o.TpOpt = "1",
    pp: o.PpOpt = "1",
    pp_layers: o.PpLayersOpt = None,
    dcp: o.DcpOpt = "1",
    dp: o.DpOpt = "1",
    block_size: o.BlockSizeOpt = None,
    gpu: o.GpuOpt = None,
    engine: o.EngineOpt = "ideal",
    cache: o.CacheOpt = "dynamic",
    prompt_tokens: o.PromptOpt = None,
    max_model_len: o.MaxModelLenOpt = None,
    max_batched_tokens: o.MaxBatchedOpt = "8192",
    batches_in_flight: o.InFlightOpt = None,
    prefix_caching: o.PrefixCachingOpt = False,
    hybrid: o.HybridOpt = None,
    kv_memory: o.KvMemoryOpt = None,
    layer_specs: o.LayerSpecsOpt = None,
    per_layer: o.PerLayerOpt = False,
    explain: o.ExplainOpt = False,
    assert_max_gib: o.AssertOpt = None,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: OutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:
    """How many bytes does the KV cache take?"""
    given: dict[str, Any] = {k: v for k, v in locals().items() if k not in _NOT_ASKED}
    out = output_from(format, json, output, quiet, verbose)
    from kvtool.cli.gpus import LEVELS, levels_of
    from kvtool.cli.size_run import curve, gate, params_of, query_of, run_size
    from kvtool.output import PICTURES, check_not_read
    from kvtool.view.size import view

    check_not_read(output, [*(models or []), *map(str, filter(None, (draft, layer_specs)))])
    query = query_of(given)
    limit = gate(assert_max_gib)
    drawn = output is not None and output.suffix.lower() in PICTURES
    levels = levels_of(gpu or LEVELS) if drawn or gpu is not None else {}
    try:
        subjects, run, failed = run_size(given, query, out)
    except KvtoolError as error:
        error.params = params_of(given)
        raise
    over = limit(run)
    if failed is not None and over is not None:
        run = replace(run, notes=(*run.notes, f"also failed: {over.message}"))
    points = curve(subjects, query) if drawn else ()
    out.emit(run, view(run, curve=points, levels=levels), failed=failed or over)

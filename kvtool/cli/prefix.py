"""kvtool prefix: how much of the prompts can be shared?"""

from __future__ import annotations

from typing import Any

from kvtool.cli import prefix_options as o
from kvtool.cli.options import (
    FormatOpt,
    JsonOpt,
    OutputOpt,
    QuietOpt,
    SeedOpt,
    VerboseOpt,
    output_from,
)
from kvtool.errors import KvtoolError

EPILOG = """Examples:

kvtool prefix --trace conversation_trace.jsonl -o curve.png

kvtool prefix --trace conversation_trace.jsonl --index hash --capacity 1000,10000

kvtool prefix --workload all --capacity 20GiB --model llama-3-8b --gpu h100

kvtool prefix --workload chat:3+agent:1 --capacity 4k --policy lru,lfu

kvtool prefix --workload agent --capacity 4GiB --model llama-3-8b --gpu h100 --tiers cpu=64GiB@25GB/s
"""
_NOT_ASKED = ("format", "json", "output", "quiet", "verbose")


def prefix(
    trace: o.TraceOpt = None,
    trace_format: o.TraceFormatOpt = None,
    trace_block_size: o.TraceBlockSizeOpt = None,
    tenants: o.TenantsOpt = None,
    workload: o.WorkloadOpt = None,
    num_requests: o.NumRequestsOpt = None,
    num_prefixes: o.NumPrefixesOpt = None,
    prefix_tokens: o.PrefixTokensOpt = None,
    zipf: o.ZipfOpt = None,
    share: o.ShareOpt = None,
    session_tokens: o.SessionTokensOpt = None,
    turn_tokens: o.TurnTokensOpt = None,
    output_tokens: o.OutputTokensOpt = None,
    turns: o.TurnsOpt = None,
    branch: o.BranchOpt = None,
    concurrency: o.ConcurrencyOpt = None,
    seed: SeedOpt = 0,
    index: o.IndexOpt = None,
    capacity: o.CapacityOpt = "all",
    block_size: o.BlockSizeOpt = None,
    policy: o.PolicyOpt = "lru",
    cache_outputs: o.CacheOutputsOpt = None,
    points: o.PointsOpt = "1000",
    model: o.ModelOpt = None,
    kv_dtype: o.KvDtypeOpt = None,
    dtype: o.DtypeOpt = None,
    tp: o.TpOpt = None,
    gpu: o.GpuOpt = None,
    weights: o.WeightsOpt = None,
    gpu_memory_utilization: o.UtilizationOpt = None,
    efficiency: o.EfficiencyOpt = None,
    tiers: o.TiersOpt = None,
    explain_request: o.ExplainOpt = None,
    show_tree: o.ShowTreeOpt = False,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: OutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:
    """How much of the prompts can be shared, by which index?"""
    given: dict[str, Any] = {k: v for k, v in locals().items() if k not in _NOT_ASKED}
    out = output_from(format, json, output, quiet, verbose)
    from kvtool.cli.prefix_run import run_all
    from kvtool.cli.prefix_words import check_picture, parse
    from kvtool.output import check_not_read
    from kvtool.run import Run
    from kvtool.view.prefix import view

    check_not_read(output, [name for name in (trace, model) if name])
    try:
        words = parse(given)
        check_picture(words, output)
        rows, notes, stopped = run_all(words, out)
    except KvtoolError as error:
        error.params = given
        raise
    run = Run(command="prefix", params=given, rows=tuple(rows), notes=tuple(notes))
    out.emit(run, view(run), failed=stopped)

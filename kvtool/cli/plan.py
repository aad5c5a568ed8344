"""kvtool plan MODEL --gpu GPU: what fits, how many users, how long a context, how fast, at what cost?"""

from __future__ import annotations

from typing import Any

from kvtool.cli import plan_options as p
from kvtool.cli import size_options as o
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

kvtool plan llama-3-70b --gpu h100:8 --engine vllm -c 8k

kvtool plan llama-3-70b --gpu h100 -c 8k -b 64

kvtool plan gpt-oss-120b --gpu all -c 32k -b 16

kvtool plan llama-3.1-8b --gpu l4 --solve kv-dtype -c 32k -b 4

kvtool plan qwen3-32b --gpu h100,h200 --kv-dtype auto,fp8 -c 4k..32k*2 -o plan.png
"""

_NOT_ASKED = ("format", "json", "output", "quiet", "verbose")


def plan(
    models: o.ModelsArg = None,
    gpu: p.GpuOpt = None,
    tp: p.TpOpt = None,
    pp: p.PpOpt = "1",
    dp: p.DpOpt = None,
    dcp: o.DcpOpt = "1",
    ep: p.EpOpt = False,
    ways: p.WaysOpt = False,
    disaggregate: p.DisaggregateOpt = None,
    link: p.LinkOpt = None,
    context: p.ContextOpt = None,
    batch: p.UsersOpt = None,
    max_num_seqs: p.MaxSeqsOpt = None,
    workload: p.WorkloadOpt = None,
    num_requests: p.NumRequestsOpt = None,
    trace: p.TraceOpt = None,
    prompt_tokens: p.PromptOpt = None,
    output_tokens: p.OutputTokensOpt = None,
    encoder_tokens: o.EncoderOpt = None,
    solve: p.SolveOpt = None,
    kv_dtype: p.KvDtypeOpt = "auto",
    dtype: o.DtypeOpt = None,
    revision: o.RevisionOpt = None,
    allow_long: o.AllowLongOpt = False,
    engine: p.EngineOpt = "ideal",
    engine_version: p.VersionOpt = None,
    weights: p.WeightsOpt = None,
    weights_dtype: p.WeightsDtypeOpt = None,
    gpu_memory_utilization: p.UtilizationOpt = None,
    reserve: p.ReserveOpt = None,
    kv_memory: p.KvMemoryOpt = None,
    max_batched_tokens: p.MaxBatchedOpt = None,
    tiers: p.TiersOpt = None,
    block_size: o.BlockSizeOpt = None,
    prefix_caching: p.PrefixCachingOpt = None,
    hybrid: o.HybridOpt = None,
    enforce_eager: p.EagerOpt = False,
    levers: p.LeversOpt = False,
    price: p.PriceOpt = None,
    efficiency: p.EfficiencyOpt = None,
    calibrate: p.CalibrateOpt = None,
    explain: p.ExplainOpt = False,
    jobs: p.JobsOpt = 1,
    backend: p.BackendOpt = None,
    seed: SeedOpt = 0,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: OutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:
    """What fits, how many users, how long a context, how fast, at what cost?"""
    given: dict[str, Any] = {k: v for k, v in locals().items() if k not in _NOT_ASKED}
    out = output_from(format, json, output, quiet, verbose)
    from kvtool.cli.plan_checks import check
    from kvtool.cli.plan_run import run_plan
    from kvtool.cli.plan_words import interrupted, query_of, solved
    from kvtool.output import check_not_read

    check_not_read(output, [*(models or []), *filter(None, (trace, calibrate))])
    query = query_of(given)
    given["solve"] = solved(given["solve"])
    check(given, query)
    try:
        run_plan(given, query, out)
    except KvtoolError as error:
        error.params = given
        raise
    except KeyboardInterrupt as end:  # before or after its rows are made
        raise interrupted(output, given) from end

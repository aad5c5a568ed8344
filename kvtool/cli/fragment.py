"""kvtool fragment: how much of the pool is wasted, by which allocator?"""

from __future__ import annotations

from typing import Any

from kvtool.cli import fragment_options as o
from kvtool.cli import scheduler_options as s
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

kvtool fragment --dist zipf

kvtool fragment --workload vllm-paper --allocator paged,max,pow2,oracle -o waste.png

kvtool fragment --trace AzureLLMInferenceTrace_conv.csv --rate trace --model llama-3-8b --gpu h100

kvtool fragment --workload chat --allocator paged --block-size 1..256*2

kvtool fragment --workload vllm-paper --allocator paged --n 2,4,6 --num-requests 3000
"""

BARS_ALONE = (
    "the picture has only the bars of some rows: shares over time and maps are drawn of at most 12 "
    "rows, of runs that came to their end, and not where requests share"
)
_NOT_ASKED = ("format", "json", "output", "quiet", "verbose")


def fragment(
    workload: o.WorkloadOpt = None,
    dist: o.DistOpt = None,
    prompt_dist: o.PromptDistOpt = None,
    output_dist: o.OutputDistOpt = None,
    prompt_mean: o.PromptMeanOpt = None,
    output_mean: o.OutputMeanOpt = None,
    prompt_cap: o.PromptCapOpt = None,
    output_cap: o.OutputCapOpt = None,
    trace: o.TraceOpt = None,
    trace_format: o.TraceFormatOpt = None,
    num_requests: o.NumRequestsOpt = None,
    rate: o.RateOpt = None,
    n: o.SamplesOpt = "1",
    shared_prefix: o.SharedPrefixOpt = "0",
    seed: SeedOpt = 0,
    num_blocks: o.NumBlocksOpt = None,
    pool_tokens: o.PoolTokensOpt = None,
    model: o.ModelOpt = None,
    kv_memory: o.KvMemoryOpt = None,
    gpu: o.GpuOpt = None,
    weights: o.WeightsOpt = None,
    gpu_memory_utilization: o.UtilizationOpt = None,
    kv_dtype: o.KvDtypeOpt = None,
    dtype: o.DtypeOpt = None,
    tp: o.TpOpt = None,
    allocator: o.AllocatorOpt = None,
    placement: o.PlacementOpt = None,
    preemption: o.PreemptionOpt = "recompute",
    cpu_blocks: o.CpuBlocksOpt = "0",
    block_size: s.BlockSizeOpt = None,
    max_model_len: s.MaxModelLenOpt = None,
    max_num_seqs: s.MaxNumSeqsOpt = "256",
    max_batched_tokens: s.MaxBatchedOpt = "8192",
    chunked_prefill: s.ChunkedOpt = True,
    watermark: s.WatermarkOpt = "0",
    reserve_full_prompt: s.FullPromptOpt = True,
    step_time: s.StepTimeOpt = None,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: OutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:
    """How much of the pool is wasted, by which allocator?"""
    given: dict[str, Any] = {k: v for k, v in locals().items() if k not in _NOT_ASKED}
    out = output_from(format, json, output, quiet, verbose)
    from kvtool.cli.fragment_run import cases_of, check_picture, films_of, run_cases
    from kvtool.cli.fragment_words import check_numbers, files_in, params_of, resolved, traffics_of
    from kvtool.output import PICTURES, check_not_read
    from kvtool.run import Run
    from kvtool.view.fragment import view

    drawn = output is not None and output.suffix.lower() in PICTURES
    check_not_read(output, files_in(given))
    try:
        check_numbers(given)
        traffics = traffics_of(given)
        grid = s.scheduler_grid(resolved(given, traffics))
        cases, notes = cases_of(given, traffics, grid)
        if drawn:
            check_picture(cases)
        measured, stopped = run_cases(cases, out)
    except KvtoolError as error:
        error.params = params_of(given)
        raise
    films, stopped = films_of(cases, measured, stopped) if drawn else ([], stopped)
    if any(not film.series and film.regions is None for film in films):
        notes.append(BARS_ALONE)
    run = Run(
        command="fragment",
        params=params_of(given),
        rows=tuple(one.row for one in measured),
        notes=(*traffics.notes, *notes),
    )
    out.emit(run, view(run, films), failed=stopped)

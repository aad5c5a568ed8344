"""kvtool simulate: what does the scheduler make of requests over time?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtool.cli import fragment_options as f
from kvtool.cli import scheduler_options as s
from kvtool.cli import simulate_options as o
from kvtool.cli.options import (
    FormatOpt,
    JsonOpt,
    OutputOpt,
    QuietOpt,
    SeedOpt,
    VerboseOpt,
    output_from,
)
from kvtool.errors import KvtoolError, usage_error

EPILOG = """Examples:

kvtool simulate --requests AzureLLMInferenceTrace_conv.csv --num-blocks 20000

kvtool simulate --model llama-3-8b --gpu h100 --workload chat --rate 4,16 --slo ttft=1s,tpot=50ms

kvtool simulate --model llama-3-8b --gpu a100-40gb --workload chat --scheduler static,continuous,chunked

kvtool simulate --model llama-3-8b --gpu h100 --workload chat --slo ttft=1s,tpot=30ms --find-rate

kvtool simulate --model llama-3-8b --disaggregate prefill=h100,decode=h200 --link 400Gb --workload chat --rate 8

kvtool simulate --requests chat.jsonl --num-blocks 500,1000,2000 --max-num-seqs 64,256

kvtool simulate --requests chat.jsonl --num-blocks 1000 --per-request out.jsonl --json

kvtool simulate --requests conversation_trace.jsonl --num-blocks 9000 --block-size 512 --prefix-caching

kvtool simulate --model llama-3-8b --gpu a100-40gb --workload agent --prefix-caching --index hash,radix

A CSV: arrival_s,prompt_tokens,output_tokens (arrival_ms and Azure's own names too).
A line of chat.jsonl: {"arrival_ns": 0, "prompt_tokens": 512, "output_tokens": 128}. With --prefix-caching
also "segments": [stream, first token, tokens, ...] of the prompt, and "out_stream".
"""

_NOT_ASKED = ("format", "json", "output", "quiet", "verbose")


def simulate(
    requests: o.RequestsOpt = None,
    trace_format: o.TraceFormatOpt = None,
    workload: o.WorkloadOpt = None,
    dist: f.DistOpt = None,
    prompt_dist: f.PromptDistOpt = None,
    output_dist: f.OutputDistOpt = None,
    prompt_mean: f.PromptMeanOpt = None,
    output_mean: f.OutputMeanOpt = None,
    prompt_cap: f.PromptCapOpt = None,
    output_cap: f.OutputCapOpt = None,
    num_requests: f.NumRequestsOpt = None,
    rate: o.RateOpt = None,
    seed: SeedOpt = 0,
    num_blocks: f.NumBlocksOpt = None,
    pool_tokens: f.PoolTokensOpt = None,
    model: f.ModelOpt = None,
    kv_memory: f.KvMemoryOpt = None,
    gpu: f.GpuOpt = None,
    weights: f.WeightsOpt = None,
    gpu_memory_utilization: f.UtilizationOpt = None,
    kv_dtype: f.KvDtypeOpt = None,
    dtype: f.DtypeOpt = None,
    tp: f.TpOpt = None,
    scheduler: o.SchedulerOpt = None,
    block_size: s.BlockSizeOpt = "16",
    max_model_len: s.MaxModelLenOpt = None,
    max_num_seqs: s.MaxNumSeqsOpt = "256",
    max_num_active_seqs: s.MaxActiveOpt = None,
    max_batched_tokens: s.MaxBatchedOpt = "8192",
    max_scheduled_tokens: s.MaxScheduledOpt = None,
    chunked_prefill: s.ChunkedOpt = True,
    prefix_caching: s.PrefixCachingOpt = False,
    watermark: s.WatermarkOpt = "0",
    reserve_full_prompt: s.FullPromptOpt = True,
    long_prefill_threshold: s.LongPrefillOpt = "0",
    long_prefill_adaptive: s.LongAdaptiveOpt = False,
    index: s.IndexOpt = "hash",
    policy: s.PolicyOpt = "fcfs",
    async_scheduling: s.AsyncOpt = False,
    finish_by: s.FinishByOpt = "max-tokens",
    on_stall: s.OnStallOpt = "abort-head",
    step_time: s.StepTimeOpt = None,
    preemption: o.PreemptionOpt = "recompute",
    cpu_blocks: o.CpuBlocksOpt = None,
    swap_bandwidth: o.SwapBandwidthOpt = None,
    disaggregate: o.DisaggregateOpt = None,
    link: o.LinkOpt = None,
    calibrate: o.CalibrateOpt = None,
    efficiency: o.EfficiencyOpt = None,
    price: o.PriceOpt = None,
    slo: o.SloOpt = None,
    slo_share: o.SloShareOpt = None,
    find_rate: o.FindRateOpt = False,
    per_request: o.PerRequestOpt = None,
    per_step: o.PerStepOpt = None,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: OutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:
    """What does the scheduler make of requests over time?"""
    given: dict[str, Any] = {k: v for k, v in locals().items() if k not in _NOT_ASKED}
    out = output_from(format, json, output, quiet, verbose)
    try:
        _check_outputs(given, output)
        _run(given, out, output)
    except KvtoolError as error:
        error.params = _params(given)
        raise


def _params(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options as they were typed, in JSON's terms."""
    from kvtool.cli.fragment_words import params_of

    files = {name: given[name] and str(given[name]) for name in ("per_request", "per_step")}
    return params_of({**given, **files})


def _check_outputs(given: Mapping[str, Any], output: Path | None) -> None:
    from kvtool.cli.fragment_words import check_numbers, files_in
    from kvtool.cli.simulate_disaggregated import check_disaggregated
    from kvtool.cli.simulate_files import check_files
    from kvtool.output import PICTURES

    check_numbers(given)
    check_disaggregated(given, drawn=output is not None and output.suffix.lower() in PICTURES)
    files = {"-o": output, "--per-request": given["per_request"], "--per-step": given["per_step"]}
    sources = [given[name] for name in ("requests", "calibrate") if given[name]]
    check_files(files, [*sources, *files_in({**given, "trace": None})])


def _run(given: Mapping[str, Any], out: Any, output: Path | None) -> None:
    """The rows, the files, and what is to be said of them."""
    from kvtool.cli.simulate_run import interrupted, run_cases, write_files
    from kvtool.cli.simulate_words import notes_of_settings, parse
    from kvtool.output import PICTURES
    from kvtool.run import Run
    from kvtool.view.simulate import view

    words = parse(given)
    if len(words.cases) > 1 and (given["per_request"] or given["per_step"]):
        raise usage_error(
            f"--per-request and --per-step are of one run, and the lists ask for {len(words.cases):,}",
            "give one value for each option, or leave the files out",
        )
    for text in (*words.notes, *notes_of_settings(words.cases)):
        out.note(text)
    drawn = output is not None and output.suffix.lower() in PICTURES
    done = run_cases(words, out, drawn=drawn)
    failed = done.failed
    if done.last is not None and done.last.interrupted:
        failed = interrupted(done.rows, len(words.cases), out)
    elif done.last is not None and failed is None:
        failed = write_files(given, done.last, words.cases[-1].requests, out)
    run = Run(command="simulate", params=_params(given), rows=tuple(done.rows))
    out.emit(run, view(run, done.lines), failed=failed)

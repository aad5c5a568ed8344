"""kvtool simulate: what does the scheduler make of requests over time?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli import scheduler_options as s
from kvtool.cli.options import (
    FormatOpt,
    JsonOpt,
    QuietOpt,
    TextOutputOpt,
    VerboseOpt,
    output_from,
)
from kvtool.errors import INTERRUPTED, KvtoolError, usage_error

if TYPE_CHECKING:
    from kvtool.output import Output
    from kvtool.run import Row
    from kvtool.sim.replay import Replay
    from kvtool.sim.settings import Settings
    from kvtool.trace import Trace

EPILOG = """Examples:

kvtool simulate --requests AzureLLMInferenceTrace_conv.csv --num-blocks 20000

kvtool simulate --requests chat.jsonl --num-blocks 500,1000,2000 --max-num-seqs 64,256

kvtool simulate --requests chat.jsonl --num-blocks 1000 --per-request out.jsonl --json

kvtool simulate --requests conversation_trace.jsonl --num-blocks 9000 --block-size 512 --prefix-caching

A line of chat.jsonl: {"arrival_ns": 0, "prompt_tokens": 512, "output_tokens": 128}. With --prefix-caching
also "segments": [stream, first token, tokens, ...] of the prompt, and "out_stream".
"""

REQUESTS = "Requests"
_NOT_ASKED = ("format", "json", "output", "quiet", "verbose")

RequestsOpt = Annotated[
    str,
    typer.Option(
        "--requests", "--trace", metavar="FILE", rich_help_panel=REQUESTS, show_default=False,
        help="Requests with their arrivals, gzip too, or - for standard input.",
    ),
]  # fmt: skip
TraceFormatOpt = Annotated[
    str | None,
    typer.Option(
        "--trace-format", metavar="NAME", rich_help_panel=REQUESTS, show_default=False,
        help="azure, mooncake, burstgpt, bailian, lengths or kvtool; found out if left out.",
    ),
]  # fmt: skip
PerRequestOpt = Annotated[
    Path | None,
    typer.Option(
        "--per-request", metavar="FILE", rich_help_panel="Output", show_default=False,
        help="Write what became of each request, a JSON line each, to FILE.jsonl.",
    ),
]  # fmt: skip
PerStepOpt = Annotated[
    Path | None,
    typer.Option(
        "--per-step", metavar="FILE", rich_help_panel="Output", show_default=False,
        help="Write what each step did, a JSON line each, to FILE.jsonl.",
    ),
]  # fmt: skip


def simulate(
    requests: RequestsOpt,
    num_blocks: s.NumBlocksOpt,
    trace_format: TraceFormatOpt = None,
    block_size: s.BlockSizeOpt = "16",
    max_model_len: s.MaxModelLenOpt = "8192",
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
    policy: s.PolicyOpt = "fcfs",
    async_scheduling: s.AsyncOpt = False,
    finish_by: s.FinishByOpt = "max-tokens",
    on_stall: s.OnStallOpt = "abort-head",
    step_time: s.StepTimeOpt = s.STEP_TIME,
    per_request: PerRequestOpt = None,
    per_step: PerStepOpt = None,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: TextOutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:
    """What does the scheduler make of requests over time?"""
    given: dict[str, Any] = {k: v for k, v in locals().items() if k not in _NOT_ASKED}
    out = output_from(format, json, output, quiet, verbose)
    try:
        _check_outputs(given, output)
        grid = _grid(given)
        from kvtool.trace import read_trace

        trace = read_trace(requests, format=trace_format, with_contents=prefix_caching)
        _run(given, grid, trace, out)
    except KvtoolError as error:
        error.params = _params(given)
        raise


def _params(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options as they were typed."""
    files = {name: given[name] and str(given[name]) for name in ("per_request", "per_step")}
    return {**given, **files}


def _check_outputs(given: Mapping[str, Any], output: Path | None) -> None:
    from kvtool.cli.simulate_files import check_files
    from kvtool.output import PICTURES

    if output is not None and output.suffix.lower() in PICTURES:
        raise usage_error(
            f"-o {output}: kvtool simulate has no chart to draw",
            "use a suffix for text: .json, .jsonl, .csv or .md",
        )
    files = {"-o": output, "--per-request": given["per_request"], "--per-step": given["per_step"]}
    check_files(files, given["requests"])


def _grid(given: Mapping[str, Any]) -> list[Settings]:
    """The settings of each row: blocks × the lists of the scheduler's options."""
    from kvtool.sim.settings import Settings
    from kvtool.units import parse_counts

    s.check_modelled(given)
    pools = parse_counts(given["num_blocks"], name="--num-blocks", high=s.MAX_BLOCKS)
    rest = s.scheduler_grid(given)
    s.check_rows([pools, rest])
    settings = [Settings(num_blocks=pool, **one) for pool in pools for one in rest]
    for one in settings:
        if one.num_slots > s.MAX_SLOTS:
            raise usage_error(
                f"{one.num_blocks:,} blocks of {one.block_size:,} tokens are more than 2^40 tokens",
                "give fewer --num-blocks, or a smaller --block-size",
            )
    if len(settings) > 1 and (given["per_request"] or given["per_step"]):
        raise usage_error(
            f"--per-request and --per-step are of one run, and the lists ask for {len(settings):,}",
            "give one value for each option, or leave the files out",
        )
    return settings


def _check_contents(given: Mapping[str, Any], trace: Trace) -> None:
    """Refuse to cache what is not known."""
    if given["prefix_caching"] and trace.contents is None:
        raise KvtoolError(
            f"--prefix-caching: {trace.name} does not say what its prompts consist of",
            "give each line segments and out_stream, take a trace with hash_ids (mooncake, bailian), "
            "or leave out --prefix-caching",
            code="trace",
        )


def _run(given: Mapping[str, Any], grid: list[Settings], trace: Trace, out: Output) -> None:
    """The rows, the files, and what is to be said of them."""
    from kvtool.run import Run
    from kvtool.view.simulate import view

    _check_contents(given, trace)
    for text in (*_notes_of_trace(trace, given["policy"]), *_notes_of_pools(grid)):
        out.note(text)
    rows, last, failed = _rows(given, grid, trace, out)
    if last.interrupted:
        failed = _interrupted(rows, len(grid), out)
    elif failed is None:
        failed = _write_files(given, last, out)
    run = Run(command="simulate", params=_params(given), rows=tuple(rows))
    out.emit(run, view(run), failed=failed)


def _notes_of_trace(trace: Trace, policy: str) -> list[str]:
    notes = [f"{trace.name}: {text}" for text in trace.notes]
    if not trace.has_arrivals:
        notes.append(f"{trace.name}: it has no arrivals, so all requests arrive at once")
    by_priority, there = policy == "priority", trace.requests.priority is not None
    if there and not by_priority:
        notes.append(f"{trace.name}: priorities are not looked at by --policy fcfs")
    if by_priority and not there:
        notes.append(f"{trace.name}: all requests have one priority")
    return notes


def _notes_of_pools(grid: list[Settings]) -> list[str]:
    """What the pools are where that is not plain, and what vLLM would say to them."""
    sizes = sorted({one.num_slots for one in grid})
    notes = [f"the pools hold {sizes[0]:,} to {sizes[-1]:,} tokens"] if len(sizes) > 1 else []
    small = [one for one in grid if one.num_slots < one.max_model_len]
    if small:
        notes.append(
            f"a pool of {small[0].num_slots:,} tokens does not hold one request of max_model_len "
            f"{small[0].max_model_len:,}: vLLM itself would not start with it"
        )
    return notes


def _rows(
    given: Mapping[str, Any], grid: list[Settings], trace: Trace, out: Output
) -> tuple[list[Row], Replay, KvtoolError | None]:
    """A row for each of the settings until an interrupt or an error; the last replay; that error."""
    from kvtool.sim.replay import compiles, replay
    from kvtool.simulate import notes_of, row_of

    requests = trace.requests
    if compiles(requests, grid[0]):
        out.aside("compiling the simulator, once on this machine: about 5 s")
    rows: list[Row] = []
    told: dict[str, list[int]] = {}
    failed: KvtoolError | None = None
    with out.progress("simulating", total=len(requests) * len(grid)) as advance:
        for settings in grid:
            try:
                found = replay(requests, settings, advance, contents=trace.contents)
            except KvtoolError as error:
                if not rows:
                    raise
                failed = error
                break
            row = {"trace": trace.name, **row_of(found, requests, settings)}
            rows.append(row)
            for text in notes_of(row, interrupted=found.interrupted):
                told.setdefault(text, []).append(len(rows))
            if found.interrupted:
                break
    for text, numbers in told.items():
        out.note(text + _of_rows(numbers, len(rows)))
    return rows, found, failed


def _of_rows(numbers: list[int], count: int) -> str:
    """Which rows a note is of, if not of all."""
    if len(numbers) == count:
        return ""
    more = f" and {len(numbers) - 3:,} more" if len(numbers) > 3 else ""
    return f" (row {', '.join(map(str, numbers[:3]))}{more})"


def _interrupted(rows: list[Row], asked: int, out: Output) -> KvtoolError:
    """What was done before the interrupt is told; the files would be taken for whole ones."""
    last = rows[-1]
    ended, of = last["requests"] - last["unfinished"], f"{last['requests']:,} requests"
    if asked > 1:
        of += f" of row {len(rows):,} of {asked:,}"
    out.note(f"interrupted after {ended:,} of {of}: its row is of what was done so far")
    return KvtoolError(
        "interrupted",
        "run again for the rest; --per-request and --per-step wrote nothing",
        code="interrupted",
        exit_code=INTERRUPTED,
    )


def _write_files(given: Mapping[str, Any], found: Replay, out: Output) -> KvtoolError | None:
    """What became of requests and steps, as files; the first failure does not lose the row."""
    from kvtool.cli.simulate_files import request_lines, step_lines
    from kvtool.output import write_file

    files = (("per_request", request_lines), ("per_step", step_lines))
    try:
        for name, lines in files:
            if given[name] is not None:
                write_file(given[name], lines(found))
                out.aside(f"written to {given[name]}")
    except KvtoolError as error:
        return error
    except KeyboardInterrupt:
        return KvtoolError(
            "interrupted while --per-request and --per-step were written",
            "the row is whole; a file that is there is whole too, run again for the other",
            code="interrupted",
            exit_code=INTERRUPTED,
        )
    return None

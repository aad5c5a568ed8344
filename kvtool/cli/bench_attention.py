"""kvtool bench attention: a paged decode kernel against its contiguous twin and its peers."""

from __future__ import annotations

from typing import Any

from kvtool.cli import bench_options as o
from kvtool.cli.options import (
    FormatOpt,
    JsonOpt,
    OutputOpt,
    QuietOpt,
    SeedOpt,
    VerboseOpt,
    defaults_of,
    output_from,
)

EPILOG = """Examples:

kvtool bench attention

kvtool bench attention --batch 1,8,32 --context 1k..16k*4 --block-size 16,64 -o bandwidth.png

kvtool bench attention --model llama-3-8b --pattern sequential,shuffled --dry-run

kvtool bench attention -b 2 -c 100 --dump-output answer.npz
"""
_NOT_ASKED = ("format", "json", "output", "quiet", "verbose")


def attention(
    batch: o.BatchOpt = "1,8",
    context: o.ContextOpt = "4k",
    query_heads: o.QueryHeadsOpt = None,
    kv_heads: o.KvHeadsOpt = None,
    head_dim: o.HeadDimOpt = None,
    model: o.ModelOpt = None,
    block_size: o.BlockSizeOpt = "16",
    kv_dtype: o.KvDtypeOpt = "auto",
    pattern: o.PatternOpt = "sequential",
    layout: o.LayoutOpt = "auto",
    num_splits: o.SplitsOpt = "0",
    num_stages: o.StagesOpt = "0",
    skew: o.SkewOpt = "1",
    threads: o.ThreadsOpt = "1",
    provider: o.ProviderOpt = None,
    device: o.DeviceOpt = "auto",
    budget: o.BudgetOpt = "60s",
    dry_run: o.DryRunOpt = False,
    inputs: o.InputsOpt = None,
    dump_output: o.DumpOpt = None,
    seed: SeedOpt = 0,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: OutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:
    """A paged decode kernel, its contiguous twin, and what else is installed."""
    given: dict[str, Any] = {k: v for k, v in locals().items() if k not in _NOT_ASKED}
    out = output_from(format, json, output, quiet, verbose)
    from kvtool.cli.bench_attention_run import run_attention

    run_attention(given, defaults_of(attention), out)

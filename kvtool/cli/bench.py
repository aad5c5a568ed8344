"""kvtool bench [all|attention|decode]: what does paging cost here?"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from kvtool.cli import bench_attention, bench_decode
from kvtool.cli import bench_options as o
from kvtool.cli.options import (
    FormatOpt,
    JsonOpt,
    OutputOpt,
    PlainCommand,
    QuietOpt,
    SeedOpt,
    VerboseOpt,
    output_from,
)

EPILOG = """Examples:

kvtool bench --block-size 16

kvtool bench attention --batch 1,8 --context 4k --block-size 1..256*2 -o bandwidth.png

kvtool bench attention --model llama-3-8b --pattern sequential,shuffled,fragmented

kvtool bench decode --model llama-3-8b --batch 1,16 --json
"""


class AllByDefault(TyperGroup):
    """Without the name of a command, options are those of `all`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `all` before options that have no command before them."""
        if not args or (args[0].startswith("-") and args[0] not in ("--help", "-h")):
            args = ["all", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="bench",
    cls=AllByDefault,
    add_completion=False,
    epilog=EPILOG,
    help="What does paging cost here, on this GPU or CPU?\n\nWithout a command: all.",
)


@app.command("all", cls=PlainCommand)
def everything(
    block_size: o.BlockSizeOpt = "16",
    kv_dtype: o.KvDtypeOpt = "auto",
    device: o.DeviceOpt = "auto",
    threads: o.ThreadsOpt = "1",
    budget: o.BudgetOpt = "30s",
    seed: SeedOpt = 0,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: OutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:
    """The attention kernel, then whole-model decode."""
    out = output_from(format, json, output, quiet, verbose)
    given: dict[str, Any] = {
        "block_size": block_size, "kv_dtype": kv_dtype, "device": device, "threads": threads,
        "budget": budget, "seed": seed,
    }  # fmt: skip
    from kvtool.cli.bench_run import run_all

    run_all(given, out)


app.command("attention", cls=PlainCommand, epilog=bench_attention.EPILOG)(bench_attention.attention)
app.command("decode", cls=PlainCommand, epilog=bench_decode.EPILOG)(bench_decode.decode)

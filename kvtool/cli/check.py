"""kvtool check MODEL…: is that what really gets allocated?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvtool.cli.options import (
    FormatOpt,
    JsonOpt,
    QuietOpt,
    TextOutputOpt,
    VerboseOpt,
    output_from,
)
from kvtool.errors import KvtoolError, did_you_mean, usage_error
from kvtool.output import PICTURES, check_not_read, format_of

if TYPE_CHECKING:
    from kvtool.check import Asked
    from kvtool.run import Row

EPILOG = """Examples:

kvtool check llama-3-70b

kvtool check ./config.json --context 4k --cache static

kvtool check gemma-3-27b deepseek-v3 --json
"""

_MODEL, _WORKLOAD = "Model", "Workload"
CACHES = ("dynamic", "static")
MAX_BATCH = 2**20


def check(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…",
            help="A Hub id, a folder, a config.json, - for standard input, or a preset.",
            show_default=False,
        ),
    ],
    context: Annotated[
        str | None,
        typer.Option(
            "--context", "-c", metavar="TOKENS", rich_help_panel=_WORKLOAD, show_default=False,
            help="Tokens of the prompt. Default: more than the largest window, else 32.",
        ),
    ] = None,
    batch: Annotated[
        str, typer.Option("--batch", "-b", metavar="N", rich_help_panel=_WORKLOAD, help="Sequences.")
    ] = "1",
    cache: Annotated[
        str,
        typer.Option(
            metavar="CACHE", rich_help_panel=_WORKLOAD,
            help="dynamic, or static: allocated for --context tokens.",
        ),
    ] = "dynamic",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", rich_help_panel=_MODEL, show_default=False,
            help="The model's dtype: fp32, fp16 or bf16. Default: the config's, else bf16.",
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="REV", rich_help_panel=_MODEL, show_default=False,
            help="Branch, tag or commit of a Hub repository.",
        ),
    ] = None,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: TextOutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:  # fmt: skip
    """Is that what really gets allocated?"""
    out = output_from(format, json, output, quiet, verbose)
    check_not_read(output, models)
    if output is not None and format_of(output) in PICTURES.values():
        raise usage_error(
            f"-o {output}: kvtool check has no chart to draw",
            "use a suffix for text: .json, .jsonl, .csv or .md",
        )
    asked = _asked(context, batch, cache, dtype)
    params: dict[str, object] = {
        "models": models, "context": context, "batch": batch, "cache": cache, "dtype": dtype,
        "revision": revision,
    }  # fmt: skip
    from kvtool.check import difference
    from kvtool.cli.each import each_model
    from kvtool.live import load_libraries
    from kvtool.run import Run
    from kvtool.view.check import view

    load_libraries()
    names: set[str] = set()
    try:
        rows, notes, failed = each_model(models, lambda m, lost: _one(m, asked, revision, names))
    except KvtoolError as error:
        error.params = params
        raise
    wrong = difference(tuple(rows))
    if wrong is not None and failed is not None:
        notes.append(f"also failed: {failed.message}")
    run = Run(command="check", params=params, rows=tuple(rows), notes=tuple(notes))
    out.emit(run, view(run), failed=wrong or failed)


def _asked(context: str | None, batch: str, cache: str, dtype: str | None) -> Asked:
    from kvtool.check import Asked
    from kvtool.dtypes import MODEL_DTYPES, dtype_named
    from kvtool.units import parse_count

    if cache not in CACHES:
        raise usage_error(
            f"--cache: '{cache[:40]}' is not known",
            f"the caches are {', '.join(CACHES)}.{did_you_mean(cache, CACHES)}",
        )
    return Asked(
        context=parse_count(context, name="--context") if context is not None else None,
        batch=parse_count(batch, name="--batch", high=MAX_BATCH),
        cache=cache,
        dtype=dtype_named(dtype, flag="--dtype", among=MODEL_DTYPES) if dtype is not None else None,
    )


def _one(
    model: str, asked: Asked, revision: str | None, names: set[str]
) -> tuple[list[Row], list[str]]:
    from kvtool import catalog
    from kvtool.check import check_rows
    from kvtool.config import load_config
    from kvtool.model import read_model
    from kvtool.size_row import Subject

    loaded = load_config(model, revision=revision)
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    name = loaded.name if loaded.name not in names else f"{loaded.name} ({len(names) + 1})"
    names.add(name)
    subject = Subject(name=name, source=loaded.source, shape=shape)
    rows, notes = check_rows(subject, loaded.config, asked)
    return rows, [*(f"{name}: {text}" for text in loaded.notes), *notes]

"""The options that mean the same in every command, and the output they ask for."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand

from kvtool.errors import did_you_mean, usage_error
from kvtool.output import FORMATS, Output, check_file

FORMAT_VARIABLE = "KVTOOL_FORMAT"
OUTPUT_PANEL = "Output"


def complete_format(incomplete: str) -> list[str]:
    """The formats that start like this, for shell completion."""
    return [name for name in FORMATS if name.startswith(incomplete)]


FormatOpt = Annotated[
    str | None,
    typer.Option(
        "--format",
        "-f",
        metavar="FORMAT",
        help=f"table (default), json, csv or md; {FORMAT_VARIABLE} sets it too.",
        show_default=False,
        autocompletion=complete_format,
        rich_help_panel=OUTPUT_PANEL,
    ),
]
JsonOpt = Annotated[
    bool,
    typer.Option("--json", help="Short for --format json.", rich_help_panel=OUTPUT_PANEL),
]


def _output(suffixes: str) -> Any:
    return typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help=f"Write to FILE, its format by suffix: {suffixes}",
        rich_help_panel=OUTPUT_PANEL,
    )


TextOutputOpt = Annotated[Path | None, _output(".json .jsonl .csv .md")]
OutputOpt = Annotated[Path | None, _output(".json .jsonl .csv .md .png .svg")]
QuietOpt = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No notes and no progress.", rich_help_panel=OUTPUT_PANEL),
]
VerboseOpt = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="More notes.", rich_help_panel=OUTPUT_PANEL),
]
SeedOpt = Annotated[
    int,
    typer.Option("--seed", metavar="N", min=0, help="The same seed gives the same rows."),
]


def output_from(
    format: str | None,
    json: bool,
    output: Path | None,
    quiet: bool,
    verbose: bool,
    *,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Output:
    """The output that a command's options ask for: flag before environment before default."""
    if json and format not in (None, "json"):
        raise usage_error(f"--json and --format {format} contradict each other", "give one of them")
    if quiet and verbose:
        raise usage_error("-q and -v contradict each other", "give one of them")
    if output is not None:
        check_file(output)
    asked = "json" if json else format
    chosen, source = (asked, "--format") if asked else (environ.get(FORMAT_VARIABLE), "")
    result = Output(
        format=_known_format(chosen, source or FORMAT_VARIABLE),
        path=output,
        print_result=output is None or asked is not None,
        quiet=quiet,
        verbose=verbose,
    )
    result.stdout = stdout or result.stdout
    result.stderr = stderr or result.stderr
    return result


def _known_format(name: str | None, source: str) -> str:
    name = name or FORMATS[0]
    if name not in FORMATS:
        raise usage_error(
            f"{source}: unknown format '{name}'",
            f"the formats are {', '.join(FORMATS)}.{did_you_mean(name, FORMATS)}",
        )
    return name


def names_in(typed: str | None, option: str, known: Sequence[str]) -> list[str]:
    """A list of known names; None or `all` is every one."""
    if typed is None or typed == "all":
        return list(known)
    names = list(dict.fromkeys(word.strip().lower() for word in typed.split(",")))
    for name in names:
        if name not in known:
            raise usage_error(
                f"{option}: '{name}' is not known",
                f"give some of {', '.join(known)}.{did_you_mean(name, known)}",
            )
    return names


def defaults_of(command: Callable[..., None]) -> dict[str, Any]:
    """Every option of a command as it stands when nothing is typed."""
    return {name: one.default for name, one in inspect.signature(command).parameters.items()}


def wants_json(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether errors must be told as JSON too, read from argv because parsing may have failed."""
    asked: str | None = None
    words = iter(argv)
    for word in words:
        if word == "--":
            break
        if word == "--json":
            return True
        if word.startswith("--format="):
            asked = word.partition("=")[2]
        elif word == "--format":
            asked = next(words, "")
        elif word.startswith("-") and not word.startswith("--"):
            flags, has_format, value = word[1:].partition("f")
            if has_format and set(flags) <= set("qv"):  # -f json, -fjson, -qf json
                asked = value or next(words, "")
    return (asked if asked is not None else environ.get(FORMAT_VARIABLE)) == "json"


class PlainCommand(TyperCommand):
    """A command whose help does not call a flag's type `<bool>`: a flag takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters as typer has them, flags without a type to show."""
        return without_flag_types(super().get_params(ctx))


def without_flag_types(params: list[Any]) -> list[Any]:
    """Parameters whose flags are not called `<bool>` in the help: a flag takes no value."""
    for param in params:
        if getattr(param, "is_bool_flag", False):
            param.metavar = ""
    return params

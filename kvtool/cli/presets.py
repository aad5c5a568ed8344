"""`kvtool presets`: the models, GPUs, workloads, shared prefixes and claims that kvtool knows by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvtool import catalog
from kvtool.cli.options import (
    FormatOpt,
    JsonOpt,
    QuietOpt,
    TextOutputOpt,
    VerboseOpt,
    output_from,
)
from kvtool.errors import KvtoolError, did_you_mean, usage_error
from kvtool.model import ModelShape, read_model
from kvtool.run import Row, Run
from kvtool.view.presets import view

EPILOG = (
    "Examples:  kvtool presets gpus  ·  kvtool presets --show h100  ·  kvtool presets models --json"
)


def _complete_kind(incomplete: str) -> list[str]:
    return [kind for kind in catalog.KINDS if kind.startswith(incomplete)]


def _complete_name(incomplete: str) -> list[str]:
    names = [name for kind in catalog.KINDS for name in catalog.preset_ids(kind)]
    return [name for name in names if name.startswith(incomplete.lower())]


def presets(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help="models, gpus, workloads, prefixes or claims; without it, how many there are of each.",
            show_default=False,
            autocompletion=_complete_kind,
        ),
    ] = None,
    show: Annotated[
        str | None,
        typer.Option(
            "--show",
            metavar="NAME",
            help="Print one preset as its file has it; with --json, its row.",
            show_default=False,
            autocompletion=_complete_name,
        ),
    ] = None,
    format: FormatOpt = None,
    json: JsonOpt = False,
    output: TextOutputOpt = None,
    quiet: QuietOpt = False,
    verbose: VerboseOpt = False,
) -> None:
    """What is known: models, GPUs, workloads, shared prefixes and claims, each with its source."""
    out = output_from(format, json, output, quiet, verbose)
    if kind is not None:
        _check(kind)
    if show is None:
        rows = _rows(kind)
    else:
        kind, text = catalog.preset_text(show, catalog.KINDS if kind is None else (kind,))
        rows = (_one_row(kind, show),)
        if out.format == "table" and out.print_result:
            out.data(text)  # the file's own words are the answer: no table, no wrapping
            out.print_result = False
    run = Run(command="presets", params={"kind": kind, "show": show}, rows=rows)
    out.emit(run, view(run))


def _check(kind: str) -> None:
    if kind not in catalog.KINDS:
        raise usage_error(
            f"there are no presets of the kind '{kind}'",
            f"the kinds are {', '.join(catalog.KINDS)}.{did_you_mean(kind, catalog.KINDS)}",
        )


def _rows(kind: str | None) -> tuple[Row, ...]:
    if kind is None:
        return tuple(
            {"kind": one, "presets": len(catalog.preset_ids(one))} for one in catalog.KINDS
        )
    if kind == "gpus":
        return tuple(asdict(preset) for preset in catalog.gpu_presets())
    if kind == "workloads":
        return tuple(asdict(preset) for preset in catalog.workload_presets())
    if kind == "prefixes":
        return tuple(asdict(preset) for preset in catalog.prefix_presets())
    if kind == "claims":
        return tuple(asdict(preset) for preset in catalog.claim_presets())
    return tuple(_model_row(preset) for preset in catalog.model_presets())


def _one_row(kind: str, name: str) -> Row:
    if kind == "gpus":
        return asdict(catalog.gpu_preset(name))
    if kind == "workloads":
        return asdict(catalog.workload_preset(name))
    if kind == "prefixes":
        return asdict(catalog.prefix_preset(name))
    if kind == "claims":
        return asdict(catalog.claim_preset(name))
    preset = catalog.model_preset(name)
    assert preset is not None  # its text was found by the same lookup
    return {**_model_row(preset), "config": preset.config}


def _model_row(preset: catalog.ModelPreset) -> Row:
    shape = _shape(preset.config)
    return {
        "name": preset.name,
        "hub_id": preset.hub_id,
        "aliases": preset.aliases,
        "model_type": preset.config.get("model_type"),
        "num_layers": shape and shape.num_layers,
        "max_context": shape and shape.max_context,
        "source": preset.source,
        "note": preset.note,
    }


def _shape(config: dict[str, Any]) -> ModelShape | None:
    """What `kvtool size` reads from it; a list does not end at the one it cannot read."""
    try:
        return read_model(config, catalog.class_defaults()["types"])
    except KvtoolError:
        return None

"""`kvtool presets` for people: the kinds, or the rows of one kind."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvtool.run import Row, Run
from kvtool.units import GIB
from kvtool.view import Table, View

MAX_SOURCE = 60


SENTENCES = {
    "models": ("– : neither the config nor its class says.",),
    "gpus": (
        "– : no source was found. Memory is the driver's total; rates are without sparsity.",
        "A price is one on-demand example of its day, not a quote.",
    ),
    "workloads": (
        "– : the preset does not say; without a rate, all requests are there at the start.",
        "Lengths are in tokens, each mean is that after the cut at the cap.",
    ),
    "prefixes": (
        "A session: a shared prefix, tokens of its own, then turns × branches of requests.",
        "Lengths are means in tokens; kept: the nodes of a level that are gone on with.",
    ),
    "claims": (
        "kvtool presets --show NAME prints the published figures and the commands that try them.",
        "scripts/claims.py runs them; docs/claims.md has what came of it.",
    ),
    None: ("kvtool presets KIND lists them, kvtool presets --show NAME prints one.",),
}


def view(run: Run) -> View:
    """One table; its columns follow from the kind that was asked for."""
    kind = run.params["kind"]
    tables = {
        "models": _models, "gpus": _gpus, "workloads": _workloads, "prefixes": _prefixes,
        "claims": _claims,
    }  # fmt: skip
    table = tables.get(kind, _kinds)(run.rows)
    return View(tables=(table,), sentences=SENTENCES[kind])


def _kinds(rows: tuple[Row, ...]) -> Table:
    return Table(
        columns=("kind", "presets"),
        rows=tuple((row["kind"], f"{row['presets']:,}") for row in rows),
        right=frozenset({"presets"}),
    )


def _models(rows: tuple[Row, ...]) -> Table:
    return Table(
        columns=("name", "Hub id", "model type", "layers", "max context", "source"),
        rows=tuple(
            (
                row["name"],
                row["hub_id"],
                _text(row["model_type"]),
                _number(row["num_layers"]),
                _number(row["max_context"]),
                _shortened(row["source"]),
            )
            for row in rows
        ),
        right=frozenset({"layers", "max context"}),
    )


def _gpus(rows: tuple[Row, ...]) -> Table:
    return Table(
        columns=(
            "name", "aliases", "nominal", "usable GiB", "GB/s",
            "bf16 TFLOPS", "fp8 TFLOPS", "native KV", "$/h", "on",
        ),
        rows=tuple(
            (
                row["id"],
                ", ".join(row["aliases"]),
                f"{_number(row['nominal_gb'])} GB",
                "–" if row["usable_bytes"] is None else f"{row['usable_bytes'] / GIB:,.2f}",
                _number(row["bandwidth_gb_s"]),
                _number(row["dense_bf16_tflops"]),
                _number(row["dense_fp8_tflops"]),
                _formats(row["native_kv_dtypes"]),
                _price(row["price_usd_per_hour"]),
                _text(row["price_date"]),
            )
            for row in rows
        ),
        right=frozenset({"nominal", "usable GiB", "GB/s", "bf16 TFLOPS", "fp8 TFLOPS", "$/h"}),
    )  # fmt: skip


def _workloads(rows: tuple[Row, ...]) -> Table:
    return Table(
        columns=(
            "name", "prompts", "mean prompt", "prompt cap", "outputs", "mean output", "output cap",
            "requests/s", "pool tokens", "source",
        ),
        rows=tuple(
            (
                row["id"],
                row["prompt_dist"],
                _number(row["prompt_mean"]),
                _number(row["prompt_cap"]),
                row["output_dist"],
                _number(row["output_mean"]),
                _number(row["output_cap"]),
                _number(row["rate"]),
                _number(row["pool_tokens"]),
                _shortened(row["source"]),
            )
            for row in rows
        ),
        right=frozenset(
            {"mean prompt", "prompt cap", "mean output", "output cap", "requests/s", "pool tokens"}
        ),
    )  # fmt: skip


def _prefixes(rows: tuple[Row, ...]) -> Table:
    counted = (
        ("prefixes", "num_prefixes"), ("prefix tokens", "prefix_mean"), ("Zipf", "zipf"),
        ("shared", "share"), ("session tokens", "session_mean"), ("turns", "turns"),
        ("branches", "branch"), ("kept", "keep"), ("turn tokens", "turn_mean"),
        ("output tokens", "output_mean"), ("live sessions", "concurrency"),
    )  # fmt: skip
    return Table(
        columns=("name", *(title for title, _ in counted), "source"),
        rows=tuple(
            (row["id"], *(_number(row[key]) for _, key in counted), _shortened(row["source"]))
            for row in rows
        ),
        right=frozenset(title for title, _ in counted),
    )


def _claims(rows: tuple[Row, ...]) -> Table:
    return Table(
        columns=("name", "claim", "commands", "figures", "source"),
        rows=tuple(
            (
                row["id"], row["name"], _number(len(row["runs"])), _number(len(row["figures"])),
                _shortened(row["source"]),
            )
            for row in rows
        ),
        right=frozenset({"commands", "figures"}),
    )  # fmt: skip


def _text(value: str | None) -> str:
    return value or "–"


def _number(value: float | None) -> str:
    """989, 362.05 or 131,072: the digits of the source, neither more nor fewer."""
    return "–" if value is None else f"{value:,.10g}"


def _formats(names: Iterable[str]) -> str:
    """Both encodings of fp8 as one word: the table is wide, and a row has them in full."""
    return " ".join(dict.fromkeys(re.sub(r"_e\dm\d", "", name) for name in names))


def _price(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _shortened(source: str) -> str:
    """The first reference, cut at a word; --show and --json have the whole of it."""
    first = re.split(r";\s", source, maxsplit=1)[0]
    if len(first) <= MAX_SOURCE:
        return first
    return first[:MAX_SOURCE].rsplit(" ", 1)[0] + " …"

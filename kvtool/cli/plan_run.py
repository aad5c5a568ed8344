"""The run of `kvtool plan`: each model's rows, what would make it fit, and the files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvtool import catalog
from kvtool.cli.each import each_model
from kvtool.cli.plan_extras import Requests, contexts_of, extras, lengths_too
from kvtool.cli.plan_notes import of_formats, of_hidden, of_prices, of_ranked, of_speeds, of_vllm
from kvtool.cli.plan_words import is_grid, weights_in
from kvtool.config import load_config
from kvtool.errors import KvtoolError, usage_error
from kvtool.fitting import context_of, has_experts
from kvtool.levers import alternatives, cache_or_weights, cheapest, instead, levers
from kvtool.model import read_model
from kvtool.output import Output
from kvtool.plan import PlanCase
from kvtool.plan_flags import row_of, with_command
from kvtool.plan_model import PlanModel, model_for
from kvtool.plan_query import PlanQuery
from kvtool.planning import cases_of
from kvtool.run import Row, Run
from kvtool.solving import queries_of, solve
from kvtool.view.plan import view
from kvtool.view.plan_words import refusal

DOES_NOT_FIT = "does_not_fit"
Wanted = tuple[PlanModel, PlanQuery, PlanCase]
"""A case, and what it is of."""
FOUND = 10
"""Of what would do where --solve finds nothing."""
FEW = 4
"""Rows of which each is told what would make it fit, or what levers gain."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one run asks of every model."""

    given: dict[str, Any]
    query: PlanQuery
    requests: Requests


def run_plan(given: dict[str, Any], query: PlanQuery, out: Output) -> None:
    """Rows of every model; exit code 1 if none of them fits."""
    query, basis = _measured(given["calibrate"], query)
    asked = Asked(given, query, Requests(given))
    found = _grid(asked, out) if is_grid(given, out.path) else each_model(
        given["models"], lambda typed, lost: _one(asked, typed, lost)
    )  # fmt: skip
    rows, notes, failed = found
    run = Run(
        command="plan",
        params=given,
        rows=tuple(rows),
        notes=(
            *notes,
            *basis,
            *of_vllm(rows, query, given),
            *of_ranked(rows, query),
            *of_speeds(rows),
            *of_hidden(given, rows),
            *of_prices(query),
        ),
    )
    if rows and not any(row["fits"] for row in rows):
        failed = failed or KvtoolError(*refusal(rows), code=DOES_NOT_FIT)
    out.emit(run, view(run), failed=failed)


def _measured(path: str | None, query: PlanQuery) -> tuple[PlanQuery, list[str]]:
    """Shares that a run reached in place of the assumed ones, and what is to be said of them."""
    if path is None:
        return query, []
    from kvtool.measured_shares import measured_shares

    found = measured_shares(path)
    measured = replace(
        query,
        read_efficiency=found.read,
        compute_efficiency=found.compute or query.compute_efficiency,
        efficiency_basis="measured",
        overhead_s=found.overhead_s,
    )
    return measured, [found.basis]


def _one(asked: Asked, typed: str, lost: list[KvtoolError]) -> tuple[list[Row], list[str]]:
    """A model's rows, one after the other."""
    model, query, notes = _loaded(asked, typed)
    rows = list(_rows(asked, model, query, lost, notes))
    if not rows and lost:
        raise lost[0]
    return rows, _named(model, notes) + of_formats(rows, model, query)


def _grid(asked: Asked, out: Output) -> tuple[list[Row], list[str], KvtoolError | None]:
    """All models' rows, spread over processes or a cluster, and kept in the file as they come."""
    from kvtool.sweep import swept

    def cases(typed: str, lost: list[KvtoolError]) -> tuple[list[Wanted], list[str]]:
        model, query, notes = _loaded(asked, typed)
        return [(model, query, case) for case in cases_of(model, query, lost)], _named(model, notes)

    found, notes, failed = each_model(asked.given["models"], cases)
    path = out.path if out.path is not None and out.path.suffix.lower() == ".jsonl" else None
    with out.progress("planning", total=len(found)) as advance:
        done = swept(
            [case for _, _, case in found], row_of, jobs=asked.given["jobs"], backend=asked.given["backend"],
            path=path, whole=_is_plan, progress=advance,
        )  # fmt: skip
    if path is not None:  # it is written: by lines as they came, each with its key
        out.path = None
        notes.append(f"written to {path}: {len(done.rows):,} rows")
    if done.lost and not done.rows:
        raise done.lost[0]
    rows = list(done.rows)
    _tell_nearest(rows, found)
    notes += [f"also failed: {error.message}" for error in done.lost[0 if failed else 1 :][:FEW]]
    return rows, notes + list(done.notes), failed or next(iter(done.lost), None)


def _is_plan(row: Row) -> bool:
    """Whether a row of a file has what is shown of a plan."""
    numbers = ("missing_bytes", "gpus", "tp", "pp", "dp", "dcp", "context_tokens")
    return isinstance(row.get("fits"), bool) and all(type(row.get(name)) is int for name in numbers)


def _tell_nearest(rows: list[Row], wanted: list[Wanted]) -> None:
    """Where nothing fits, what would make the nearest miss fit, unless it is there."""
    if not rows or any(row["fits"] for row in rows) or len(rows) != len(wanted):
        return
    at = min(range(len(rows)), key=lambda one: int(rows[one]["missing_bytes"]))
    if "alternatives" not in rows[at]:
        rows[at] = rows[at] | {"alternatives": _alternatives(*wanted[at])}


def _alternatives(model: PlanModel, query: PlanQuery, case: PlanCase) -> list[Row]:
    """None where they cannot be looked for: advice costs no row."""
    try:
        return [one.as_row() for one in alternatives(model, query, case)]
    except KvtoolError:
        return []


def _loaded(asked: Asked, typed: str) -> tuple[PlanModel, PlanQuery, list[str]]:
    """The model, what is asked of it, and what is to be said of both."""
    given, query = asked.given, asked.query
    loaded = load_config(typed, revision=given["revision"])
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    model = model_for(loaded, shape, query, given["revision"])
    if query.expert_parallel and model.stored is not None and not has_experts(model):
        raise usage_error(f"{model.subject.name} has no experts to spread", "leave out --ep")
    model, query = weights_in(given["weights_dtype"], model, query)
    return model, contexts_of(query, asked.requests, model), list(model.notes)


def _named(model: PlanModel, notes: list[str]) -> list[str]:
    name = model.subject.name
    said = [text if text.startswith(name) else f"{name}: {text}" for text in notes]
    return list(dict.fromkeys(said))


def _rows(
    asked: Asked, model: PlanModel, query: PlanQuery, lost: list[KvtoolError], notes: list[str]
) -> Iterator[Row]:
    """Of what is missing, of all GPUs ranked, or of each combination."""
    given = asked.given
    if given["solve"] is not None:
        yield from _solved(asked, model, query, lost, notes)
        return
    if query.ranked:
        yield from _ranked(asked, model, query, lost, notes)
        return
    cases = list(cases_of(model, query, lost))
    rows, wanted = [], []
    for case in cases:
        try:
            row = row_of(case)
        except KvtoolError as error:  # vLLM may refuse a mix of layers
            lost.append(error)
            continue
        if len(cases) <= FEW:
            row |= _advice(given, model, query, case, fits=row["fits"])
        rows.append(row | extras(given, model, query, case, asked.requests, notes))
        wanted.append((model, query, case))
    _tell_nearest(rows, wanted)
    if given["levers"] and not all("levers" in row for row in rows):
        notes.append(f"--levers: of plans that fit, up to {FEW} at a time")
    yield from rows


def _advice(
    given: dict[str, Any], model: PlanModel, query: PlanQuery, case: PlanCase, *, fits: bool
) -> Row:
    """What would make it fit; if it does and is asked, what each change would gain."""
    if not fits:
        return {"alternatives": _alternatives(model, query, case)}
    if not given["levers"]:
        return {}
    return {
        "levers": list(levers(model, query, case)),
        "quantise_first": cache_or_weights(model, query, case),
    }


def _solved(
    asked: Asked, model: PlanModel, query: PlanQuery, lost: list[KvtoolError], notes: list[str]
) -> Iterator[Row]:
    what = asked.given["solve"]
    for one in queries_of(what, query):
        try:
            found = solve(what, model, one)
        except KvtoolError as error:
            lost.append(error)
            continue
        solved = {"what": what, "value": found.value, "flags": found.flags}
        row = with_command(found.plan) | {"solved": solved}
        row |= lengths_too(found.plan.case, asked.requests, notes)
        if found.error is not None:
            others = instead(model, one, found, most=FOUND)
            row["alternatives"] = [other.as_row() for other in others]
            hint = refusal([row])[1] if others else found.error.hint
            lost.append(KvtoolError(found.error.message, hint, code=found.error.code))
        yield row


def _ranked(
    asked: Asked, model: PlanModel, query: PlanQuery, lost: list[KvtoolError], notes: list[str]
) -> Iterator[Row]:
    """Of each preset the number of GPUs with the cheapest output token, cheapest first."""
    for context in query.contexts or (context_of(model, query),):
        for users in query.users:
            found = cheapest(model, query, context, users, by="tokens")
            rows = [
                with_command(one.plan) | lengths_too(one.plan.case, asked.requests, notes)
                for one in found
            ]
            # Those whose rate nobody published would seem to compute for nothing.
            yield from sorted(rows, key=lambda row: row["ridge"] is None)
            if not found:
                many = "a request" if users is None else f"{users:,} requests"
                lost.append(
                    KvtoolError(
                        f"none of the GPU presets, up to 16 of a kind, fits {many} of {context:,} tokens",
                        "name GPUs and how many, such as --gpu h200:64, or ask for fewer or shorter requests",
                        code=DOES_NOT_FIT,
                    )
                )

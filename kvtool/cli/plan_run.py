"""The run of `kvtool plan`: each model's rows, what would make it fit, and the files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvtool import catalog
from kvtool.calibrate import calibrated, differs
from kvtool.cli.each import each_model
from kvtool.cli.plan_extras import Requests, contexts_of, extras
from kvtool.cli.plan_words import solved
from kvtool.config import load_config
from kvtool.errors import KvtoolError
from kvtool.fitting import context_of
from kvtool.levers import alternatives, cache_or_weights, cheapest, levers
from kvtool.model import read_model
from kvtool.output import Output
from kvtool.plan import PlanCase, plan_row, planned
from kvtool.plan_flags import flags_of
from kvtool.planning import PlanModel, PlanQuery, cases_of, model_for
from kvtool.run import Row, Run
from kvtool.solving import queries_of, solve
from kvtool.view.plan import view
from kvtool.view.plan_words import refusal

DOES_NOT_FIT = "does_not_fit"
FEW = 4
"""Rows of which each is told what would make it fit, or what levers gain."""


def run_plan(given: dict[str, Any], query: PlanQuery, out: Output) -> None:
    """Rows of every model; exit code 1 if none of them fits."""
    requests = Requests(given)
    fit = None if given["calibrate"] is None else calibrated(given["calibrate"])
    query = query if fit is None else replace(query, law=fit.law.step_time)

    def one(typed: str, lost: list[KvtoolError]) -> tuple[list[Row], list[str]]:
        model = _load(typed, given, query)
        asked, notes = contexts_of(query, requests, model), list(model.notes)
        if fit is not None:
            other = differs(fit, load_config, model=typed, gpus=None, dtype=given["dtype"])
            notes += [fit.law.basis, *([] if other is None else [other])]
        rows = list(_rows(given, model, asked, requests, lost, notes))
        if not rows and lost:
            raise lost[0]
        name = model.subject.name
        said = [text if text.startswith(name) else f"{name}: {text}" for text in notes]
        return rows, list(dict.fromkeys(said))

    rows, notes, failed = each_model(given["models"], one)
    run = Run(command="plan", params=given, rows=tuple(rows), notes=tuple(notes + _prices(query)))
    if rows and not any(row["fits"] for row in rows):
        failed = KvtoolError(*refusal(rows), code=DOES_NOT_FIT)
    out.emit(run, view(run), failed=failed)


def _load(typed: str, given: dict[str, Any], query: PlanQuery) -> PlanModel:
    loaded = load_config(typed, revision=given["revision"])
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    return model_for(loaded, shape, query, given["revision"])


def _rows(
    given: dict[str, Any], model: PlanModel, query: PlanQuery, requests: Requests,
    lost: list[KvtoolError], notes: list[str],
) -> Iterator[Row]:  # fmt: skip
    """Of what is missing, of all GPUs ranked, or of each combination."""
    what = solved(given["solve"])
    if what is not None:
        yield from _solved(what, model, query, lost)
        return
    if query.ranked:
        yield from _ranked(model, query)
        return
    cases = list(cases_of(model, query, lost))
    for case in cases:
        row = _row(case, model)
        if len(cases) <= FEW:
            row |= _advice(given, model, query, case, fits=row["fits"])
        yield row | extras(given, model, query, case, requests, notes)


def _row(case: PlanCase, model: PlanModel) -> Row:
    return {**plan_row(planned(case)), "command": flags_of(case, hub_id(model))}


def hub_id(model: PlanModel) -> str:
    """What an engine is to load."""
    preset = catalog.model_preset(model.subject.name)
    return preset.hub_id if preset else model.subject.name


def _advice(
    given: dict[str, Any], model: PlanModel, query: PlanQuery, case: PlanCase, *, fits: bool
) -> Row:
    """What would make it fit; if it does and is asked, what each change would gain."""
    if not fits:
        return {"alternatives": [one.as_row() for one in alternatives(model, query, case)]}
    if not given["levers"]:
        return {}
    return {
        "levers": list(levers(model, query, case)),
        "quantise_first": cache_or_weights(model, query, case),
    }


def _solved(
    what: str, model: PlanModel, query: PlanQuery, lost: list[KvtoolError]
) -> Iterator[Row]:
    for one in queries_of(what, query):
        try:
            found = solve(what, model, one)
        except KvtoolError as error:
            lost.append(error)
            continue
        if found.error is not None:
            lost.append(found.error)
        row = {**plan_row(found.plan), "command": flags_of(found.plan.case, hub_id(model))}
        yield row | {"solved": {"what": what, "value": found.value, "flags": found.flags}}


def _ranked(model: PlanModel, query: PlanQuery) -> Iterator[Row]:
    """Of each preset the number of GPUs with the cheapest output token, cheapest first."""
    for context in query.contexts or (context_of(model, query),):
        for users in query.users:
            for found in cheapest(model, query, context, users, by="tokens"):
                yield {**found.row, "command": flags_of(found.plan.case, hub_id(model))}


def _prices(query: PlanQuery) -> list[str]:
    """Where the prices come from: examples of a day, not quotes."""
    if query.price is not None:
        return []
    if query.ranked:
        return ["prices are the presets' examples of one day, not quotes (kvtool presets gpus)"]
    return [
        f"{one.preset.id}: {one.preset.price_usd_per_hour:g} USD an hour is an example of "
        f"{one.preset.price_date}, {one.preset.price_source} (--price sets it)"
        for one in query.gpus
        if one.preset.price_usd_per_hour is not None
    ]

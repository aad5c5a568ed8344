"""The run of `kvtool plan`: each model's rows, what would make it fit, and the files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvtool import catalog
from kvtool.calibrate import calibrated, differs
from kvtool.cli.each import each_model
from kvtool.cli.plan_extras import Requests, contexts_of, extras
from kvtool.config import load_config
from kvtool.errors import KvtoolError
from kvtool.model import read_model
from kvtool.output import Output
from kvtool.plan import plan_row, planned
from kvtool.plan_flags import flags_of
from kvtool.planning import PlanModel, PlanQuery, cases_of, model_for
from kvtool.run import Row, Run
from kvtool.view.plan import view
from kvtool.view.plan_words import refusal

GATED = "does_not_fit"


def run_plan(given: dict[str, Any], query: PlanQuery, out: Output) -> None:
    """Rows of every model; exit code 1 if none of them fits."""

    requests = Requests(given)
    fit = None if given["calibrate"] is None else calibrated(given["calibrate"])
    query = query if fit is None else replace(query, law=fit.law.step_time)

    def one(typed: str, lost: list[KvtoolError]) -> tuple[list[Row], list[str]]:
        model = _load(typed, given, query)
        asked, more = contexts_of(query, requests, model), list[str]()
        rows = [
            _row(case, model) | extras(given, model, asked, case, requests, more)
            for case in cases_of(model, asked, lost)
        ]
        model = replace(model, notes=(*model.notes, *more))
        name = model.subject.name
        if fit is not None:
            other = differs(fit, load_config, model=typed, gpus=None, dtype=given["dtype"])
            lost_words = [] if other is None else [other]
            model = replace(model, notes=(*model.notes, fit.law.basis, *lost_words))
        said = [text if text.startswith(name) else f"{name}: {text}" for text in model.notes]
        if not rows and lost:
            raise lost[0]
        return rows, said

    rows, notes, failed = each_model(given["models"], one)
    notes += _prices(query)
    run = Run(command="plan", params=given, rows=tuple(rows), notes=tuple(notes))
    if failed is None and rows and not any(row["fits"] for row in rows):
        failed = KvtoolError(*refusal(rows), code=GATED)
    out.emit(run, view(run), failed=failed)


def _prices(query: PlanQuery) -> list[str]:
    """Where the prices come from: examples of a day, not quotes."""
    if query.price is not None or query.ranked:
        return []
    return [
        f"{one.preset.id}: {one.preset.price_usd_per_hour:g} USD an hour is an example of "
        f"{one.preset.price_date}, {one.preset.price_source} (--price sets it)"
        for one in query.gpus
        if one.preset.price_usd_per_hour is not None
    ]


def _load(typed: str, given: dict[str, Any], query: PlanQuery) -> PlanModel:
    loaded = load_config(typed, revision=given["revision"])
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    return model_for(loaded, shape, query, given["revision"])


def _row(case: Any, model: PlanModel) -> Row:
    preset = catalog.model_preset(model.subject.name)
    named = preset.hub_id if preset else model.subject.name
    return {**plan_row(planned(case)), "command": flags_of(case, named)}

"""How long a step takes, as words: by a roofline of the GPUs that are named, by `--step-time`, or by both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvtool.cli import fragment_words
from kvtool.cli.scheduler_options import step_time_terms
from kvtool.errors import KvtoolError
from kvtool.prefill import prefill_of
from kvtool.sim.settings import StepTime
from kvtool.step_law import StepLaw, law_of

LINEAR = ("base_ns", "token_ns", "context_ns")
"""Terms that are a whole law together; fewer take the place of a roofline's."""
UNCOUNTED = ("prefill_not_counted", "weights_not_counted")


def stated_law(
    given: Mapping[str, Any], of_model: Mapping[str, Any] | None, notes: list[str], *, ranks: int
) -> StepLaw | None:
    """Of `ranks` GPUs that are one replica; `of_model` are words of prefill_of besides the model, None without
    a GPU. None: nothing says it."""
    typed = {} if given["step_time"] is None else step_time_terms(given["step_time"])
    if of_model is None or typed.keys() >= set(LINEAR):
        return _typed(typed)
    try:
        found = _roofline(given, of_model)
    except KvtoolError as error:
        if error.code not in UNCOUNTED:
            raise
        if typed:
            return _typed(typed)
        hint = "give the step's time with --step-time"
        hint += " or --calibrate" if given["disaggregate"] is None else ""
        raise KvtoolError(error.message, hint, code=error.code) from error
    law = replace(found, step_time=replace(found.step_time, **typed))
    said = []
    if ranks > 1:
        said.append(f"no time is counted for what the {ranks} ranks exchange (all-reduces)")
    if given["async_scheduling"]:
        said.append(
            f"--async-scheduling: the host's time, {law.step_time.base_ns:,} ns a step, counts in full, "
            "though it would overlap"
        )
    notes += [one for one in said if one not in notes]
    if not typed:
        return law
    return replace(law, basis=f"{law.basis}; {', '.join(typed)} as --step-time says", source="")


def _roofline(given: Mapping[str, Any], of_model: Mapping[str, Any]) -> StepLaw:
    prefill = prefill_of(
        fragment_words.load, given["model"], efficiency=given["efficiency"], **of_model
    )
    return law_of(prefill)


def _typed(typed: Mapping[str, Any]) -> StepLaw | None:
    """As typed; of the linear law's terms those that were not have values that nobody measured."""
    if not typed:
        return None
    usual = [name for name in LINEAR if name not in typed]
    basis = "as --step-time says" + (f"; {', '.join(usual)} by default" if usual else "")
    return StepLaw(step_time=StepTime(**typed), basis=basis, source="")

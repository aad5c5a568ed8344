"""The rows of `kvtool bench decode`: equal prompts, greedy, every kind of cache in turn.

The rows of one shape come together, after rounds over its caches; what is finished is kept when
something later fails. In fp32 the greedy tokens of each run are compared with DynamicCache's; in any
other dtype that is done before anything is timed, in an fp32 model of the same config's first layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from kvtool.bench.attention.case import KV_DTYPES
from kvtool.bench.decode.blueprint import Blueprint, blueprint, refuse_long
from kvtool.bench.decode.continuous import (
    continuous_tokens,
    timed_continuous,
    warm_up_continuous,
)
from kvtool.bench.decode.failures import named_failure
from kvtool.bench.decode.growth import contexts_of, growth
from kvtool.bench.decode.hushed import hushed
from kvtool.bench.decode.kernels import Kernels, kernels_for
from kvtool.bench.decode.memory import (
    case_bytes,
    case_words,
    check_memory,
    forget_peak,
    peak_bytes,
)
from kvtool.bench.decode.model import build_model, prompts
from kvtool.bench.decode.row import Bench, uniform_row
from kvtool.bench.decode.same import Verdict, compare
from kvtool.bench.decode.sessions import Setting
from kvtool.bench.decode.settings import (
    Advance,
    DecodeCase,
    DecodeRun,
    ModelChoice,
    Roofs,
    silent,
)
from kvtool.bench.decode.trial import Timed, greedy_tokens, timed, warm_up
from kvtool.errors import KvtoolError
from kvtool.run import Row

Tensor = torch.Tensor

LOWER = "--batch, --prompt-tokens or --output-tokens"
CHECK_TOKENS = 32
"""Output tokens that are compared where the check is a run of its own."""

Shape = tuple[int, int, int]
"""batch, prompt_tokens, output_tokens: cases of one shape are rivals."""


def uniform_rows(
    plan: Blueprint,
    choice: ModelChoice,
    run: DecodeRun,
    roofs: Roofs,
    *,
    advance: Advance = silent,
    make_kernels: Callable[[str, int], Kernels] = kernels_for,
) -> Iterator[Row]:
    """A row for each case, its shape's DynamicCache first. Raises KvtoolError, for what can be known
    beforehand at once.

    `same_tokens` False in a row is a wrong answer: the caller's exit code is 1.
    """
    for case in run.cases:
        refuse_long(plan, case.total_tokens)
        needed = case_bytes(plan, case, KV_DTYPES[choice.dtype])
        check_memory(plan, choice, needed, what=case_words(case), lower=LOWER)
    return hushed(_all_rows(plan, choice, run, roofs, advance, make_kernels), run.threads)


def _all_rows(
    plan: Blueprint,
    choice: ModelChoice,
    run: DecodeRun,
    roofs: Roofs,
    advance: Advance,
    make_kernels: Callable[[str, int], Kernels],
) -> Iterator[Row]:
    kernels = make_kernels(choice.device, run.threads)
    checked = _checked(plan, choice, run, kernels, advance) if choice.dtype != "fp32" else {}
    with named_failure(f"the weights of {plan.name}", "the width of --dtype"):
        decoder = build_model(plan, choice)
    advance(f"{plan.name}: built")
    setting = Setting(
        decoder=decoder,
        kernels=kernels,
        cuda_graph=run.cuda_graph and choice.device.startswith("cuda"),
    )
    flops = roofs.matmul() if roofs.matmul is not None else None
    bench = Bench(setting=setting, run=run, roofs=roofs, advance=advance, matmul_flops=flops)
    yield from _rows(bench, checked)


@dataclass(slots=True, kw_only=True)
class Found:
    """What the cases of one shape have come to so far."""

    runs: dict[DecodeCase, list[Timed]] = field(default_factory=dict)
    growth: dict[DecodeCase, Row] = field(default_factory=dict)
    known: Tensor | None = None
    """The dynamic cache's tokens, where none of the cases has them."""


def _rows(bench: Bench, checked: Mapping[DecodeCase, Verdict]) -> Iterator[Row]:
    shapes: dict[Shape, list[DecodeCase]] = {}
    for case in bench.run.cases:
        shapes.setdefault(_shape(case), []).append(case)
    fitted: set[tuple[str, int]] = set()
    for cases in shapes.values():
        rivals = sorted(cases, key=lambda one: one.cache != "dynamic")
        found, ended = Found(), None
        try:
            _measure(bench, rivals, found, fitted)
        except (KvtoolError, KeyboardInterrupt) as error:
            ended = error
        for case in found.runs:
            yield _row(bench, case, found, checked)
        if ended is not None:
            raise ended


def _measure(
    bench: Bench, cases: list[DecodeCase], found: Found, fitted: set[tuple[str, int]]
) -> None:
    """Rounds over the rivals, so that what drifts meets all alike, then the growth of each cache."""
    setting, seed = bench.setting, bench.run.seed
    if setting.decoder.choice.dtype == "fp32" and cases[0].cache != "dynamic":
        with named_failure(f"the dynamic cache of {case_words(cases[0])}", LOWER):
            found.known = _reference(setting, cases[0], seed)
    for number in range(bench.run.repeats):
        for case in cases:
            with named_failure(case_words(case), LOWER):
                run = _timed(bench, case, is_first=number == 0)
            found.runs.setdefault(case, []).append(run)
            bench.advance(f"{case_words(case)}: run {number + 1} of {bench.run.repeats}")
    contexts = contexts_of(setting.decoder.plan, bench.run)
    for case in cases:
        place = (case.cache, case.block_size)
        if contexts and place not in fitted and case.cache != "continuous":
            fitted.add(place)
            with named_failure(f"the growth of a token's time, {case.cache}", LOWER):
                found.growth[case] = growth(setting, case, contexts, seed)
            bench.advance(f"{case.cache}: growth with the context")


def _timed(bench: Bench, case: DecodeCase, *, is_first: bool) -> Timed:
    """One run, the first after a warm-up."""
    decoder = bench.setting.decoder
    ids = prompts(decoder, case.batch, case.prompt_tokens, bench.run.seed)
    own = case.cache != "continuous"
    if is_first and own:
        warm_up(bench.setting, case, ids)
    elif is_first:
        warm_up_continuous(decoder, case, ids)
    forget_peak(decoder.device)
    run = timed(bench.setting, case, ids) if own else timed_continuous(decoder, case, ids)
    return replace(run, peak_bytes=peak_bytes(decoder.device))


def _row(
    bench: Bench, case: DecodeCase, found: Found, checked: Mapping[DecodeCase, Verdict]
) -> Row:
    verdict = checked.get(case)
    if bench.setting.decoder.choice.dtype == "fp32":
        verdict = _verdict(bench, case, found)
    return (
        uniform_row(bench, case, found.runs)
        | found.growth.get(case, {})
        | {"same_tokens": verdict and verdict.same, "ties": verdict and verdict.ties}
    )


def _verdict(bench: Bench, case: DecodeCase, found: Found) -> Verdict:
    """Of every run of a case against the dynamic cache's first."""
    decoder = bench.setting.decoder
    ids = prompts(decoder, case.batch, case.prompt_tokens, bench.run.seed)
    known = found.known if found.known is not None else next(iter(found.runs.values()))[0].tokens
    verdicts = [compare(decoder, ids, run.tokens, known) for run in found.runs[case]]
    return Verdict(all(one.same for one in verdicts), max(one.ties for one in verdicts))


def _reference(setting: Setting, case: DecodeCase, seed: int) -> Tensor:
    """DynamicCache's tokens, where the cases of this shape do not have it."""
    ids = prompts(setting.decoder, case.batch, case.prompt_tokens, seed)
    return greedy_tokens(setting, replace(case, cache="dynamic"), ids)


def _shape(case: DecodeCase) -> Shape:
    return case.batch, case.prompt_tokens, case.output_tokens


def _checked(
    plan: Blueprint, choice: ModelChoice, run: DecodeRun, kernels: Kernels, advance: Advance
) -> dict[DecodeCase, Verdict]:
    """Whether each case's tokens are DynamicCache's in fp32, in a model of the first few layers."""
    few = blueprint(plan.loaded, layers=min(run.check_layers, plan.heads.num_layers))
    fp32 = replace(choice, dtype="fp32", random_weights=True)
    check_memory(few, fp32, {}, what="the check in fp32", lower="--batch")
    decoder = build_model(few, fp32)
    setting = Setting(
        decoder=decoder,
        kernels=kernels,
        cuda_graph=run.cuda_graph and choice.device.startswith("cuda"),
    )
    known: dict[Shape, Tensor] = {}
    same: dict[DecodeCase, Verdict] = {}
    for case in run.cases:
        short = replace(case, output_tokens=min(case.output_tokens, CHECK_TOKENS))
        shape = _shape(short)
        with named_failure(f"the fp32 check of {case_words(case)}", LOWER):
            if shape not in known:
                known[shape] = _reference(setting, short, run.seed)
            ids = prompts(decoder, short.batch, short.prompt_tokens, run.seed)
            same[case] = compare(decoder, ids, _tokens(setting, short, ids), known[shape])
        advance(f"{case_words(case)}: checked in fp32")
    return same


def _tokens(setting: Setting, case: DecodeCase, ids: Tensor) -> Tensor:
    if case.cache == "continuous":
        return continuous_tokens(setting.decoder, case, ids)
    return greedy_tokens(setting, case, ids)


def uniform_steps(plan: Blueprint, choice: ModelChoice, run: DecodeRun) -> int:
    """How often `advance` is called: for a progress bar's length."""
    fits = {(one.cache, one.block_size) for one in run.cases if one.cache != "continuous"}
    checks = len(run.cases) if choice.dtype != "fp32" else 0
    fitted = len(fits) if contexts_of(plan, run) else 0
    return 1 + checks + run.repeats * len(run.cases) + fitted

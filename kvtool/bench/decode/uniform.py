"""The rows of `kvtool bench decode`: equal prompts, greedy, one kind of cache after the other.

Rows come one at a time, so that what is finished is kept when something later fails. In fp32 the
greedy tokens of each run are compared with DynamicCache's; in any other dtype that is done before
anything is timed, in an fp32 model of the same config's first layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from kvtool.bench.decode.blueprint import Blueprint, blueprint, refuse_long
from kvtool.bench.decode.continuous import continuous_tokens, time_continuous
from kvtool.bench.decode.failures import named_failure
from kvtool.bench.decode.hushed import hushed
from kvtool.bench.decode.kernels import Kernels, kernels_for
from kvtool.bench.decode.memory import (
    ITEM_BYTES,
    case_bytes,
    case_words,
    check_memory,
)
from kvtool.bench.decode.model import build_model, prompts
from kvtool.bench.decode.row import Bench, uniform_row
from kvtool.bench.decode.sessions import Setting
from kvtool.bench.decode.settings import (
    Advance,
    DecodeCase,
    DecodeRun,
    ModelChoice,
    Roofs,
    silent,
)
from kvtool.bench.decode.trial import (
    FIT_SAMPLES,
    Timed,
    greedy_tokens,
    time_exponent,
    timed,
    warm_up,
)
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
    """A row for each case, its shape's DynamicCache first. Raises KvtoolError.

    `same_tokens` False in a row is a wrong answer: the caller's exit code is 1.
    """
    for case in run.cases:
        refuse_long(plan, case.total_tokens)
        needed = case_bytes(plan, case, ITEM_BYTES[choice.dtype])
        check_memory(plan, choice, needed, what=case_words(case), lower=LOWER)
    yield from hushed(_all_rows(plan, choice, run, roofs, advance, make_kernels), run.threads)


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


def _rows(bench: Bench, checked: Mapping[DecodeCase, bool]) -> Iterator[Row]:
    shapes: dict[Shape, list[DecodeCase]] = {}
    for case in bench.run.cases:
        shapes.setdefault((case.batch, case.prompt_tokens, case.output_tokens), []).append(case)
    fitted: set[tuple[str, int]] = set()
    contexts = _contexts(bench.setting.decoder.plan, bench.run)
    for cases in shapes.values():
        known: Tensor | None = None
        baseline: Timed | None = None
        for case in sorted(cases, key=lambda one: one.cache != "dynamic"):
            with named_failure(case_words(case), LOWER):
                found, peak = _measured(bench, case)
                if case.cache == "dynamic":
                    known, baseline = found.tokens, found
                if bench.setting.decoder.choice.dtype == "fp32":
                    known = (
                        _reference(bench.setting, case, bench.run.seed) if known is None else known
                    )
                    same: bool | None = torch.equal(found.tokens, known)
                else:
                    same = checked.get(case)
                row = uniform_row(bench, case, found, baseline) | {
                    "same_tokens": same,
                    "peak_bytes": peak,
                }
                place = (case.cache, case.block_size)
                if contexts and place not in fitted and case.cache != "continuous":
                    fitted.add(place)
                    row |= _exponent(bench, case, contexts)
            yield row


def _measured(bench: Bench, case: DecodeCase) -> tuple[Timed, int | None]:
    """A case's run after its warm-up, and the peak of the GPU's memory; a CPU tells none."""
    setting, device = bench.setting, bench.setting.decoder.device
    ids = prompts(setting.decoder, case.batch, case.prompt_tokens, bench.run.seed)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if case.cache == "continuous":
        found = time_continuous(setting.decoder, case, ids, bench.run.repeats)
    else:
        warm_up(setting, case, ids)
        found = timed(setting, case, ids, bench.run.repeats, silent)
    bench.advance(case_words(case))
    peak = torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else None
    return found, peak


def _reference(setting: Setting, case: DecodeCase, seed: int) -> Tensor:
    """DynamicCache's tokens, where the cases of this shape do not have it."""
    ids = prompts(setting.decoder, case.batch, case.prompt_tokens, seed)
    return greedy_tokens(setting, replace(case, cache="dynamic"), ids)


def _contexts(plan: Blueprint, run: DecodeRun) -> list[int]:
    """Contexts for the law of growth that the model may have; [] if too few are left."""
    most = plan.max_context or 1 << 62
    found = [one for one in run.exponent_contexts if 1 < one <= most - FIT_SAMPLES]
    return found if len(found) > 2 else []


def _exponent(bench: Bench, case: DecodeCase, contexts: list[int]) -> Row:
    value = time_exponent(bench.setting, case, contexts, bench.run.seed)
    bench.advance(f"{case.cache}: growth with the context")
    return {"time_exponent": value, "exponent_contexts": contexts}


def _checked(
    plan: Blueprint, choice: ModelChoice, run: DecodeRun, kernels: Kernels, advance: Advance
) -> dict[DecodeCase, bool]:
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
    same: dict[DecodeCase, bool] = {}
    for case in run.cases:
        short = replace(case, output_tokens=min(case.output_tokens, CHECK_TOKENS))
        shape = (short.batch, short.prompt_tokens, short.output_tokens)
        with named_failure(f"the fp32 check of {case_words(case)}", LOWER):
            if shape not in known:
                known[shape] = _reference(setting, short, run.seed)
            same[case] = torch.equal(known[shape], _tokens(setting, short, run.seed))
        advance(f"{case_words(case)}: checked in fp32")
    return same


def _tokens(setting: Setting, case: DecodeCase, seed: int) -> Tensor:
    ids = prompts(setting.decoder, case.batch, case.prompt_tokens, seed)
    if case.cache == "continuous":
        return continuous_tokens(setting.decoder, case, ids)
    return greedy_tokens(setting, case, ids)


def uniform_steps(plan: Blueprint, choice: ModelChoice, run: DecodeRun) -> int:
    """How often `advance` is called: for a progress bar's length."""
    fits = {(one.cache, one.block_size) for one in run.cases if one.cache != "continuous"}
    checks = len(run.cases) if choice.dtype != "fp32" else 0
    return 1 + checks + len(run.cases) + (len(fits) if _contexts(plan, run) else 0)

"""`kvtool bench attention`: each provider of a case, correct first, then timed beside the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvtool.bench import roofs
from kvtool.bench.attention.case import Case
from kvtool.bench.attention.correct import Answer, Verdict, expected, spoil, verdict
from kvtool.bench.attention.data import Data, make
from kvtool.bench.attention.prepared import Missing, Prepared
from kvtool.bench.attention.providers import Provider, providers_of
from kvtool.bench.attention.row import COPY, READ, TIMED, base_row, clocks, times
from kvtool.bench.device import load_torch, nvml_record
from kvtool.bench.timer import Sampler, Samples, measure, samplers
from kvtool.run import Row

ROUNDS = 30
PADDED_TOKENS = 509
"""Of the companion that a case without padding is checked with: no multiple of any block size."""

Ready = dict[str, Prepared]
Verdicts = dict[str, Verdict]


@dataclass(slots=True, kw_only=True)
class Found:
    """The rows of a case, what must be said of it, and how long its samples took."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sampled_s: float = 0.0


def measure_case(
    data: Data,
    *,
    names: Sequence[str],
    budget_s: float,
    seed: int,
    peak: float | None = None,
    keep: Callable[[Data, Ready], None] | None = None,
) -> Found:
    """A row for each provider that is there: checked against float64, then timed in one run.

    `peak` is the arithmetic roof in operations a second. `keep` is given the data and the providers
    once they are checked, before anything is timed.
    """
    case = data.case
    if case.threads is not None:
        load_torch().set_num_threads(case.threads)
    found, answer = Found(), expected(data)
    ready, verdicts = _checked(data, answer, names, found)
    if keep is not None:
        keep(data, ready)
    right = {name: one for name, one in ready.items() if verdicts[name].correct}
    timed, samples = _timed(data, right, budget_s, seed, found)
    record = clocks(nvml_record() if data.device.is_gpu else {})
    for name in right:  # what was timed must itself have done the work
        spoil(data, right[name])
        verdicts[name] = verdict(data, right[name], answer, timed[name].once)
    for name, one in ready.items():
        is_right = name in right and verdicts[name].correct
        speed = times(data, samples, name, timed[name], seed) if is_right else {}
        row = base_row(data, name, one, verdicts[name])
        found.rows.append(row | dict.fromkeys(TIMED) | speed | record | {"peak_flop_per_s": peak})
    found.notes += _said(data, timed)
    return found


def _timed(
    data: Data, right: Ready, budget_s: float, seed: int, found: Found
) -> tuple[dict[str, Sampler], dict[str, Samples]]:
    """The providers and the two roofs, interleaved."""
    if not right:
        return {}, {}
    torch = load_torch()
    calls = {name: one.run for name, one in right.items()}
    calls[READ] = roofs.read_call(data.kv, data.device, data.case.threads)
    calls[COPY] = roofs.copy_call(data.kv, [torch.empty_like(one) for one in data.kv])
    timed = samplers(calls, pools=data.pools, device=data.device)
    started = time.perf_counter()
    samples = measure(timed, rounds=ROUNDS, budget_s=budget_s, seed=seed)
    found.sampled_s = time.perf_counter() - started
    return timed, samples


def _said(data: Data, timed: dict[str, Sampler]) -> list[str]:
    """Doubts about a case's figures."""
    case = data.case
    said = [
        f"{name}: not captured in a CUDA graph, its launches count ({one.eager})"
        for name, one in timed.items()
        if one.eager is not None
    ]
    if timed and not data.is_cold:
        said.append(
            f"batch {case.batch}, context {case.context_tokens:,}: so small that it may be read from "
            "the last-level cache; so may the roofs"
        )
    return said


def _checked(
    data: Data, answer: Answer, names: Sequence[str], found: Found
) -> tuple[Ready, Verdicts]:
    """Every provider that can do the case, and whether it is right.

    Those that promise to keep to the tokens are checked while everything else is NaN.
    """
    table = {name: one for name, one in providers_of(data.device.kind).items() if name in names}
    ready: Ready = {}
    verdicts: Verdicts = {}
    for masks, padding in ((True, float("nan")), (False, 0.0)):
        data.fill_padding(padding)
        for name, provider in table.items():
            if provider.masks_padding is masks:
                _prepare(name, provider, data, ready, found)
                if name in ready:  # and has run on every pool
                    verdicts[name] = verdict(data, ready[name], answer, lambda: None)
    _check_padding(data, table, verdicts)
    return {name: ready[name] for name in table if name in ready}, verdicts


def _check_padding(data: Data, table: dict[str, Provider], verdicts: Verdicts) -> None:
    """Where every slot of a case holds a token: the same kernels on a companion that has padding."""
    case = data.case
    if sum(case.lengths) < data.k_cache[0].shape[0] * case.block_size:
        return
    companion = _padded(case)
    other = make(companion, replace(data.device, cache_bytes=1), seed=0)
    other.fill_padding(float("nan"))
    answer = expected(other)
    for name, provider in table.items():
        if provider.masks_padding and name in verdicts and verdicts[name].correct:
            found = verdict(other, provider.prepare(other), answer)
            verdicts[name] = verdicts[name] if found.correct else found


def _padded(case: Case) -> Case:
    return replace(
        case, batch=min(case.batch, 2), skew=1, context_tokens=PADDED_TOKENS, given_lengths=None,
        pattern="fragmented",
    )  # fmt: skip


def _prepare(name: str, provider: Provider, data: Data, ready: Ready, found: Found) -> None:
    """A provider that is missing, or refuses this case, is a note and no row. Ours may not."""
    torch = load_torch()
    try:
        one = provider.prepare(data)
        for pool in range(data.pools):
            one.run(pool)
        if data.device.is_gpu:
            torch.cuda.synchronize()
    except Missing as why:
        found.notes.append(f"{name} has no row: {why}")
        return
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        if provider.masks_padding:
            raise
        text = " ".join(str(error).split())[:200]
        found.notes.append(f"{name} has no row: {type(error).__name__}: {text}")
        return
    ready[name] = one

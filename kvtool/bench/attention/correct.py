"""Whether a provider's output is right: against float64, within what its arithmetic may lose."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvtool.bench.attention.data import Data, factor, torch_dtype
from kvtool.bench.attention.providers import Prepared
from kvtool.bench.device import load_torch

ROUNDINGS = 2
"""Of probabilities and of the output to the cache's dtype; each loses at most half a unit in the last
place of the sum of |p·v|, and as much again is left for the order of the sums."""
FP32_SUMS = 1e-5
"""Relative: an fp32 sum over a long context in any order, with exp2 of a GPU's fast unit."""


class Answer(NamedTuple):
    """[batch, query_heads, head_dim] in float64, [batch, query_heads], and the error allowed."""

    out: Any
    lse: Any
    tolerance: float


class Verdict(NamedTuple):
    """The largest error of any element in any pool, and whether it is allowed."""

    max_abs_error: float | None
    """None: the output is not finite."""
    max_lse_error: float | None
    tolerance: float
    correct: bool


def expected(data: Data) -> Answer:
    """Softmax(q·K^T·scale)·V a sequence at a time in float64, from the contiguous copy.

    The tolerance is relative to the largest sum of |p·v|, which bounds what roundings can add up to.
    """
    torch = load_torch()
    case = data.case
    group = case.query_heads // case.kv_heads
    out = torch.zeros(data.q.shape, dtype=torch.float64, device=data.q.device)
    lse = torch.full(data.q.shape[:2], float("-inf"), dtype=torch.float64, device=data.q.device)
    largest = 0.0
    for row, tokens in enumerate(case.lengths):
        if not tokens:
            continue
        q = data.q[row].double().view(case.kv_heads, group, case.head_dim)
        k, v = (one[0][row, :tokens].permute(1, 0, 2).double() for one in (data.k, data.v))
        scores = q @ k.transpose(1, 2) * data.scale
        weights = torch.softmax(scores, dim=-1)
        lse[row] = torch.logsumexp(scores, dim=-1).view(-1)
        out[row] = (weights @ v).reshape(case.query_heads, case.head_dim)
        largest = max(largest, float((weights @ v.abs()).max()))
    step = torch.finfo(torch_dtype(case.kv_dtype)).eps
    return Answer(out, lse, largest * (ROUNDINGS * step + FP32_SUMS))


def verdict(data: Data, one: Prepared, answer: Answer) -> Verdict:
    """The output of every pool against the answer, V's scaling of that pool undone."""
    torch = load_torch()
    worst, worst_lse = 0.0, 0.0
    for pool in range(data.pools):
        one.run(pool)
        found = one.output(pool).double() / factor(pool)
        if not bool(torch.isfinite(found).all()):
            return Verdict(None, None, answer.tolerance, False)
        worst = max(worst, float((found - answer.out).abs().max()))
        if one.lse is not None:
            worst_lse = max(worst_lse, _lse_error(one.lse(pool).double(), answer.lse))
    correct = worst <= answer.tolerance and worst_lse <= answer.tolerance * 10
    lse = worst_lse if one.lse is not None and worst_lse != float("inf") else None
    return Verdict(worst, lse, answer.tolerance, correct)


def _lse_error(found: Any, answer: Any) -> float:
    """The largest difference; −∞ must stand where a sequence is empty, and nowhere else."""
    torch = load_torch()
    empty = torch.isneginf(answer)
    if not bool((torch.isneginf(found) == empty).all()) or bool(torch.isnan(found).any()):
        return float("inf")
    return float((found - answer)[~empty].abs().max()) if bool((~empty).any()) else 0.0

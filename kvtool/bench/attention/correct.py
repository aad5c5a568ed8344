"""Whether a provider's output is right: against float64, within what its arithmetic may lose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvtool.bench.attention.data import Data, factor
from kvtool.bench.attention.prepared import Prepared
from kvtool.bench.device import load_torch, torch_dtype
from kvtool.errors import KvtoolError

ROUNDINGS = 2
"""Of probabilities and of the output to the cache's dtype; each loses at most half a unit in the last
place of an element's sum of |p·v|, and as much again is left for the order of the sums."""
FP32_SUMS = 1e-5
"""Relative: an fp32 sum over a long context in any order, with exp2 of a GPU's fast unit."""
LSE_ABSOLUTE, LSE_RELATIVE = 1e-4, 1e-5
"""Of the log-sum-exp, which no rounding of the cache enters: products are exact in fp32, sums are
fp32. A token lost among 4,096 equals is 2.4e-4."""


MOST_SCORES = 2**23
"""Of a sequence's query heads at once: 64 MiB in float64, and as much again a few times."""
LARGEST = 1e30
"""Of a score or a sum of |p·v|: fp32 has room for the sums on the way to it."""


class Answer(NamedTuple):
    """[batch, query_heads, head_dim] in float64; the error allowed each element; [batch, query_heads]."""

    out: Any
    allowed: Any
    lse: Any


class Verdict(NamedTuple):
    """The worst of all pools. None: a value that is no number, or no log-sum-exp."""

    max_abs_error: float | None
    tolerance: float
    """Allowed the element that comes nearest to what it is allowed, or most exceeds it."""
    error_share: float | None
    """Of that element's error in its tolerance: above 1 is wrong."""
    max_lse_error: float | None
    lse_share: float | None

    @property
    def correct(self) -> bool:
        """Whether both are within what is allowed."""
        shares = (self.error_share, 0.0 if self.lse_share is None else self.lse_share)
        return all(share is not None and share <= 1 for share in shares)


def expected(data: Data) -> Answer:
    """Softmax(q·K^T·scale)·V a sequence at a time in float64, from the contiguous copy.

    What is allowed is relative to an element's own sum of |p·v|, which bounds what its roundings can
    add up to.
    """
    torch = load_torch()
    case = data.case
    group = case.query_heads // case.kv_heads
    out = torch.zeros(data.q.shape, dtype=torch.float64, device=data.q.device)
    sums = torch.zeros_like(out)
    lse = torch.full(data.q.shape[:2], float("-inf"), dtype=torch.float64, device=data.q.device)
    for row, tokens in enumerate(case.lengths):
        if not tokens:
            continue
        at_once = max(1, MOST_SCORES // tokens)
        for head in range(case.query_heads):
            if head % group % at_once == 0:
                heads = slice(head, min(head + at_once, (head // group + 1) * group))
                _attend(data, row, tokens, heads, head // group, (out, sums, lse))
    kind = torch.finfo(torch_dtype(case.kv_dtype))
    smallest = max(kind.smallest_normal * kind.eps, float(torch.finfo(torch.float32).tiny))
    _check_finite(data, out, sums, lse)
    return Answer(out, sums * (ROUNDINGS * kind.eps + FP32_SUMS) + smallest, lse)


def _attend(
    data: Data, row: int, tokens: int, heads: slice, kv_head: int, into: tuple[Any, Any, Any]
) -> None:
    """Some query heads of one sequence, all of one KV head."""
    torch = load_torch()
    out, sums, lse = into
    k, v = (one[0][row, :tokens, kv_head].double() for one in (data.k, data.v))
    scores = data.q[row, heads].double() @ k.T * data.scale
    weights = torch.softmax(scores, dim=-1)
    lse[row, heads] = torch.logsumexp(scores, dim=-1)
    out[row, heads] = weights @ v
    sums[row, heads] = weights @ v.abs()


def _check_finite(data: Data, out: Any, sums: Any, lse: Any) -> None:
    """Refuse inputs whose answer no kernel can give: NaN, infinities, beyond fp32 or the KV dtype."""
    torch = load_torch()
    most = torch.finfo(torch_dtype(data.case.kv_dtype)).max
    full = lse[data.lengths > 0]
    fits = bool((full.abs() < LARGEST).all()) and bool((sums < LARGEST).all())
    fits = fits and bool((out.abs() <= most).all())
    if not fits:
        raise KvtoolError(
            "the answer of these inputs is no number, or too large for what it is computed in",
            "look for NaN and infinities in q, k_cache, v_cache and scale",
            code="bad_inputs",
        )


def spoil(data: Data, one: Prepared) -> None:
    """NaN over every output, so that what is found there later was written since."""
    for pool in range(data.pools):
        one.output(pool)[:] = float("nan")


def verdict(
    data: Data, one: Prepared, answer: Answer, run: Callable[[], object] | None = None
) -> Verdict:
    """The output of every pool against the answer, V's scaling of that pool undone.

    `run` does the work on all pools; without it the call is made on each.
    """
    if run is None:
        for pool in range(data.pools):
            one.run(pool)
    else:
        run()
    found = [_pool_verdict(data, one, answer, pool) for pool in range(data.pools)]
    broken = [each for each in found if each.error_share is None]
    worst = broken[0] if broken else max(found, key=lambda each: each.error_share or 0.0)
    if one.lse is None or broken:
        return worst
    lse = max(found, key=lambda each: each.lse_share or 0.0)
    return worst._replace(max_lse_error=lse.max_lse_error, lse_share=lse.lse_share)


def _pool_verdict(data: Data, one: Prepared, answer: Answer, pool: int) -> Verdict:
    torch = load_torch()
    found = torch.as_tensor(one.output(pool)).reshape(answer.out.shape).double() / factor(pool)
    full = data.lengths > 0
    error = (found - answer.out)[full].abs()
    allowed = answer.allowed[full]
    not_zero = one.answers_empty and bool((found[~full] != 0).any())
    if not_zero or not bool(torch.isfinite(error).all()):
        return Verdict(None, float(allowed.max()), None, None, None)
    shares = error / allowed
    at = int(shares.argmax())
    lse_error, lse_share = (
        (None, None) if one.lse is None else _lse_errors(one.lse(pool).double(), answer.lse)
    )
    return Verdict(
        max_abs_error=float(error.max()),
        tolerance=float(allowed.flatten()[at]),
        error_share=float(shares.flatten()[at]),
        max_lse_error=lse_error,
        lse_share=lse_share,
    )


def _lse_errors(found: Any, answer: Any) -> tuple[float | None, float]:
    """The largest difference where sequences have tokens, None if one is no number; and its share of
    what is allowed: −∞ must stand where a sequence is empty, and nowhere else."""
    torch = load_torch()
    empty = torch.isneginf(answer)
    error = (found - answer)[~empty].abs()
    worst = float(error.max())
    share = float((error / (LSE_ABSOLUTE + LSE_RELATIVE * answer[~empty].abs())).max())
    in_place = bool((torch.isneginf(found) == empty).all()) and not bool(torch.isnan(found).any())
    return worst if worst < float("inf") else None, share if in_place else float("inf")

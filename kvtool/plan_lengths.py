"""Real lengths in place of one context: how many requests of a workload or a trace run at a time.

A running request holds its prompt and what it has generated so far: over its time half its output, at its
end all of it. It runs for as many steps as it generates tokens, so that at any moment a request is met in
proportion to its output; steps are taken to be equally long, and the one of the prompt to be one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvtool import catalog
from kvtool.capacity import LONGEST, Holder, capacity
from kvtool.errors import KvtoolError, usage_error
from kvtool.lengths import parse_lengths
from kvtool.requests import Requests
from kvtool.workload import Workload, chunks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtool.requests import Column
    from kvtool.run import Row
    from kvtool.trace_blocks import HashedRequests

    Floats = NDArray[np.float64]

SHARES = (0.5, 0.95, 0.99)
NUM_REQUESTS = 10_000
STRAIGHT = 1e-3
"""Costs this close to a line, as a share of them, are read off it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What requests hold, in tokens: prompt and output. Percentiles are rounded up to whole tokens."""

    num_requests: int
    p50: int
    p95: int
    p99: int
    longest: int
    mean: float
    mean_running: float
    """Of a running request at any moment: prompt and half the output, weighted by how long it runs."""
    prompt_tokens: Column = field(repr=False, compare=False)
    output_tokens: Column = field(repr=False, compare=False)

    @property
    def at_end(self) -> Column:
        """Tokens of each request with all its output."""
        total: Column = self.prompt_tokens + self.output_tokens
        return total

    @property
    def steps(self) -> Column:
        """That each runs for: one a token that it generates, and one at least."""
        import numpy as np

        return np.maximum(self.output_tokens, 1)


def made_requests(name: str, *, num_requests: int = NUM_REQUESTS, seed: int = 0) -> Requests:
    """Requests of a preset workload (kvtool presets workloads), in one piece."""
    preset = catalog.workload_preset(name)
    prompt, output = (
        parse_lengths(
            getattr(preset, f"{side}_dist"),
            name=f"--{side}-dist",
            mean=getattr(preset, f"{side}_mean"),
            cap=getattr(preset, f"{side}_cap"),
            column=column,
        )
        for column, side in enumerate(("prompt", "output"))
    )
    workload = Workload(
        name=preset.id, prompt=prompt, output=output, num_requests=num_requests, seed=seed
    )
    (found,) = chunks(workload, num_requests)
    return found


def lengths_of(*requests: Requests | HashedRequests) -> Lengths:
    """Of all these requests: those of a workload, a trace, or a trace by the chunk (`*prompts`)."""
    import numpy as np

    return _measured(
        np.concatenate([one.prompt_tokens for one in requests] or [np.zeros(0, np.int64)]),
        np.concatenate([one.output_tokens for one in requests] or [np.zeros(0, np.int64)]),
    )


def _measured(prompt: Column, output: Column) -> Lengths:
    import numpy as np

    if not len(prompt):
        raise usage_error(
            "there are no requests to plan for", "give a workload or a trace with some"
        )
    total, steps = prompt + output, np.maximum(output, 1)
    p50, p95, p99 = (math.ceil(one) for one in np.quantile(total, SHARES))
    return Lengths(
        num_requests=len(total),
        p50=p50,
        p95=p95,
        p99=p99,
        longest=int(total.max()),
        mean=float(total.mean()),
        mean_running=float(np.average(prompt + output / 2, weights=steps)),
        prompt_tokens=prompt,
        output_tokens=output,
    )


# -- how many of them run at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRow:
    """Requests at a time, of all replicas; `lengths` are those that are served, cut where they are too long."""

    lengths: Lengths
    limit: int | None
    """Tokens of the longest request that is served: max_model_len, else the model's maximum."""
    num_cut: int
    """Requests that end there before they have all their output."""
    num_refused: int
    """Requests whose prompt leaves no room for a token: they are not served."""
    at_p50: float
    """If all were of the length of the 50th percentile; so the next two."""
    at_p95: float
    at_p99: float
    running: float
    """Of the real mix, each with what it holds on average: an estimate of what continuous batching holds."""
    at_end: float
    """Of the real mix, all of them with all their output: none is ever preempted for long outputs."""
    mean_blocks: float | None
    """Of a running request, on a rank; None where an engine has no blocks."""
    mean_bytes: float
    notes: tuple[str, ...]


def concurrency_of(holder: Holder, kv_bytes: int, lengths: Lengths, replicas: int = 1) -> LengthRow:
    """Of `kv_bytes` of a rank, which may be negative: then nothing is held."""
    import numpy as np

    served, limit, cut, refused, notes = _served(holder, lengths)
    holder = any_length(holder)
    at = [capacity(holder, tokens, kv_bytes) for tokens in (served.p50, served.p95, served.p99)]
    block = at[0].bytes_per_block
    room = max(0, kv_bytes) // block if block else max(0, kv_bytes)
    costs = running_costs(holder, served), request_costs(holder, served.at_end)
    means = [float(np.average(one, weights=served.steps)) for one in costs]
    running, at_end = (replicas * room / mean if mean else math.inf for mean in means)
    of_percentile = [replicas * one.max_concurrency for one in at]
    return LengthRow(
        lengths=served,
        limit=limit,
        num_cut=cut,
        num_refused=refused,
        at_p50=of_percentile[0],
        at_p95=of_percentile[1],
        at_p99=of_percentile[2],
        running=running,
        at_end=at_end,
        mean_blocks=means[0] if block else None,
        mean_bytes=means[0] * (block or 1),
        notes=notes,
    )


def length_fields(found: LengthRow) -> Row:
    """The same as fields of a row."""
    lengths = found.lengths
    return {
        "requests": lengths.num_requests,
        "length_tokens_p50": lengths.p50,
        "length_tokens_p95": lengths.p95,
        "length_tokens_p99": lengths.p99,
        "length_tokens_mean": lengths.mean,
        "length_tokens_max": lengths.longest,
        "running_tokens_mean": lengths.mean_running,
        "limit_tokens": found.limit,
        "requests_cut": found.num_cut,
        "requests_refused": found.num_refused,
        "max_concurrency_p50": found.at_p50,
        "max_concurrency_p95": found.at_p95,
        "max_concurrency_p99": found.at_p99,
        "max_concurrency_running": found.running,
        "max_concurrency_at_end": found.at_end,
        "running_blocks_mean": found.mean_blocks,
        "running_bytes_mean": found.mean_bytes,
    }


def limit_of(holder: Holder) -> int | None:
    """Tokens of the longest request that is served; a maximum that the config does not state is none."""
    shape, asked = holder.layout.shape, holder.options.max_model_len
    if asked is not None:
        return asked
    return shape.max_context if shape.max_context_stated else None


def _served(
    holder: Holder, lengths: Lengths
) -> tuple[Lengths, int | None, int, int, tuple[str, ...]]:
    """What is left of the requests under the limit, the limit, and what it cuts and refuses.

    vLLM ends a request at max_model_len and refuses a prompt that leaves no room for one token.
    """
    import numpy as np

    limit, top = limit_of(holder), holder.layout.shape.max_context
    name = "the model's maximum" if holder.options.max_model_len is None else "max_model_len"
    notes = []
    if top is not None and limit is None and lengths.longest > top:
        count = _share(int((lengths.at_end > top).sum()), lengths)
        notes.append(f"{count} longer than the {top:,} tokens that its class is made for")
    if top is not None and limit is not None and limit > top:
        notes.append(f"max_model_len {limit:,} is above the model's maximum of {top:,} tokens")
    if limit is None or lengths.longest <= limit:
        return lengths, limit, 0, 0, tuple(notes)
    refused = lengths.prompt_tokens >= limit
    if refused.all():
        raise KvtoolError(
            f"no prompt of the requests is shorter than {name}, {limit:,} tokens",
            "take a model that reads longer prompts (--allow-long for one context)",
            code="context_too_long",
        )
    cut = int(((lengths.at_end > limit) & ~refused).sum())
    if cut:
        notes.append(f"{_share(cut, lengths)} longer than {name}, {limit:,} tokens: cut there")
    if refused.any():
        count = _share(int(refused.sum()), lengths)
        notes.append(f"{count} refused: prompts that leave no token of {name}, {limit:,}")
    prompt = lengths.prompt_tokens[~refused]
    output = np.minimum(lengths.output_tokens[~refused], limit - prompt)
    return _measured(prompt, output), limit, cut, int(refused.sum()), tuple(notes)


def _share(count: int, lengths: Lengths) -> str:
    one = "request is" if count == 1 else "requests are"
    return f"{count:,} of {lengths.num_requests:,} {one}"


def any_length(holder: Holder) -> Holder:
    """The same without max_model_len, for which vLLM's row would reserve whatever the request."""
    return replace(holder, options=replace(holder.options, max_model_len=None))


def request_costs(holder: Holder, tokens: Column) -> Floats:
    """What requests of so many tokens take on a rank: blocks, or bytes where the engine has none.

    Looked up where the cost bends, and read off the line between (STRAIGHT): exact where it is a line of
    whole blocks, as it is of full attention.
    """
    import numpy as np

    holder = any_length(holder)
    step = tokens_a_step(holder)
    places = -(-np.asarray(tokens, np.int64) // step)

    def cost(place: int) -> int:
        row = holder.row(max(1, place * step))
        return int(row.get("blocks_per_request") or row["per_gpu_bytes"])

    known = _bends(cost, int(places.min()), int(places.max()))
    found: Floats = np.interp(places, list(known), list(known.values()))
    return np.rint(found)


def running_costs(holder: Holder, lengths: Lengths) -> Floats:
    """The same on average over the steps of each: the first holds its prompt, each later one a token more."""
    import numpy as np

    if lengths.longest > LONGEST:
        raise usage_error(
            f"the longest request has {lengths.longest:,} tokens: lengths are looked at up to {LONGEST:,}",
            "leave such requests out",
        )
    step = tokens_a_step(any_length(holder))
    each = request_costs(holder, step * np.arange(1, lengths.longest // step + 2))
    before = np.concatenate([[0.0], step * np.cumsum(each)])

    def summed(tokens: Column) -> Floats:
        """Costs of 1, 2, … up to so many tokens."""
        sums: Floats = before[tokens // step] + tokens % step * each[tokens // step]
        return sums

    first = np.maximum(lengths.prompt_tokens, 1) - 1
    mean: Floats = (summed(first + lengths.steps) - summed(first)) / lengths.steps
    return mean


def tokens_a_step(holder: Holder) -> int:
    """Tokens by which a request's cost grows: a block's on all ranks that share a sequence's tokens."""
    size = holder.row(1)["block_size"]
    return int(size) * holder.layout.dcp if size else 1


def _bends(cost: Callable[[int], int], low: int, high: int) -> dict[int, int]:
    """Places in order, between which the cost is a line."""
    known = {low: cost(low), high: cost(high)}
    spans = [(low, high)] if high - low > 1 else []
    while spans:
        first, last = spans.pop()
        tried = sorted({first + (last - first) * part // 4 for part in (1, 2, 3)} - {first, last})
        line = (known[last] - known[first]) / (last - first)
        known |= {place: cost(place) for place in tried if place not in known}
        off = (abs(known[one] - known[first] - line * (one - first)) / known[one] for one in tried)
        if max(off) > STRAIGHT:
            middle = (first + last) // 2
            spans += [span for span in ((first, middle), (middle, last)) if span[1] - span[0] > 1]
    return dict(sorted(known.items()))

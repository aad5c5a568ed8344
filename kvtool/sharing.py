"""Made workloads with shared prefixes: what is typed as parameters, and their requests as chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.catalog import PrefixPreset, prefix_preset
from kvtool.errors import KvtoolError, usage_error
from kvtool.lengths import Lengths, parse_lengths
from kvtool.sharing_part import MOST_NODES, OWN, Part, Runs, Stream
from kvtool.trace_blocks import HashedRequests

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

NUM_REQUESTS = 2000
CHUNK_TOKENS = 1 << 21
BATCH = 1 << 11
"""Requests whose runs of tokens are laid out at once."""
MOST_PROMPT_TOKENS = 1 << 22
MOST_TOKENS = 1 << 33
MOST_LIVE = 1 << 20
"""Requests of all live sessions together: they are all in memory."""
MOST_PREFIX_TOKENS = 1 << 40
ID_BITS = 52
"""A part numbers its tokens from its place × 2^52 on."""
MOST_PARTS = 64

RANGES: Mapping[str, tuple[float, float]] = {
    "num_prefixes": (0, 1 << 20),
    "prefix_tokens": (0, MOST_PROMPT_TOKENS),
    "session_tokens": (0, MOST_PROMPT_TOKENS),
    "turn_tokens": (1, MOST_PROMPT_TOKENS),
    "output_tokens": (1, MOST_PROMPT_TOKENS),
    "zipf": (0, 10),
    "share": (0, 1),
    "turns": (1, 1024),
    "branch": (1, 1024),
    "keep": (1, MOST_NODES),
    "concurrency": (1, 1 << 16),
}
"""What can be set over a preset, and from where to where; lengths are means."""
WHOLE = {"num_prefixes", "turns", "branch", "keep", "concurrency"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """A made workload with shared prefixes: one part, or a mix of them, a tenant each."""

    name: str
    num_requests: int
    seed: int
    parts: tuple[Part, ...]

    @property
    def mean_prompt_tokens(self) -> float:
        """Of a request, over the parts by weight."""
        total = sum(part.weight for part in self.parts)
        return sum(part.weight * part.mean_prompt_tokens for part in self.parts) / total

    @property
    def mean_output_tokens(self) -> float:
        """Of a request, over the parts by weight."""
        total = sum(part.weight for part in self.parts)
        return sum(part.weight * part.output.mean for part in self.parts) / total

    def echo(self) -> dict[str, object]:
        """All parameters as JSON has them: flat for one part, in `parts` for a mix."""
        named = {"workload": self.name, "num_requests": self.num_requests, "seed": self.seed}
        if len(self.parts) == 1:
            return named | self.parts[0].echo()
        parts = [
            {"tenant": part.tenant, "weight": part.weight, **part.echo()} for part in self.parts
        ]
        return named | {"parts": parts}


def sharing_of(
    name: str, *, num_requests: int | None = None, seed: int = 0, **overrides: float | None
) -> Sharing:
    """The workload of that name, or a mix like chat:3+agent:1, with what is set over its presets.

    A part's share of the requests is its weight's of all weights. Overrides are those of RANGES and
    hold for every part; None leaves the preset's.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    for key, value in given.items():
        _check(key, value)
    count = NUM_REQUESTS if num_requests is None else num_requests
    if not 1 <= count <= MOST_TOKENS:
        raise usage_error(
            f"--num-requests: {count:,} is not from 1 to {MOST_TOKENS:,}", "give fewer"
        )
    if seed < 0:
        raise usage_error(f"--seed: {seed} is below 0", "give a whole number from 0 on")
    words = [_weighted(word, name) for word in name.split("+")]
    if len(words) > MOST_PARTS:
        raise usage_error(
            f"--workload: a mix of {len(words)} is too much", f"mix {MOST_PARTS} at most"
        )
    parts: list[Part] = []
    for preset, weight in words:
        same = sum(part.preset == preset.id for part in parts)
        parts.append(_part(preset, f"{preset.id}-{same + 1}" if same else preset.id, weight, given))
    full = parts[0].preset if len(parts) == 1 else "+".join(
        f"{part.preset}:{part.weight:g}" for part in parts
    )  # fmt: skip
    made = Sharing(name=full, num_requests=count, seed=seed, parts=tuple(parts))
    _check_size(made)
    return made


def tenants(sharing: Sharing) -> tuple[str, ...]:
    """The names of the parts, by the number in the column `tenant`."""
    return tuple(part.tenant for part in sharing.parts)


def chunks(
    sharing: Sharing, *, tokens: int = CHUNK_TOKENS, batch: int = BATCH
) -> Iterator[HashedRequests]:
    """The requests in the order in which they are served: the same ones whatever the sizes.

    A block is a token, of prompts and outputs. A chunk has at most so many tokens, or one request.
    """
    import numpy as np

    seeds = np.random.SeedSequence(sharing.seed).spawn(1 + len(sharing.parts))
    chooser = np.random.default_rng(seeds[0])
    streams = [
        Stream(part, seed, place << ID_BITS)
        for place, (part, seed) in enumerate(zip(sharing.parts, seeds[1:], strict=True))
    ]
    below = np.cumsum([part.weight for part in sharing.parts])
    for first in range(0, sharing.num_requests, batch):
        count = min(batch, sharing.num_requests - first)
        drawn = chooser.random(count) * below[-1]
        tenant = np.searchsorted(below[:-1], drawn, side="right")
        yield from _spelled(_taken(streams, tenant), tenant if len(streams) > 1 else None, tokens)


def _taken(streams: list[Stream], tenant: Column) -> Runs:
    """The next requests, each of its part's stream."""
    import numpy as np

    if len(streams) == 1:
        return streams[0].take(len(tenant))
    shape = (len(tenant), OWN + max(stream.part.turns for stream in streams))
    runs = Runs(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape[0], np.int64))
    for place, stream in enumerate(streams):
        rows = np.flatnonzero(tenant == place)
        if len(rows):
            taken = stream.take(len(rows))
            width = taken.firsts.shape[1]
            runs.firsts[rows, :width] = taken.firsts
            runs.lengths[rows, :width] = taken.lengths
            runs.outputs[rows] = taken.outputs
    return runs


def _spelled(runs: Runs, tenant: Column | None, tokens: int) -> Iterator[HashedRequests]:
    """Token by token, cut into chunks."""
    import numpy as np

    starts = np.zeros(len(runs.outputs) + 1, np.int64)
    np.cumsum(runs.lengths.sum(axis=1), out=starts[1:])
    first = 0
    while first < len(runs.outputs):
        end = int(np.searchsorted(starts, starts[first] + tokens, side="right")) - 1
        end = max(end, first + 1)
        lengths = runs.lengths[first:end].ravel()
        # A run counts up from its first token: add what it starts at less what is before it.
        ids = np.repeat(runs.firsts[first:end].ravel() - np.cumsum(lengths) + lengths, lengths)
        ids += np.arange(len(ids))
        yield HashedRequests(
            arrival_ns=np.zeros(end - first, np.int64),
            prompt_tokens=np.diff(starts[first : end + 1]) - runs.outputs[first:end],
            output_tokens=runs.outputs[first:end],
            hash_ids=ids,
            starts=starts[first : end + 1] - starts[first],
            block_size=1,
            tenant=None if tenant is None else tenant[first:end],
            spells_outputs=True,
        )
        first = end


def _weighted(word: str, name: str) -> tuple[PrefixPreset, float]:
    preset, colon, text = (one.strip() for one in word.partition(":"))
    try:
        weight = float(text) if colon else 1.0
    except ValueError:
        weight = math.nan
    if not preset or not 1e-6 <= weight <= 1e6:
        raise usage_error(
            f"--workload: '{name}' is no workload and no mix of them",
            "write a name, or names with weights above 0: chat:3+agent:1",
        )
    return prefix_preset(preset), weight


def _part(preset: PrefixPreset, tenant: str, weight: float, given: Mapping[str, float]) -> Part:
    prefix = _lengths(preset, "prefix", given.get("prefix_tokens"))
    count = int(given.get("num_prefixes", preset.num_prefixes))
    if prefix is None and given.get("num_prefixes", 0) > 0 and "prefix_tokens" not in given:
        raise usage_error(
            f"{preset.id} has no shared prefixes: of what length are {count:,}?",
            "give --prefix-tokens as well",
        )
    if prefix and not count and "num_prefixes" not in given:
        raise usage_error(
            f"{preset.id} has no shared prefixes: how many of {prefix.mean:,.10g} tokens?",
            "give --num-prefixes as well",
        )
    turn, output = (_lengths(preset, one, given.get(f"{one}_tokens")) for one in ("turn", "output"))
    assert turn is not None
    assert output is not None
    keep = given.get("keep", preset.keep)
    return Part(
        preset=preset.id,
        tenant=tenant,
        weight=weight,
        num_prefixes=count if prefix else 0,
        prefix=prefix if count else None,
        zipf=given.get("zipf", preset.zipf),
        share=given.get("share", preset.share),
        session=_lengths(preset, "session", given.get("session_tokens")),
        turn=turn,
        output=output,
        turns=int(given.get("turns", preset.turns)),
        branch=int(given.get("branch", preset.branch)),
        keep=None if keep is None else int(keep),
        concurrency=int(given.get("concurrency", preset.concurrency)),
    )


def _lengths(preset: PrefixPreset, kind: str, mean: float | None) -> Lengths | None:
    """With another mean it is the same distribution at another scale: the cap moves with it."""
    dist, preset_mean, cap = (getattr(preset, f"{kind}_{one}") for one in ("dist", "mean", "cap"))
    if mean == 0 or (mean is None and dist is None):
        return None
    if dist is None:
        dist, preset_mean, cap = "fixed", 1, 1
    if mean is None:
        mean = preset_mean
    cap = math.ceil(cap * mean / preset_mean)
    return parse_lengths(dist, name=f"--{kind}-tokens", mean=mean, cap=cap)


def _check(key: str, value: float) -> None:
    if key not in RANGES:
        raise TypeError(f"a workload has no {key}")
    low, high = RANGES[key]
    option = f"--{key.replace('_', '-')}"
    if not low <= value <= high or (key in WHOLE and value != int(value)):
        kind = "whole number" if key in WHOLE else "number"
        raise usage_error(
            f"{option}: {value:,.10g} is not a {kind} from {low:,.10g} to {high:,.10g}",
            "give another, or leave it out for the preset's",
        )
    if key.endswith("_tokens") and 0 < value < 1:
        raise usage_error(f"{option}: a mean of {value:g} tokens is too small", "give 1 or more")


def _check_size(sharing: Sharing) -> None:
    """Refuse what no cache is asked about, and what would not end or not fit."""
    for part in sharing.parts:
        live = part.concurrency * part.requests_per_session
        if part.requests_per_session > MOST_NODES or live > MOST_LIVE:
            raise _too_large(
                f"{part.preset}: {part.concurrency:,} sessions of {part.requests_per_session:,}"
                f" requests or more are live at once; {MOST_LIVE:,} requests in all, and"
                f" {MOST_NODES:,} a session, are the most",
                "take fewer turns, branches or live sessions, or keep fewer nodes a level",
            )
        if part.max_prompt_tokens > MOST_PROMPT_TOKENS:
            raise _too_large(
                f"{part.preset}: prompts of up to {part.max_prompt_tokens:,} tokens;"
                f" {MOST_PROMPT_TOKENS:,} are the most",
                "take fewer turns, or shorter prefixes, turns or outputs",
            )
        if part.prefix and part.num_prefixes * part.prefix.cap > MOST_PREFIX_TOKENS:
            raise _too_large(
                f"{part.preset}: {part.num_prefixes:,} prefixes of up to {part.prefix.cap:,} tokens"
                f" are more than {MOST_PREFIX_TOKENS:,}",
                "take fewer or shorter prefixes",
            )
    each = sharing.mean_prompt_tokens + sharing.mean_output_tokens
    if sharing.num_requests * each > MOST_TOKENS:
        raise _too_large(
            f"{sharing.name}: {sharing.num_requests:,} requests of {each:,.0f} tokens are more than"
            f" {MOST_TOKENS:,} tokens",
            f"take {int(MOST_TOKENS / each):,} requests at most",
        )


def _too_large(message: str, hint: str) -> KvtoolError:
    return KvtoolError(message, hint, code="too_large")

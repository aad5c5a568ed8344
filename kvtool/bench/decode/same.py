"""Whether a cache generates what the dynamic cache does; a near-tie of two words decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtool.bench.decode.model import Decoder
from kvtool.bench.decode.stepping import attend

Tensor = torch.Tensor

NEAR = 1e-4
"""A margin between two logits, as a share of all logits' spread, that fp32 in another order may turn."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ties`: tokens that are another of two words as likely."""

    same: bool
    ties: int = 0


def compare(decoder: Decoder, ids: Tensor, found: Tensor, known: Tensor) -> Verdict:
    """What was found [batch, output] after prompts [batch, tokens] against what is known."""
    ties = 0
    for row in (found != known).any(1).nonzero()[:, 0].tolist():
        more = near_ties(decoder, ids[row], found[row].tolist())
        if more is None:
            return Verdict(False, ties)
        ties += more
    return Verdict(True, ties)


def near_ties(decoder: Decoder, ids: Tensor, found: Sequence[int], rank: int = 0) -> int | None:
    """Of tokens that are not the known ones: how many are near-ties of the likeliest word after the
    prompt [tokens] and the tokens before them; None if one is not.

    The first is to be the word of that rank. All positions are computed again at once, without a
    cache, so that what follows a tie is checked too.
    """
    attend(decoder, "sdpa")
    tokens = torch.tensor(found, device=ids.device)
    with torch.no_grad():
        logits = decoder.module(
            input_ids=torch.cat([ids, tokens[:-1]])[None],
            use_cache=False,
            logits_to_keep=len(found),
        ).logits[0]
    best, right = logits.max(-1)
    spread = best - logits.min(-1).values
    first = logits[0].topk(rank + 1)
    best[0], right[0] = first.values[rank], first.indices[rank]
    made = logits.gather(1, tokens[:, None])[:, 0]
    if not bool(((best - made).abs() < NEAR * spread).all()):
        return None
    return max(1, int((tokens != right).sum()))

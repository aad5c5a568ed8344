"""How the parameters of a family are counted: what differs from Llama."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.weights.pieces import Piece, Whole, attention, last_norm, mlp, norms, words

ATTENTION, MLP, TWO_NORMS = attention(), mlp(), norms(2)
LAST_NORM, WORDS = last_norm(), words()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """RMS norms, a gated MLP, no biases, a head of its own, unless said otherwise."""

    mixer: Piece = ATTENTION
    """What mixes tokens: attention, a state, or both."""
    feed: Piece = MLP
    """What follows in the layer: an MLP, experts, or nothing."""
    norms: Piece = TWO_NORMS
    last_norm: Whole = LAST_NORM
    words: Whole = WORDS
    beside: tuple[Whole, ...] = ()
    """What stands beside the language model, or belongs to none of its layers: towers, projections."""

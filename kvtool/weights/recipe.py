"""How the parameters of a family are counted: what differs from Llama."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.weights.pieces import Piece, Whole, attention, last_norm, mlp, norms, words


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """RMS norms, a gated MLP, no biases, a head of its own, unless said otherwise."""

    mixer: Piece = attention()
    """What mixes tokens: attention, a state, or both."""
    feed: Piece = mlp()
    """What follows in the layer: an MLP, experts, or nothing."""
    norms: Piece = norms(2)
    last_norm: Whole = last_norm()
    words: Whole = words()
    beside: tuple[Whole, ...] = ()
    """What stands beside the language model, or belongs to none of its layers: towers, projections."""

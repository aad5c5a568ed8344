"""What a model's weights consist of: parts whose parameters are alike, and sums over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Role = Literal[
    "embedding", "head", "attention", "state", "mlp", "experts", "shared", "router", "norms",
    "encoder", "vision", "audio", "beside",
]  # fmt: skip
"""`state`: a layer's convolution, recurrence or linear attention. `shared`: experts that every token
meets. `beside`: what belongs to no layer and is none of the others, such as projections of embeddings."""
TEXT: frozenset[Role] = frozenset({
    "embedding", "head", "attention", "state", "mlp", "experts", "shared", "router", "norms", "beside",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """Parameters, and those of them in matrices that a token is multiplied by."""

    count: int = 0
    matrices: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.count + other.count, self.matrices + other.matrices)

    def __mul__(self, times: int) -> Size:
        return Size(self.count * times, self.matrices * times)


def matrix(inputs: int, outputs: int, bias: bool = False) -> Size:
    """A linear layer."""
    return Size(inputs * outputs + outputs * bias, inputs * outputs)


def vector(width: int, bias: bool = False) -> Size:
    """A norm's weight, a bias, a convolution's taps: what multiplies no token as a matrix."""
    return Size(width * (1 + bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Parameters that are alike, of one layer or of the whole model."""

    role: Role
    size: Size
    layer: int | None = None
    """Decoder layer; None: of no layer."""
    experts: int = 1
    """Equal experts that `size` consists of; a token meets `chosen` of them."""
    chosen: int = 1
    pieces: int = 0
    """Most pieces that tensor parallelism cuts it into (heads, columns); 0: whole on every rank."""
    quantised: bool = False
    """Linear layers, which quantised checkpoints store in fewer bits unless they say otherwise."""

    @property
    def is_met(self) -> bool:
        """Whether a decoded token is multiplied by it: not a table that is looked up, not a tower."""
        looked_up = self.role == "embedding" or (self.role == "beside" and not self.size.matrices)
        return self.role in TEXT and not looked_up

    @property
    def active(self) -> Size:
        """What one token meets."""
        share = Fraction(self.chosen, self.experts)
        return Size(int(self.size.count * share), int(self.size.matrices * share))

    def rank_count(self, tp: int) -> Fraction:
        """Parameters on the fullest of `tp` ranks; pieces fewer than ranks are copied."""
        if not self.pieces:
            return Fraction(self.size.count)
        return Fraction(self.size.count * max(1, -(-self.pieces // tp)), self.pieces)


def total(parts: Iterable[Part]) -> Size:
    """All of them."""
    return sum((part.size for part in parts), Size())

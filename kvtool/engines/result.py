"""What an engine answers for one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.model.shape import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class KindBytes:
    """One cache entry and what it takes: `tokens` held, `bytes` with its states."""

    entry: LayerCache
    tokens: int
    bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes of one kind of tensor in one layer of transformers' cache object."""

    layer: int
    kind: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One sequence's cache, whole model; `rank_bytes` is the fullest GPU's share."""

    kinds: tuple[KindBytes, ...]
    next_token_bytes: int
    state_bytes: int
    cross_bytes: int
    rank_bytes: int
    mha_bytes: int
    scale_bytes: int
    parts: tuple[Part, ...] = ()
    """By kind of tensor, where the engine tells them apart."""

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(kind.bytes for kind in self.kinds)

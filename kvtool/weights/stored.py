"""The bytes that a model's parts take, as a checkpoint stores them and an engine loads them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

from kvtool.dtypes import Dtype
from kvtool.weights.counting import not_counted
from kvtool.weights.modules import wordings
from kvtool.weights.parts import Part, Role
from kvtool.weights.schemes import SAID_IN, TOWERS, Scheme, scheme_of
from kvtool.weights.storages import Storage

Stages = Sequence[Collection[int]]
"""Decoder layers of each pipeline stage."""
Shares = tuple[tuple[Storage | None, Fraction], ...]
"""How much of a matrix is stored how; None: in the model's dtype."""

_AS_IT_IS: Shares = ((None, Fraction(1)),)
_LAST: frozenset[Role] = frozenset({"head", "norms"})
NAMES = 150
"""A role of a layer has about so many, with all wordings and prefixes."""
MOST_MATCHES = 20_000_000
"""Names held against patterns, at most: seconds."""
_WORDS: dict[Role, str] = {
    "embedding": "embeddings", "norms": "norms", "router": "routers", "mlp": "MLPs",
    "state": "recurrences", "shared": "shared experts", "vision": "vision tower",
    "audio": "audio tower", "beside": "what stands beside the layers",
}  # fmt: skip

__all__ = ["SAID_IN", "Scheme", "Stages", "Stored", "StoredPart", "scheme_of", "stored"]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part, and its bits with the scales' share."""

    part: Part
    bits: Fraction
    storages: tuple[str, ...] = ()
    """How its matrices are stored, in words, where they are quantised."""

    def rank_bits(self, tp: int, ep: int) -> Fraction:
        """On the fullest rank of its stage: whole experts where they are spread over `ep` ranks."""
        part = self.part
        if ep > 1 and part.role == "experts":
            return self.bits * Fraction(-(-part.experts // ep), part.experts)
        if not part.size.count:
            return Fraction(0)
        return self.bits * part.rank_count(tp) / part.size.count


@dataclass(frozen=True, slots=True)
class Stored:
    """The bytes of a model's weights."""

    parts: tuple[StoredPart, ...]
    basis: str
    """In words, what they are counted by."""

    def __hash__(self) -> int:
        """Of what is short: it is a key of what was computed of its parts."""
        return hash((len(self.parts), self.basis))

    @property
    def parameters(self) -> int:
        """Scales and zero points are none."""
        return sum(one.part.size.count for one in self.parts)

    @property
    def bytes(self) -> int:
        """All of them."""
        return _bytes(one.bits for one in self.parts)

    @property
    def active_parameters(self) -> int:
        """That one token meets: the chosen experts, the head, no table that is looked up, no tower."""
        return sum(one.part.active.count for one in self.parts if one.part.is_met)

    @property
    def expert_bytes(self) -> int:
        """All routed experts."""
        return _bytes(one.bits for one in self.parts if one.part.role == "experts")

    @property
    def by_role(self) -> dict[Role, int]:
        """Each role's bytes, rounded up on its own."""
        bits: dict[Role, Fraction] = {}
        for one in self.parts:
            bits[one.part.role] = bits.get(one.part.role, Fraction(0)) + one.bits
        return {role: ceil(many / 8) for role, many in bits.items()}

    @property
    def tied(self) -> bool:
        """The head is the embedding table: no other is stored."""
        return all(one.part.role != "embedding" for one in self.parts)

    def rank_bytes(self, tp: int = 1, stages: Stages = ((),), ep: int = 1) -> int:
        """On the fullest rank of `tp` × the pipeline's stages, experts spread over `ep` ranks.

        What belongs to no layer is on the first stage, the head and the last norm on the last; a head
        that is the table, on both (vLLM, models/llama.py).
        """
        stage_of = {layer: i for i, stage in enumerate(stages) for layer in stage}
        last = len(stages) - 1
        bits = [Fraction(0)] * len(stages)
        for one in self.parts:
            many, part = one.rank_bits(tp, ep), one.part
            if part.layer is None:
                bits[last if part.role in _LAST else 0] += many
                if part.role == "head" and last and self.tied:
                    bits[0] += many
            elif last:
                bits[stage_of[part.layer]] += many
            else:
                bits[0] += many
        return ceil(max(bits) / 8)


def _bytes(bits: Iterator[Fraction]) -> int:
    return ceil(sum(bits, Fraction(0)) / 8)


def stored(
    parts: Sequence[Part], config: Mapping[str, Any], dtype: Dtype, *, name: str = "the model"
) -> Stored:
    """The parts as the config's scheme stores them: `dtype` for what no scheme speaks of.

    Norms, biases, routers and embedding tables always stay in `dtype`.
    """
    scheme = scheme_of(config, name=name)
    tied = all(part.role != "embedding" for part in parts)
    cache: dict[tuple[Role, int | None], Shares] = {}
    kept: list[StoredPart] = []
    found: dict[str, dict[Role, int]] = {}
    _check_work(name, parts, scheme)
    for part in parts:
        shares = _AS_IT_IS
        if scheme.key and _can(part, tied=tied):
            at = (part.role, part.layer)
            if at not in cache:
                cache[at] = _shares(scheme, *at)
            shares = cache[at]
        bits = Fraction((part.size.count - part.size.matrices) * dtype.bits)
        for storage, share in shares:
            bits += part.size.matrices * share * (storage.bits if storage else dtype.bits)
            roles = found.setdefault(storage.words if storage else "", {})
            roles[part.role] = roles.get(part.role, 0) + part.size.count
        ways = tuple(storage.words for storage, _ in shares if storage)
        kept.append(StoredPart(part, bits, ways))
    return Stored(tuple(kept), _basis(parts, scheme, dtype, found))


def _can(part: Part, *, tied: bool) -> bool:
    """Linear layers; a head with a matrix of its own; those of towers, where the scheme reaches them."""
    if part.role == "head":
        return not tied
    return part.quantised or part.role in TOWERS


def _check_work(name: str, parts: Sequence[Part], scheme: Scheme) -> None:
    """A stranger's list may be long, and the model deep."""
    patterns = len(scheme.left.loose) + len(scheme.named.loose)
    places = len({(part.role, part.layer) for part in parts if part.quantised})
    if patterns * places * NAMES > MOST_MATCHES:
        raise not_counted(name, f"{scheme.key} has {patterns:,} patterns for all layers")


def _shares(scheme: Scheme, role: Role, layer: int | None) -> Shares:
    """Of a role's modules, in the wording that the lists speak of most."""
    usual = scheme.by_role.get(role)
    best, most = [usual], 0
    if scheme.left or scheme.named:
        for modules in wordings(role, layer, scheme.kind):
            found = [_one(scheme, names, layer or 0) for names in modules]
            hits = sum(hit for hit, _ in found)
            if hits > most:
                best, most = [value if hit else usual for hit, value in found], hits
    return tuple((one, Fraction(best.count(one), len(best))) for one in dict.fromkeys(best))


def _one(scheme: Scheme, names: Sequence[str], layer: int) -> tuple[bool, Storage | None]:
    """What the lists say of a module, whatever stands before its name."""
    for name in names:
        if scheme.left.find(name, layer)[0]:
            return True, None
    for name in names:
        hit, storage = scheme.named.find(name, layer)
        if hit:
            return True, storage
    return False, None


def _basis(
    parts: Sequence[Part], scheme: Scheme, dtype: Dtype, found: Mapping[str, Mapping[Role, int]]
) -> str:
    count = f"{sum(part.size.count for part in parts):,} parameters"
    ways = {words: roles for words, roles in found.items() if words}
    if not ways:
        return f"{count} in {dtype.name}, counted from the config"
    spoken = [
        f"{_and(list(roles))} in {words}" if len(ways) > 1 or set(roles) == {"experts"} else words
        for words, roles in ways.items()
    ]
    rest = [role for role in found.get("", {}) if not any(role in roles for roles in ways.values())]
    also = f"; {_and(rest)} in {dtype.name}" if rest else ""
    return f"{count}, counted from the config: {', '.join(spoken)}, by {scheme.key}{also}"


def _and(roles: Sequence[Role]) -> str:
    words = [_WORDS.get(role, role) for role in roles]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

"""Ways to store a matrix, and the keys of a config that speak of them, read with their ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from kvtool.model.keys import Keys, refuse, shown


@dataclass(frozen=True, slots=True)
class Storage:
    """How a matrix is stored: its words, and bits a weight with the scales' share."""

    words: str
    bits: Fraction


class UnknownError(Exception):
    """A known method in a form that is not; its text is which."""


MAX_SECTIONS = 20_000


def blocks(words: str, bits: int, block: int, scale: int, more: int = 0) -> Storage:
    """`bits` a weight; a scale, and perhaps a zero, of so many bits for each block."""
    return Storage(words, bits + Fraction(scale + more, block))


NVFP4 = blocks("nvfp4 with an fp8 scale per 16", 4, 16, 8)
MXFP4 = blocks("mxfp4 with an 8-bit scale per 32", 4, 32, 8)
MXFP8 = blocks("mxfp8 with an 8-bit scale per 32", 8, 32, 8)
FP8 = Storage("fp8", Fraction(8))


def integers(bits: int, group: int, *, zero: bool) -> Storage:
    """Packed integers; a 16-bit scale and perhaps a packed zero for each group. −1: a channel."""
    if group == -1:
        return Storage(f"int{bits}", Fraction(bits))
    also = " and zero" if zero else ""
    return blocks(f"int{bits} with an fp16 scale{also} per {group}", bits, group, 16, bits * zero)


def block_scaled(sides: list[int], scale: int) -> Storage:
    """fp8 with a scale for a block of so many rows and columns."""
    rows, columns = sides
    word = {8: "ue8m0", 16: "bf16", 32: "fp32"}[scale]
    words = f"fp8 with {word} scales per {rows} × {columns} block"
    return blocks(words, 8, rows * columns, scale)


def sides_of(keys: Keys, name: str) -> list[int] | None:
    """Rows and columns of a block; None where it is absent or null."""
    found = keys.numbers(name, low=1, high=2**16)
    if found is not None and len(found) != 2:
        raise refuse(f"{keys.path}{name} is not a number of rows and of columns")
    return found


def bits_of(keys: Keys, *names: str) -> int:
    bits = keys.need(*names, low=1, high=64).value
    if not 2 <= bits <= 8:
        raise UnknownError(f"{bits} bits")
    return bits


def group_of(keys: Keys, *names: str, absent: int = -1) -> int:
    """Weights that share a scale; −1: all of a channel."""
    known = keys.maybe(*names, low=-1, high=2**20)
    if known is None:
        return absent
    if known.value == 0:
        raise refuse(f"{known.by}: a group has no weights")
    return known.value


def modules_in(keys: Keys, *names: str) -> list[str]:
    """Names of modules; null and absent are an empty list."""
    found = keys.get(*names)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise refuse(f"{keys.path}{names[0]} is not a list of modules")
    return [one for one in found if one]


def sections(keys: Keys, name: str) -> Iterator[tuple[str, Keys]]:
    """Each object in an object, and its name."""
    held = keys.section(name)
    if len(held.raw) > MAX_SECTIONS:
        raise refuse(f"{keys.path}{name} has {len(held.raw):,} entries")
    for one in held.raw:
        yield one, held.section(one)


ALGORITHMS: dict[str, Callable[[int], Storage]] = {
    "FP8": lambda group: FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": lambda group: FP8,
    "FP8_PB_WO": lambda group: block_scaled([128, 128], 32),
    "FP8_PB_REAL": lambda group: block_scaled([128, 128], 32),
    "NVFP4": lambda group: NVFP4,
    "NVFP4_AWQ": lambda group: NVFP4,
    "W4A16_NVFP4": lambda group: NVFP4,
    "W4A8_NVFP4_FP8": lambda group: NVFP4,
    "MXFP4": lambda group: MXFP4,
    "MXFP8": lambda group: MXFP8,
    "INT4_AWQ": lambda group: integers(4, group if group > 0 else 128, zero=False),
    "W4A16_AWQ": lambda group: integers(4, group if group > 0 else 128, zero=False),
    "W4A8_AWQ": lambda group: integers(4, group if group > 0 else 128, zero=False),
    "W8A8_SQ_PER_CHANNEL": lambda group: Storage("int8", Fraction(8)),
}
"""Of ModelOpt: modelopt/torch/export/quant_utils.py. Given the size of a group."""


def algorithm_of(keys: Keys) -> Storage | None:
    """quant_algo as a storage; None where it is null: then the cache alone is quantised."""
    stated = keys.get("quant_algo")
    if stated is None:
        return None
    made = ALGORITHMS.get(stated.upper()) if isinstance(stated, str) else None
    if made is None:
        raise UnknownError(f"quant_algo {shown(stated)}")
    group, own = group_of(keys, "group_size"), {"NVFP4": 16, "MXFP": 32}
    for word, size in own.items():
        if word in stated.upper() and group not in (-1, size):
            raise UnknownError(f"{shown(stated)} in groups of {group}")
    return made(group)

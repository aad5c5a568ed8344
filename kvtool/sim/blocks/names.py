"""Names of blocks, compiled: a hash of 64 bits of all tokens up to the block's end.

A token is a value and an offset, and requests are kept as runs of offsets that count up. Within a
block the longest such runs follow from the tokens alone, so equal tokens have equal names however the
request was cut into pieces. Different ones share a name once in 2^64: among 100 million blocks with a
probability of 3 in 10,000.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtool.jit import part
from kvtool.sim.blocks.numbers import NO_NAME

SEED = 0x243F6A8885A308D3
"""What the name of a first block follows: the digits of π."""
ENDLESS = 1 << 62


@part
def name_of(size: int, request: Any, pieces: Any, block: int, piece: int, chain: int) -> Any:
    """The name of a block of so many tokens, after `chain` and from a piece on, and the piece where the next begins."""
    place = block * size
    end = place + size
    mixed = np.uint64(chain)
    value, first, length = 0, 0, 0
    while place < end:
        if piece < request.last_piece:
            of, shift, stop = pieces[piece].value, pieces[piece].shift, pieces[piece].end
        else:
            of, shift, stop = request.out_value, request.out_shift, ENDLESS
        taken = min(stop, end) - place
        if length > 0 and of == value and shift + place == first + length:
            length += taken
        else:
            if length > 0:
                mixed = mix(mixed, value, first, length)
            value, first, length = of, shift + place, taken
        place += taken
        if place == stop:
            piece += 1
    name = np.int64(mix(mixed, value, first, length))
    return (name if name != NO_NAME else np.int64(1)), piece


@part
def mix(chain: Any, value: int, first: int, length: int) -> Any:
    """A run of tokens after what came before: the multiplications and shifts of splitmix64."""
    mixed = chain ^ (np.uint64(value) * np.uint64(0x9E3779B97F4A7C15))
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed += np.uint64(first) * np.uint64(0xD1B54A32D192ED03)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    mixed += np.uint64(length)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return mixed ^ (mixed >> np.uint64(31))

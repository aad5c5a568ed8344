"""What mixes tokens without a growing cache: Mamba, delta rules, convolutions, RG-LRU, RWKV.

Sizes are those of the states that the layer keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt

from kvtool.model.shape import LayerCache, State
from kvtool.weights.model import Flag, Layer, Model
from kvtool.weights.parts import Part, Size, matrix, vector
from kvtool.weights.pieces import Piece, norm


def state(layer: Layer, linears: Size, pieces: int, *, rest: Size | None = None) -> Iterator[Part]:
    """Linear layers of a recurrence, and what is stored beside them, which no checkpoint quantises."""
    here = Part(role="state", size=linears, layer=layer.index, pieces=pieces, quantised=True)
    yield here
    if rest is not None:
        yield replace(here, size=rest, quantised=False)


def _state(entry: LayerCache, name: str) -> State:
    return next(one for one in entry.states if one.name == name)


def mamba1(rank: str, *, bias: Flag, conv_bias: Flag, normed: bool = False) -> Piece:
    """Mamba: channels of their own. `rank`: the key of the time step's rank, "auto" for hidden_size / 16.

    `normed`: norms on the time step, B and C, as in Jamba.
    """

    def piece(model: Model, layer: Layer) -> Iterator[Part]:
        entry = layer.entry("linear")
        if entry is None:
            return
        conv, biased = _state(entry, "conv"), model.flag(bias)
        inner = conv.elements
        size = _state(entry, "ssm").elements // inner
        auto = model.keys.get(rank) == "auto"
        step = -(-model.hidden // 16) if auto else model.size(rank)
        linears = matrix(model.hidden, 2 * inner, biased) + matrix(inner, model.hidden, biased)
        linears += matrix(inner, step + 2 * size) + matrix(step, inner, True)
        taps = vector(inner * conv.held) + vector(inner * model.flag(conv_bias))
        yield from state(layer, linears, inner, rest=taps + vector(inner * (size + 1)))
        if normed:
            yield norm(layer, vector(step + 2 * size))

    return piece


def mamba2(
    *, in_bias: Flag, out_bias: Flag, conv_bias: Flag | tuple[str, str], gated_norm: Flag = True
) -> Piece:
    """Mamba-2: heads, whose B and C are shared by groups.

    `conv_bias`: where it is two keys, the first counts if the config has it.
    """

    def piece(model: Model, layer: Layer) -> Iterator[Part]:
        entry = layer.entry("linear")
        if entry is None:
            return
        conv, hidden, biased = _state(entry, "conv"), model.hidden, model.flag(in_bias)
        (inner, heads), (shared, groups) = conv.parts
        flag = (
            conv_bias
            if not isinstance(conv_bias, tuple)
            else conv_bias[conv_bias[0] not in model.keys.raw]
        )
        taps = conv.held + model.flag(flag)
        linears = matrix(hidden, 2 * inner + heads, biased)
        linears += matrix(inner, hidden, model.flag(out_bias))
        rest = vector(inner * taps + 3 * heads + inner * model.flag(gated_norm))
        yield from state(layer, linears, heads, rest=rest)
        yield from state(layer, matrix(hidden, shared, biased), groups, rest=vector(shared * taps))

    return piece


def gated_delta(model: Model, layer: Layer) -> Iterator[Part]:
    """Gated DeltaNet: queries and keys of the key heads; values, gates and decays of the value heads."""
    entry = layer.entry("linear")
    if entry is None:
        return
    conv, hidden = _state(entry, "conv"), model.hidden
    (keys, key_heads), (values, heads) = conv.parts
    yield from state(layer, matrix(hidden, keys), key_heads, rest=vector(keys * conv.held))
    linears = matrix(hidden, 2 * values + 2 * heads) + matrix(values, hidden)
    yield from state(layer, linears, heads, rest=vector(values * conv.held + 2 * heads))
    yield norm(layer, vector(values // heads))


def delta_attention(model: Model, layer: Layer) -> Iterator[Part]:
    """Kimi delta attention: a gate and a decay of each channel, made by way of one head's width."""
    entry = layer.entry("linear")
    if entry is None:
        return
    conv, hidden = _state(entry, "conv"), model.hidden
    (channels, heads), *_ = conv.parts
    wide = channels // 3
    narrow = wide // heads
    yield from state(layer, matrix(hidden, narrow) * 2, 0)
    linears = matrix(hidden, channels) + matrix(narrow, wide) * 2 + matrix(hidden, heads)
    rest = vector(channels * conv.held + wide + heads)
    yield from state(layer, linears + matrix(wide, hidden), heads, rest=rest)
    yield norm(layer, vector(narrow))


def lightning(model: Model, layer: Layer) -> Iterator[Part]:
    """Lightning attention (MiniMax): queries, keys, values and an output gate, all of every head."""
    entry = layer.entry("linear")
    if entry is None:
        return
    elements, heads = _state(entry, "ssm").parts[0]
    wide = heads * isqrt(elements // heads)
    linears = matrix(model.hidden, 4 * wide) + matrix(wide, model.hidden)
    yield from state(layer, linears, heads)
    yield norm(layer, vector(wide))


def short_conv(model: Model, layer: Layer) -> Iterator[Part]:
    """LFM2: a convolution between two gates."""
    entry = layer.entry("linear")
    if entry is None:
        return
    hidden, biased = model.hidden, model.flag("conv_bias")
    linears = matrix(hidden, 3 * hidden, biased) + matrix(hidden, hidden, biased)
    taps = _state(entry, "conv").held + biased
    yield from state(layer, linears, hidden, rest=vector(hidden * taps))


def rg_lru(model: Model, layer: Layer) -> Iterator[Part]:
    """RecurrentGemma: a gated recurrence between three projections, its gates block-diagonal by heads."""
    entry = layer.entry("linear")
    if entry is None:
        return
    conv, heads = _state(entry, "conv"), model.size("num_attention_heads")
    wide = conv.elements
    block = wide // heads
    linears = matrix(model.hidden, 2 * wide) + matrix(wide, model.hidden)
    biases = vector(2 * wide + model.hidden)
    gates = (matrix(block, block, True) * heads) * 2
    taps = conv.held + 1  # it holds one column less
    yield from state(layer, linears + biases, heads, rest=gates + vector(wide * (taps + 2)))


def rwkv(model: Model, layer: Layer) -> Iterator[Part]:
    """RWKV-4: time mixing."""
    hidden = model.hidden
    wide = model.number("attention_hidden_size") or hidden
    linears = matrix(hidden, 3 * wide) + matrix(wide, hidden)
    yield from state(layer, linears, wide, rest=vector(2 * wide + 3 * hidden))

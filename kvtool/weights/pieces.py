"""Pieces that many families share: attention, MLPs, experts, norms, embeddings.

Each function of a row's switches gives a function of a model and one of its layers. The numbers are
those of the classes in transformers 5.24, which tests/test_weights.py builds and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from kvtool.model.keys import refuse
from kvtool.weights.model import Flag, Layer, Model
from kvtool.weights.parts import Part, Role, Size, matrix, vector

Piece = Callable[[Model, Layer], Iterable[Part]]
"""Parts of one layer."""
Whole = Callable[[Model], Iterable[Part]]
"""Parts of no layer."""
Width = Callable[[Model, Layer], int]
Number = Callable[[Model], int]


def attention(
    *,
    qkv_bias: Flag = False,
    out_bias: Flag = False,
    qk_norm: str = "",
    qk_norm_if: Flag = True,
    qk_norm_bias: bool = False,
    gate: bool = False,
) -> Piece:
    """Query, key, value and output projections of a layer that attends.

    `qk_norm`: "head" for one weight of the head's size on queries and one on keys; "heads" for one
    weight an element of all heads; only with `qk_norm_if`. `gate`: the query projection also makes a
    gate a query element.
    """

    def piece(model: Model, layer: Layer) -> Iterator[Part]:
        entry = layer.entry("full", "sliding", "chunked")
        if entry is None:
            return
        hidden, biased = model.hidden, model.flag(qkv_bias)
        queries, kv = entry.query_heads, entry.kv_heads
        q = matrix(hidden, queries * entry.k_head_dim * (1 + gate), biased)
        out = matrix(queries * entry.v_head_dim, hidden, model.flag(out_bias))
        k = matrix(hidden, kv * entry.k_head_dim, biased)
        v = matrix(hidden, kv * entry.v_head_dim, biased)
        here = Part(
            role="attention", size=q + out, layer=layer.index, pieces=queries, quantised=True
        )
        yield here
        yield replace(here, size=k + v, pieces=kv)
        if qk_norm and model.flag(qk_norm_if):
            heads = 2 if qk_norm == "head" else queries + kv
            yield norm(layer, vector(heads * entry.k_head_dim, qk_norm_bias))

    return piece


def norm(layer: Layer | None, size: Size) -> Part:
    """Norms, whole on every rank."""
    return Part(role="norms", size=size, layer=None if layer is None else layer.index)


def width_of(*names: str, times: int = 0) -> Width:
    """An MLP's width: a key, or that many times hidden_size where it is absent or null."""

    def width(model: Model, layer: Layer) -> int:
        known = model.keys.maybe(*names)
        if known is None and times:
            return times * model.hidden
        return known.value if known else model.size(*names)

    return width


def feed_forward(hidden: int, width: int, *, gated: bool, bias: bool = False) -> Size:
    """An MLP's matrices up, with a gate beside, and down."""
    ups = matrix(hidden, width, bias) * (1 + gated)
    return ups + matrix(width, hidden, bias)


def stack(
    role: Role,
    count: int,
    *,
    mixing: Size,
    heads: int,
    feeding: Size,
    columns: int,
    vectors: int,
    quantised: bool = False,
) -> Iterator[Part]:
    """All layers of a tower or an encoder, which are alike: `mixing`, `feeding` and `vectors` of one of
    them. `heads` and `columns` are the pieces that each is cut into."""
    yield Part(role=role, size=mixing * count, pieces=heads, quantised=quantised)
    yield Part(role=role, size=feeding * count, pieces=columns, quantised=quantised)
    yield Part(role=role, size=Size(vectors * count))


USUAL_WIDTH = width_of("intermediate_size")


def mlp(*, width: Width = USUAL_WIDTH, gated: bool = True, bias: Flag = False) -> Piece:
    """A dense MLP."""

    def piece(model: Model, layer: Layer) -> Iterator[Part]:
        wide = width(model, layer)
        size = feed_forward(model.hidden, wide, gated=gated, bias=model.flag(bias))
        yield Part(role="mlp", size=size, layer=layer.index, pieces=wide, quantised=True)

    return piece


def experts(
    *,
    width: Width,
    number: Number,
    chosen: Number,
    shared: Width | None = None,
    shared_gate: bool = False,
    gated: bool = True,
    bias: Flag = False,
    shared_bias: Flag = False,
    router_bias: Flag = False,
) -> Piece:
    """Routed experts, the router, and experts that every token meets: `shared` is their width together,
    `shared_bias` their biases where the routed ones have none."""

    def piece(model: Model, layer: Layer) -> Iterator[Part]:
        hidden, count, wide = model.hidden, number(model), width(model, layer)
        picked = chosen(model)
        if picked > count:
            raise refuse(f"{picked} experts a token, and there are {count}")
        one = feed_forward(hidden, wide, gated=gated, bias=model.flag(bias))
        at = layer.index
        yield Part(role="experts", size=one * count, layer=at, experts=count, chosen=picked,
                   pieces=wide, quantised=True)  # fmt: skip
        yield Part(role="router", size=matrix(hidden, count, model.flag(router_bias)), layer=at)
        together = shared(model, layer) if shared else 0
        biased = model.flag(bias) or model.flag(shared_bias)
        if together or (shared and model.flag(shared_bias)):
            size = feed_forward(hidden, together, gated=gated, bias=biased)
            yield Part(role="shared", size=size, layer=at, pieces=together, quantised=True)
            if shared_gate:
                yield Part(role="router", size=matrix(hidden, 1), layer=at)

    return piece


def either(is_sparse: Callable[[Model, Layer], bool], sparse: Piece, dense: Piece) -> Piece:
    """Experts in some layers, a dense MLP in the others."""

    def piece(model: Model, layer: Layer) -> Iterable[Part]:
        return (sparse if is_sparse(model, layer) else dense)(model, layer)

    return piece


def norms(per_layer: int = 2, *, bias: bool = False, weight: Flag = True) -> Piece:
    """So many norms of hidden_size in each layer."""

    def piece(model: Model, layer: Layer) -> Iterator[Part]:
        if per_layer and model.flag(weight):
            yield norm(layer, vector(model.hidden, bias) * per_layer)

    return piece


def last_norm(*, bias: bool = False, weight: Flag = True) -> Whole:
    """The norm before the head."""

    def whole(model: Model) -> Iterator[Part]:
        if model.flag(weight):
            yield norm(None, vector(model.hidden, bias))

    return whole


def words(
    *,
    positions: int | None = None,
    head_bias: Flag = False,
    tied: Callable[[Model], bool] = lambda model: model.tied,
) -> Whole:
    """The embedding table and the head, which is the table where they are tied.

    `positions`: learned positions, so many more than the maximum context. `tied`: for classes that do
    not go by tie_word_embeddings.
    """

    def whole(model: Model) -> Iterator[Part]:
        hidden, known = model.hidden, model.size("vocab_size")
        biased = model.flag(head_bias)
        head = Part(role="head", size=matrix(hidden, known, biased), pieces=known)
        if not tied(model):
            yield Part(role="embedding", size=Size(known * hidden), pieces=known)
        yield head
        if positions is not None:
            places = model.size("max_position_embeddings", "n_positions") + positions
            yield Part(role="beside", size=Size(places * hidden))

    return whole


def all_of(*pieces: Piece) -> Piece:
    """One after the other; nothing where none is named."""

    def piece(model: Model, layer: Layer) -> Iterator[Part]:
        for one in pieces:
            yield from one(model, layer)

    return piece


Roles = tuple[Role, ...]

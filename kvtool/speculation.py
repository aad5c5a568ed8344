"""Caches beside the model's own: a draft model's, and multi-token-prediction layers'."""

from __future__ import annotations

from dataclasses import replace

from kvtool.errors import KvtoolError
from kvtool.model.shape import LayerCache, ModelShape


def with_draft(shape: ModelShape, draft: ModelShape, name: str) -> ModelShape:
    """The model with a draft model's layers, which run beside its last ones on the last stage."""
    moved = tuple(
        replace(
            entry,
            layer=entry.layer + shape.num_layers,
            module=shape.num_modules - 1,
            owner=draft.model_type,
            trace=(("draft", name), ("layers", draft.layers_by), *entry.trace),
        )
        for entry in draft.layers
    )
    return replace(
        shape,
        layers=shape.layers + moved,
        num_layers=shape.num_layers + draft.num_layers,
        draft=name,
        draft_layers=draft.num_layers,
        assumed=shape.assumed or draft.assumed,
        notes=(
            *shape.notes,
            f"with the cache of the draft model {name}",
            *(f"{name}: {note}" for note in draft.notes),
            *_shorter(shape, draft, name),
        ),
    )


def _shorter(shape: ModelShape, draft: ModelShape, name: str) -> list[str]:
    top = draft.max_context
    if top is None or (shape.max_context is not None and shape.max_context <= top):
        return []
    return [f"{name} goes no further than {top:,} tokens"]


def with_mtp(shape: ModelShape, count: int) -> ModelShape:
    """The model with `count` multi-token-prediction layers.

    Each is a decoder layer like the model's last one that keeps every token (DeepSeek-V3, arXiv
    2412.19437, section 2.2): its attention, latent and indexer.
    """
    if not count:
        return shape
    last = max((e.layer for e in shape.layers if e.kind in ("full", "latent")), default=None)
    if last is None:
        raise KvtoolError(
            f"{shape.model_type} has no full attention layer for --mtp to repeat",
            "leave out --mtp",
            code="no_mtp",
        )
    own = [e for e in shape.layers if e.layer == last and e.kind != "linear"]
    return replace(
        shape,
        layers=shape.layers + tuple(_copy(shape, e, i) for i in range(count) for e in own),
        num_layers=shape.num_layers + count,
        mtp=count,
        notes=(
            *shape.notes,
            f"with {count} multi-token-prediction layer{'s' if count > 1 else ''} on the last stage",
        ),
    )


def _copy(shape: ModelShape, entry: LayerCache, index: int) -> LayerCache:
    return replace(
        entry,
        layer=shape.num_layers + index,
        module=shape.num_modules - 1,
        trace=(("mtp", f"like layer {entry.layer}"), ("layers", "--mtp"), *entry.trace),
    )

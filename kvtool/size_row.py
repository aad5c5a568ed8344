"""The row of a size: totals, kinds of layer with their formula, and what decided each number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtool.cache import CacheLayout, element_bytes, fixed_bytes
from kvtool.engines import transformers
from kvtool.engines.result import KindBytes, Sequence
from kvtool.model.shape import LayerCache, ModelShape, State
from kvtool.run import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model as the user named it."""

    name: str
    source: str
    shape: ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination of what is asked. Lengths in tokens."""

    engine: str
    context: int
    encoder: int
    batch: int
    layout: CacheLayout
    cache: str = "dynamic"
    prompt: int | None = None
    dp: int = 1
    """Data-parallel attention: ranks that share the sequences."""


DS_MLA = "fp8_ds_mla"
"""vLLM's own layout of DeepSeek's latents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """The engine's own options, as typed. Lengths in tokens, memory in bytes a GPU."""

    max_model_len: int | None = None
    max_batched_tokens: int = 8192
    batches_in_flight: int | None = None
    prefix_caching: bool = False
    hybrid: bool | None = None
    """None: vLLM's own choice, which is off where attention is chunked."""
    kv_memory: int | None = None
    ds_mla: bool = False
    """fp8_ds_mla: DeepSeek's own fp8 layout of a latent, 656 bytes a token."""

    def kv_dtype(self, layout: CacheLayout) -> str:
        """As it is asked for, and shown."""
        return DS_MLA if self.ds_mla else layout.kv.name


def inputs(subject: Subject, case: Case) -> Row:
    """What every engine's row echoes."""
    layout = case.layout
    return {
        "model": subject.name,
        "model_type": layout.shape.model_type,
        "source": subject.source,
        "engine": case.engine,
        "context_tokens": case.context,
        "encoder_tokens": case.encoder,
        "batch": case.batch,
        "dtype": layout.dtype.name,
        "kv_dtype": layout.kv.name,
        "tp": layout.tp,
        "pp": layout.pp,
        "dcp": layout.dcp,
        "dp": case.dp,
        "block_size": layout.block_size,
        "max_context": layout.shape.max_context,
        **_beside(layout.shape),
    }


def _beside(shape: ModelShape) -> Row:
    """What was added to the model, where something was."""
    added: Row = {"draft": shape.draft} if shape.draft else {}
    return added | ({"mtp": shape.mtp} if shape.mtp else {})


def size_row(subject: Subject, case: Case, sequence: Sequence, *, per_layer: bool) -> Row:
    """The row of an engine that holds tensors: `ideal` and `transformers`."""
    layout, batch = case.layout, case.batch
    row = inputs(subject, case)
    if case.engine == "transformers":
        row |= {"cache": case.cache, "prompt_tokens": case.prompt}
    row |= {
        "bytes_per_token": sequence.next_token_bytes,
        "sequence_bytes": sequence.bytes,
        "state_bytes": sequence.state_bytes,
        "cross_bytes": sequence.cross_bytes,
        "scale_bytes": batch * sequence.scale_bytes,
        "total_bytes": batch * sequence.bytes,
        "per_gpu_bytes": -(-batch // case.dp) * sequence.rank_bytes,
        "mha_bytes": batch * sequence.mha_bytes,
        "gqa_ratio": gqa_ratio(layout.shape),
        "plain_bytes": batch * plain_bytes(layout, case.context),
        "layers": layout.shape.num_layers,
    }
    if sequence.parts:
        row |= transformers.fields(sequence, batch)
    rows = layout.shape.rows_per_sequence if sequence.parts else 1
    row["kinds"] = [_kind(layout, group, batch, rows) for group in _groups(sequence)]
    if layout.shape.assumed:
        row["assume"] = layout.shape.assumed
    if per_layer:
        row["per_layer"] = [_layer(kind, batch) for kind in sequence.kinds]
    return row


def gqa_ratio(shape: ModelShape) -> float | None:
    """Query heads for each KV head, over the layers with attention; None without any."""
    pairs = [(e.query_heads, e.kv_heads) for e in shape.layers if e.query_heads and not e.owner]
    return sum(q for q, _ in pairs) / sum(kv for _, kv in pairs) if pairs else None


def plain_bytes(layout: CacheLayout, context: int) -> int:
    """2 · layers · KV heads · head size · tokens · bytes, taken literally, as a reader would."""
    shape = layout.shape
    heads = [e for e in shape.layers if e.query_heads and e.kind != "cross" and not e.owner]
    if not heads:
        return 0
    first = next((e for e in heads if e.kind == "full"), heads[0])
    count = first.kv_heads
    if first.replicated:
        count = shape.stated_kv_heads or first.query_heads
    widths = layout.kv.k.vector_bytes(first.mha_k_dim) + layout.kv.v.vector_bytes(first.mha_v_dim)
    return (shape.num_layers - shape.draft_layers) * count * widths * context


def _groups(sequence: Sequence) -> list[list[KindBytes]]:
    """Entries that differ only in their layer, in order of first appearance."""
    groups: dict[Any, list[KindBytes]] = {}
    for kind in sequence.kinds:
        e = kind.entry
        key = (
            e.kind,
            e.kv_heads,
            e.k_head_dim,
            e.v_head_dim,
            e.window,
            e.stride,
            e.fixed_bytes,
            e.states,
            e.trace,
        )
        groups.setdefault(key, []).append(kind)
    return list(groups.values())


def _kind(layout: CacheLayout, group: list[KindBytes], batch: int, rows: int) -> dict[str, Any]:
    entry = group[0].entry
    return {
        "kind": entry.kind,
        "layers": len(group),
        "kv_heads": entry.kv_heads,
        "k_head_dim": entry.k_head_dim,
        "v_head_dim": entry.v_head_dim,
        "window": entry.window,
        "stride": entry.stride,
        "tokens": group[0].tokens,
        "bytes": batch * sum(kind.bytes for kind in group),
        "state_bytes": batch * sum(kind.state_bytes for kind in group),
        "formula": formula(layout, group, batch) + (f" / {rows} codebooks" if rows > 1 else ""),
        "decided_by": {
            "layers": layout.shape.layers_by,
            **dict(entry.trace),
            **{d.name: d.about for d in (layout.kv.k, layout.kv.v) if d.about and entry.kv_heads},
        },
    }


def _layer(kind: KindBytes, batch: int) -> dict[str, Any]:
    entry = kind.entry
    return {
        "layer": entry.layer,
        "kind": entry.kind,
        "kv_heads": entry.kv_heads,
        "k_head_dim": entry.k_head_dim,
        "v_head_dim": entry.v_head_dim,
        "window": entry.window,
        "tokens": kind.tokens,
        "bytes": batch * kind.bytes,
    }


def formula(layout: CacheLayout, group: list[KindBytes], batch: int) -> str:
    """The group's bytes written out: factors that multiply to `bytes`."""
    entry, tokens, layers = group[0].entry, group[0].tokens, len(group)
    terms = []
    if entry.kind != "linear":
        terms.append(_token_terms(layout, entry) + f" × {tokens:,} tokens")
    if fixed_bytes(entry, tokens):
        terms.append(f"{entry.fixed_bytes} bytes × {tokens:,} tokens")
    terms += [_state_term(layout, state) for state in entry.states] or (
        [] if terms else ["0 bytes"]
    )
    inner = terms[0] if len(terms) == 1 else "(" + " + ".join(terms) + ")"
    sequences = f" × {batch:,} sequences" if batch > 1 else ""
    return f"{layers} layers × {inner}{sequences}"


def _token_terms(layout: CacheLayout, entry: LayerCache) -> str:
    k, v = layout.kv.k, layout.kv.v
    same = k == v and not k.scale_bytes
    heads = "" if entry.replicated else f"{entry.kv_heads} KV heads × "
    if same and entry.k_head_dim == entry.v_head_dim:
        return f"2 × {heads}{entry.k_head_dim} × {k.bits // 8} bytes"
    if same and entry.v_head_dim:
        return f"{heads}({entry.k_head_dim} + {entry.v_head_dim}) × {k.bits // 8} bytes"
    if same:
        return f"{heads}{entry.k_head_dim} × {k.bits // 8} bytes"
    parts = [f"{k.vector_bytes(entry.k_head_dim)} bytes of K"]
    if entry.v_head_dim:
        parts.append(f"{v.vector_bytes(entry.v_head_dim)} bytes of V")
    return f"{heads}({' + '.join(parts)})"


def _state_term(layout: CacheLayout, state: State) -> str:
    width = element_bytes(layout, state)
    if state.name == "conv":
        return f"{state.elements:,} channels × {state.columns} columns × {width} bytes"
    return f"{state.elements:,} state elements × {width} bytes"

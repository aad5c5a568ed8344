"""What a prefill computes, how long that takes, and how fast a link must be to load its cache instead.

FLOPs are two a multiply-add: the layers' matrices for every computed token (2·N: Kaplan et al. 2020,
arXiv 2001.08361, section 2.1), the head for the last token alone, and causal attention, whose scores
and weighted sums take 2·heads·(k_head_dim + v_head_dim) for each query and each key that it sees
(Dao 2023, arXiv 2307.08691, section 4.1). Norms, softmax, rotations and biases are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool import catalog
from kvtool.cache import CacheLayout
from kvtool.dtypes import DTYPES, MODEL_DTYPES, dtype_named, parse_kv_dtype
from kvtool.engines import ideal
from kvtool.errors import KvtoolError, usage_error
from kvtool.model import read_model
from kvtool.model.shape import LayerCache, ModelShape
from kvtool.model_pool import Gpus, gpus_of, layers_in_words, layout_of, ranks_of
from kvtool.units import parse_bytes
from kvtool.weights.counted import Counted, count, in_words, of_bytes, summed, weights_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtool.config import LoadedConfig

    Counts = NDArray[np.int64]
    Floats = NDArray[np.float64]

EFFICIENCY = 0.5
"""Share of the peak that a prefill reaches unless another is asked for: an estimate, not measured.
Pope et al. 2022 (arXiv 2211.05102, abstract) report 0.76 for PaLM 540B in large batches."""
LEAVE_OUT = "leave out --model: hit rates need none"
SECONDS_WITHOUT_GPU = "without --gpu there are FLOPs, and no seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Layers that attend alike. Head sizes are what is multiplied: of a latent, the expanded ones."""

    num_layers: int
    query_heads: int
    k_head_dim: int
    v_head_dim: int
    window: int | None
    """Most tokens that a token sees, itself included; None: all before it."""

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query token and one key token, all these layers together."""
        return 2 * self.num_layers * self.query_heads * (self.k_head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """What decides the FLOPs of a prefill and, with a GPU, its seconds."""

    model: str
    dtype: str
    kv_dtype: str
    tp: int
    parameters: int
    """Of the layers' matrices, which every computed token is multiplied by."""
    head_parameters: int
    """Of the head, which the last token alone is multiplied by."""
    attention: tuple[Attention, ...]
    bytes_per_token: int
    """KV cache of one token, all layers, whole model."""
    weights_bytes: int
    """Of the whole model, the embedding table included."""
    looked_up_bytes: int = 0
    """Of these the embedding table, of which a step reads a row a token; 0 where it is the head too."""
    rank_bytes_per_token: int = 0
    """KV cache of one token on the fullest rank: heads that are fewer than the ranks are copied."""
    efficiency: float = EFFICIENCY
    """Share of `flops_per_s` that is reached: an estimate."""
    gpu: str | None = None
    flops_per_s: float | None = None
    """Dense peak in the dtype (fp16 or bf16), the ranks of one replica together."""
    bandwidth_bytes_per_s: float | None = None
    """Peak of their memories together."""
    notes: tuple[str, ...] = ()


def prefill_of(
    load: Callable[[str], LoadedConfig],
    model: str,
    *,
    gpu: str | None = None,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    weights: str | None = None,
    tp: int | str | None = None,
    efficiency: float | None = None,
) -> Prefill:
    """The options as typed, None where one was not given; `load` is called last.

    Raises KvtoolError for a model whose FLOPs cannot be counted, or a GPU without a known rate.
    """
    gpus = None if gpu is None else gpus_of(gpu, tp)
    part = _checked(gpus, efficiency)
    given = None if weights is None else parse_bytes(weights, name="--weights")
    asked = None if dtype is None else dtype_named(dtype, flag="--dtype", among=MODEL_DTYPES)
    kv = kv_dtype or "auto"
    parse_kv_dtype(kv, auto=DTYPES["bf16"])
    ranks = gpus.tp if gpus else ranks_of(tp, 1)
    loaded = load(model)
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    _check_counted(loaded, shape)
    layout, notes = layout_of(loaded, shape, dtype=asked, kv_dtype=kv, tp=ranks)
    plain = replace(_of_model(loaded, layout, given), efficiency=part)
    plain = replace(plain, notes=(*notes, *plain.notes))
    return plain if gpus is None else _on_gpus(plain, gpus)


def flops(prefill: Prefill, tokens: Counts, cached: Counts) -> Floats:
    """FLOPs of computing tokens[cached:] of each prompt, the first `cached` tokens being cached.

    A computed token at position p sees p + 1 keys, cached ones too, or a window. Every term is
    positive and exact to float64. Where all tokens are cached nothing is computed, not even the head
    (vLLM and SGLang never hit the last token, whose logits they need).
    """
    end, start = _as_floats(tokens, cached)
    work: Floats = 2.0 * prefill.parameters * (end - start)
    work += 2.0 * prefill.head_parameters * (end > start)
    for layers in prefill.attention:
        work += layers.pair_flops * _pairs(end, start, layers.window)
    return work


def seconds(prefill: Prefill, tokens: Counts, cached: Counts) -> Floats:
    """Seconds of each prefill alone: its FLOPs at `efficiency` of the peak, and at the least what
    reading the weights once takes; no queue, no batch, no launch. 0 where all tokens are cached."""
    import numpy as np

    rate, bandwidth = _rates(prefill)
    computed = flops(prefill, tokens, cached) / rate
    end, start = _as_floats(tokens, cached)
    alone: Floats = np.where(
        end > start, np.maximum(computed, prefill.weights_bytes / bandwidth), 0.0
    )
    return alone


def token_flops(prefill: Prefill, context: int = 0) -> int:
    """FLOPs of one computed token after `context` others, without the head."""
    seen = context + 1
    pairs = sum(
        layers.pair_flops * (seen if layers.window is None else min(seen, layers.window))
        for layers in prefill.attention
    )
    return 2 * prefill.parameters + pairs


def break_even_bytes_per_s(prefill: Prefill, context: int = 0) -> float:
    """Bytes a second above which loading a cached token after `context` others beats computing it.

    bytes_per_token × FLOPs a second / FLOPs of the token. It falls with the context, for a later
    token costs more to compute and no more to load. The prefill is taken to be bound by compute, as
    one of a few hundred tokens is; of fewer, reading the weights takes longer (`seconds`).
    """
    rate, _ = _rates(prefill)
    return prefill.bytes_per_token * rate / token_flops(prefill, context)


def _pairs(end: Floats, start: Floats, window: int | None) -> Floats:
    """Queries in [start, end) and the keys that each sees: a ramp up to the window, then level."""
    import numpy as np

    if window is None:
        return (end - start) * (end + start + 1.0) / 2.0
    top, low = np.minimum(end, window), np.minimum(start, window)
    ramp: Floats = (top - low) * (top + low + 1.0) / 2.0
    return ramp + window * ((end - top) - (start - low))


def _as_floats(tokens: Counts, cached: Counts) -> tuple[Floats, Floats]:
    """Both as float64, which holds counts up to 2^53 exactly."""
    import numpy as np

    end, start = np.asarray(tokens, np.float64), np.asarray(cached, np.float64)
    if np.any(start < 0) or np.any(start > end):
        raise ValueError("cached tokens are a part of the prompt's tokens")
    return end, start


def _rates(prefill: Prefill) -> tuple[float, float]:
    """FLOPs a second that are reached, and bytes a second of the peak."""
    if prefill.flops_per_s is None or prefill.bandwidth_bytes_per_s is None:
        raise usage_error(SECONDS_WITHOUT_GPU, "add --gpu h100, or --gpu h100:8 for 8 ranks")
    return prefill.flops_per_s * prefill.efficiency, prefill.bandwidth_bytes_per_s


# -- from words to a Prefill


def _checked(gpus: Gpus | None, efficiency: float | None) -> float:
    """The efficiency; refused before a model is read: that, and GPUs without any rate."""
    part = EFFICIENCY if efficiency is None else efficiency
    if not 1e-3 <= part <= 1:
        raise usage_error(
            f"--efficiency: {part} is out of range",
            "give the share of the GPU's peak that a prefill reaches, from 0.001 to 1",
        )
    if gpus and gpus.preset.dense_bf16_tflops is None and gpus.preset.dense_fp16_tflops is None:
        raise _no_rate(gpus.preset.id, "bf16 or fp16", "choose a GPU that has one")
    return part


def _no_rate(gpu: str, dtype: str, hint: str) -> KvtoolError:
    return usage_error(
        f"{gpu}: no dense {dtype} rate is known, so a prefill's time is not either",
        f"{hint}, or leave out --gpu: {SECONDS_WITHOUT_GPU}",
    )


def _on_gpus(prefill: Prefill, gpus: Gpus) -> Prefill:
    """With the peak rates of one replica's ranks, which are taken to add up."""
    preset = gpus.preset
    known = {"bf16": preset.dense_bf16_tflops, "fp16": preset.dense_fp16_tflops}
    tflops = known.get(prefill.dtype)
    if tflops is None:
        other = next(name for name, rate in known.items() if rate is not None)
        raise _no_rate(preset.id, prefill.dtype, f"give --dtype {other}, whose rate is known")
    notes = [
        f"{preset.id}: a prefill is taken to reach {prefill.efficiency:g} of {tflops:g} TFLOP/s: "
        "an estimate (--efficiency sets it)"
    ]
    if gpus.tp > 1:
        notes.append(f"{gpus.tp:,} ranks are taken to be {gpus.tp:,} times as fast as one")
    if gpus.count > gpus.tp:
        notes.append(f"{gpus.count:,} GPUs and --tp {gpus.tp:,}: the time is that of one replica")
    return replace(
        prefill,
        gpu=preset.id,
        flops_per_s=tflops * 1e12 * gpus.tp,
        bandwidth_bytes_per_s=preset.bandwidth_gb_s * 1e9 * gpus.tp,
        notes=(*prefill.notes, *notes),
    )


def _of_model(loaded: LoadedConfig, layout: CacheLayout, given: int | None) -> Prefill:
    """The model's own part, its weights as given or as counted."""
    counted, weights, notes = _weights(loaded, layout, given)
    size = ideal.size(layout, context=1, encoder=0)
    return Prefill(
        model=loaded.name,
        dtype=layout.dtype.name,
        kv_dtype=layout.kv.name,
        tp=layout.tp,
        parameters=counted.matrices,
        head_parameters=counted.head,
        attention=_attention(layout),
        bytes_per_token=size.bytes,
        rank_bytes_per_token=size.rank_bytes,
        weights_bytes=weights,
        looked_up_bytes=counted.looked_up * layout.dtype.bits // 8,
        notes=notes,
    )


def _attention(layout: CacheLayout) -> tuple[Attention, ...]:
    """Layers that are alike together, in the order in which they first come."""
    alike = Counter(
        (e.query_heads, e.mha_k_dim, e.mha_v_dim, e.span or e.window) for e in layout.shape.layers
    )
    return tuple(
        Attention(num_layers=n, query_heads=heads, k_head_dim=k, v_head_dim=v, window=window)
        for (heads, k, v, window), n in alike.items()
    )


def _check_counted(loaded: LoadedConfig, shape: ModelShape) -> None:
    """Refuse what no formula here covers: experts, and layers that do not attend to what they keep."""
    why = ""
    if not all(map(_attends, shape.layers)) or shape.rows_per_sequence != 1:
        why = f"its layers are {layers_in_words(shape)}"
    elif len(shape.layers) != shape.num_modules:
        why = f"its {shape.num_modules} layers keep {len(shape.layers)} caches"
    if why:
        raise KvtoolError(
            f"{loaded.name}: what its prefill computes is not known: {why}",
            LEAVE_OUT,
            code="prefill_not_counted",
        )


def _attends(entry: LayerCache) -> bool:
    """Plain causal attention, to all before or to a window of it."""
    if entry.extra or entry.stride != 1 or entry.fixed_bytes or entry.states or entry.reference:
        return False
    return entry.kind in ("full", "sliding", "latent") and entry.query_heads > 0 < entry.mha_k_dim


def _weights(
    loaded: LoadedConfig, layout: CacheLayout, given: int | None
) -> tuple[Counted, int, tuple[str, ...]]:
    """What multiplies a token, bytes of all weights, and notes.

    A quantised model multiplies by as many parameters. A type that is not counted is estimated from the
    bytes that --weights gives.
    """
    name, config, shape = loaded.name, loaded.config, layout.shape
    try:
        if given is None:
            found = weights_of(name, config, shape, layout.dtype)
            counted = summed(one.part for one in found.parts)
            return counted, found.bytes, (in_words(name, found), *_of_experts(name, counted))
        with suppress(KvtoolError):
            counted = count(name, config, shape)
            return counted, given, _of_experts(name, counted)
        counted, note = of_bytes(name, config, shape, layout.dtype, given)
        return counted, given, (note,)
    except KvtoolError as error:
        if error.code != "weights_not_counted":
            raise
        hint = LEAVE_OUT if given else f"give --weights 16GiB (the whole model's), or {LEAVE_OUT}"
        raise KvtoolError(error.message, hint, code=error.code) from error


def _of_experts(name: str, counted: Counted) -> tuple[str, ...]:
    if counted.resident == counted.matrices:
        return ()
    return (
        f"{name}: a token meets {counted.matrices:,} of {counted.resident:,} parameters of matrices; a step "
        "is taken to read all experts, the most that few requests do",
    )

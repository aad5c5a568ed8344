"""How many tokens a model's memory for the cache holds on one GPU.

Bytes become tokens only where every token costs the same in every layer at every length, which is
what the pool of one block size assumes: full attention and latents. Any other layout is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from kvtool import catalog
from kvtool.cache import CacheLayout, check_parallel
from kvtool.dtypes import DTYPES, MODEL_DTYPES, Dtype, dtype_named, parse_kv_dtype
from kvtool.engines import ideal
from kvtool.errors import KvtoolError, usage_error
from kvtool.model import read_model
from kvtool.model.shape import LayerCache, ModelShape
from kvtool.units import format_bytes, parse_bytes, parse_count
from kvtool.weights.counted import in_words, weights_of

if TYPE_CHECKING:
    from kvtool.config import LoadedConfig

GPU_MEMORY_UTILIZATION = 0.9
"""The part of a GPU's memory that weights and cache share unless another is asked for."""

MAX_PARALLEL = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Tokens in the memory that one GPU has for the cache, and how that came about."""

    tokens: int
    kv_bytes: int
    bytes_per_token: int
    model: str
    gpu: str | None
    tp: int
    source: str
    notes: tuple[str, ...]


def tokens_of(
    *,
    load: Callable[[str], LoadedConfig],
    model: str,
    kv_memory: str | None,
    gpu: str | None,
    weights: str | None,
    gpu_memory_utilization: float | None,
    kv_dtype: str | None,
    dtype: str | None,
    tp: int | str | None,
) -> Fit:
    """The options as typed, None where one was not given; `load` is called last."""
    device = None if gpu is None else _device(gpu, tp, weights, gpu_memory_utilization)
    asked = _Asked(
        memory=None if kv_memory is None else parse_bytes(kv_memory, name="--kv-memory"),
        device=device,
        tp=device.tp if device else ranks_of(tp, 1),
        dtype=None if dtype is None else dtype_named(dtype, flag="--dtype", among=MODEL_DTYPES),
        kv_dtype=kv_dtype or "auto",
    )
    parse_kv_dtype(asked.kv_dtype, auto=DTYPES["bf16"])
    return _fit(asked, load(model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs of one kind; `tp` of the `count` are the ranks of one replica."""

    preset: catalog.GpuPreset
    count: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """The GPUs asked for. `usable_bytes` are one GPU's, `weights` the whole model's."""

    gpu: str
    usable_bytes: int
    count: int
    tp: int
    utilization: float
    weights: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The words about a model, parsed: bytes a GPU, or a device that decides them."""

    memory: int | None
    device: _Device | None
    tp: int
    dtype: Dtype | None
    kv_dtype: str


def token_bytes_of(
    load: Callable[[str], LoadedConfig],
    model: str,
    *,
    dtype: str | None,
    kv_dtype: str | None,
    tp: int | str | None,
) -> tuple[int, int]:
    """KV cache of a token, all layers: bytes of the whole model, and of the fullest of its ranks."""
    asked = _Asked(
        memory=None,
        device=None,
        tp=ranks_of(tp, 1),
        dtype=None if dtype is None else dtype_named(dtype, flag="--dtype", among=MODEL_DTYPES),
        kv_dtype=kv_dtype or "auto",
    )
    parse_kv_dtype(asked.kv_dtype, auto=DTYPES["bf16"])
    layout, _ = _layout(asked, load(model))
    size = ideal.size(layout, context=1, encoder=0)
    return size.bytes, size.rank_bytes


def ranks_of(tp: int | str | None, usual: int) -> int:
    """Tensor-parallel ranks as typed, or the usual number."""
    return usual if tp is None else parse_count(str(tp), name="--tp", high=MAX_PARALLEL)


def gpus_of(text: str, tp: int | str | None) -> Gpus:
    """`h100` or `h100:8`: that many GPUs are as many ranks, unless --tp says otherwise."""
    if "," in text:
        raise usage_error("--gpu: give one kind of GPU, not several", "write --gpu h100:8")
    name, colon, number = text.strip().partition(":")
    preset = catalog.one_device(name)
    count = parse_count(number, name="--gpu", high=MAX_PARALLEL) if colon else 1
    ranks = ranks_of(tp, count)
    if colon and ranks > count:
        raise usage_error(
            f"--tp {ranks:,} is more than the {count:,} GPUs of --gpu {text.strip()}",
            f"write --gpu {name}:{ranks}, or lower --tp",
        )
    return Gpus(preset=preset, count=max(count, ranks), tp=ranks)


def _device(
    text: str, tp: int | str | None, weights: str | None, utilization: float | None
) -> _Device:
    gpus = gpus_of(text, tp)
    if gpus.preset.usable_bytes is None:
        raise usage_error(
            f"{gpus.preset.id}: no usable memory is known",
            "give the cache's memory with --kv-memory 12GiB",
        )
    part = GPU_MEMORY_UTILIZATION if utilization is None else utilization
    if not 0 < part <= 1:
        raise usage_error(
            f"--gpu-memory-utilization: {part} is out of range",
            "give a part of the memory above 0 and up to 1, such as 0.9",
        )
    return _Device(
        gpu=gpus.preset.id,
        usable_bytes=gpus.preset.usable_bytes,
        count=gpus.count,
        tp=gpus.tp,
        utilization=part,
        weights=None if weights is None else parse_bytes(weights, name="--weights"),
    )


def _fit(asked: _Asked, loaded: LoadedConfig) -> Fit:
    """The tokens that fit into a GPU's memory for the cache."""
    name = loaded.name
    layout, notes = _layout(asked, loaded)
    per_token = ideal.size(layout, context=1, encoder=0)
    if per_token.rank_bytes * asked.tp > per_token.bytes:
        notes.append(f"{name}: latents and copied KV heads do not shrink with --tp {asked.tp}")
    memory, how = asked.memory or 0, ""
    if asked.device is not None:
        memory, how, more = _left(asked.device, loaded, layout)
        notes += more
    tokens = memory // per_token.rank_bytes
    what = f"{per_token.rank_bytes:,} B a token ({name}, {layout.kv.name}"
    what += f", tp {asked.tp})" if asked.tp > 1 else ")"
    if not tokens:
        raise KvtoolError(
            f"{format_bytes(memory)} for the cache hold no token at {what}",
            "give the cache more memory, or choose a smaller --kv-dtype or a higher --tp",
            code="does_not_fit",
        )
    each = " a GPU" if asked.tp > 1 else ""
    return Fit(
        tokens=tokens,
        kv_bytes=memory,
        bytes_per_token=per_token.rank_bytes,
        model=name,
        gpu=asked.device.gpu if asked.device else None,
        tp=asked.tp,
        source=f"{format_bytes(memory)}{each}{how} at {what}",
        notes=tuple(notes),
    )


def _layout(asked: _Asked, loaded: LoadedConfig) -> tuple[CacheLayout, list[str]]:
    """The model's cache in the dtypes asked for, and notes; refused unless its tokens are equal."""
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    _check_plain(loaded.name, shape)
    return layout_of(loaded, shape, dtype=asked.dtype, kv_dtype=asked.kv_dtype, tp=asked.tp)


def layout_of(
    loaded: LoadedConfig, shape: ModelShape, *, dtype: Dtype | None, kv_dtype: str, tp: int
) -> tuple[CacheLayout, list[str]]:
    """A model's cache in the dtypes asked for, or its config's, and notes on what is assumed."""
    check_parallel(shape, tp, 1)
    notes = [*loaded.notes, *shape.notes]
    if dtype is None and shape.dtype is None:
        notes.append("the config states no dtype: bf16 is assumed (--dtype sets it)")
    dtype = dtype or DTYPES[shape.dtype or "bf16"]
    if shape.kv_dtype and "auto" in kv_dtype.lower():
        notes.append(f"the checkpoint quantises its KV cache: auto is {shape.kv_dtype}")
    kv = parse_kv_dtype(kv_dtype, auto=DTYPES[shape.kv_dtype] if shape.kv_dtype else dtype)
    layout = CacheLayout(shape=shape, dtype=dtype, kv=kv, tp=tp)
    return layout, [f"{loaded.name}: {note}" for note in notes]


def _check_plain(name: str, shape: ModelShape) -> None:
    """Refuse layers whose tokens do not all cost the same."""
    plain = all(_is_plain(entry, shape) for entry in shape.layers)
    if plain and shape.rows_per_sequence == 1:
        return
    raise KvtoolError(
        f"{name}: bytes are no number of tokens, for its layers do not keep every token alike: "
        f"{layers_in_words(shape)}",
        "give the pool itself: --num-blocks or --pool-tokens",
        code="tokens_differ",
    )


def _is_plain(entry: LayerCache, shape: ModelShape) -> bool:
    """Every token, one entry each, and nothing else; or a window that no context fills."""
    if entry.extra or entry.stride != 1 or entry.fixed_bytes or entry.states or entry.reference:
        return False
    if entry.window is None:
        return entry.kind in ("full", "latent")
    top = shape.max_context if shape.max_context_stated else None
    return entry.kind == "sliding" and top is not None and entry.window >= top


def layers_in_words(shape: ModelShape) -> str:
    """'21 × sliding (4,096 tokens), 21 × full': what the layers cache, by kind."""
    kinds = Counter(_kind(entry) for entry in shape.layers)
    listed = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    if shape.rows_per_sequence > 1:
        listed += f", for {shape.rows_per_sequence} codebooks"
    return listed


def _kind(entry: LayerCache) -> str:
    """The kind of a cache entry in words."""
    word = {"linear": "constant state", "cross": "cross-attention", "hidden": "hidden state"}
    kind = word.get(entry.kind, entry.kind)
    if entry.window is not None:
        kind += f" ({entry.window:,} tokens)"
    if entry.extra:
        kind += f" (and {entry.extra:,} tokens of its own)"
    return f"{kind} (the prompt whole)" if entry.reference else kind


def _left(device: _Device, loaded: LoadedConfig, layout: CacheLayout) -> tuple[int, str, list[str]]:
    """What the weights leave of a GPU's memory, how it came about, and notes."""
    notes: list[str] = []
    if device.weights is None:
        found = weights_of(loaded.name, loaded.config, layout.shape, layout.dtype)
        notes.append(in_words(loaded.name, found))
        share = found.rank_bytes(device.tp)
    else:
        share = -(-device.weights // device.tp)
    budget = int(device.usable_bytes * Fraction(str(device.utilization)))
    if share >= budget:
        raise KvtoolError(
            f"{loaded.name}: {format_bytes(share)} of weights leave nothing of the "
            f"{format_bytes(budget)} that may be used of {device.gpu}",
            "name more GPUs (--gpu h100:8), raise --gpu-memory-utilization, or give --weights",
            code="does_not_fit",
        )
    if device.count > device.tp:
        notes.append(
            f"{device.count:,} GPUs and --tp {device.tp:,}: the pool is that of one replica"
        )
    notes.append(f"{device.gpu}: activations and what else the engine keeps are not subtracted")
    how = (
        f" of {device.gpu} ({device.utilization:g} × {format_bytes(device.usable_bytes)} − "
        f"{format_bytes(share)} of weights)"
    )
    return budget - share, how, notes

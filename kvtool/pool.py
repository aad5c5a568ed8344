"""How large the pool of KV blocks is: as blocks, as tokens, or as a model's bytes on one GPU.

Bytes become tokens only where every token costs the same in every layer at every length, which is
what the pool of one block size assumes: full attention and latents. Any other layout is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
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
from kvtool.weights import parameters

if TYPE_CHECKING:
    from kvtool.config import LoadedConfig

__all__ = ["GPU_MEMORY_UTILIZATION", "Pool", "pool_of"]

GPU_MEMORY_UTILIZATION = 0.9
"""The part of a GPU's memory that weights and cache share unless another is asked for."""

MAX_PARALLEL = 2**16
USUAL = {"--kv-dtype": "auto", "--tp": "1"}
"""What asks for nothing."""
WAYS = (
    "give --num-blocks, --pool-tokens, --model with --kv-memory 12GiB, or --model with --gpu h100"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What the KV cache has room for. Either `blocks` or `tokens` is set; bytes are one GPU's."""

    tokens: int | None = None
    blocks: int | None = None
    kv_bytes: int | None = None
    """Memory for the cache on each GPU; None where the pool was given in blocks or tokens."""
    bytes_per_token: int | None = None
    """Of one token, all layers, on the fullest tensor-parallel rank."""
    model: str | None = None
    source: str
    """Where the number comes from, in a line."""
    notes: tuple[str, ...] = ()

    def num_blocks(self, block_size: int) -> int:
        """Whole blocks of that many tokens; a pool that holds none is refused."""
        if self.blocks is not None:
            return self.blocks
        count = (self.tokens or 0) // block_size
        if not count:
            raise usage_error(
                f"a pool of {self.tokens:,} tokens holds no block of {block_size:,}",
                "choose a smaller --block-size, or a larger pool",
            )
        return count

    def num_tokens(self, block_size: int) -> int:
        """Tokens there is room for: blocks × block_size, or the tokens themselves, of which what
        does not cut memory into blocks can use every one."""
        return self.blocks * block_size if self.blocks is not None else self.tokens or 0


def pool_of(
    *,
    load: Callable[[str], LoadedConfig],
    num_blocks: int | str | None = None,
    pool_tokens: int | str | None = None,
    model: str | None = None,
    kv_memory: str | None = None,
    gpu: str | None = None,
    weights: str | None = None,
    gpu_memory_utilization: float | None = None,
    kv_dtype: str | None = None,
    dtype: str | None = None,
    tp: int | str | None = None,
) -> Pool:
    """The pool that the options ask for, as typed; None where one was not given.

    `load` reads a model's config (kvtool.config.load_config); it is called last, once every word
    has been understood. Raises KvtoolError unless exactly one way is given.
    """
    counts = {"--num-blocks": num_blocks, "--pool-tokens": pool_tokens}
    way = _way({**counts, "--kv-memory": kv_memory, "--gpu": gpu}, model)
    on_gpu = {"--weights": weights, "--gpu-memory-utilization": gpu_memory_utilization}
    of_model = {"--kv-dtype": kv_dtype, "--dtype": dtype, "--tp": tp}
    if model is None:
        return _counted(way, counts[way], _ignored(way, {**on_gpu, **of_model}))
    device = None if gpu is None else _device(gpu, tp, weights, gpu_memory_utilization)
    asked = _Asked(
        memory=None if kv_memory is None else parse_bytes(kv_memory, name="--kv-memory"),
        device=device,
        tp=device.tp if device else _ranks(tp, 1),
        dtype=None if dtype is None else dtype_named(dtype, flag="--dtype", among=MODEL_DTYPES),
        kv_dtype=kv_dtype or "auto",
    )
    parse_kv_dtype(asked.kv_dtype, auto=DTYPES["bf16"])
    return _of_model(asked, load(model), () if device else _ignored(way, on_gpu))


def _way(ways: dict[str, object], model: str | None) -> str:
    """The one option that says how large the pool is."""
    given = [flag for flag, value in ways.items() if value is not None]
    if not given and model is None:
        raise usage_error("nothing says how large the pool is", WAYS)
    if not given:
        raise usage_error("--model alone does not say how large the pool is", WAYS)
    if len(given) > 1:
        raise usage_error(
            f"{' and '.join(given)} each say how large the pool is", "leave out all but one"
        )
    way = given[0]
    by_memory = way in ("--kv-memory", "--gpu")
    if by_memory and model is None:
        raise usage_error(
            f"{way} is memory, and how many tokens fit into it depends on the model",
            "add --model, such as --model llama-3.1-8b",
        )
    if model is not None and not by_memory:
        raise usage_error(
            f"{way} says how large the pool is, and --model asks to derive it",
            f"leave out --model, or give --kv-memory or --gpu in place of {way}",
        )
    return way


def _ignored(way: str, options: Mapping[str, object]) -> tuple[str, ...]:
    """Notes on options that change nothing with this way."""
    return tuple(
        f"{flag} is ignored: {way} says how large the pool is"
        for flag, value in options.items()
        if value is not None and str(value) != USUAL.get(flag)
    )


def _counted(way: str, typed: int | str | None, notes: tuple[str, ...]) -> Pool:
    count = parse_count(str(typed), name=way)
    if way == "--num-blocks":
        return Pool(blocks=count, source=f"{count:,} blocks ({way})", notes=notes)
    return Pool(tokens=count, source=f"{count:,} tokens ({way})", notes=notes)


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


def _ranks(tp: int | str | None, usual: int) -> int:
    return usual if tp is None else parse_count(str(tp), name="--tp", high=MAX_PARALLEL)


def _device(
    text: str, tp: int | str | None, weights: str | None, utilization: float | None
) -> _Device:
    """`h100` or `h100:8`: that many GPUs are as many ranks, unless --tp says otherwise."""
    if "," in text:
        raise usage_error("--gpu: a pool is that of one kind of GPU", "write --gpu h100:8")
    name, colon, number = text.strip().partition(":")
    gpu = catalog.gpu_preset(name)
    count = parse_count(number, name="--gpu", high=MAX_PARALLEL) if colon else 1
    ranks = _ranks(tp, count)
    if colon and ranks > count:
        raise usage_error(
            f"--tp {ranks:,} is more than the {count:,} GPUs of --gpu {text.strip()}",
            f"write --gpu {name}:{ranks}, or lower --tp",
        )
    if gpu.usable_bytes is None:
        raise usage_error(
            f"{gpu.id}: no usable memory is known", "give the cache's memory with --kv-memory 12GiB"
        )
    part = GPU_MEMORY_UTILIZATION if utilization is None else utilization
    if not 0 < part <= 1:
        raise usage_error(
            f"--gpu-memory-utilization: {part} is out of range",
            "give a part of the memory above 0 and up to 1, such as 0.9",
        )
    return _Device(
        gpu=gpu.id,
        usable_bytes=gpu.usable_bytes,
        count=max(count, ranks),
        tp=ranks,
        utilization=part,
        weights=None if weights is None else parse_bytes(weights, name="--weights"),
    )


def _of_model(asked: _Asked, loaded: LoadedConfig, ignored: tuple[str, ...]) -> Pool:
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
    return Pool(
        tokens=tokens,
        kv_bytes=memory,
        bytes_per_token=per_token.rank_bytes,
        model=name,
        source=f"{format_bytes(memory)}{each}{how} at {what}",
        notes=(*ignored, *notes),
    )


def _layout(asked: _Asked, loaded: LoadedConfig) -> tuple[CacheLayout, list[str]]:
    """The model's cache in the dtypes asked for, and notes; refused unless its tokens are equal."""
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    _check_plain(loaded.name, shape)
    check_parallel(shape, asked.tp, 1)
    notes = [*loaded.notes, *shape.notes]
    if asked.dtype is None and shape.dtype is None:
        notes.append("the config states no dtype: bf16 is assumed (--dtype sets it)")
    dtype = asked.dtype or DTYPES[shape.dtype or "bf16"]
    if shape.kv_dtype and "auto" in asked.kv_dtype.lower():
        notes.append(f"the checkpoint quantises its KV cache: auto is {shape.kv_dtype}")
    kv = parse_kv_dtype(asked.kv_dtype, auto=DTYPES[shape.kv_dtype] if shape.kv_dtype else dtype)
    layout = CacheLayout(shape=shape, dtype=dtype, kv=kv, tp=asked.tp)
    return layout, [f"{loaded.name}: {note}" for note in notes]


def _check_plain(name: str, shape: ModelShape) -> None:
    """Refuse layers whose tokens do not all cost the same."""
    plain = all(_is_plain(entry, shape) for entry in shape.layers)
    if plain and shape.rows_per_sequence == 1:
        return
    kinds = Counter(_kind(entry) for entry in shape.layers)
    listed = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    if shape.rows_per_sequence > 1:
        listed += f", for {shape.rows_per_sequence} codebooks"
    raise KvtoolError(
        f"{name}: bytes are no number of tokens, for its layers do not keep every token alike: "
        f"{listed}",
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
    notes, weights = [], device.weights
    if weights is None:
        count = parameters(loaded.name, loaded.config, layout.shape)
        weights = count * layout.dtype.bits // 8
        notes.append(
            f"{loaded.name}: its weights are an estimate: {count:,} parameters in "
            f"{layout.dtype.name} are {format_bytes(weights)} (--weights sets them)"
        )
    share = -(-weights // device.tp)
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

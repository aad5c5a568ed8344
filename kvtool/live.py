"""A real model of transformers, built from a config without weights, and what its cache holds.

The oracle behind `kvtool check` and the tests: the class that transformers itself has for the
model type is given random weights (or, on torch's meta device, none), a prompt is run through it,
and every tensor of the cache object it fills is listed. Code from a model repository is never run:
the class is looked up by model_type among transformers' own.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kvtool.errors import KvtoolError

DECODERS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "TEXT_TO_WAVEFORM")
ENCODER_DECODERS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
"""MODEL_FOR_…_MAPPING: where transformers lists the classes that generate, in the order tried."""

CACHE_NAMES = ("cache", "past_key_values", "past_buckets_states", "state", "mems")
"""What models call the cache they return; `past_key_values` before transformers 5.20."""

KINDS = {
    "keys": "self_k",
    "values": "self_v",
    "conv_states": "conv",
    "recurrent_states": "ssm",
    "linear_cache": "ssm",
    "rnn_state": "ssm",
    "state": "ssm",
    "indexer_keys": "indexer",
    "idx_keys": "indexer",
}
"""An attribute of a cache or of one of its layers → the kind of what it holds; `other` if absent."""

BOOKKEEPING = {
    "cumulative_length", "indexer_cumulative_length", "_sliding_window_tensor",
    "indexer_position_ids",
}  # fmt: skip
"""Counters and positions, not cached values."""

UNASKED = {"switch_transformers"}
"""Caches by itself, and refuses `use_cache` on behalf of its encoder."""

ONE_DTYPE = {"deepseek_v4"}
"""Cast as a whole: its gates are predicted in the model's dtype, where from_pretrained keeps the
modules in fp32 that make them, a few KiB a layer more."""

ALL_LAYERS = -1
"""The layer of a tensor that holds the states of every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One tensor of a cache."""

    layer: int
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def load_libraries() -> tuple[Any, Any]:
    """torch and transformers, or the one error that says how to get them."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise KvtoolError(
            f"this needs torch and transformers, and {error.name or 'one of them'} is not installed",
            "pip install 'kvtool[bench]'",
            code="missing_extra",
        ) from error
    except Exception as error:  # a broken library, or a variable that one of them cannot read
        raise KvtoolError(
            f"torch or transformers cannot be loaded: {' '.join(str(error).split())[:120]}",
            "check the HF_… and TORCH_… environment variables, and reinstall 'kvtool[bench]'",
            code="missing_extra",
        ) from error
    return torch, transformers


def config_class(model_type: str) -> Any:
    """transformers' own config class of a model type; KeyError if it has none."""
    load_libraries()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def model_class(config: Any) -> Any:
    """The class that generates with this config; KeyError if transformers has none.

    A composite config may also be listed with the class of its text part, which wants the text
    part's config: the class made for this config comes first. A part of a composite may have no
    class that generates; its bare model fills a cache as well.
    """
    from transformers.models.auto import modeling_auto

    crossing = getattr(config, "is_encoder_decoder", False)
    order = ENCODER_DECODERS + DECODERS if crossing else DECODERS + ENCODER_DECODERS
    found: list[Any] = []
    for name in (*(f"MODEL_FOR_{task}_MAPPING" for task in order), "MODEL_MAPPING"):
        mapping = getattr(modeling_auto, name, {})
        if type(config) in mapping:
            one = mapping[type(config)]
            found += one if isinstance(one, tuple) else [one]
    own = [cls for cls in found if cls.config_class in (None, type(config))]
    found = own or found or _unlisted(config)
    if not found:
        raise KeyError(type(config).__name__)
    return found[0]


def _unlisted(config: Any) -> list[Any]:
    """Model classes beside the config class that no auto class lists, those that generate first."""
    place = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(place)
    except ImportError:
        return []
    models = [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and getattr(cls, "config_class", None) is type(config)
        and not cls.__name__.endswith(("PreTrainedModel", "Classification"))
    ]
    return sorted(models, key=lambda cls: not cls.can_generate())


def build(config: Any, *, device: str = "cpu", dtype: str = "float32", cls: Any = None) -> Any:
    """The model of a config with random weights, in evaluation mode."""
    torch, _ = load_libraries()
    with torch.device(device):
        model = (cls or model_class(config))._from_config(config, dtype=getattr(torch, dtype))
    if config.model_type in ONE_DTYPE:
        model = model.to(getattr(torch, dtype))
    if device == "meta" and hasattr(model, "set_experts_implementation"):
        with suppress(ValueError):  # the default of experts multiplies bf16 only
            model.set_experts_implementation("batched_mm")
    return model.eval()


def prompt(model: Any, *, rows: int, tokens: int, encoder: int) -> dict[str, Any]:
    """Token ids for a model without weights.

    An encoder-decoder is given its encoder's output in place of what the encoder would read: ids,
    sound or an image.
    """
    torch, _ = load_libraries()
    from transformers.modeling_outputs import BaseModelOutput

    ids = torch.zeros((rows, tokens), dtype=torch.long, device=model.device)
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids}
    width = (getattr(model.config, "encoder", None) or model.config).hidden_size
    state = torch.zeros((rows, encoder, width), dtype=model.dtype, device=model.device)
    return {
        "decoder_input_ids": ids,
        "encoder_outputs": BaseModelOutput(last_hidden_state=state),
    }


def call(model: Any, inputs: Mapping[str, Any]) -> Any:
    """One forward pass that fills a cache; the model's output, which has it."""
    torch, _ = load_libraries()
    asked = {} if model.config.model_type in UNASKED else {"use_cache": True}
    with torch.no_grad():
        return model(**inputs, **asked)


def fill(model: Any, inputs: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """(name, cache, output) of one forward pass.

    Where the class makes no cache by itself, it is given the one that generate() would give it.
    """
    output = call(model, inputs)
    name, cache = cache_of(output)
    if cache is None and (given := cache_argument(model)):
        from transformers import DynamicCache

        name, cache = given, DynamicCache(config=model.config)
        output = call(model, {**inputs, name: cache})
    return name, cache, output


def cache_argument(model: Any) -> str:
    """What the model's forward calls the Cache object it is given; empty if it takes none."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES[:2] if name in taken), "")


def static_cache(model: Any, length: int) -> dict[str, Any]:
    """The argument that is a static cache as generate() makes it; of the encoder, as many tokens as
    there are. A composite may hand it on without naming it."""
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache

    cache: Any = StaticCache(config=model.config, max_cache_len=length)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache())
    return {cache_argument(model) or CACHE_NAMES[0]: cache}


def cache_of(output: Any) -> tuple[str, Any]:
    """The cache in a model's output and the name it goes by; None if there is none.

    A composite may put its language model's whole output into its own (blip-2).
    """
    for name in CACHE_NAMES:
        found = getattr(output, name, None)
        if found is not None:
            return name, found
    for value in output.values() if isinstance(output, Mapping) else ():
        if isinstance(value, Mapping) and cache_of(value)[1] is not None:
            return cache_of(value)
    return CACHE_NAMES[0], None


def held(cache: Any, name: str = CACHE_NAMES[0]) -> tuple[Held, ...]:
    """Every tensor of a cache object that is not empty, in layer order."""
    listed = sorted(_objects(cache, name), key=lambda one: one[0])
    seen: set[tuple[int, int, int]] = set()
    out = []
    for layer, kind, what, tensor in listed:
        # K and V may be one tensor (deepseek_v4): counted once.
        key = (layer, id(tensor), tensor.numel())
        if key in seen or not tensor.numel():
            continue
        seen.add(key)
        out.append(
            Held(
                layer=layer,
                kind=kind,
                name=what,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                bytes=tensor.numel() * tensor.element_size(),
            )
        )
    return tuple(out)


Found = tuple[int, str, str, Any]


def _objects(cache: Any, name: str) -> Iterator[Found]:
    """(layer, kind, name, tensor) of a cache object of any class."""
    if cache is None:
        return
    if hasattr(cache, "self_attention_cache"):
        yield from _layers(cache.self_attention_cache)
        for layer, kind, what, tensor in _layers(cache.cross_attention_cache):
            yield layer, kind.replace("self_", "cross_"), f"cross {what}", tensor
    elif hasattr(cache, "layers"):
        yield from _layers(cache)
        yield from _lists(cache, skip="layers")
    elif isinstance(cache, list | tuple):
        yield from _states(cache, name)
    else:
        yield from _lists(cache, skip="")


def _layers(cache: Any) -> Iterator[Found]:
    for index, layer in enumerate(cache.layers):
        for name, value in vars(layer).items():
            if name in BOOKKEEPING:
                continue
            for path, tensor in _tensors(value, name):
                yield index, KINDS.get(name, "other"), path, tensor


def _lists(cache: Any, *, skip: str) -> Iterator[Found]:
    """Lists and dicts beside or instead of the layers, an item a layer (MiniMaxCache, xLSTMCache)."""
    for name, value in vars(cache).items():
        if name != skip and isinstance(value, list | tuple | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for index, item in items:
                for path, tensor in _tensors(item, f"{name}[{index}]"):
                    yield index, KINDS.get(name, "other"), path, tensor


def _states(states: Any, name: str) -> Iterator[Found]:
    """A plain list: RWKV's states, each of all layers, or XLNet's hidden states, one a layer."""
    kind = KINDS.get(name, "other")
    for index, (path, tensor) in enumerate(_tensors(states, name)):
        yield (ALL_LAYERS if kind == "ssm" else index), kind, path, tensor


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Tensors in a value, however its lists and dicts are nested."""
    if hasattr(value, "element_size") and hasattr(value, "numel"):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}[{index}]")


@contextmanager
def unweighted() -> Iterator[None]:
    """Run on the meta device: a question about values, which are not there, is answered yes.

    Whether every expert is used, whether a mask is full: the shapes of the cache do not depend on
    it, and with `yes` no input is thought to be padded or packed.
    """
    torch, _ = load_libraries()
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked: Any = args[0] if args else None
            if getattr(asked, "is_meta", False):
                if func is aten._local_scalar_dense.default:
                    return torch.ones((), dtype=asked.dtype, device="cpu").item()
                if func is aten.nonzero.default:
                    shape = (asked.numel(), asked.dim())
                    return torch.empty(shape, dtype=torch.int64, device="meta")
            return func(*args, **(kwargs or {}))

    with Answers():  # type: ignore[no-untyped-call]
        yield

"""What a config becomes when it is built: its class, heads, windows and exact number of parameters.

Decided before a byte is allocated: the model is built on torch's meta device first. What the
kernels cannot decode is refused here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool import live
from kvtool.bench.attention.case import HEAD_DIMS
from kvtool.config import CONFIG, LoadedConfig
from kvtool.errors import KvtoolError, usage_error
from kvtool.guard import offline, plain_config, quiet, refuse_huge
from kvtool.model.shape import LayerCache

HINT = "choose a plain decoder: llama-3-8b, mistral-7b-v0.1, qwen3-8b; kvtool presets lists more"

UNREAD = ("attn_logit_softcapping", "attn_logit_softcap", "position_embedding_type")
"""Keys of attention that is not softmax(qk·scale)v, if they are set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What every layer caches alike. `windows`: tokens that a layer sees, 0 for all."""

    query_heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Layers, each with a cache of its own."""
        return len(self.windows)

    def token_bytes(self, itemsize: int) -> int:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * itemsize

    def seen_tokens(self, context: int) -> int:
        """Tokens that the layers see together: the context, or their windows."""
        return sum(min(context, window or context) for window in self.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A model that can be built and decoded; nothing is allocated yet."""

    name: str
    model_type: str
    config: Any
    """transformers' config of the language model, with the layers that are kept."""
    cls: Any
    heads: Heads
    vocab: int
    num_parameters: int
    linear_parameters: int
    """Of the matrices that multiply each token, without the head."""
    head_parameters: int
    read_parameters: int
    """That a decode step reads: all but an embedding table of which it reads a row a token."""
    dense: bool
    """False with experts: what a step reads and computes then depends on the tokens."""
    max_context: int | None
    folder: Path | None
    """Where its real weights are."""
    loaded: LoadedConfig
    """Where it comes from, to read it again with fewer layers."""
    notes: tuple[str, ...] = ()


def blueprint(loaded: LoadedConfig, *, layers: int | None = None) -> Blueprint:
    """The model of a config, or a KvtoolError that says what it has that cannot be run."""
    from kvtool.catalog import class_defaults
    from kvtool.model import read_model

    live.load_libraries()
    raw, notes = copy.deepcopy(loaded.config), []
    refuse_huge(raw)
    shape = read_model(raw, class_defaults()["types"])
    if layers is not None:
        if not 1 <= layers <= shape.num_modules:
            raise usage_error(
                f"{loaded.name} has {shape.num_modules} layers, not {layers}",
                f"choose 1 to {shape.num_modules}",
            )
        notes.append(f"{layers} layers are run, of the config's {shape.num_modules}")
        raw = _cut(raw, shape.num_modules, layers)
        shape = read_model(raw, class_defaults()["types"])
    if shape.encoder_tokens is not None or shape.rows_per_sequence != 1:
        raise _refused(loaded.name, "it reads more than one row of text tokens")
    config, cls = _classes(raw, loaded.name)
    _refuse_attention(loaded.name, config, cls)
    heads = _heads(loaded.name, shape.layers, config.num_hidden_layers)
    return Blueprint(
        name=loaded.name,
        model_type=shape.model_type,
        config=config,
        cls=cls,
        heads=heads,
        vocab=config.vocab_size,
        **_parameters(loaded.name, config, cls),
        max_context=shape.max_context if shape.max_context_stated else None,
        folder=_weights(loaded),
        loaded=loaded,
        notes=tuple(notes),
    )


def refuse_long(plan: Blueprint, tokens: int) -> None:
    """Refuse a sequence that is longer than the model's own maximum."""
    if plan.max_context is not None and tokens > plan.max_context:
        raise KvtoolError(
            f"{tokens:,} tokens are more than {plan.name} has positions for ({plan.max_context:,})",
            "shorten the prompt or the output",
            code="context_too_long",
        )


def _cut(raw: dict[str, Any], old: int, new: int) -> dict[str, Any]:
    """The config with the first layers alone: its count, and every list with an entry a layer."""
    out: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            value = _cut(dict(value), old, new)
        elif isinstance(value, list) and len(value) == old:
            value = value[:new]
        out[key] = value
    nested = out.get("text_config")
    place = nested if isinstance(nested, dict) else out
    counts = [
        key for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if key in place
    ]
    place.update(dict.fromkeys(counts or ["num_hidden_layers"], new))
    return out


def _classes(raw: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """transformers' config of the part that is a language model, and the class that generates."""
    with quiet(), offline():
        try:
            whole = live.config_class(str(raw.get("model_type"))).from_dict(plain_config(raw))
            config = whole.get_text_config(decoder=True)
            return config, live.model_class(config)
        except Exception as error:
            why = f"transformers does not build it ({type(error).__name__}: {str(error)[:100]})"
            raise _refused(name, " ".join(why.split())) from error


def _refuse_attention(name: str, config: Any, cls: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(name, "it has an encoder")
    if not getattr(cls, "_supports_attention_backend", False) or not cls.can_generate():
        raise _refused(name, "its class in transformers does not take another attention function")
    for key in UNREAD:
        value = getattr(config, key, None)
        if value not in (None, False, "absolute"):
            raise _refused(name, f"its attention has {key} = {value}, which no kernel here has")


def _heads(name: str, entries: tuple[LayerCache, ...], num_layers: int) -> Heads:
    """The heads that all layers share. Raises KvtoolError for any other layout."""
    own = [one for one in entries if not one.owner and one.layer < num_layers]
    for one in own:
        if one.kind not in ("full", "sliding") or one.extra or one.stride != 1 or one.states:
            raise _refused(name, f"layer {one.layer} has a cache of kind {one.kind}")
    if len(own) != num_layers:
        raise _refused(name, f"{len(own)} caches for {num_layers} layers: some layers share one")
    sizes = {(e.query_heads, e.kv_heads, e.k_head_dim, e.v_head_dim) for e in own}
    if len(sizes) > 1:
        raise _refused(name, "its layers have different numbers or sizes of heads")
    query_heads, kv_heads, k_dim, v_dim = sizes.pop()
    if k_dim != v_dim or k_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise _refused(name, f"the kernels have heads of {known}, it has K {k_dim} and V {v_dim}")
    return Heads(
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=k_dim,
        windows=tuple(one.window or 0 for one in own),
    )


def _parameters(name: str, config: Any, cls: Any) -> dict[str, Any]:
    """Counts of a model without memory; tied weights once."""
    import torch

    try:
        with quiet(), offline():
            model = live.build(config, device="meta", dtype="float32", cls=cls)
    except Exception as error:
        raise _refused(name, f"transformers does not build it ({type(error).__name__})") from error
    total = sum(one.numel() for one in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if any(key.rsplit(".", 1)[-1] == "sinks" for key, _ in model.named_parameters()):
        raise _refused(name, "its attention has sinks, which no kernel here has")
    tables = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)} | {
        id(head)
    }
    linear = sum(
        one.numel() for one in model.parameters() if one.ndim == 2 and id(one) not in tables
    )
    experts = any(
        isinstance(value, int) and value > 1
        for key in ("num_experts", "num_local_experts", "n_routed_experts")
        if (value := getattr(config, key, None)) is not None
    )
    return {
        "num_parameters": total,
        "linear_parameters": linear,
        "head_parameters": head.numel(),
        "read_parameters": total if table is head else total - table.numel(),
        "dense": not experts,
    }


def _weights(loaded: LoadedConfig) -> Path | None:
    """The folder of the config, if safetensors lie in it."""
    if loaded.source not in ("folder", "file") or Path(loaded.where).name != CONFIG:
        return None
    folder = Path(loaded.where).parent
    return folder if any(folder.glob("*.safetensors")) else None


def _refused(name: str, why: str) -> KvtoolError:
    return KvtoolError(f"{name} cannot be run by bench decode: {why}", HINT, code="not_runnable")

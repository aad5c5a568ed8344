"""Tiny random models of transformers, run for a few tokens, against what kvtool predicts."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from live_types import SMALL, TYPES, Setting

from kvtool import live
from kvtool.cache import CacheLayout
from kvtool.dtypes import KvDtype, dtype_named
from kvtool.engines.transformers import parts
from kvtool.model import read_model

BATCH, PROMPT, ENCODER = 2, 21, 11
TOKENS = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
OPTIONAL = {"sliding_window", "attention_chunk_size", "q_lora_rank", "window_size", "head_dim"}
"""Keys whose class default None means something: left alone."""

Bytes = dict[tuple[int, str], int]
"""(layer, kind) → bytes of one sequence."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A cache of a real model: when it was looked at, and its bytes."""

    context: int
    encoder: int
    real: Bytes


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A tiny model that was built and run: its config in three forms, its cache at two moments."""

    forms: dict[str, dict[str, Any]]
    dtype: str
    samples: tuple[Sample, ...]


def tiny(cls: Any) -> dict[str, Any]:
    """The keyword arguments that shrink a config class and the configs in it."""
    names = {f.name: f for f in dataclasses.fields(cls)}
    out: dict[str, Any] = {}
    for key, value in SMALL.items():
        if key not in names:
            continue
        default = names[key].default
        absent = default is None or default is dataclasses.MISSING
        if key in TOKENS or not (isinstance(default, list | tuple) or (absent and key in OPTIONAL)):
            out[key] = value
    for key, spec in cls.sub_configs_defaults.items():
        own = spec.config_class
        if not (inspect.isclass(own) and dataclasses.is_dataclass(own)):
            own = live.config_class(spec.model_type) if spec.model_type else None
        plain = {k: v for k, v in spec.init_kwargs.items() if not isinstance(v, dict | list)}
        named = {"model_type": spec.model_type} if spec.model_type else {}
        out[key] = {**plain, **(tiny(own) if own else {}), **named}
    return out


def tiny_config(model_type: str) -> dict[str, Any]:
    """The keyword arguments of a type's tiny config."""
    raw = tiny(live.config_class(model_type))
    for path, value in TYPES.get(model_type, Setting()).config.items():
        *parents, last = path.split(".")
        place = raw
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return json.loads(json.dumps(raw))


def forms_of(model_type: str, raw: dict[str, Any], config: Any) -> dict[str, dict[str, Any]]:
    """A config as its class is called, as it says itself, and as config.json holds it."""
    return {
        "raw": {**raw, "model_type": model_type},
        "full": json.loads(json.dumps(config.to_dict(), default=str)),
        "diff": json.loads(config.to_json_string(use_diff=True)),
    }


def try_type(model_type: str, *, dtype: str = "float32", static: int = 0) -> Trial:
    """Build a type's tiny model, run a prompt and some steps, and look at its cache after each."""
    import torch

    setting = TYPES.get(model_type, Setting())
    raw = tiny_config(model_type)
    config = live.config_class(model_type)(**json.loads(json.dumps(raw)))
    forms = forms_of(model_type, raw, config)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = _class(setting.cls) if setting.cls else None
        built = getattr(config, setting.part) if setting.part else config
        model = live.build(built, dtype=dtype, cls=cls)
        samples = tuple(_run(model, setting, getattr(torch, dtype), static))
    return Trial(forms=forms, dtype=dtype, samples=samples)


def _class(name: str) -> Any:
    """A class of transformers, by its name or by its module and name."""
    module, _, own = f"transformers.{name}".rpartition(".")
    return getattr(importlib.import_module(module), own)


def _run(model: Any, setting: Setting, dtype: Any, static: int) -> Iterator[Sample]:
    inputs = _inputs(model, setting, dtype)
    if setting.generate:
        yield _generated(model, setting, inputs)
        return
    text = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    given = live.static_cache(model, static) if static else {}
    name, cache, output = live.fill(model, {**inputs, **given})
    yield _sample(name, cache, static or PROMPT, setting.rows)
    if static or not setting.steps:
        return
    more = _encoded(output) if text == "decoder_input_ids" else {}
    for _ in range(setting.steps):
        again = live.call(model, {text: _ids(1, setting), name: cache, **more})
        cache = live.cache_of(again)[1] or cache
    yield _sample(name, cache, PROMPT + setting.steps, setting.rows)


def _generated(model: Any, setting: Setting, inputs: dict[str, Any]) -> Sample:
    """The cache that generate() leaves: of the last token it holds nothing yet."""
    new = setting.steps + 1
    output = model.generate(
        **inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, use_cache=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    name, cache = live.cache_of(output)
    return _sample(name, cache, PROMPT + setting.steps + setting.shift)


def _inputs(model: Any, setting: Setting, dtype: Any) -> dict[str, Any]:
    import torch

    ids = _ids(PROMPT, setting)
    token, count = setting.image
    ids[:, :count] = token
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder and "decoder_input_ids" not in setting.drop:
        inputs = {"input_ids": _ids(ENCODER, Setting()), "decoder_input_ids": ids}
    for name, shape in setting.inputs.items():
        made = torch.rand(BATCH, *shape).to(dtype)
        inputs[name] = torch.randint(3, 150, made.shape) if name.endswith("_ids") else made
    return {name: value for name, value in inputs.items() if name not in setting.drop}


def _ids(tokens: int, setting: Setting) -> Any:
    import torch

    return torch.randint(10, 150, (BATCH * setting.rows, tokens, *setting.trail))


def _encoded(output: Any) -> dict[str, Any]:
    """The encoder's output, so that a further step does not run it again."""
    from transformers.modeling_outputs import BaseModelOutput

    class Encoded(BaseModelOutput):
        attention_mask = router_logits = None

    state = getattr(output, "encoder_last_hidden_state", None)
    return {} if state is None else {"encoder_outputs": Encoded(last_hidden_state=state)}


def _sample(name: str, cache: Any, context: int, rows: int = 1) -> Sample:
    real: Counter[tuple[int, str]] = Counter()
    encoder = 0
    for one in live.held(cache, name):
        real[one.layer, one.kind] += one.bytes // (BATCH * rows)
        encoder = one.shape[2] if one.kind == "cross_k" else encoder
    return Sample(context=context, encoder=encoder, real=dict(real))


def predicted(
    form: Mapping[str, Any], table: Mapping[str, Any], trial: Trial, sample: Sample, cache: str
) -> Bytes:
    """What kvtool says of the same moment, by layer and kind."""
    dtype = dtype_named(trial.dtype, flag="dtype")
    layout = CacheLayout(shape=read_model(form, table), dtype=dtype, kv=KvDtype(k=dtype, v=dtype))
    out: Counter[tuple[int, str]] = Counter()
    for part in parts(
        layout, context=sample.context, encoder=sample.encoder, prompt=PROMPT, cache=cache
    ):
        out[part.layer, part.kind] += part.bytes
    same = {key: count for key, count in out.items() if count}
    if any(layer == live.ALL_LAYERS for layer, _ in sample.real):
        return _by_kind(same)
    return same


def _by_kind(by_layer: Bytes) -> Bytes:
    out: Counter[tuple[int, str]] = Counter()
    for (_, kind), count in by_layer.items():
        out[live.ALL_LAYERS, kind] += count
    return dict(out)

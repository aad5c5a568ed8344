"""How a checkpoint is quantised, read from its config: which linear layers, and in how many bits.

Scales a tensor or a channel are not counted (0.1 % of the weights at most); neither is what only says
how integers are packed (GPTQ's g_idx, compressed-tensors' weight_shape).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from kvtool import catalog
from kvtool.model.keys import Keys, refuse, shown
from kvtool.model.nested import Part as Level
from kvtool.model.nested import language_part
from kvtool.weights.counting import not_counted
from kvtool.weights.matching import NotUnderstoodError, Table, table_of
from kvtool.weights.parts import Role
from kvtool.weights.storages import (
    FP8,
    MXFP4,
    MXFP8,
    NVFP4,
    Storage,
    UnknownError,
    algorithm_of,
    bits_of,
    block_scaled,
    group_of,
    integers,
    modules_in,
    sections,
    sides_of,
)

SAID_IN = ("quantization_config", "compression_config", "hf_quant_config")
LEFT_ALONE = (
    "ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules",
    "llm_int8_skip_modules",
)  # fmt: skip
"""Keys of lists of modules that stay as they are."""
LAYERS: tuple[Role, ...] = ("attention", "state", "mlp", "experts", "shared", "encoder")
TOWERS: tuple[Role, ...] = ("vision", "audio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What is stored how; linear layers that nothing here speaks of are in the model's dtype."""

    key: str = ""
    """The config's key that says so; empty: nothing is quantised."""
    by_role: Mapping[Role, Storage] = field(default_factory=dict)
    left: Table[None] = field(default_factory=Table)
    """Modules that stay as they are, whatever their role."""
    named: Table[Storage | None] = field(default_factory=Table)
    """Modules that are stored in a way of their own."""
    kind: str = ""
    """The language model's type."""


def scheme_of(config: Mapping[str, Any], *, name: str = "the model") -> Scheme:
    """The scheme of a checkpoint.

    Raises KvtoolError (weights_not_counted), by `name`, for one that is not known here.
    """
    level = language_part(config, catalog.class_defaults()["types"])
    if level.anywhere("quantization_bit") not in (None, 0):  # ChatGLM's own way
        raise not_counted(name, "its config has quantization_bit")
    found = _said(level)
    if found is None:
        return Scheme()
    key, raw, inside = found
    if not isinstance(raw, Mapping):
        raise refuse(f"{key} is not an object")
    method = _method(key, raw)
    reader = METHODS.get(method)
    if reader is None:
        raise not_counted(name, f"it is quantised by {shown(method)}")
    keys = Keys(raw=raw, model_type="quantisation", path=f"{key}.")
    try:
        scheme = reader(keys, level)
    except UnknownError as error:
        raise not_counted(name, f"{key}: {error}") from None
    except NotUnderstoodError as error:
        raise not_counted(name, f"{key} has {error}") from None
    if not scheme.by_role and not scheme.named:
        return Scheme()
    if inside:  # it speaks of the language model alone
        reached = {role: how for role, how in scheme.by_role.items() if role not in TOWERS}
        scheme = replace(scheme, by_role=reached)
    return replace(scheme, key=key, kind=level.keys.model_type)


def _said(level: Level) -> tuple[str, Any, bool] | None:
    """The innermost level that says something, and if it is inside another; an empty object says nothing."""
    for raw in (level.keys.raw, *reversed(level.above)):
        for key in SAID_IN:
            if raw.get(key) not in (None, {}):
                return key, raw[key], bool(level.above) and raw is not level.above[0]
    return None


def _method(key: str, raw: Mapping[str, Any]) -> str:
    stated = raw.get("quant_method")
    if isinstance(stated, str) and stated:
        method = stated.strip().lower().replace("_", "-")
        return "modelopt" if method.startswith("modelopt") else method
    if stated is not None:
        raise refuse(f"{key}.quant_method is {shown(stated)}: a word is needed")
    if raw.get("config_groups") is not None and "quant_algo" not in raw:
        return "compressed-tensors"
    if key == "hf_quant_config" or "quant_algo" in raw or "quantization" in raw:
        return "modelopt"
    if raw.get("load_in_4bit") or raw.get("load_in_8bit"):
        return "bitsandbytes"
    return "no method"


def _left(keys: Keys) -> Table[None]:
    """Every list of modules that stay as they are."""
    return table_of((one, None) for name in LEFT_ALONE for one in modules_in(keys, name))


def _all(storage: Storage, *more: Role) -> dict[Role, Storage]:
    return dict.fromkeys((*LAYERS, *more), storage)


def _fp8(keys: Keys, level: Level) -> Scheme:
    """transformers, FineGrainedFP8Config: towers as they are, and the head.

    DeepSeek-V4: expert_dtype "fp4" is MXFP4's form. ModelOpt writes its experts over them into
    quantized_layers; the list of modules that stay belongs to those.
    """
    sides, form = sides_of(keys, "weight_block_size"), keys.get("scale_fmt")
    if form not in (None, "float", "ue8m0"):
        raise UnknownError(f"scale_fmt {shown(form)}")
    storage = block_scaled(sides, 8 if form == "ue8m0" else 32) if sides else FP8
    by_role = _all(storage)
    experts = level.anywhere("expert_dtype")
    if experts == "fp4":
        by_role["experts"] = MXFP4
    elif experts not in (None, "fp8"):
        raise UnknownError(f"expert_dtype {shown(experts)}")
    if keys.get("quantized_layers") is not None:
        return Scheme(by_role=by_role, named=table_of(_layers(keys)))
    return Scheme(by_role=by_role, left=_left(keys))


def _fbgemm(keys: Keys, level: Level) -> Scheme:
    """FBGEMM's fp8, a scale a channel (Llama-3.1-405B-Instruct-FP8)."""
    return Scheme(by_role=_all(FP8), left=_left(keys))


def _gptq(keys: Keys, level: Level) -> Scheme:
    """AutoGPTQ and GPTQModel: linear layers of the decoder; zeros are stored, symmetric or not."""
    for name in ("dynamic", "modules_in_block_to_quantize"):
        if keys.get(name):
            raise UnknownError(f"{name} is given")
    storage = integers(bits_of(keys, "bits"), group_of(keys, "group_size"), zero=True)
    head: tuple[Role, ...] = ("head",) if keys.flag("lm_head") else ()
    return Scheme(by_role=_all(storage, *head), left=_left(keys))


def _awq(keys: Keys, level: Level) -> Scheme:
    """AutoAWQ: linear layers of the decoder."""
    bits, group = bits_of(keys, "bits", "w_bit"), group_of(keys, "group_size", "q_group_size")
    storage = integers(bits, group, zero=keys.flag("zero_point", default=True))
    return Scheme(by_role=_all(storage), left=_left(keys))


def _mxfp4(keys: Keys, level: Level) -> Scheme:
    """transformers, Mxfp4Config: the experts alone (gpt-oss)."""
    return Scheme(by_role={"experts": MXFP4}, left=_left(keys))


def _bitsandbytes(keys: Keys, level: Level) -> Scheme:
    """4 bits in blocks of 64 with an fp32 scale, or an 8-bit one of which 256 share an fp32 one; or 8 bits.

    bitsandbytes, functional.py, quantize_4bit. Towers too; never the head.
    """
    if keys.flag("load_in_4bit") or keys.flag("_load_in_4bit"):
        kind = keys.get("bnb_4bit_quant_type") or "fp4"
        if kind not in ("nf4", "fp4"):
            raise UnknownError(f"bnb_4bit_quant_type {shown(kind)}")
        twice = keys.flag("bnb_4bit_use_double_quant")
        scale = 8 + Fraction(32, 256) if twice else Fraction(32)
        words = f"{kind} with {'8-bit' if twice else 'fp32'} scales per 64"
        storage = Storage(words, 4 + scale / 64)
    elif keys.flag("load_in_8bit") or keys.flag("_load_in_8bit"):
        storage = Storage("int8", Fraction(8))
    else:
        raise UnknownError("neither load_in_4bit nor load_in_8bit")
    return Scheme(by_role=_all(storage, *TOWERS), left=_left(keys))


FORMATS = frozenset({
    None, "dense", "pack-quantized", "naive-quantized", "int-quantized", "float-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
})  # fmt: skip


def _compressed(keys: Keys, level: Level) -> Scheme:
    """compressed-tensors: groups of targets, which are the class Linear or modules. What is ignored is
    left alone first; then a module's own name counts before its class."""
    _check_format(keys)
    if keys.get("config_groups") is None:
        raise UnknownError("it has no config_groups")
    by_role: dict[Role, Storage] = {}
    named: list[tuple[str, Storage | None]] = []
    for _, group in sections(keys, "config_groups"):
        _check_format(group)
        storage = _weights(group)
        if storage is None:
            continue
        for target in modules_in(group, "targets"):
            if not _is_class(target):
                named.append((target, storage))
            elif target == "Linear":
                by_role = {**_all(storage, "head", *TOWERS), **by_role}
            elif target == "FusedMoE":
                by_role["experts"] = storage
            elif not target.endswith("Attention"):  # which quantises the cache
                raise UnknownError(f"the target {shown(target)}")
    return Scheme(by_role=by_role, left=_left(keys), named=table_of(named))


def _check_format(keys: Keys) -> None:
    form, sparse = keys.get("format"), keys.section("sparsity_config").get("format")
    if not isinstance(form, str | None) or form not in FORMATS:
        raise UnknownError(f"the format {shown(form)}")
    if sparse not in (None, "dense"):
        raise UnknownError(f"the sparse format {shown(sparse)}")


def _is_class(target: str) -> bool:
    return target[:1].isupper() and "." not in target and not target.startswith("re:")


def _weights(group: Keys) -> Storage | None:
    """How a group stores weights; None if it quantises activations alone."""
    if group.get("weights") is None:
        return None
    keys = group.section("weights")
    bits, kind = bits_of(keys, "num_bits"), keys.get("type") or "int"
    size = group_of(keys, "group_size")
    strategy = keys.get("strategy") or ("group" if size > 0 else "channel")
    if strategy in ("tensor", "channel"):
        size = -1
    elif strategy not in ("group", "tensor_group", "block"):
        raise UnknownError(f"the strategy {shown(strategy)}")
    if kind == "float":
        return _floats(keys, bits, size, strategy)
    if kind != "int" or strategy == "block":
        raise UnknownError(f"weights of type {shown(kind)} by {shown(strategy)}")
    return integers(bits, size, zero=not keys.flag("symmetric", default=True))


def _floats(keys: Keys, bits: int, size: int, strategy: str) -> Storage:
    sides = sides_of(keys, "block_structure") if strategy == "block" else None
    if bits == 8 and strategy == "block":
        if sides is None:
            raise UnknownError("blocks without block_structure")
        return block_scaled(sides, 16)
    known = {(4, 16): NVFP4, (4, 32): MXFP4, (8, 32): MXFP8, (8, -1): FP8}
    found = known.get((bits, size))
    if found is None:
        raise UnknownError(f"floats of {bits} bits in groups of {size}")
    return found


def _layers(keys: Keys) -> Iterator[tuple[str, Storage | None]]:
    """quantized_layers: modules, each with its algorithm."""
    for module, one in sections(keys, "quantized_layers"):
        yield module, algorithm_of(one)


def _modelopt(keys: Keys, level: Level) -> Scheme:
    """Of config.json or of hf_quant_config.json, where it stands in `quantization`; the head only by name."""
    if isinstance(keys.raw.get("quantization"), Mapping):
        keys = keys.section("quantization")
    stated = keys.get("quant_algo")
    if isinstance(stated, str) and stated.upper() in ("MIXED_PRECISION", "MIXED"):
        if keys.get("quantized_layers") is None:
            raise UnknownError("mixed precision without quantized_layers")
        return Scheme(left=_left(keys), named=table_of(_layers(keys)))
    if stated is None and keys.get("config_groups") is not None:
        return _compressed(keys, level)
    storage = algorithm_of(keys)
    if storage is None:
        return Scheme()
    return Scheme(by_role=_all(storage, *TOWERS), left=_left(keys))


METHODS: dict[str, Callable[[Keys, Level], Scheme]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fbgemm-fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}

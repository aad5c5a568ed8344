"""What of a model's parameters multiplies a token, the bytes of all, and what is known of bytes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtool import catalog
from kvtool.dtypes import Dtype
from kvtool.errors import usage_error
from kvtool.model.nested import language_part
from kvtool.model.shape import ModelShape
from kvtool.units import format_bytes
from kvtool.weights.counting import not_counted, parts_of
from kvtool.weights.parts import TEXT, Part
from kvtool.weights.stored import Stored, stored

QUANTISED = ("quantization_config", "compression_config", "hf_quant_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Parameters of a whole model, and which of them a token of text meets."""

    total: int
    matrices: int
    """Of the layers, without norms and biases: each multiplies every token once; of experts those chosen."""
    head: int
    """The matrix from hidden state to words; the embedding table itself where it is tied."""
    looked_up: int
    """Of the embedding table where it is not the head: then it stands beside the matrices too."""
    resident: int
    """`matrices` with all experts."""


def _check_known(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a preset whose source leaves out what its weights depend on."""
    preset = catalog.model_preset(name)
    if preset is not None and not preset.weights_known and preset.config == config:
        raise not_counted(name, "its preset's source does not say all its sizes")


def count(name: str, config: Mapping[str, Any], shape: ModelShape) -> Counted:
    """By the recipe of its type; KvtoolError, by `name`, for one without."""
    _check_known(name, config)
    return summed(parts_of(name, config, shape))


def summed(parts: Iterable[Part]) -> Counted:
    """Parts as one count."""
    parts = tuple(parts)
    layers = [
        part for part in parts if part.role in TEXT and part.role not in ("embedding", "head")
    ]
    return Counted(
        total=sum(part.size.count for part in parts),
        matrices=sum(part.active.matrices for part in layers),
        head=sum(part.size.matrices for part in parts if part.role == "head"),
        looked_up=sum(part.size.count for part in parts if part.role == "embedding"),
        resident=sum(part.size.matrices for part in layers),
    )


def weights_of(name: str, config: Mapping[str, Any], shape: ModelShape, dtype: Dtype) -> Stored:
    """The bytes of all its parts, as the checkpoint stores them; KvtoolError for a type without a recipe."""
    _check_known(name, config)
    return stored(parts_of(name, config, shape), config, dtype, name=name)


def in_words(name: str, found: Stored) -> str:
    """The note on what they are counted by."""
    return (
        f"{name}: its weights are {format_bytes(found.bytes)}: {found.basis} (--weights sets them)"
    )


def of_bytes(
    name: str, config: Mapping[str, Any], shape: ModelShape, dtype: Dtype, weights: int
) -> tuple[Counted, str]:
    """What a dense model that is not counted has by the bytes of its weights, and the note on it.

    Of all parameters, the embedding table multiplies nothing; the rest is taken to be matrices.
    A config that does not say so is tied: transformers writes tie_word_embeddings if it is false.
    """
    part = language_part(config, catalog.class_defaults()["types"])
    if _has_experts(config):
        raise not_counted(name, "it has experts, and bytes do not tell which of them a token meets")
    quantised = next((key for key in QUANTISED if part.anywhere(key) is not None), "")
    stated = part.anywhere("dtype", "torch_dtype")
    if quantised or (shape.dtype is None and stated not in (None, "", "auto")):
        raise not_counted(
            name, f"its config has {quantised or str(stated)[:40]}: bytes do not tell"
        )
    total = weights * 8 // dtype.bits
    hidden, words = part.keys.maybe("hidden_size"), part.keys.maybe("vocab_size")
    head = hidden.value * words.value if hidden and words else 0
    tied = part.anywhere("tie_word_embeddings") in (None, True)
    tables = head if tied else 2 * head
    if total <= tables:
        raise usage_error(
            f"--weights: {format_bytes(weights)} in {dtype.name} are {total:,} parameters, and the "
            f"embeddings of {name} alone have {tables:,}",
            "give the bytes of the whole model",
        )
    less = f"less {tables:,} of embeddings" if tables else "embeddings included"
    found = Counted(
        total=total, matrices=total - tables, head=head, looked_up=0 if tied else head,
        resident=total - tables,
    )  # fmt: skip
    return found, (
        f"{name}: its parameters are an estimate: {format_bytes(weights)} in {dtype.name} are "
        f"{total:,}, {less}"
    )


def _has_experts(config: Mapping[str, Any]) -> bool:
    """More than one expert, by any key that speaks of them."""
    return any(
        _has_experts(value)
        if isinstance(value, Mapping)
        else "expert" in key and type(value) is int and value > 1
        for key, value in config.items()
    )

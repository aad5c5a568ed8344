"""A model as it is planned with: what it caches, and what its weights take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool import catalog
from kvtool.dtypes import DTYPES
from kvtool.engine_memory import ModelSizes, sizes_of
from kvtool.errors import KvtoolError
from kvtool.size_row import Subject
from kvtool.sizing import model_dtype
from kvtool.units import format_bytes
from kvtool.weights.counted import in_words, weights_of

if TYPE_CHECKING:
    from kvtool.config import LoadedConfig
    from kvtool.dtypes import Dtype
    from kvtool.model.shape import ModelShape
    from kvtool.plan_query import PlanQuery
    from kvtool.weights.headers import Headers
    from kvtool.weights.stored import Stored

MOST_BLOCK = 2**20
LEAST, LEAST_LIKE = 0.5, 0.9
"""Of the counted bytes: headers of fewer are of a part of the model; of fewer than the second, it is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanModel:
    """A model as it is planned with."""

    subject: Subject
    config: Mapping[str, Any]
    dtype: Dtype
    sizes: ModelSizes
    stored: Stored | None
    """None: no recipe counts its weights, whose bytes are given then."""
    exact: Headers | None = None
    """Of the checkpoint itself, where its headers can be read."""
    block: int = 1
    """Rows of a weight that share a scale (weight_block_size); 1 where none do."""
    repository: str = ""
    """What an engine is to load."""
    quantization: str = ""
    """How an engine is to quantise it as it loads."""
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        """What it caches."""
        return self.subject.shape


def model_for(
    loaded: LoadedConfig, shape: ModelShape, query: PlanQuery, revision: str | None = None
) -> PlanModel:
    """KvtoolError if nothing says how many bytes its weights take."""
    dtype, note = model_dtype(shape, query.dtype)
    if dtype.name == "fp32" and query.dtype is None and "vllm" in query.engines:
        dtype, note = (
            DTYPES["bf16"],
            "its checkpoint is fp32: bf16, as vLLM takes it, in every engine's plan (--dtype)",
        )
    found: Stored | None = None
    exact, why = _headers(loaded, revision) if query.weights is None else (None, "")
    try:
        found = weights_of(loaded.name, loaded.config, shape, dtype)
    except KvtoolError:
        if query.weights is None and query.kv_memory is None and exact is None:
            raise
    counted = "" if query.weights is not None or found is None else in_words(loaded.name, found)
    if exact is not None and found is not None and exact.bytes < LEAST * found.bytes:
        why = f"{exact.source} have {format_bytes(exact.bytes)}, which is not the whole model"
        exact = None
    if exact is not None:
        counted = f"its weights are {format_bytes(exact.bytes)}, as {exact.source} say"
        if found is not None and abs(exact.bytes / found.bytes - 1) > 1 - LEAST_LIKE:
            counted += f"; by its config they would be {format_bytes(found.bytes)}"
    said = (*loaded.notes, note, *shape.notes, why, counted)
    return PlanModel(
        subject=Subject(name=loaded.name, source=loaded.source, shape=shape),
        config=loaded.config,
        dtype=dtype,
        sizes=sizes_of(loaded.name, loaded.config, shape),
        stored=found,
        exact=exact,
        block=_block(loaded.config),
        repository=_repository(loaded),
        notes=tuple(text for text in said if text),
    )


def _block(config: Mapping[str, Any]) -> int:
    quantised = config.get("quantization_config")
    sizes = quantised.get("weight_block_size") if isinstance(quantised, Mapping) else None
    first = sizes[0] if isinstance(sizes, list) and sizes else 1
    return first if type(first) is int and 0 < first < MOST_BLOCK else 1


def _repository(loaded: LoadedConfig) -> str:
    """A Hub id, or the folder that a config lies in."""
    if loaded.source == "preset" and "/" not in loaded.name:
        preset = catalog.model_preset(loaded.name)
        return preset.hub_id if preset else loaded.name
    return str(Path(loaded.where).parent) if loaded.source in ("folder", "file") else loaded.name


def _headers(loaded: LoadedConfig, revision: str | None) -> tuple[Headers | None, str]:
    """Of a folder's or a Hub repository's safetensors files; None, and why, where there are none to read."""
    place: str | Path = loaded.name if loaded.source == "hub" else Path(loaded.where).parent
    if loaded.source == "folder" and not any(Path(place).glob("*.safetensors")):
        return None, ""
    if loaded.source not in ("hub", "folder"):
        return None, ""
    from kvtool.weights.headers import headers_of

    try:
        return headers_of(place, revision=revision), ""
    except KvtoolError as error:
        return None, f"{error.message}: its weights are counted from the config"

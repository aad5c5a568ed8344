"""The words of `kvtool size` as a Query: every list is parsed before any model is loaded."""

from __future__ import annotations

from typing import Any

from kvtool.dtypes import DTYPES, MODEL_DTYPES, dtype_named, parse_kv_dtype
from kvtool.engines import engines_named
from kvtool.errors import usage_error
from kvtool.query import Query
from kvtool.size_row import DS_MLA, VllmOptions
from kvtool.units import parse_bytes, parse_count, parse_counts

MAX_BATCH = 2**20
MAX_PARALLEL = 2**16


def query_of(given: dict[str, Any]) -> Query:
    """What is asked of each model."""
    engines = engines_named(given["engine"])
    if given["assume"] not in (None, "full"):
        raise usage_error(f"--assume: '{given['assume'][:40]}' is not known", "write --assume full")
    if given["cache"] not in ("dynamic", "static"):
        raise usage_error(f"--cache: '{given['cache'][:40]}' is not known", "dynamic or static")
    dtype = given["dtype"]
    stages = _stages(given["pp_layers"])
    pps = _many(given["pp"], "--pp", MAX_PARALLEL)
    if stages and pps == (1,):
        pps = (len(stages),)
    if stages and pps != (len(stages),):
        raise usage_error(
            f"--pp-layers names {len(stages)} stages and --pp says otherwise", "leave out --pp"
        )
    vllm = _vllm(given)
    prompt = _one(given["prompt_tokens"], "--prompt-tokens", low=0)
    contexts = _many(given["context"], "--context") if given["context"] is not None else ()
    if prompt is not None and contexts and prompt > max(contexts):
        raise usage_error(
            f"--prompt-tokens {prompt:,} is more than --context {max(contexts):,}",
            "the prompt is part of the context",
        )
    return Query(
        engines=engines,
        contexts=contexts or ((vllm.max_model_len,) if vllm.max_model_len else ()),
        batches=_many(given["batch"], "--batch", MAX_BATCH),
        dtype=dtype_named(dtype, flag="--dtype", among=MODEL_DTYPES) if dtype is not None else None,
        kv_dtypes=_kv_dtypes(given["kv_dtype"], engines),
        tps=_many(given["tp"], "--tp", MAX_PARALLEL),
        pps=pps,
        block_sizes=_many(given["block_size"], "--block-size", MAX_BATCH)
        if given["block_size"] is not None
        else (None,),
        encoder_tokens=_one(given["encoder_tokens"], "--encoder-tokens", low=0),
        allow_long=given["allow_long"],
        per_layer=given["per_layer"],
        cache=given["cache"],
        prompt=prompt,
        pp_layers=stages,
        dcp=parse_count(given["dcp"], name="--dcp", high=MAX_PARALLEL),
        dp=parse_count(given["dp"], name="--dp", high=MAX_PARALLEL),
        vllm=vllm,
    )


def _vllm(given: dict[str, Any]) -> VllmOptions:
    memory = given["kv_memory"]
    return VllmOptions(
        max_model_len=_one(given["max_model_len"], "--max-model-len"),
        max_batched_tokens=parse_count(given["max_batched_tokens"], name="--max-batched-tokens"),
        batches_in_flight=_one(given["batches_in_flight"], "--batches-in-flight", high=1024),
        prefix_caching=given["prefix_caching"],
        hybrid=given["hybrid"],
        kv_memory=parse_bytes(memory, name="--kv-memory") if memory is not None else None,
        ds_mla=given["kv_dtype"].strip().lower() == DS_MLA,
    )


OPTIONS_OF: dict[str, dict[str, Any]] = {
    "vllm": {
        "max_model_len": None, "max_batched_tokens": "8192", "batches_in_flight": None,
        "prefix_caching": False, "hybrid": None, "kv_memory": None,
    },
    "transformers": {"prompt_tokens": None, "cache": "dynamic"},
}  # fmt: skip
"""Each engine's own options, with the values that ask for nothing."""
NOT_OF_SPECS = {
    "tp": "1", "kv_dtype": "auto", "block_size": None, "dtype": None, "draft": None, "mtp": "0",
    "encoder_tokens": None, "per_layer": False,
}  # fmt: skip
"""What --layer-specs already say, with the values that ask for nothing."""


def ignored(given: dict[str, Any], query: Query) -> list[str]:
    """Notes on options of an engine that was not asked for."""
    notes = [
        f"{_flag(name, given[name])} is ignored: it belongs to --engine {engine}"
        for engine, usual in OPTIONS_OF.items()
        for name in _asked(given, usual)
        if engine not in query.engines
    ]
    if given["per_layer"] and query.engines == ("vllm",):
        notes.append("--per-layer is ignored: vLLM's blocks belong to groups of layers")
    if given["layer_specs"] is not None:
        notes += [
            f"{_flag(name, given[name])} is ignored: the specs are one rank's as it is"
            for name in _asked(given, NOT_OF_SPECS)
        ]
    return notes


def _asked(given: dict[str, Any], usual: dict[str, Any]) -> list[str]:
    return [name for name, value in usual.items() if given[name] != value]


def _flag(name: str, value: object) -> str:
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def _kv_dtypes(text: str, engines: tuple[str, ...]) -> tuple[str, ...]:
    if text.strip().lower() == DS_MLA:
        if engines != ("vllm",):
            raise usage_error(f"--kv-dtype {DS_MLA} is vLLM's own layout", "add --engine vllm")
        return ("fp8",)
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        parse_kv_dtype(name, auto=DTYPES["bf16"])
    return names


def _stages(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    return tuple(parse_count(part, name="--pp-layers", high=10_000) for part in text.split("/"))


def _many(text: str, name: str, high: int | None = None) -> tuple[int, ...]:
    return tuple(parse_counts(text, name=name, **({"high": high} if high else {})))


def _one(text: str | None, name: str, *, low: int = 1, high: int | None = None) -> int | None:
    if text is None:
        return None
    return parse_count(text, name=name, low=low, **({"high": high} if high else {}))

"""The words of `kvtool prefix` about memory: bytes of a model's tokens, capacities, tiers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from kvtool import catalog
from kvtool.errors import KvtoolError, usage_error
from kvtool.model import read_model
from kvtool.model_pool import Fit, tokens_of
from kvtool.prefill import Prefill, prefill_of
from kvtool.prefix import Room
from kvtool.prefix_worth import Tier
from kvtool.units import parse_bytes, parse_counts

ALL, ON_GPU = "all", "gpu"
MOST_BLOCKS, MOST_TOKENS = 2**31 - 1, 2**40
ANY_MEMORY = "1024TiB"
"""A token's bytes are asked for, whatever the memory."""
_MEMORY = re.compile(r"gpu|[0-9.]+\s*[a-z]*b")
_TIER = re.compile(r"([a-z0-9_-]{1,20})=([^@=,]+)@([^@=,/]+)/s")


def words_in(typed: str) -> list[str]:
    return [word.strip().lower() for word in typed.split(",")]


def model_of(
    given: Mapping[str, Any], notes: list[str]
) -> tuple[Fit | None, Prefill | None, int | None]:
    """Bytes of a token, what its prefill computes, and the maximum context, each where it is known."""
    if given["model"] is None:
        return None, None, None
    load = _loader()
    words = {name: given[name] for name in ("kv_dtype", "dtype", "tp")}
    fit = _fit(load, given, words, notes)
    try:
        prefill = prefill_of(
            load, given["model"], gpu=given["gpu"], weights=given["weights"],
            efficiency=given["efficiency"], **words,
        )  # fmt: skip
    except KvtoolError as error:
        if error.code not in ("prefill_not_counted", "weights_not_counted"):
            raise
        notes.append(f"no FLOPs, no time: {error.message}")
        return fit, None, None
    if given["gpu"] is not None:
        notes += [note for note in prefill.notes if note not in notes]
    return fit, prefill, _max_context(load(given["model"]))


def _max_context(loaded: Any) -> int | None:
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    return shape.max_context if shape.max_context_stated else None


def _fit(
    load: Callable[[str], Any], given: Mapping[str, Any], words: Mapping[str, Any], notes: list[str]
) -> Fit | None:
    """Bytes of a token on one GPU; with --capacity gpu the tokens that it has room for, too.

    None where tokens do not cost all the same and nothing is asked for in bytes.
    """
    asked = words_in(given["capacity"])
    on_gpu = ON_GPU in asked
    if on_gpu and given["gpu"] is None:
        raise usage_error("--capacity gpu is what a GPU has left", "add --gpu h100")
    device = {name: given[name] for name in ("gpu", "weights", "gpu_memory_utilization")}
    try:
        found = tokens_of(
            load=load, model=given["model"], kv_memory=None if on_gpu else ANY_MEMORY,
            **(device if on_gpu else dict.fromkeys(device)),
            **{**words, "tp": words["tp"] or _ranks(given["gpu"])},
        )  # fmt: skip
    except KvtoolError as error:
        if error.code != "tokens_differ":
            raise
        if given["tiers"] is None and not any(_MEMORY.fullmatch(word) for word in (*asked,)):
            notes.append(f"no bytes: {error.message}")
            return None
        raise KvtoolError(
            error.message, "give --capacity in blocks, and leave out --tiers", code=error.code
        ) from error
    notes += found.notes
    return found


def _ranks(gpu: str | None) -> str | None:
    """`h100:8` is 8 ranks unless --tp says otherwise."""
    return gpu.partition(":")[2] or None if gpu else None


def _loader() -> Callable[[str], Any]:
    """Each config is read once: standard input can be read only once."""
    from functools import cache

    from kvtool.config import load_config

    return cache(load_config)


def rooms_of(given: Mapping[str, Any], fit: Fit | None) -> tuple[list[Room], bool]:
    """The capacities as typed, and whether all are asked for."""
    rooms: list[Room] = []
    words = [word.strip() for word in given["capacity"].split(",")]
    for word in words:
        if word.lower() == ALL:
            continue
        if word.lower() == ON_GPU:
            if fit is None:
                raise usage_error(
                    "--capacity gpu is what a GPU has left beside a model",
                    "add --model llama-3-8b --gpu h100",
                )
            rooms.append(Room(tokens=fit.tokens))
        elif _MEMORY.fullmatch(word.lower()):
            rooms.append(Room(tokens=_tokens_in(word, fit)))
        else:
            counts = parse_counts(word, name="--capacity", high=MOST_BLOCKS)
            rooms += [Room(blocks=count) for count in counts]
    return list(dict.fromkeys(rooms)), any(word.lower() == ALL for word in words)


def _tokens_in(word: str, fit: Fit | None) -> int:
    memory = parse_bytes(word, name="--capacity")
    if fit is None:
        raise usage_error(
            f"--capacity {word} is memory, and how many tokens fit into it depends on the model",
            "add --model, such as --model llama-3-8b, or give blocks: --capacity 1000",
        )
    tokens = memory // fit.bytes_per_token
    if not 0 < tokens <= MOST_TOKENS:
        raise usage_error(
            f"--capacity {word} holds {tokens:,} tokens of {fit.bytes_per_token:,} bytes",
            f"from 1 to {MOST_TOKENS:,} are a cache: give {'less' if tokens else 'more'}",
        )
    return tokens


def tiers_of(typed: str | None, fit: Fit | None) -> tuple[Tier, ...]:
    """`cpu=64GiB@25GB/s,disk=1TiB@6GB/s`, the nearest first."""
    found: list[Tier] = []
    for word in [] if typed is None else typed.split(","):
        match = _TIER.fullmatch(word.strip())
        if match is None:
            raise usage_error(
                f"--tiers: '{word.strip()[:40]}' is no tier",
                "write NAME=SIZE@BANDWIDTH/s: --tiers cpu=64GiB@25GB/s,disk=1TiB@6GB/s",
            )
        assert fit is not None, "checked: tiers want a model"
        rate, size = (parse_bytes(match[place], name="--tiers") for place in (3, 2))
        if (
            not rate
            or not 0 < size // fit.bytes_per_token <= MOST_TOKENS
            or match[1] in ("gpu", *(tier.name for tier in found))
        ):
            raise usage_error(
                f"--tiers: '{word.strip()[:40]}' holds or moves nothing, or there is one of that name",
                "give each tier a name of its own, a size and a bandwidth above 0",
            )
        found.append(
            Tier(
                name=match[1],
                capacity_bytes=size,
                bytes_per_token=fit.bytes_per_token * fit.tp,
                bytes_per_s=float(rate),
            )
        )
    return tuple(found)

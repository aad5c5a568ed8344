"""The words of `kvtool prefix` about memory: bytes of a model's tokens, capacities, tiers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from kvtool.errors import KvtoolError, usage_error
from kvtool.model_pool import Fit, tokens_of
from kvtool.prefill import Prefill, prefill_of
from kvtool.prefix import Room
from kvtool.prefix_worth import Tier
from kvtool.units import parse_bytes, parse_counts

ALL, ON_GPU = "all", "gpu"
MOST_BLOCKS = 2**31 - 1
_TIER = re.compile(r"([a-z0-9_-]{1,20})=([^@=,]+)@([^@=,/]+)/s")


def words_in(typed: str) -> list[str]:
    return [word.strip().lower() for word in typed.split(",")]


def model_of(given: Mapping[str, Any], notes: list[str]) -> tuple[Fit | None, Prefill | None]:
    """Bytes of a token, and what its prefill computes where that is known."""
    if given["model"] is None:
        return None, None
    load = _loader()
    on_gpu = ON_GPU in words_in(given["capacity"])
    if on_gpu and given["gpu"] is None:
        raise usage_error("--capacity gpu is what a GPU has left", "add --gpu h100")
    words = {name: given[name] for name in ("kv_dtype", "dtype", "tp")}
    device = {
        "gpu": given["gpu"],
        "weights": given["weights"],
        "gpu_memory_utilization": given["gpu_memory_utilization"],
    }
    memory = dict.fromkeys(device) if not on_gpu else device
    fit = _fit(load, given, on_gpu, words, memory)
    notes += fit.notes
    try:
        prefill = prefill_of(
            load, given["model"], gpu=given["gpu"], weights=given["weights"],
            efficiency=given["efficiency"], **words,
        )  # fmt: skip
    except KvtoolError as error:
        if error.code not in ("prefill_not_counted", "weights_not_counted"):
            raise
        notes.append(f"no FLOPs, no time: {error.message}")
        return fit, None
    if given["gpu"] is not None:
        notes += [note for note in prefill.notes if note not in notes]
    return fit, prefill


def _fit(
    load: Callable[[str], Any], given: Mapping[str, Any], on_gpu: bool,
    words: Mapping[str, Any], memory: Mapping[str, Any],
) -> Fit:  # fmt: skip
    """Bytes of a token on one GPU; with --capacity gpu the tokens that it has room for, too."""
    try:
        return tokens_of(
            load=load, model=given["model"], kv_memory=None if on_gpu else "1024TiB", **memory,
            **{**words, "tp": words["tp"] or _ranks(given["gpu"])},
        )  # fmt: skip
    except KvtoolError as error:
        if error.code != "tokens_differ":
            raise
        raise KvtoolError(
            error.message, "leave out --model, and give --capacity in blocks", code=error.code
        ) from error


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
        elif re.fullmatch(r"[0-9.]+\s*[a-z]*b", word.lower()):
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
    if not tokens:
        raise usage_error(
            f"--capacity {word} holds no token of {fit.bytes_per_token:,} bytes", "give more"
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
        if not rate or not size or match[1] in ("gpu", *(tier.name for tier in found)):
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

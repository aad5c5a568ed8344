"""Preemption by swap, as `kvtool simulate` takes it: where blocks go, and what moving one takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvtool.cli import fragment_words
from kvtool.cli.options import names_in
from kvtool.errors import KvtoolError, usage_error
from kvtool.model_pool import token_bytes_of
from kvtool.sim.settings import RECOMPUTE, SWAP, StepTime
from kvtool.units import parse_bytes, parse_counts

MOST_CPU_BLOCKS = 2**40
MOST_SWAP_NS = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Swaps:
    """How to preempt: a row for each of `ways`, arguments of Settings."""

    ways: Sequence[dict[str, Any]]
    bytes_per_token: int | None = None
    """Of the whole model; None: not known, or a model whose tokens differ."""
    ns_per_token: float | None = None
    """To move a token's share of one GPU over that GPU's link, either way; None: as --step-time says."""


def swaps_of(given: Mapping[str, Any], schedulers: Sequence[str], tp: int | None) -> Swaps:
    """The options as typed; the model is read if something is swapped and its bytes count."""
    ways = _ways(given)
    if all(way["preemption"] == RECOMPUTE for way in ways):
        for name in ("cpu_blocks", "swap_bandwidth"):
            if given[name] is not None:
                flag = f"--{name.replace('_', '-')}"
                raise usage_error(f"{flag} is of --preemption swap", f"add it, or leave out {flag}")
        return Swaps(ways=ways, bytes_per_token=None if given["model"] is None else 0)
    blocks = given["prefix_caching"] or given["async_scheduling"] or given["policy"] != "fcfs"
    if blocks or "static" in schedulers:
        raise _refused("prefix caching, priorities, asynchronous steps or static batches")
    bandwidth = _bandwidth(given)
    whole = rank = None
    if given["model"] is not None:
        try:
            whole, rank = token_bytes_of(
                fragment_words.load, given["model"], dtype=given["dtype"],
                kv_dtype=given["kv_dtype"], tp=tp or given["tp"],
            )  # fmt: skip
        except KvtoolError as error:
            if error.code != "tokens_differ" or bandwidth is not None:
                raise
    by_link = None if bandwidth is None or rank is None else rank / bandwidth * 1e9
    return Swaps(ways=ways, bytes_per_token=whole, ns_per_token=by_link)


def with_swaps(
    grid: Sequence[dict[str, Any]], swaps: Swaps, notes: list[str]
) -> list[dict[str, Any]]:
    """Arguments of Settings for each way of preempting, which turns fastest."""
    found, free = [], False
    for rules in grid:
        for way in swaps.ways:
            law = rules.get("step_time", StepTime())
            if way["preemption"] == SWAP:
                law = _timed(law, swaps.ns_per_token, rules.get("block_size", 16))
                free |= not law.swap_ns
            more = {"step_time": law} if law != StepTime() else {}
            found.append({**rules, **way, **more})
    if free:
        notes.append(
            "swapping takes no time: give --swap-bandwidth 25GB/s, or --step-time swap_ns=…"
        )
    return found


def check_followers(follow: bool, swaps: Swaps) -> None:
    """Refuse requests that follow others: another engine runs them."""
    if follow and any(way["preemption"] == SWAP for way in swaps.ways):
        raise _refused("requests that follow others (parent)")


def _ways(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Recompute, or swap to each number of CPU blocks."""
    typed = given["cpu_blocks"]
    sizes = [0] if typed is None else parse_counts(typed, name="--cpu-blocks", high=MOST_CPU_BLOCKS)
    ways: list[dict[str, Any]] = []
    for how in names_in(given["preemption"], "--preemption", (RECOMPUTE, SWAP)):
        if how == SWAP and typed is None:
            raise usage_error("--preemption swap has no blocks to swap to", "add --cpu-blocks 1000")
        for size in sizes if how == SWAP else (0,):
            ways.append({"preemption": how, "cpu_blocks": size})
    return ways


def _bandwidth(given: Mapping[str, Any]) -> float | None:
    """Bytes a second, each way."""
    typed = given["swap_bandwidth"]
    if typed is None:
        return None
    if given["model"] is None:
        raise usage_error(
            "--swap-bandwidth: the bytes of a block depend on the model",
            "add --model, or give the time of a block: --step-time swap_ns=80000",
        )
    if given["step_time"] is not None and "swap_ns" in given["step_time"]:
        raise usage_error(
            "--swap-bandwidth and --step-time swap_ns both say what a block takes", "leave out one"
        )
    size = re.fullmatch(r"(.+)/s", typed.strip())
    if size is None:
        raise usage_error(
            f"--swap-bandwidth: '{typed[:40]}' is no rate", "write bytes a second: 25GB/s"
        )
    rate = parse_bytes(size[1], name="--swap-bandwidth")
    if not rate:
        raise usage_error("--swap-bandwidth: nothing moves at 0", "write bytes a second: 25GB/s")
    return float(rate)


def _timed(law: StepTime, ns_per_token: float | None, block_size: int) -> StepTime:
    """The law with the time of a block, if a bandwidth says it."""
    if ns_per_token is None:
        return law
    ns = round(ns_per_token * block_size)
    if ns > MOST_SWAP_NS:
        raise usage_error(
            f"--swap-bandwidth: a block would take {ns / 1e9:,.0f} s to move", "raise the bandwidth"
        )
    return replace(law, swap_ns=ns)


def _refused(what: str) -> KvtoolError:
    return KvtoolError(
        f"--preemption swap is not modelled with {what}",
        "leave them out, or take --preemption recompute",
        code="unsupported",
    )

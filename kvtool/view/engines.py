"""Engines side by side: vLLM's pool as tables, and in words why the engines' numbers differ."""

from __future__ import annotations

from collections.abc import Iterable

from kvtool.run import Row
from kvtool.units import format_bytes
from kvtool.view import Table

MEANING = {  # what the mathematics needs, a cache object holds, and is reserved for a request
    "ideal": "needed",
    "transformers": "held",
    "vllm": "reserved",
}


def pool_table(rows: Iterable[Row]) -> Table | None:
    """Blocks of every vLLM row; None without one."""
    found = [row for row in rows if row["engine"] == "vllm"]
    if not found:
        return None
    counted = any(row["kv_memory_bytes"] is not None for row in found)
    columns = ["model", "max length", "block size", "bytes a block", "blocks a request"]
    columns += ["one request, a GPU"]
    columns += ["KV memory", "blocks", "cache size", "max concurrency"] if counted else []
    cells = []
    for row in found:
        line = [row["model"], f"{row['max_model_len']:,}", _count(row["block_size"])]
        line += [_count(row["bytes_per_block"]), _count(row["blocks_per_request"])]
        line += [_bytes(row["one_request_bytes"])]
        if counted:
            concurrency = row["max_concurrency"]
            line += [_bytes(row["kv_memory_bytes"]), _count(row["num_blocks"])]
            line += [_tokens(row["kv_cache_size_tokens"])]
            line += ["–" if concurrency is None else f"{concurrency:.2f}x"]
        cells.append(tuple(line))
    return Table(
        title="vLLM's blocks",
        columns=tuple(columns),
        rows=tuple(cells),
        right=frozenset(columns) - {"model"},
    )


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _tokens(value: int | None) -> str:
    return "–" if value is None else f"{value:,} tokens"


def _bytes(value: int | None) -> str:
    return "–" if value is None else format_bytes(value)


def differences(rows: list[Row]) -> list[str]:
    """Why transformers and vLLM differ from the mathematics, for each model's longest context."""
    said = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = {row["engine"]: row for row in _longest(rows, model)}
        ideal = own.get("ideal")
        if ideal is None:
            continue
        for engine, reasons in (("transformers", _held), ("vllm", _reserved)):
            if engine in own and own[engine]["total_bytes"] is not None:
                said.append(_difference(model, ideal, own[engine], reasons(ideal, own[engine])))
    return said


def _longest(rows: list[Row], model: str) -> list[Row]:
    mine = [row for row in rows if row["model"] == model]
    longest = max((row["context_tokens"], -row["batch"]) for row in mine)
    chosen: dict[str, Row] = {}
    for row in mine:
        if (row["context_tokens"], -row["batch"]) == longest:
            chosen.setdefault(row["engine"], row)
    return list(chosen.values())


def _difference(model: str, ideal: Row, other: Row, reasons: list[str]) -> str:
    need, has = ideal["total_bytes"], other["total_bytes"]
    verb = "reserves" if other["engine"] == "vllm" else "holds"
    head = f"{model}, {other['context_tokens']:,} tokens: {other['engine']} {verb}"
    if has == need:
        return f"{head} just what the mathematics needs."
    change = f"{format_bytes(abs(has - need))} {'more' if has > need else 'less'}"
    part = abs(has - need) / need if need else 0.0
    share = f" ({part:.1%})" if part >= 0.001 else " (less than 0.1%)"
    why = f": {'; '.join(reasons)}" if reasons else ""
    return f"{head} {change}{share}{why}."


def _held(ideal: Row, other: Row) -> list[str]:
    kinds = {kind["kind"]: kind for kind in ideal["kinds"]}
    reasons = []
    if {"sliding", "chunked"} & set(kinds):
        reasons.append("a window layer keeps window − 1 tokens, and the next one completes it")
    pools = {"compressed", "indexer"}
    if any(kind["state_bytes"] for kind in ideal["kinds"] if kind["kind"] in pools):
        reasons.append("a pool's pending tokens are counted as they are, not at their most")
    if any(kind["state_bytes"] for kind in ideal["kinds"] if kind["kind"] not in pools):
        reasons.append("convolutions keep a column more, and recurrent states stay in fp32")
    if other["kv_dtype"] != ideal["kv_dtype"]:
        reasons.append(f"K and V are kept in {other['kv_dtype']}, whatever the checkpoint says")
    own = {kind["kind"]: kind["kv_heads"] for kind in other["kinds"]}
    if any(own.get(name) not in (None, kind["kv_heads"]) for name, kind in kinds.items()):
        reasons.append("K and V are repeated to every query head before they are cached")
    return reasons


def _reserved(ideal: Row, other: Row) -> list[str]:
    reasons = [f"tokens are rounded up to blocks of {other['block_size']}"]
    groups = {group["kind"] for group in other["groups"]}
    if "sliding" in groups or "chunked" in groups:
        flight = other["max_batched_tokens"] * other["batches_in_flight"]
        reasons.append(
            f"a window layer may hold its window and the {flight:,} tokens in flight besides"
        )
    if "linear" in groups:
        reasons.append(
            "states are kept in the dtype that vLLM gives them, and padded to the attention "
            "layers' pages or the other way round"
        )
    if len(other["groups"]) > 1:
        reasons.append(
            f"{len(other['groups'])} groups of layers draw blocks of one size "
            f"({format_bytes(other['bytes_per_block'])}) from one pool"
        )
    if any(kind["kind"] == "indexer" for kind in ideal["kinds"]):
        reasons.append("indexer keys are kept in fp8 with their scales")
    if other["tp"] > 1:
        reasons.append("what is copied to every rank counts on each")
    return reasons

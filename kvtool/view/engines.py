"""Engines side by side: vLLM's pool as tables, and in words why the engines' numbers differ."""

from __future__ import annotations

from collections.abc import Iterable

from kvtool.run import Row
from kvtool.units import format_bytes
from kvtool.view import Table
from kvtool.view.reasons import Reason, held, reserved
from kvtool.view.words import amount, counted, number, ranks, times, told_apart

MEANING = {  # what the mathematics needs, a cache object holds, and is reserved for a request
    "ideal": "needed",
    "transformers": "held",
    "vllm": "reserved",
}
SAME = ("context_tokens", "batch", "tp", "pp", "dcp", "dp")
"""Rows that differ in one of these cannot be compared: the difference would be theirs."""


def pool_table(rows: Iterable[Row]) -> Table | None:
    """Blocks of every vLLM row; None without one."""
    found = [row for row in rows if row["engine"] == "vllm"]
    if not found:
        return None
    counts = any(row["kv_memory_bytes"] is not None for row in found)
    columns = ["model", "max length", "block size", "bytes a block", "blocks a request"]
    columns += ["one request, a GPU"]
    columns += ["KV memory", "blocks", "cache size", "max concurrency"] if counts else []
    return Table(
        title="vLLM's blocks",
        columns=tuple(columns),
        rows=tuple(_pool_cells(row, counts=counts) for row in found),
        right=frozenset(columns) - {"model"},
    )


def _pool_cells(row: Row, *, counts: bool) -> tuple[str, ...]:
    line = [row["model"], f"{row['max_model_len']:,}", number(row["block_size"])]
    line += [number(row["bytes_per_block"]), number(row["blocks_per_request"])]
    line += [amount(row["one_request_bytes"])]
    if counts:
        tokens, concurrency = row["kv_cache_size_tokens"], row["max_concurrency"]
        line += [amount(row["kv_memory_bytes"]), number(row["num_blocks"])]
        line += ["–" if tokens is None else counted(tokens, "token")]
        line += ["–" if concurrency is None else f"{concurrency:.2f}x"]
    return tuple(line)


def concurrency(rows: Iterable[Row]) -> list[str]:
    """How many requests the KV memory serves at once, and the smallest batch that it does not."""
    rows = list(rows)
    pools: dict[str, list[Row]] = {}
    for row in rows:
        if row["engine"] == "vllm" and row["max_concurrency"] is not None:
            pools.setdefault(_at_once(row, rows), []).append(row)
    said = []
    for text, pool in pools.items():
        over = [row for row in pool if -(-row["batch"] // row["dp"]) > _fit(row)]
        more = _not_at_once(min(over, key=lambda row: int(row["batch"]))) if over else ""
        said.append(f"{text}{more}.")
    return said


def _fit(row: Row) -> int:
    """Requests of the longest length; max_concurrency counts the null block too, which holds none."""
    return int((row["num_blocks"] - 1) // row["blocks_per_request"])


def _at_once(row: Row, rows: list[Row]) -> str:
    requests = _fit(row)
    length = counted(row["max_model_len"], "token")
    fit = "fits" if requests == 1 else "fit"
    many = ranks(row) > 1
    return (
        f"{row['model']}{told_apart(row, rows)}: {counted(requests, 'request')} of {length} {fit} "
        f"at once in {format_bytes(row['kv_memory_bytes'])} on {'each' if many else 'one'} GPU"
    )


def _not_at_once(row: Row) -> str:
    batch, dp = row["batch"], row["dp"]
    if dp == 1:
        return f"; {batch:,} do not"
    return f"; {batch:,} over {dp} replicas, {-(-batch // dp):,} on each, do not"


def differences(rows: list[Row]) -> list[str]:
    """Why transformers and vLLM differ from the mathematics, for each model's longest context."""
    said = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        for engine, reasons in (("transformers", held), ("vllm", reserved)):
            pair = _pair(mine, engine)
            if pair is not None:
                said.append(_difference(*pair, reasons(*pair), told_apart(pair[1], rows)))
    return said


def _pair(rows: list[Row], engine: str) -> tuple[Row, Row] | None:
    """The mathematics and the engine at the longest context and smallest batch, else alike."""
    pairs = [
        (ideal, other)
        for other in rows
        for ideal in rows
        if ideal["engine"] == "ideal" and other["engine"] == engine
        if other["total_bytes"] is not None
        if all(ideal[name] == other[name] for name in SAME)
        # transformers knows only the model's dtype, whatever the checkpoint's cache is quantised to
        if engine == "transformers" or ideal["kv_dtype"] == other["kv_dtype"]
    ]
    return max(pairs, key=_alike) if pairs else None


def _alike(pair: tuple[Row, Row]) -> tuple[int, ...]:
    ideal, other = pair
    return (
        other["context_tokens"],
        -other["batch"],
        ideal["kv_dtype"] == other["kv_dtype"],
        ideal["block_size"] == other["block_size"],
        ideal["block_size"] is None,
    )


def _difference(ideal: Row, other: Row, reasons: list[Reason], which: str) -> str:
    need, has = ideal["total_bytes"], other["total_bytes"]
    verb = "reserves" if other["engine"] == "vllm" else "holds"
    head = (
        f"{other['model']}, {counted(other['context_tokens'], 'token')}{times(other['batch'])}"
        f"{which}: {other['engine']} {verb}"
    )
    if has == need:
        return f"{head} just what the mathematics needs."
    change = f"{format_bytes(abs(has - need))} {'more' if has > need else 'less'}"
    part = abs(has - need) / need if need else 0.0
    share = f" ({part:.1%})" if part >= 0.001 else " (less than 0.1%)" if need else ""
    return f"{head} {change}{share}{_why(reasons, more=has > need)}."


def _why(reasons: list[Reason], *, more: bool) -> str:
    """The reasons that pull this way, then those that pull the other; no reason without the first."""
    towards = [reason.text for reason in reasons if reason.more == more]
    against = [reason.text for reason in reasons if reason.more != more]
    if not towards:
        return ""
    return f": {'; '.join(towards)}" + (f"; but {'; '.join(against)}" if against else "")

"""What `kvtool size` says of one row: what the plain formula would miss, and what a GPU would hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtool.run import Row
from kvtool.units import format_bytes
from kvtool.view.words import counted, times, told_apart

CACHING = ("full", "sliding", "chunked", "latent")


def about(row: Row, *, named: bool) -> list[str]:
    """What a row's numbers leave unsaid; `named` where several models are asked for."""
    who = f"{row['model']}: " if named else ""
    found = [_assumed(row), _mha(row), _plain(row), _scales(row)]
    return [who + text for text in found if text]


def _assumed(row: Row) -> str:
    """A guess is called a guess wherever its numbers stand."""
    return "Sized as plain full attention because of --assume full." if row.get("assume") else ""


def _mha(row: Row) -> str:
    """What grouping the query heads saves."""
    if not row["gqa_ratio"] or row["mha_bytes"] <= row["total_bytes"]:
        return ""
    return (
        f"If every query head had its own KV head: {format_bytes(row['mha_bytes'])} "
        f"({_ratio(row['mha_bytes'], row['total_bytes'])})."
    )


def _plain(row: Row) -> str:
    """What 2 · layers · KV heads · head size · tokens · bytes gets wrong, and why."""
    if row.get("draft"):
        return ""  # two models' heads and layers have no one formula
    reasons = _reasons(row)
    plain, total = row["plain_bytes"], row["total_bytes"]
    if not reasons or plain == total:
        return ""
    if not plain:
        return "There is no K and V here: the cache is a constant state, whatever the context."
    high = plain > total
    factor = _ratio(plain, total) if high else _ratio(total, plain)
    return (
        f"The plain formula (2 · layers · KV heads · head size · tokens · bytes) would say "
        f"{format_bytes(plain)}, {factor} too {'much' if high else 'little'}: {'; '.join(reasons)}."
    )


def _reasons(row: Row) -> list[str]:
    layers, windows = _layers_by_kind(row)
    most = " or ".join(f"{window:,}" for window in sorted(windows))
    said = {
        "window": ("hold", f"at most {most} token{'' if windows == {1} else 's'}"),
        "latent": ("keep", "one compressed latent instead of K and V"),
        "compressed": ("keep", "a compressed pool beside their window"),
        "linear": ("keep", "a constant state instead of K and V"),
        "indexer": ("keep", "an indexer's keys as well"),
        "cross": ("keep", "K and V of the encoder's tokens"),
    }
    total = row["layers"]
    reasons = [
        _of_layers(layers[name], total, verb, what)
        for name, (verb, what) in said.items()
        if name in layers
    ]
    own = sum(count for name, count in layers.items() if name in CACHING)
    idle = total - own - layers.get("linear", 0) - _only_cross(row)
    if idle > 0:
        reasons.append(_of_layers(idle, total, "keep", "nothing of their own"))
    widths = {
        (k["kv_heads"], k["k_head_dim"], k["v_head_dim"])
        for k in row["kinds"]
        if k["kind"] in CACHING
    }
    return [*reasons, *(["not all layers have the same heads"] if len(widths) > 1 else [])]


def _layers_by_kind(row: Row) -> tuple[dict[str, int], set[int]]:
    """Layers of each kind and, as "window", those that a window cuts; and the windows."""
    layers: dict[str, int] = {}
    windows: set[int] = set()
    for kind in row["kinds"]:
        name = kind["kind"]
        if kind["window"] is not None and kind["window"] < row["context_tokens"]:
            windows.add(kind["window"])
            layers["window"] = layers.get("window", 0) + kind["layers"]
        layers[name] = layers.get(name, 0) + kind["layers"]
    return layers, windows


def _of_layers(count: int, total: int, verb: str, what: str) -> str:
    return f"{count:,} of {counted(total, 'layer')} {verb}{'s' if count == 1 else ''} {what}"


def _only_cross(row: Row) -> int:
    """Layers that attend to the encoder alone, as in Llama 3.2 Vision."""
    self_layers = sum(
        k["layers"] for k in row["kinds"] if k["kind"] in ("full", "sliding", "chunked")
    )
    cross = sum(k["layers"] for k in row["kinds"] if k["kind"] == "cross")
    return cross if self_layers + cross == row["layers"] else 0


def _scales(row: Row) -> str:
    if not row["scale_bytes"]:
        return ""
    share = row["scale_bytes"] / row["total_bytes"]
    return f"Scales and zero points of {row['kv_dtype']}: {format_bytes(row['scale_bytes'])} ({share:.1%})."


def _ratio(large: int, small: int) -> str:
    ratio = large / small
    return f"{ratio:.0f}x" if abs(ratio - round(ratio)) < 0.005 else f"{ratio:.1f}x"


# --- beside a GPU's memory ------------------------------------------------------------------------


def shares(row: Row, rows: Iterable[Row]) -> list[str]:
    """What part of each GPU named by --gpu the cache would take, weights apart."""
    who = f"{row['model']}, {counted(row['context_tokens'], 'token')}{times(row['batch'])}"
    which = told_apart(row, rows)
    engine = "" if row["engine"] == "ideal" else f", {row['engine']}"
    return [
        f"{who}{engine}{which}: {_share(gpu)}; the weights come on top."
        for gpu in row.get("gpus", ())
        if gpu["need_bytes"] is not None
    ]


def _share(gpu: dict[str, Any]) -> str:
    need, usable = format_bytes(gpu["need_bytes"]), gpu["usable_bytes"]
    name, count, ranks = gpu["gpu"], gpu["count"], gpu["ranks"]
    if ranks == 1 and count > 1:
        return (
            f"{need} would be {gpu['share']:.1%} of the {format_bytes(count * usable)} of "
            f"{count:,} × {name}, if it were spread evenly over them"
        )
    each = f"{need} is {gpu['share']:.1%} of the {format_bytes(usable)} of one {name}"
    if ranks == 1:
        return each
    each = f"on the fullest of {ranks:,} GPUs {each}"
    return (
        each
        if count in (1, ranks)
        else f"{each} ({ranks:,} ranks need {ranks:,} GPUs, not {count:,})"
    )

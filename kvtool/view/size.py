"""How `kvtool size` looks: the totals, a breakdown by kind, and what the plain formula would miss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtool.dtypes import DTYPES
from kvtool.run import Row, Run
from kvtool.units import format_bytes
from kvtool.view import Chart, Line, Table, View
from kvtool.view.engines import MEANING, differences, pool_table

OPTIONAL = ("encoder_tokens", "tp", "pp", "dcp", "dp", "block_size")
"""Columns shown only where some row has something other than nothing or 1 in them."""


def view(run: Run, curve: tuple[Row, ...] = ()) -> View:
    """Tables and sentences of a size run; `curve` are the rows to draw, if not its own.

    The run's `params` say which breakdowns were asked for.
    """
    rows = run.rows
    tables = [_totals(rows)]
    pool = pool_table(rows)
    tables += [pool] if pool else []
    firsts = _largest_of_each(rows)
    several = len(firsts) > 1
    # Beside each other, engines are told apart in words; --explain has each one's breakdown.
    shown = firsts if run.params.get("explain") else _one_of_each_model(firsts)
    tables += [_kinds(row, titled=several) for row in shown if row["kinds"]]
    if run.params.get("per_layer"):
        tables += [_layers(row) for row in firsts if row.get("per_layer")]
    if run.params.get("explain"):
        tables += [_explanation(row) for row in firsts if row["kinds"]]
    plain = [row for row in firsts if row["engine"] != "vllm"]
    named = len({row["model"] for row in firsts}) > 1
    sentences = [text for row in _one_of_each_model(plain) for text in _sentences(row, named=named)]
    if len({row["engine"] for row in rows}) > 1:
        sentences += differences(list(rows))
    if run.params.get("gpu_asked"):
        sentences += [text for row in firsts for text in _shares(row, run.params["levels"])]
    return View(tables=tuple(tables), sentences=tuple(sentences), chart=_chart(run, curve or rows))


def _largest_of_each(rows: Iterable[Row]) -> list[Row]:
    """For each model and engine its row of the longest context, at the smallest batch."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row["model"], row["engine"])
        held = best.get(key)
        rank = (row["context_tokens"], -row["batch"])
        if held is None or rank > (held["context_tokens"], -held["batch"]):
            best[key] = row
    return list(best.values())


def _one_of_each_model(rows: Iterable[Row]) -> list[Row]:
    return list({row["model"]: row for row in reversed(list(rows))}.values())[::-1]


def _totals(rows: tuple[Row, ...]) -> Table:
    engines = len({row["engine"] for row in rows}) > 1
    shown = [n for n in OPTIONAL if any(row[n] not in (None, 0, 1) for row in rows)]
    shown = [n for n in shown if not (engines and n == "block_size")]  # vLLM's own table has it
    single = engines and all(row["batch"] == 1 for row in rows)
    split = any(row["tp"] * row["pp"] * row["dp"] > 1 for row in rows)
    columns = [
        "model", *(["engine"] if engines else []), "context", "batch", "KV dtype",
        *[name.replace("_", " ") for name in shown],
        "next token", *([] if single else ["sequence"]), "total", *(["per GPU"] if split else []),
        *(["which is"] if engines else []),
    ]  # fmt: skip
    cells = []
    for row in rows:
        line = [row["model"], *([row["engine"]] if engines else [])]
        line += [f"{row['context_tokens']:,}", f"{row['batch']:,}", row["kv_dtype"]]
        line += ["–" if row[name] is None else f"{row[name]:,}" for name in shown]
        names = ["bytes_per_token", *([] if single else ["sequence_bytes"]), "total_bytes"]
        line += [_bytes(row[name]) for name in ([*names, "per_gpu_bytes"] if split else names)]
        cells.append(tuple(line + ([MEANING[row["engine"]]] if engines else [])))
    return Table(
        columns=tuple(columns),
        rows=tuple(cells),
        right=frozenset(columns) - {"model", "engine", "KV dtype", "which is"},
    )


def _bytes(count: int | None) -> str:
    return "–" if count is None else format_bytes(count)


def _kinds(row: Row, *, titled: bool) -> Table:
    columns = ("kind", "layers", "KV heads", "K + V size", "tokens held", "bytes", "share")
    name = f"{row['model']}, " if titled else ""
    what = "by kind of layer"
    if row["engine"] != "ideal":
        what += f" ({row['engine']})"
    return Table(
        title=f"{name}{row['context_tokens']:,} tokens{_times(row['batch'])}, {what}",
        columns=columns,
        rows=tuple(_kind_cells(kind, row["total_bytes"]) for kind in row["kinds"]),
        right=frozenset(columns[1:]),
    )


def _kind_cells(kind: dict[str, Any], total: int) -> tuple[str, ...]:
    grows = kind["kind"] != "linear"
    heads = kind["kv_heads"]
    return (
        kind["kind"],
        f"{kind['layers']:,}",
        f"{heads:,}" if grows and heads is not None else "–",
        f"{kind['k_head_dim']} + {kind['v_head_dim']}" if grows and heads is not None else "–",
        f"{kind['tokens']:,}" if grows else "constant",
        format_bytes(kind["bytes"]),
        f"{kind['bytes'] / total:.1%}" if total else "–",
    )


def _layers(row: Row) -> Table:
    columns = ("layer", "kind", "KV heads", "K + V size", "window", "tokens held", "bytes")
    return Table(
        title=f"{row['model']}, {row['context_tokens']:,} tokens, by layer",
        columns=columns,
        rows=tuple(
            (
                str(layer["layer"]),
                layer["kind"],
                f"{layer['kv_heads']:,}",
                f"{layer['k_head_dim']} + {layer['v_head_dim']}",
                "–" if layer["window"] is None else f"{layer['window']:,}",
                f"{layer['tokens']:,}",
                format_bytes(layer["bytes"]),
            )
            for layer in row["per_layer"]
        ),
        right=frozenset(columns) - {"kind"},
    )


def _sentences(row: Row, *, named: bool) -> list[str]:
    who = f"{row['model']}: " if named else ""
    found = [_assumed(row), _mha(row), _plain(row), _scales(row)]
    return [who + text for text in found if text]


def _assumed(row: Row) -> str:
    """A guess is called a guess wherever its numbers stand."""
    return "Sized as plain full attention because of --assume full." if row.get("assume") else ""


def _shares(row: Row, levels: dict[str, int]) -> list[str]:
    """What part of each GPU (or number of them) the cache would take, weights apart."""
    said = []
    for name, size in levels.items():
        several = " × " in name
        need = row["total_bytes"] if several else row["per_gpu_bytes"]
        if need is not None:
            said.append(
                f"{row['model']}, {row['context_tokens']:,} tokens{_times(row['batch'])}: "
                f"{format_bytes(need)} is {need / size:.1%} of the {format_bytes(size)} of "
                f"{name if several else f'one {name}'}; the weights come on top."
            )
    return said


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
    reasons = _reasons(row)
    plain, total = row["plain_bytes"], row["total_bytes"]
    if not reasons or plain == total:
        return ""
    if not plain:
        return "There is no K and V here: the cache is a constant state, whatever the context."
    high = plain > total
    times = _ratio(plain, total) if high else _ratio(total, plain)
    return (
        f"The plain formula (2 · layers · KV heads · head size · tokens · bytes) would say "
        f"{format_bytes(plain)}, {times} too {'much' if high else 'little'}: {'; '.join(reasons)}."
    )


def _reasons(row: Row) -> list[str]:
    layers: dict[str, int] = {}
    windows: set[int] = set()
    for kind in row["kinds"]:
        name = kind["kind"]
        if kind["window"] is not None and kind["window"] < row["context_tokens"]:
            windows.add(kind["window"])
            layers["window"] = layers.get("window", 0) + kind["layers"]
        layers[name] = layers.get(name, 0) + kind["layers"]
    said = {
        "window": f"hold at most {' or '.join(f'{w:,}' for w in sorted(windows))} tokens",
        "latent": "keep one compressed latent instead of K and V",
        "compressed": "keep a compressed pool beside their window",
        "linear": "keep a constant state instead of K and V",
        "indexer": "also keep an indexer's keys",
        "cross": "keep K and V of the encoder's tokens",
    }
    total = row["layers"]
    reasons = [
        f"{layers[name]} of {total} layers {text}" for name, text in said.items() if name in layers
    ]
    caching = {"full", "sliding", "chunked", "latent"}
    own = sum(count for name, count in layers.items() if name in caching)
    idle = total - own - layers.get("linear", 0) - _only_cross(row)
    if idle > 0:
        reasons.append(f"{idle} of {total} layers keep nothing of their own")
    widths = {
        (k["kv_heads"], k["k_head_dim"], k["v_head_dim"])
        for k in row["kinds"]
        if k["kind"] in caching
    }
    if len(widths) > 1:
        reasons.append("not all layers have the same heads")
    return reasons


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


def _explanation(row: Row) -> Table:
    """The formula of each kind written out, and the key that decided each number."""
    cells: list[tuple[str, ...]] = []
    for kind in row["kinds"]:
        cells.append((kind["kind"], "bytes", f"{kind['formula']} = {kind['bytes']:,}"))
        cells += [("", name, by) for name, by in kind["decided_by"].items()]
    used = [DTYPES[name] for name in dict.fromkeys(row["kv_dtype"].split("/")) if name in DTYPES]
    cells += [("dtype", dtype.name, dtype.about) for dtype in used if dtype.about]
    cells.append(("total", "bytes", f"{row['total_bytes']:,}"))
    return Table(
        title=f"{row['model']} ({row['model_type']}), {row['context_tokens']:,} tokens"
        f"{_times(row['batch'])}: where each number comes from",
        columns=("kind", "number", "from"),
        rows=tuple(cells),
    )


def _times(batch: int) -> str:
    return f" × {batch:,} sequences" if batch > 1 else ""


def _ratio(large: int, small: int) -> str:
    ratio = large / small
    return f"{ratio:.0f}x" if abs(ratio - round(ratio)) < 0.005 else f"{ratio:.1f}x"


def _chart(run: Run, rows: tuple[Row, ...]) -> Chart | None:
    """Bytes against context, a line for each model, batch and dtype."""
    lines: dict[str, list[tuple[int, int]]] = {}
    names = ("engine", "batch", "kv_dtype", "tp", "pp", "block_size")
    varying = [n for n in names if len({r[n] for r in rows}) > 1]
    for row in rows:
        if row["total_bytes"] is None:
            continue
        extra = ", ".join(f"{name.replace('_', ' ')} {row[name]}" for name in varying)
        name = f"{row['model']} ({extra})" if extra else row["model"]
        lines.setdefault(name, []).append((row["context_tokens"], row["total_bytes"]))
    if not any(len(points) > 1 for points in lines.values()):
        return None
    return Chart(
        title="KV cache against context",
        x_label="context (tokens)",
        y_label="KV cache (bytes)",
        lines=tuple(
            Line(name=name, x=tuple(p[0] for p in sorted(pts)), y=tuple(p[1] for p in sorted(pts)))
            for name, pts in lines.items()
        ),
        levels=tuple((name, size) for name, size in run.params.get("levels", {}).items()),
        log_x=True,
        log_y=True,
    )

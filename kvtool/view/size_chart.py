"""The chart of `kvtool size`: bytes against context, beside the memory of some GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from kvtool.run import Row
from kvtool.view import Chart, Line
from kvtool.view.words import ranks, words_of

NAMES = ("engine", "batch", "kv_dtype", "tp", "pp", "dcp", "dp")


def chart(rows: tuple[Row, ...], levels: Mapping[str, int]) -> Chart | None:
    """A line for each model, batch, dtype and split; None where no line has two points.

    With ranks the lines are one GPU's share, as the levels are one GPU's memory.
    """
    split = any(ranks(row) > 1 for row in rows)
    field = "per_gpu_bytes" if split else "total_bytes"
    lines: dict[str, list[tuple[int, int]]] = {}
    varying = _varying(rows)
    for row in rows:
        if row[field] is None:
            continue
        extra = ", ".join(words_of(row, varying))
        name = f"{row['model']} ({extra})" if extra else row["model"]
        lines.setdefault(name, []).append((row["context_tokens"], row[field]))
    if not any(len(points) > 1 for points in lines.values()):
        return None
    return Chart(
        title="KV cache against context",
        x_label="context (tokens)",
        y_label="KV cache on a GPU (bytes)" if split else "KV cache (bytes)",
        lines=tuple(
            Line(
                name=name,
                x=tuple(x for x, _ in sorted(points)),
                y=tuple(y for _, y in sorted(points)),
            )
            for name, points in lines.items()
        ),
        levels=tuple(levels.items()),
        log_x=True,
        log_y=True,
    )


def _varying(rows: tuple[Row, ...]) -> list[str]:
    """Fields that tell lines apart. A block size does so only within an engine: others have none."""
    names = [name for name in NAMES if len({row[name] for row in rows}) > 1]
    sizes: dict[tuple[str, str], set[int | None]] = {}
    for row in rows:
        sizes.setdefault((row["engine"], row["model"]), set()).add(row["block_size"])
    return names + (["block_size"] if any(len(found) > 1 for found in sizes.values()) else [])

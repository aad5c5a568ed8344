"""How `kvtool bench` looks: attention and whole-model decode, each with its own table."""

from __future__ import annotations

from kvtool.run import Run
from kvtool.view import Charts, Table, View
from kvtool.view import bench_attention as attention
from kvtool.view import bench_decode as decode


def view(run: Run) -> View:
    """The tables, the verdicts and the picture of whatever was measured."""
    kernels = [row for row in run.rows if row["bench"] == "attention"]
    models = [row for row in run.rows if row["bench"] != "attention"]
    tables: list[Table] = []
    said: list[str] = []
    planned = [row for row in kernels if "expected_s" in row]
    timed = [row for row in kernels if "expected_s" not in row]
    if planned:
        tables.append(attention.forecast_table(planned))
        said += attention.forecast_sentences(planned)
    if timed:
        tables.append(attention.table(timed))
        said += attention.sentences(timed, run.env)
    if models:
        tables += decode.tables(models)
        said += decode.sentences(models, run.env)
    charts = (*attention.charts(timed, run.env), *decode.charts(models, run.env))
    return View(
        tables=tuple(tables),
        sentences=tuple(said),
        chart=Charts(charts=charts) if charts else None,
    )

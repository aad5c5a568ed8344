"""How plans look: nothing broken on 80 columns, the answer first, caveats said, nothing of what cannot run."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ran import Ran

from kvtool.cli.main import run
from kvtool.run import Row, Run
from kvtool.view import Bars, Chart, Panels, Table, View
from kvtool.view.plan import view
from kvtool.view.plan_columns import GAP, WIDTH, Column, table

Kvtool = Callable[..., Ran]
GRID = "qwen3-32b llama-3-70b --gpu h100,h200 --engine vllm --kv-dtype auto,fp8 -b 1,8 --allow-long"


@pytest.fixture(scope="module")
def planned() -> Callable[[str], list[Row]]:
    """Rows of a command line, each run once."""

    @cache
    def rows(words: str) -> list[Row]:
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            run(["plan", *shlex.split(words), "--json"])
        return list(json.loads(out.getvalue())["rows"])

    return rows


def shown(rows: list[Row]) -> View:
    return view(Run(command="plan", params={}, rows=tuple(rows)))


def said(rows: list[Row]) -> str:
    found = shown(rows)
    return "\n".join((*found.lead, *found.sentences))


def width(one: Table) -> int:
    lines = zip(one.columns, *one.rows, strict=True)
    return sum(max(map(len, cells)) + GAP for cells in lines) - GAP


@pytest.mark.parametrize(
    "words",
    [
        f"{GRID} -c 4k,32k",
        f"{GRID} -c 4k",
        "llama-3-70b --gpu all",
        "llama-3-70b --gpu all -c 4k,8k",
        "gpt-oss-120b --gpu all -c 128k -b 16",
        "llama-3-70b --gpu h100:8 --tp 1,2,4,8 --engine vllm,ideal --gpu-memory-utilization 0.8,0.9",
        "llama-3-8b qwen3-32b gemma-3-27b --gpu h200",
        "llama-3-70b --gpu h100 -b 64",
        "qwen2.5-7b --gpu l4 --engine vllm -c 32k -b 16",
        "llama-3-8b --gpu h100 --engine vllm --levers",
        "deepseek-v3 --gpu h200:8 --ways",
        "llama-3-8b --gpu h100 --engine vllm --tiers cpu=64GiB@25GB/s,disk=1TiB@6GB/s",
    ],
)
def test_no_table_is_broken_on_a_narrow_terminal(
    planned: Callable[[str], list[Row]], words: str
) -> None:
    tables = shown(planned(words)).tables
    assert tables
    assert max(map(width, tables)) <= WIDTH, [one for one in tables if width(one) > WIDTH]


def test_what_matters_least_goes_first() -> None:
    wide = Column(name="wide", cells=("x" * 60,), rank=1)
    long = Column(name="long", cells=("no: context",), shorter=("no",))
    kept = table(
        [wide, long, Column(name="figure", cells=("1,024",)), Column(name="a", cells=("–",))]
    )
    assert kept.columns == ("wide", "long", "figure")  # shortened, and what is empty has no column
    assert kept.rows == (("x" * 60, "no", "1,024"),)
    more = table([wide, Column(name="figures", cells=("1" * 30,))])
    assert more.columns == ("figures",)


def test_a_block_a_machine_says_once_what_its_rows_share(
    planned: Callable[[str], list[Row]],
) -> None:
    rows = planned(f"{GRID} -c 4k,32k")
    tables = shown(rows).tables
    assert [one.title.partition(":")[0] for one in tables] == [
        f"{model} on 1 × {gpu}" for model in ("qwen3-32b", "llama-3-70b") for gpu in ("h100-sxm", "h200")
    ]  # fmt: skip
    assert tables[0].title.endswith("6.89 GiB for the cache, 3.29 USD/h")
    assert "63.22 GiB missing before any cache" in tables[2].title
    assert tables[0].columns[:3] == ("KV", "context", "users")
    assert sum(len(one.rows) for one in tables) == len(rows)


def test_each_context_of_a_ranking_has_a_block(planned: Callable[[str], list[Row]]) -> None:
    tables = shown(planned("llama-3-70b --gpu all -c 4k,8k")).tables
    assert [one.title.partition(":")[0] for one in tables] == [
        f"llama-3-70b, {tokens} tokens" for tokens in ("4,096", "8,192")
    ]
    assert {"gpu", "gpus", "requests", "TPOT", "USD/M"} <= set(tables[0].columns)


def test_what_does_not_fit_has_no_speed(planned: Callable[[str], list[Row]]) -> None:
    (row,) = planned("qwen3-32b --gpu h100 --engine vllm -c 4k -b 8")
    assert not row["fits"]
    for tpot in (0.0281, None):  # as it would be, were it to run, or null
        lacking = row | {"tpot_s": tpot}
        holds = shown([lacking]).tables[1]
        assert "TPOT" not in holds.columns
        assert "tokens/s" not in holds.columns
        text = said([lacking])
        assert text.startswith("Does not fit: ")
        assert "A step of" not in text
        assert "tokens/s" not in text
    (both,) = shown([row, planned("qwen3-32b --gpu h100 --engine vllm -c 4k -b 1")[0]]).tables
    assert both.rows[0][both.columns.index("TPOT")] == "–"
    assert both.rows[1][both.columns.index("TPOT")].endswith(" ms")


def test_blocks_are_shown_of_engines_that_have_them(planned: Callable[[str], list[Row]]) -> None:
    users = "-c 8k -b 500"
    of_vllm = shown(planned(f"llama-3-8b --gpu h100 --engine vllm {users}")).tables[1]
    assert int(of_vllm.rows[0][of_vllm.columns.index("blocks")].replace(",", "")) > 20_000
    for words in (f"llama-3-8b --gpu h100 {users}", "llama-3-70b --gpu h100"):
        assert "blocks" not in shown(planned(words)).tables[1].columns


def test_caveats_are_said_once_with_their_sources(planned: Callable[[str], list[Row]]) -> None:
    rows = planned("qwen2.5-7b --gpu l4 --engine vllm -c 32k -b 4")
    (changes,) = [one for one in shown(rows).tables if "would make it fit" in one.title]
    text = said(rows)
    numbers = re.findall(r"^\((\d+)\) (.+)$", text, re.MULTILINE)
    assert [int(number) for number, _ in numbers] == list(range(1, len(numbers) + 1))
    assert len({caveat for _, caveat in numbers}) == len(numbers)
    cited = ", ".join(row[changes.columns.index("see")] for row in changes.rows)
    assert set(re.findall(r"\d+", cited)) == {number for number, _ in numbers}
    assert "(verl-project/verl#4435, ggml-org/llama.cpp#21385)" in text


def test_changes_can_be_pasted(planned: Callable[[str], list[Row]]) -> None:
    (row,) = planned("llama-3-8b --gpu h100 --engine vllm --levers")
    gains = shown([row]).tables[-1]
    flags = [cells[0] for cells in gains.rows]
    assert gains.columns[0] == "flags"
    assert flags == [one["flags"] for one in row["levers"]]
    assert "--gpu-memory-utilization 0.95" in flags
    tried = said(planned("llama-3-70b --gpu h100 -c 8k -b 64"))
    assert "Not enough on the same GPUs: --kv-dtype fp8; --kv-dtype int8; " in tried


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("llama-3.1-8b --gpu l4 --solve kv-dtype -c 32k -b 4", "KV dtype: int4 (--kv-dtype int4)."),
        ("llama-3.1-8b --gpu h100 --solve kv-dtype -c 8k", "KV dtype: bf16 (--kv-dtype auto)."),
        (
            "qwen3-32b --gpu h100 --engine vllm --solve context -b 2",
            r"Context: [\d,]+ tokens \(--c",
        ),
        ("llama-3-8b --gpu h100 --solve batch -c 8k", r"Batch: \d+ requests \(--batch"),
        ("llama-3-70b --gpu h100 --solve gpus -c 8k", r"GPUs: \d+ \(--gpu h100-sxm:"),
    ],
)
def test_the_first_line_is_the_answer(
    planned: Callable[[str], list[Row]], words: str, first: str
) -> None:
    lead = shown(planned(words)).lead
    assert lead[0].startswith(first) or re.match(first, lead[0])
    assert lead[1].startswith("Fits: ")


def test_the_assumptions_of_a_step_are_said(planned: Callable[[str], list[Row]]) -> None:
    for words, peaks in (
        ("llama-3-8b --gpu h100 -c 8k", "3,350 GB/s and 50% of 989 TFLOPS"),
        ("llama-3-8b --gpu h100:2 --pp 2 -c 8k", "3,350 GB/s and 50% of 989 TFLOPS"),
    ):
        (row,) = planned(words)
        text = said([row])
        assert f"at 80% of {peaks}, and 1.0 ms a step besides" in text
        assert "(assumed; --efficiency, --calibrate)" in text
        assert "That is" in text  # one replica is not 'all replicas'
    measured = said([row | {"efficiency": row["efficiency"] | {"basis": "measured"}}])
    assert "(measured)" in measured


def test_a_verdict_that_estimates_would_change_says_so(
    planned: Callable[[str], list[Row]],
) -> None:
    (row,) = planned("qwen3-32b --gpu h100 --engine vllm -c 4k -b 6")
    held = {"whole_requests": {"low": 4, "best": 6, "high": 8}, "runs": 6}
    assert "by the best estimate, 4 if the estimates are off;" in said([row | held])
    sure = held | {"whole_requests": {"low": 6, "best": 6, "high": 8}}
    assert "by the best estimate; memory" in said([row | sure])
    several = shown([row | held, row | sure | {"users": 5}])
    (lines,) = several.tables
    assert [cells[lines.columns.index("fits")] for cells in lines.rows] == ["yes*", "yes"]
    assert any(text.startswith("yes*: ") for text in several.sentences)
    missing = row | held | {"users": 7, "fits": False, "binds": "users", "missing_bytes": 1}
    assert "8 would if the estimates are off" in said([missing])


def test_a_limit_of_the_engine_is_told_from_the_memory(
    planned: Callable[[str], list[Row]],
) -> None:
    (row,) = planned("llama-3-8b --gpu h200 --engine vllm -c 1k --max-num-seqs 256")
    assert row["whole_requests"]["best"] > 256
    assert ", of which 256 run, by the best estimate" in said([row])
    assert "(--max-num-seqs)" in said([row])


def test_why_there_is_no_speed(planned: Callable[[str], list[Row]]) -> None:
    reading = "How fast a rtx-a6000 computes in bf16 is not known: reading alone is counted."
    assert reading in said(planned("llama-3-8b --gpu rtx-a6000 -c 4k"))
    why = "No TPOT or tokens/s where the GPU's peak rate in fp32 is not known: h100-sxm."
    assert why in said(planned("llama-3-8b --gpu h100 -c 4k --dtype fp32"))
    assert why in said(planned("llama-3-8b --gpu h100 -c 4k,8k --dtype fp32"))


def parts_of(rows: list[Row]) -> tuple[Panels, Bars]:
    chart = shown(rows).chart
    assert isinstance(chart, Panels)
    (panel,) = chart.panels
    assert isinstance(panel, Bars)
    return chart, panel


def test_pictures_mark_the_memory_and_what_is_missing(
    planned: Callable[[str], list[Row]],
) -> None:
    rows = planned(f"{GRID} -c 4k")
    picture, panel = parts_of(rows)
    assert [name for name, _ in panel.limits] == [
        "all of a GPU's memory",
        "what the engine may use",
    ]
    assert panel.limits[1][1] == pytest.approx(0.9)
    missing = [text for text in panel.ends if text]
    assert len(missing) == sum(not row["fits"] for row in rows)
    assert all(text.startswith("lacks ") for text in missing)
    assert "61.0 GiB" in panel.labels[0]
    assert picture.title.endswith("llama-3-70b")
    assert parts_of([*rows, *rows])[0].title.endswith("the first 24 of 32 plans")


def test_a_part_has_its_colour_in_every_picture(planned: Callable[[str], list[Row]]) -> None:
    colours: dict[str, int] = {}
    for words in ("gemma-3-27b --gpu h100 --engine vllm", "qwen3-next-80b-a3b --gpu h100:8",
                  "deepseek-v3 --gpu h200:8", "llama-3-8b --gpu h100 --reserve 2GiB"):  # fmt: skip
        _, panel = parts_of(planned(words))
        for name, colour in zip(panel.parts, panel.colours, strict=True):
            assert colours.setdefault(name, colour) == colour
        assert all(
            any(sizes[place] for _, sizes in panel.rows) for place in range(len(panel.parts))
        )
    assert len(set(colours.values())) == len(colours)
    assert "left alone" not in parts_of(planned("llama-3-8b --gpu h100 --reserve 2GiB"))[1].parts


def test_curves_are_drawn_once_and_name_who_is_left_out(
    planned: Callable[[str], list[Row]],
) -> None:
    chart = shown(planned(f"{GRID} -c 4k,8k")).chart
    assert isinstance(chart, Chart)
    assert len({line.name for line in chart.lines}) == len(chart.lines) == 4
    assert all(len(line.x) == len(set(line.x)) == 2 for line in chart.lines)
    assert "not one fits: llama-3-70b" in chart.title


def test_pictures_of_what_does_not_fit_are_written(kvtool: Kvtool, tmp_path: Path) -> None:
    words: tuple[Any, ...] = ("plan", "llama-3-70b", "gemma-3-27b", "--gpu", "h100,l40s", "-q")
    for suffix in ("png", "svg"):
        path = tmp_path / f"plan.{suffix}"
        kvtool(*words, "-o", str(path))
        assert path.stat().st_size > 1000

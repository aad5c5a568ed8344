"""`kvtool presets`: counts, tables, one preset's own text, and its errors."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvtool import catalog
from kvtool.cli.main import run
from kvtool.cli.presets import _complete_kind, _complete_name, _model_row
from kvtool.run import Run
from kvtool.view.presets import MAX_SOURCE, view

ROOT = Path(catalog.__file__).with_name("presets")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(["presets", *words])
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    code, out, err = call(capsys, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)["rows"]


def test_without_a_kind_it_counts(capsys):
    assert rows(capsys) == [
        {"kind": "models", "presets": len(catalog.model_presets())},
        {"kind": "gpus", "presets": len(catalog.gpu_presets())},
        {"kind": "workloads", "presets": len(catalog.workload_presets())},
        {"kind": "prefixes", "presets": len(catalog.prefix_presets())},
        {"kind": "claims", "presets": len(catalog.claim_presets())},
    ]
    code, out, _ = call(capsys)
    assert code == 0
    assert ["gpus", str(len(catalog.gpu_presets()))] in [line.split() for line in out.splitlines()]


def test_a_gpu_row_is_the_preset(capsys):
    found = rows(capsys, "gpus")
    assert [row["id"] for row in found] == [gpu.id for gpu in catalog.gpu_presets()]
    h100 = next(row for row in found if row["id"] == "h100-sxm")
    assert h100["usable_bytes"] == 85_520_809_984
    assert h100["native_kv_dtypes"] == ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"]
    assert rows(capsys, "--show", "H100") == [h100]
    blank = next(row for row in found if row["id"] == "h100-nvl")
    assert blank["dense_bf16_tflops"] is None


def test_the_gpu_table_has_memory_rates_formats_and_the_price_with_its_date(capsys):
    code, out, _ = call(capsys, "gpus")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("h100-sxm "))
    for cell in ("h100", "80 GB", "79.65", "3,350", "989", "1,979", "fp16 bf16 fp8 int8", "3.29"):
        assert cell in line
    assert catalog.gpu_preset("h100").price_date in line
    unknown = next(line for line in out.splitlines() if line.startswith("tpu-v5e "))
    assert "–" in unknown
    assert "0.00" not in unknown


def test_a_workload_row_is_the_preset_under_its_name_and_its_aliases(capsys):
    found = rows(capsys, "workloads")
    assert [row["id"] for row in found] == [one.id for one in catalog.workload_presets()]
    paper = next(row for row in found if row["id"] == "vllm-paper")
    assert rows(capsys, "--show", "vLLM paper") == [paper]
    assert rows(capsys, "workloads", "--show", "vllm-paper") == [paper]
    assert (paper["prompt_mean"], paper["output_mean"]) == (161.31, 337.99)
    assert paper["pool_tokens"] == 12 * 2**30 // (2 * 40 * 5120 * 2)
    assert paper["rate"] is None


def test_the_workload_table_has_lengths_and_pool(capsys):
    code, out, _ = call(capsys, "workloads")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("vllm-paper "))
    for cell in ("lognormal:sigma=", "161.31", "1,024", "337.99", "–", "15,728", "Kwon et al."):
        assert cell in line


def test_a_row_of_shared_prefixes_is_the_preset_under_its_name_and_its_aliases(capsys):
    found = rows(capsys, "prefixes")
    assert [row["id"] for row in found] == [one.id for one in catalog.prefix_presets()]
    chat = next(row for row in found if row["id"] == "multi-turn-chat")
    assert rows(capsys, "--show", "Multi-turn chat") == [chat]
    assert rows(capsys, "prefixes", "--show", "chat") == [chat]
    assert (chat["turns"], chat["branch"], chat["keep"]) == (4, 1, None)
    # Two kinds have this name: without the kind it is the first one's.
    assert rows(capsys, "--show", "chat") == [
        row for row in rows(capsys, "workloads") if row["id"] == "chat"
    ]


def test_the_table_of_shared_prefixes_has_their_shape(capsys):
    code, out, _ = call(capsys, "prefixes")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("tree-of-thought "))
    cells = ["3", "512", "0", "1", "128", "3", "5", "5", "16", "96", "16"]
    assert line.split()[1:12] == cells
    assert "Yao et al." in line


def test_a_row_of_claims_is_the_preset_and_the_table_counts_its_commands(capsys):
    found = rows(capsys, "claims")
    assert [row["id"] for row in found] == [one.id for one in catalog.claim_presets()]
    radix = next(row for row in found if row["id"] == "radix-5x")
    assert rows(capsys, "--show", "Radix 5x") == [radix]
    assert radix["published"]
    assert radix["runs"]["hits"].startswith("prefix ")
    code, out, _ = call(capsys, "claims")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("radix-5x "))
    for cell in (radix["name"], str(len(radix["runs"])), str(len(radix["figures"])), "Zheng et"):
        assert cell in line


def test_a_model_row_has_its_hub_id_layers_and_maximum(capsys):
    found = rows(capsys, "models")
    assert [row["name"] for row in found] == [model.name for model in catalog.model_presets()]
    for row in found:
        assert 0 < row["num_layers"] < 1000
        assert row["max_context"] is None or row["max_context"] >= 448
    llama = next(row for row in found if row["name"] == "llama-3.1-8b")
    assert llama["hub_id"] == "meta-llama/Llama-3.1-8B"
    assert llama["model_type"] == "llama"
    assert (llama["num_layers"], llama["max_context"]) == (32, 131072)
    assert llama["source"]


def test_a_model_that_cannot_be_read_is_listed_without_its_layers():
    preset = catalog.ModelPreset(
        name="odd", hub_id="acme/odd", source="acme", config={"model_type": "no-such-type"}
    )
    row = _model_row(preset)
    assert (row["num_layers"], row["max_context"]) == (None, None)
    assert row["model_type"] == "no-such-type"


@pytest.mark.parametrize("kind", catalog.KINDS)
def test_show_prints_the_text_of_the_file(capsys, kind):
    name = catalog.preset_ids(kind)[0]
    code, out, err = call(capsys, "--show", name.upper())
    assert (code, err) == (0, "")
    assert any(out.strip() in path.read_text("utf-8") for path in (ROOT / kind).glob("*.toml"))
    assert list(tomllib.loads(out)) == [name]


def test_show_of_a_model_as_json_has_the_config_with_its_nulls(capsys):
    model = next(m for m in catalog.model_presets() if None in m.config.values())
    (row,) = rows(capsys, "models", "--show", model.hub_id)
    assert row["name"] == model.name
    assert row["config"] == model.config
    assert None in row["config"].values()


def test_show_into_a_file_writes_the_row_and_prints_nothing(capsys, tmp_path):
    target = tmp_path / "h100.json"
    code, out, _ = call(capsys, "--show", "h100", "-o", str(target))
    assert (code, out) == (0, "")
    assert json.loads(target.read_text())["rows"][0]["id"] == "h100-sxm"


def test_csv_has_a_line_for_each_gpu(capsys):
    code, out, _ = call(capsys, "gpus", "-f", "csv")
    assert code == 0
    read = list(csv.DictReader(io.StringIO(out)))
    assert [row["id"] for row in read] == list(catalog.preset_ids("gpus"))
    assert json.loads(read[0]["native_kv_dtypes"]) == ["fp16", "bf16", "int8"]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["gpu"], "no presets of the kind 'gpu'", "Did you mean gpus?"),
        (["workload"], "no presets of the kind 'workload'", "Did you mean workloads?"),
        (["prefix"], "no presets of the kind 'prefix'", "Did you mean prefixes?"),
        (["prefixes", "--show", "chats"], "no preset is called 'chats'", "kvtool presets prefixes"),
        (["things"], "no presets of the kind 'things'", "workloads, prefixes, claims"),
        (["--show", "chatt"], "no preset is called 'chatt'", "workloads|prefixes|claims"),
        (["workloads", "--show", "h100"], "no preset is called 'h100'", "kvtool presets workloads"),
        (["--show", "rtx-4091"], "no preset is called 'rtx-4091'", "rtx-4090"),
        (["models", "--show", "h100"], "no preset is called 'h100'", "kvtool presets models"),
    ],
)
def test_what_is_not_there_is_a_usage_error(capsys, words, message, hint):
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert first.startswith("Error: ")
    assert message in first
    assert second.startswith("Hint: ")
    assert hint in second


def test_completion_offers_kinds_and_names():
    assert _complete_kind("g") == ["gpus"]
    assert _complete_kind("w") == ["workloads"]
    assert _complete_kind("p") == ["prefixes"]
    assert _complete_kind("c") == ["claims"]
    assert _complete_name("tree") == ["tree-of-thought"]
    assert _complete_name("vllm") == ["vllm-paper"]
    assert set(_complete_name("RTX-4")) == {"rtx-4090"}
    assert "h100-pcie" in _complete_name("h100")


def test_a_long_source_is_cut_at_a_word_in_the_table_only():
    source = "acme/model config.json; cross-check: " + "and another reference " * 9
    long = "reference " * 20
    made = Run(
        command="presets",
        params={"kind": "models", "show": None},
        rows=tuple(
            {
                "name": "m", "hub_id": "acme/m", "model_type": None,
                "num_layers": 4, "max_context": 131072, "source": text,
            }
            for text in (source, long)
        ),
    )  # fmt: skip
    (table,) = view(made).tables
    assert table.rows[0] == ("m", "acme/m", "–", "4", "131,072", "acme/model config.json")
    assert table.rows[1][-1].endswith("reference …")
    assert len(table.rows[1][-1]) <= MAX_SOURCE + 2

"""What engines keep of a GPU's memory, against what they printed.

The rows are in tests/data; scripts/engine_memory.py prints them as a table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtool import catalog
from kvtool.engine_memory import (
    ModelSizes,
    Overhead,
    Range,
    kv_range,
    overhead,
    sizes_of,
    usable,
)
from kvtool.engine_memory.defaults import (
    Batch,
    sglang_fraction,
    sglang_step,
    version_of,
    vllm_batch,
    vllm_graph_sizes,
    vllm_utilization,
)
from kvtool.errors import KvtoolError
from kvtool.model import read_model
from kvtool.units import GIB

DATA = Path(__file__).parent / "data"
TYPES = catalog.class_defaults()["types"]
ROUNDED = 0.006
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


PEAKS = rows_of("engine_memory.jsonl")
POOLS = rows_of("engine_memory_pools.jsonl")


def sizes(row: Row) -> ModelSizes:
    preset = None if "config" in row else catalog.model_preset(row["model"])
    config = preset.config if preset else row["config"]
    return sizes_of(row["model"], config, read_model(config, TYPES))


def kept(row: Row, *, known: bool = True) -> Overhead:
    """A card without a preset has its total printed: only its links matter then."""
    return overhead(
        "vllm",
        sizes(row),
        tp=row["tp"],
        pp=row.get("pp", 1),
        max_batched_tokens=row["tokens"],
        max_num_seqs=row["sequences"],
        gpu=catalog.gpu_preset(row.get("gpu", "rtx-4090")),
        dtype_bytes=2,
        version=row.get("version") if known else None,
    )


def memory(row: Row, version: str | None) -> Range:
    shares = [row["util"]] if "util" in row else [vllm_utilization(version_of(version))]
    if "util" not in row and version is None:
        shares.append(0.9)
    if "total_gib" in row:
        ends = [round(row["total_gib"] * GIB * share) for share in shares]
        return Range(min(ends), ends[0], max(ends))
    ranges = [usable("vllm", catalog.gpu_preset(row["gpu"]), share)[0] for share in shares]
    return ranges[0] | ranges[-1]


def pool(row: Row, *, known: bool = True) -> Range:
    version = row.get("version") if known else None
    return kv_range(memory(row, version), round(row["weights_gib"] * GIB), kept(row, known=known))


def inside(value: float, range: Range) -> bool:
    return range.low / GIB - ROUNDED <= value <= range.high / GIB + ROUNDED


def name(row: Row) -> str:
    return f"{row.get('id', row['model'])}-tp{row['tp']}-{row.get('version', '')}"


@pytest.mark.parametrize("row", PEAKS, ids=name)
def test_printed_peaks_are_inside(row: Row) -> None:
    activations, graphs, context = (line.range for line in kept(row).lines)
    if version_of(row["version"]) >= (0, 27):  # type: ignore[operator]
        activations = activations + graphs
    if "activation_gib" in row:
        assert inside(row["activation_gib"], activations)
    if "non_torch_gib" in row:
        assert inside(row["non_torch_gib"], context)
    if "kv_gib" in row:
        assert inside(row["kv_gib"], pool(row))


@pytest.mark.parametrize(
    "row", [row for row in PEAKS if row["version"] == "0.19.0" and row["pp"] == 1], ids=name
)
def test_the_best_guess_is_near(row: Row) -> None:
    """gpt-oss brings kernels of its own, whose workspace is smaller."""
    best = kept(row).lines[0].range.best / GIB
    assert best == pytest.approx(row["activation_gib"], rel=0.15 if "gpt" in row["model"] else 0.06)


@pytest.mark.parametrize("known", [True, False], ids=["version", "any-version"])
@pytest.mark.parametrize("row", POOLS, ids=name)
def test_printed_pools_are_inside(row: Row, known: bool) -> None:
    """But for those whose reason the row states."""
    assert inside(row["kv_gib"], pool(row, known=known)) == ("outside" not in row)


@pytest.mark.parametrize("row", [*POOLS, *(row for row in PEAKS if "kv_gib" in row)], ids=name)
def test_ranges_are_narrow_where_little_is_kept(row: Row) -> None:
    range = pool(row)
    if "outside" not in row and range.best > 3 * kept(row).total.high:
        assert range.high <= 1.25 * range.low


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "transformers", "ideal"])
def test_every_engine_has_the_three_lines(engine: str) -> None:
    row = {"model": "llama-3.1-8b"}
    found = overhead(
        engine, sizes(row), tp=2, pp=1, max_batched_tokens=8192, max_num_seqs=256,
        gpu=catalog.gpu_preset("h100"), dtype_bytes=2,
    )  # fmt: skip
    named = [line.name for line in found.lines]
    assert named == ["activations", "CUDA graphs", "context and communication"]
    for line in found.lines:
        assert 0 <= line.range.low <= line.range.best <= line.range.high
        assert line.basis


def test_llama_cpp_prints_304_mib_for_qwen() -> None:
    found = overhead(
        "llama.cpp", sizes({"model": "qwen2.5-7b"}), tp=1, pp=1, max_batched_tokens=4096,
        max_num_seqs=1, gpu=catalog.gpu_preset("rtx-a6000"), dtype_bytes=2,
    )  # fmt: skip
    assert found.lines[0].range.best == pytest.approx(304 * 2**20, rel=0.02)


def test_sglang_gives_what_it_printed_on_a_b300() -> None:
    """Qwen3-8B, 234.56 'GB' (LT117 of engine_logs)."""
    gpu = catalog.gpu_preset("b300")
    row = {"model": "qwen3-8b"}
    whole, _ = usable("sglang", gpu, sglang_fraction(gpu, tp=1, pp=1))
    found = overhead(
        "sglang", sizes(row), tp=1, pp=1, max_batched_tokens=16384, max_num_seqs=512, gpu=gpu,
        dtype_bytes=2,
    )  # fmt: skip
    assert inside(234.56, kv_range(whole, round(15.27 * GIB), found))


def test_ranks_that_exchange_take_memory_for_it() -> None:
    def outside_torch(model: str, pp: int = 1, dp: int = 1) -> int:
        found = overhead(
            "vllm", sizes({"model": model}), tp=1, pp=pp, dp=dp, max_batched_tokens=8192,
            max_num_seqs=256, gpu=catalog.gpu_preset("h100"), dtype_bytes=2,
        )  # fmt: skip
        return int(found.lines[2].range.best)

    alone = outside_torch("llama-3.1-8b")
    assert outside_torch("llama-3.1-8b", dp=2) == alone
    assert outside_torch("llama-3.1-8b", pp=2) > alone
    assert outside_torch("gpt-oss-20b", dp=2) > outside_torch("gpt-oss-20b")


def test_defaults_by_gpu() -> None:
    assert vllm_batch(catalog.gpu_preset("h100")) == Batch(8192, 1024)
    assert vllm_batch(catalog.gpu_preset("a100-80gb")) == Batch(2048, 256)
    assert vllm_batch(catalog.gpu_preset("rtx-4090"), server=False) == Batch(8192, 256)
    assert vllm_batch(catalog.gpu_preset("h100"), version=(0, 7)) == Batch(2048, 256)
    assert vllm_graph_sizes(256) == 51 + 35
    assert vllm_graph_sizes(128) == 35 + 19
    assert sglang_step(catalog.gpu_preset("h100"), 8).graphs == 512
    assert sglang_fraction(catalog.gpu_preset("h100"), tp=1, pp=1) == pytest.approx(0.835, abs=0.01)


@pytest.mark.parametrize(
    ("text", "parsed"), [("0.10.1", (0, 10, 1)), ("~0.7.3 (V0)", (0, 7)), ("v0.19.0", (0, 19, 0)),
                         ("V1", None), (None, None)],
)  # fmt: skip
def test_versions(text: str | None, parsed: tuple[int, ...] | None) -> None:
    assert version_of(text) == parsed


def test_what_is_unknown_is_refused() -> None:
    gpu = catalog.gpu_preset("h100")
    with pytest.raises(KvtoolError, match="nothing is known"):
        overhead(
            "tgi", sizes({"model": "llama-3.1-8b"}), tp=1, pp=1, max_batched_tokens=1,
            max_num_seqs=1, gpu=gpu, dtype_bytes=2,
        )  # fmt: skip
    with pytest.raises(KvtoolError, match="out of range"):
        usable("vllm", gpu, 1.5)


def test_every_preset_has_sizes() -> None:
    for preset in catalog.model_presets():
        if preset.config.get("model_type") in ("whisper", "t5", "bart"):
            continue
        found = sizes_of(preset.name, preset.config, read_model(preset.config, TYPES))
        assert min(found.hidden, found.vocabulary) > 0, preset.name

"""How many rows of measured vLLM pools `kvtool` predicts to the byte, and every row that is off.

    python scripts/accuracy_vllm.py TRUTH_FOLDER CONFIG_FOLDER

TRUTH_FOLDER holds vllm_kv.jsonl (a model, its parallelism and lengths, and what vLLM 0.32 laid out)
and vllm_groups.jsonl (the same for mixes of layer specs). CONFIG_FOLDER holds the models' configs as
<org>__<name>.json. The block size that was asked for is not in the rows: it was 16, or 64 in a
second set, so a row is compared with what 16 makes, and with what 64 makes if 16 makes another
block size than the row's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from kvtool.catalog import class_defaults
from kvtool.engines.vllm import VllmPool, VllmSettings, parse_specs, pool_of, reserve
from kvtool.engines.vllm_specs import CLASSES
from kvtool.model import ModelShape, read_model

Row = dict[str, Any]
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def settings_of(row: Row, block_size: int | None = None) -> VllmSettings:
    """The settings that a row was measured with."""
    return VllmSettings(
        max_model_len=row["max_model_len"],
        tp=row.get("tp", 1),
        dtype=DTYPES[row.get("dtype", "bfloat16")],
        kv_dtype=row.get("kv_cache_dtype", "auto"),
        block_size=block_size,
        max_batched_tokens=row.get("max_num_batched_tokens", 8192),
        batches_in_flight=row["max_in_flight_tokens"] // row.get("max_num_batched_tokens", 8192),
        prefix_caching=row.get("prefix_caching", False),
        hybrid=not row.get("disable_hybrid_kv_cache_manager", False),
        mamba_block_size=row.get("mamba_block_size"),
        kv_memory=row["available_bytes"],
    )


def differences(row: Row, pool: VllmPool) -> Iterator[str]:
    """What of a row is predicted otherwise."""
    expected: Row = {"fits": "error" not in row}
    names = ("bytes_per_block", "one_request_bytes", "num_blocks", "kv_cache_size_tokens")
    expected |= {name: row.get(name) for name in names}
    if "block_size" in row:
        expected["block_size"] = row["block_size"]
    for name, value in expected.items():
        if getattr(pool, name) != value:
            yield f"{name}: {getattr(pool, name)} and not {value}"
    concurrency = None if pool.max_concurrency is None else round(pool.max_concurrency, 6)
    if concurrency != row.get("max_concurrency"):
        yield f"max_concurrency: {concurrency} and not {row.get('max_concurrency')}"
    reason = row.get("error", "").removeprefix("ValueError: ")
    if not pool.reason.startswith(reason) or bool(reason) != bool(pool.reason):
        yield f"reason: {pool.reason!r} and not {reason!r}"
    yield from _groups(row, pool)


def _groups(row: Row, pool: VllmPool) -> Iterator[str]:
    real = [
        (g["n_layers"], g["block_size"], g["page_size_bytes"], g["blocks_per_request"])
        for g in row.get("groups", [])
    ]
    own = [(g.layers, g.block_size, g.page_bytes, g.blocks_per_request) for g in pool.groups]
    if own != real:
        yield f"groups: {own[:4]} … and not {real[:4]} …"
    kinds = [CLASSES.get(g["cls"]) for g in row.get("groups", [])]
    if any(kind and kind != g.kind for kind, g in zip(kinds, pool.groups, strict=False)):
        yield f"kinds: {[g.kind for g in pool.groups]} and not {kinds}"


def model_differences(row: Row, shape: ModelShape) -> list[str]:
    """What of a row of vllm_kv is predicted otherwise."""
    pool = reserve(shape, settings_of(row))
    if pool.block_size != row["block_size"]:
        pool = reserve(shape, settings_of(row, 64))
    return list(differences(row, pool))


def group_differences(row: Row) -> list[str]:
    """A row of vllm_groups."""
    specs = parse_specs(row["specs"])
    return list(differences(row, pool_of(specs, settings_of(row))))


def main(truth: Path, configs: Path) -> int:
    """Print exact / total of each file and the rows that are off; 1 if any is."""

    @cache
    def shape_of(model: str) -> ModelShape:
        raw = json.loads((configs / f"{model.replace('/', '__')}.json").read_text())
        return read_model(raw, class_defaults()["types"])

    bad = 0
    for name in ("vllm_kv.jsonl", "vllm_groups.jsonl"):
        rows = [json.loads(line) for line in (truth / name).read_text().splitlines()]
        exact = 0
        for row in rows:
            model = row.get("model")
            off = model_differences(row, shape_of(model)) if model else group_differences(row)
            exact += not off
            if off:
                what = (
                    f"{model or row['case']}, tp {row.get('tp', 1)}, {row['max_model_len']} tokens"
                )
                print(f"off: {what}: {'; '.join(off)}")
        print(f"{name}: {exact} of {len(rows)} rows exact")
        bad += len(rows) - exact
    return 1 if bad else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

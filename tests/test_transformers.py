"""The engine `transformers` against the tensors in transformers' own caches, row by row.

Every row of tests/data/hf_cache_rows.jsonl.gz is a tiny random model that transformers 5.24.0 ran.
Sizes are compared by kind of tensor, by layer, and in all: no row may be off by a byte.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvtool.cache import CacheLayout
from kvtool.dtypes import DTYPES, KvDtype
from kvtool.engines import transformers
from kvtool.errors import KvtoolError
from kvtool.model import read_model

DATA = Path(__file__).parent / "data/hf_cache_rows.jsonl.gz"
HEAD, *ROWS = [json.loads(line) for line in gzip.decompress(DATA.read_bytes()).splitlines()]
NAMES = {"float32": "fp32", "bfloat16": "bf16"}


def layout_of(row: dict[str, Any], table: dict[str, Any]) -> CacheLayout:
    """The layout that a row's model has in the row's dtype."""
    dtype = DTYPES[NAMES[row["dtype"]]]
    shape = read_model(HEAD["configs"][row["config"]], table)
    return CacheLayout(shape=shape, dtype=dtype, kv=KvDtype(k=dtype, v=dtype))


def test_the_rows_cover_many_types_and_both_caches() -> None:
    assert len(ROWS) >= 799
    assert len({row["model_type"] for row in ROWS}) >= 170
    assert {row["cache"] for row in ROWS} == {"dynamic", "static"}
    assert {row["dtype"] for row in ROWS} == set(NAMES)


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: "-".join(str(row[k]) for k in ("model_type", "variant", "cache"))
)
def test_no_row_is_off_by_a_byte(row: dict[str, Any], table: dict[str, Any]) -> None:
    how = {name: row[name] for name in ("context", "encoder", "prompt", "cache")}
    layout = layout_of(row, table)
    sequence = transformers.size(layout, **how)
    fields = transformers.fields(sequence, row["batch"])
    assert {k.removesuffix("_bytes"): v for k, v in fields.items() if v} == row["bytes"]
    assert row["batch"] * sequence.bytes == row["total"]
    if any(key.startswith("-1 ") for key in row["layers"]):
        return  # a cache that is one list over all layers: RWKV, XLNet, Reformer
    by_layer: Counter[str] = Counter()
    for part in transformers.parts(layout, **how):
        by_layer[f"{part.layer} {part.kind}"] += row["batch"] * part.bytes
    assert dict(by_layer) == {k: v for k, v in row["layers"].items() if v}


def test_what_it_cannot_be_asked(table: dict[str, Any]) -> None:
    shape = read_model({"model_type": "llama"}, table)
    bf16, fp8 = DTYPES["bf16"], DTYPES["fp8"]
    plain = KvDtype(k=bf16, v=bf16)
    for layout, words in (
        (CacheLayout(shape=shape, dtype=bf16, kv=KvDtype(k=fp8, v=fp8)), "not in fp8"),
        (CacheLayout(shape=shape, dtype=bf16, kv=plain, tp=2), "one process"),
        (CacheLayout(shape=shape, dtype=bf16, kv=plain, block_size=16), "one process"),
    ):
        with pytest.raises(KvtoolError, match=words):
            transformers.size(layout, context=8, encoder=0, prompt=None, cache="dynamic")
    old = read_model({"model_type": "openai-gpt"}, table)
    with pytest.raises(KvtoolError, match="takes no cache"):
        transformers.check(CacheLayout(shape=old, dtype=bf16, kv=plain))


def parts_of(config: dict[str, Any], table: dict[str, Any], context: int) -> dict[str, int]:
    """Bytes by layer and kind of tensor of a model in bf16."""
    bf16 = DTYPES["bf16"]
    layout = CacheLayout(shape=read_model(config, table), dtype=bf16, kv=KvDtype(k=bf16, v=bf16))
    found = transformers.parts(layout, context=context, encoder=0)
    return {f"{part.layer} {part.kind}": part.bytes for part in found}


def test_a_window_that_does_not_count_the_query(table: dict[str, Any]) -> None:
    """MiMo-V2: sliding_window_size = 8 is the class's sliding_window = 9, which holds 8 tokens."""
    config = {"model_type": "mimo_v2_flash", "num_hidden_layers": 2, "swa_num_key_value_heads": 1,
              "swa_head_dim": 4, "swa_v_head_dim": 2, "sliding_window": 8}  # fmt: skip
    assert parts_of(config, table, 20)["1 self_k"] == 7 * 4 * 2
    stated = config | {"sliding_window_size": 8}
    assert parts_of(stated, table, 20)["1 self_k"] == 8 * 4 * 2
    assert parts_of(stated | {"sliding_window": 9}, table, 20)["1 self_k"] == 8 * 4 * 2


def test_deepseek_v4_layers_without_a_pool_hold_k_and_v(table: dict[str, Any]) -> None:
    """As measured with compress_ratios = [0, 4]: only the pooled layers' V is their K."""
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [0, 4],
              "sliding_window": 8, "head_dim": 16}  # fmt: skip
    held = parts_of(config, table, 20)
    assert (held["0 self_k"], held["0 self_v"]) == (7 * 16 * 2, 7 * 16 * 2)
    assert held["1 self_k"] == 7 * 16 * 2
    assert "1 self_v" not in held

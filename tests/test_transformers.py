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

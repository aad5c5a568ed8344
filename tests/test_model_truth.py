"""The shapes read from a config against the tensors in transformers' own caches.

Every row of tests/data/hf_cache_rows.jsonl.gz is a tiny random model that transformers 5.24.0 ran.
What it holds follows from our entries by three rules of its cache classes: a window layer keeps
window − 1 tokens, a convolution keeps `held` columns, everything else keeps every token.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvtool.errors import KvtoolError
from kvtool.model import ModelShape, read_model

DATA = Path(__file__).parent / "data/hf_cache_rows.jsonl.gz"
ROWS = [json.loads(line) for line in gzip.decompress(DATA.read_bytes()).splitlines()]

# Where transformers holds something else than the mathematics needs, and why. May only shrink.
OTHERWISE = {
    ("deepseek_v4", "base"): "its pools and pending tokens are named `other`",
    ("falcon", "new_arch"): "K and V are repeated to every query head before they are cached",
    (
        "falcon",
        "new_arch_mq_false",
    ): "K and V are repeated to every query head before they are cached",
    ("gpt_neo", "base"): "local layers are not cut to their window",
    ("musicgen", "base"): "the row's batch counts codebooks",
    ("musicgen_melody", "base"): "the row's batch counts codebooks",
    ("xlm", "base"): "one token more is held than the row says",
    ("nllb-moe", "base"): "one token more is held than the row says",
    ("moonshine", "base"): "one token more is held than the row says",
    ("unlimited_ocr", "base"): "the prompt is held apart from the generated tokens, as `other`",
}
REFUSED = {"reformer", "xlnet"}


def held_by_transformers(shape: ModelShape, row: dict[str, Any]) -> dict[str, int]:
    """Bytes by kind that transformers' dynamic cache holds for this shape, in fp32."""
    out: Counter[str] = Counter()
    for entry in shape.layers:
        for state in entry.states:
            out[state.name] += state.elements * state.held
        tokens = row["enc_len"] if entry.kind == "cross" else row["seq_len"]
        if entry.window is not None:
            tokens = min(tokens, entry.window - 1)
        k, v = entry.kv_heads * entry.k_head_dim, entry.kv_heads * entry.v_head_dim
        names = {"cross": ("cross_k", "cross_v"), "indexer": ("indexer", "indexer")}
        k_name, v_name = names.get(entry.kind, ("self_k", "self_v"))
        out[k_name] += tokens * k
        out[v_name] += tokens * v
    return {name: count * row["batch"] * 4 for name, count in out.items() if count}


def test_the_rows_cover_many_types() -> None:
    assert len({row["model_type"] for row in ROWS}) >= 170


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model_type']}-{row['variant']}")
def test_the_cache_of_transformers(row: dict[str, Any], table: dict[str, Any]) -> None:
    if row["model_type"] in REFUSED:
        with pytest.raises(KvtoolError, match=row["model_type"]):
            read_model(row["config"], table)
        return
    predicted = held_by_transformers(read_model(row["config"], table), row)
    real = {name: count for name, count in row["bytes"].items() if count}
    if (row["model_type"], row["variant"]) in OTHERWISE:
        assert predicted != real, "this difference is gone: take it off the list"
    else:
        assert predicted == real

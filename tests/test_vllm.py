"""What vLLM 0.32 reserves, against pools that vLLM itself laid out, and the edges of its rules."""

from __future__ import annotations

import gzip
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.catalog import model_preset
from kvtool.engines.vllm import (
    MEASURED,
    LayerSpec,
    VllmPool,
    VllmSettings,
    parse_specs,
    pool_of,
    reserve,
    specs_of,
)
from kvtool.errors import KvtoolError
from kvtool.model import ModelShape, read_model

DATA = Path(__file__).parent / "data"
GIB = 1024**3


def script() -> ModuleType:
    """scripts/accuracy.py, whose comparison the tests share."""
    path = Path(__file__).parents[1] / "scripts/accuracy.py"
    spec = importlib.util.spec_from_file_location("accuracy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


accuracy = script()
CONFIGS = json.loads(gzip.decompress((DATA / "vllm_configs.json.gz").read_bytes()))


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(r) for r in gzip.decompress((DATA / name).read_bytes()).splitlines()]


MODEL_ROWS = rows("vllm_kv_rows.jsonl.gz")
GROUP_ROWS = rows("vllm_groups_rows.jsonl.gz")


@pytest.mark.parametrize("model", sorted(CONFIGS))
def test_every_row_of_a_model_is_exact(model: str, table: dict[str, Any]) -> None:
    shape = read_model(CONFIGS[model], table)
    of_model = [row for row in MODEL_ROWS if row["model"] == model]
    assert of_model
    for row in of_model:
        assert accuracy.model_differences(row, shape) == [], row


@pytest.mark.parametrize("case", sorted({row["case"] for row in GROUP_ROWS}))
def test_every_row_of_a_mix_of_layers_is_exact(case: str) -> None:
    for row in GROUP_ROWS:
        if row["case"] == case:
            assert accuracy.group_differences(row) == [], row


def shape_of(preset: str, table: dict[str, Any]) -> ModelShape:
    found = model_preset(preset)
    assert found is not None
    return read_model(found.config, table)


@pytest.mark.parametrize(
    ("preset", "kv_dtype", "asked", "block_size"),
    [
        ("qwen3-next-80b-a3b", "auto", None, 544),
        ("qwen3-next-80b-a3b", "auto", 64, 576),
        ("deepseek-v3.2", "auto", None, 64),
        ("deepseek-v3.2", "auto", 128, 128),
        ("gpt-oss-20b", "auto", 64, 64),
        ("falcon-mamba-7b", "auto", None, 16),
    ],
)
def test_the_block_size_that_a_model_gets(
    preset: str, kv_dtype: str, asked: int | None, block_size: int, table: dict[str, Any]
) -> None:
    how = VllmSettings(max_model_len=8192, kv_dtype=kv_dtype, block_size=asked)
    assert reserve(shape_of(preset, table), how).block_size == block_size


def test_gemma_3_27b_is_seven_groups_of_at_most_ten_layers(table: dict[str, Any]) -> None:
    pool = reserve(shape_of("gemma-3-27b", table), VllmSettings(max_model_len=8192))
    assert sorted(group.layers for group in pool.groups) == [8, 8, 9, 9, 9, 9, 10]
    assert pool.bytes_per_block == 10 * pool.groups[0].page_bytes


def test_cross_attention_reserves_the_encoder_budget(table: dict[str, Any]) -> None:
    whisper = shape_of("whisper-large-v3", table)
    how = VllmSettings(max_model_len=448)
    blocks = {g.kind: g.blocks_per_request for g in reserve(whisper, how).groups}
    assert blocks == {"full": 28, "cross": 512}
    short = reserve(whisper, replace(how, encoder_budget=1500))
    assert {g.kind: g.blocks_per_request for g in short.groups}["cross"] == 94


def test_a_latent_expanded_to_heads_is_split_over_ranks(table: dict[str, Any]) -> None:
    shape = shape_of("minicpm3", table)
    one, two = (reserve(shape, VllmSettings(max_model_len=4096, tp=tp)) for tp in (1, 2))
    assert one.bytes_per_block == 2 * (two.bytes_per_block or 0)


@pytest.mark.parametrize("preset", ["t5-large", "deepseek-v4-flash", "rwkv-4-3b", "minimax-m3"])
def test_what_vllm_lays_out_otherwise_is_refused_by_name(
    preset: str, table: dict[str, Any]
) -> None:
    with pytest.raises(KvtoolError, match="not modelled"):
        reserve(shape_of(preset, table), VllmSettings(max_model_len=4096))


def test_fp8_ds_mla_is_656_bytes_a_token_and_nothing_but_512_and_64(table: dict[str, Any]) -> None:
    how = VllmSettings(max_model_len=4096, kv_dtype="fp8_ds_mla")
    specs = specs_of(shape_of("deepseek-v3.2", table), how)
    assert {spec.token_bytes for spec in specs} == {656, 132}
    shape = shape_of("deepseek-v3.2", table)
    wide = replace(
        shape,
        layers=tuple(
            replace(e, k_head_dim=1024) if e.kind == "latent" else e for e in shape.layers
        ),
    )
    with pytest.raises(KvtoolError, match="not 512"):
        specs_of(wide, how)


def test_k_and_v_of_different_dtypes_are_a_usage_error(table: dict[str, Any]) -> None:
    with pytest.raises(KvtoolError, match="one dtype"):
        specs_of(
            shape_of("llama-3.1-8b", table), VllmSettings(max_model_len=1, kv_dtype="int4/int2")
        )


# --- mixes ----------------------------------------------------------------------------------------

FULL = LayerSpec(kind="full", block_size=16, token_bytes=4096)
SLIDING = LayerSpec(kind="sliding", block_size=16, token_bytes=4096, window=1024)
CHUNKED = LayerSpec(kind="chunked", block_size=16, token_bytes=4096, chunk=2048)
STATE = LayerSpec(kind="linear", block_size=16, state_bytes=65536)
LATENT = LayerSpec(kind="latent", block_size=16, token_bytes=1152)
HOW = VllmSettings(max_model_len=32768)


def numbered(*runs: tuple[LayerSpec, int]) -> tuple[LayerSpec, ...]:
    layers = [spec for spec, count in runs for _ in range(count)]
    return tuple(replace(spec, layer=i) for i, spec in enumerate(layers))


def sizes(pool: VllmPool) -> list[tuple[str, int]]:
    return [(group.kind, group.layers) for group in pool.groups]


def test_buckets_of_nearly_a_size_are_padded_to_the_larger() -> None:
    near = pool_of(numbered((FULL, 10), (SLIDING, 14)), HOW)
    assert sizes(near) == [("full", 10), ("sliding", 14)]
    far = pool_of(numbered((FULL, 10), (SLIDING, 15)), HOW)
    assert sizes(far) == [("full", 10), ("sliding", 8), ("sliding", 7)]


def test_without_the_hybrid_manager_two_windows_cannot_become_one_group() -> None:
    other = replace(SLIDING, window=4096)
    mixed = numbered((FULL, 2), (SLIDING, 2), (other, 2))
    assert pool_of(mixed, HOW).fits
    refused = pool_of(mixed, replace(HOW, hybrid=False))
    assert (refused.fits, refused.num_blocks, refused.groups) == (False, None, ())
    assert "same window size" in refused.reason


def test_windows_and_chunks_beside_full_layers_become_one_group_without_it() -> None:
    pool = pool_of(numbered((FULL, 2), (SLIDING, 2), (CHUNKED, 2)), replace(HOW, hybrid=False))
    assert sizes(pool) == [("full", 6)]
    assert pool.groups[0].blocks_per_request == 2048


def test_a_latent_beside_windows_of_another_page_keeps_the_windows_whole() -> None:
    pool = pool_of(numbered((LATENT, 4), (SLIDING, 2)), HOW)
    assert sizes(pool) == [("full", 6)]
    assert pool.bytes_per_block == 16 * (4 * 1152 + 2 * 4096)
    refused = pool_of(numbered((LATENT, 4), (CHUNKED, 2)), HOW)
    assert not refused.fits
    assert "cannot be padded" in refused.reason


def test_pages_that_do_not_divide_are_padded_and_those_that_do_take_more_tokens() -> None:
    small = replace(SLIDING, token_bytes=2048)
    odd = replace(SLIDING, token_bytes=3072, window=512)
    pool = pool_of(numbered((FULL, 2), (small, 2), (odd, 2)), HOW)
    assert {group.page_bytes for group in pool.groups} == {65536}
    assert [group.block_size for group in pool.groups] == [16, 32, 16]


def test_one_block_stays_free_and_is_counted_all_the_same() -> None:
    layers = numbered((FULL, 8))
    needed = 32768 // 16
    block = 8 * 65536
    exact = pool_of(layers, replace(HOW, kv_memory=(needed + 1) * block))
    assert (exact.fits, exact.num_blocks) == (True, needed + 1)
    short = pool_of(layers, replace(HOW, kv_memory=(needed + 1) * block - 1))
    assert (short.fits, short.num_blocks, short.max_concurrency) == (False, None, None)
    assert "estimated maximum model length is 32752" in short.reason
    none = pool_of(layers, replace(HOW, kv_memory=block))
    assert none.reason.startswith("No available memory")


def test_without_memory_no_blocks_are_counted() -> None:
    pool = pool_of(numbered((FULL, 8)), HOW)
    assert (pool.fits, pool.num_blocks, pool.kv_cache_size_tokens) == (True, None, None)
    assert pool.one_request_bytes == 2048 * 8 * 65536


def test_pipeline_stages_share_the_number_of_blocks_of_the_fullest() -> None:
    layers = numbered((FULL, 10))
    even = pool_of(layers, replace(HOW, pp=2, kv_memory=GIB * 40))
    assert even.bytes_per_block == 5 * 65536
    uneven = pool_of(layers, replace(HOW, pp_layers=(3, 7), kv_memory=GIB * 40))
    assert uneven.bytes_per_block == 7 * 65536
    assert uneven.num_blocks == GIB * 40 // (7 * 65536)


def test_the_types_that_are_said_to_be_measured_are(table: dict[str, Any]) -> None:
    configs = json.loads(gzip.decompress((DATA / "vllm_configs.json.gz").read_bytes()))
    assert {read_model(config, table).model_type for config in configs.values()} == MEASURED


def test_all_stages_count_what_each_holds() -> None:
    layers = numbered((FULL, 10))
    whole = pool_of(layers, HOW)
    uneven = pool_of(layers, replace(HOW, pp_layers=(3, 7)))
    assert uneven.one_request_bytes == 7 * whole.one_request_bytes // 10
    assert uneven.all_stages_bytes == whole.one_request_bytes


@pytest.mark.parametrize(
    ("mix", "length", "tokens_of"),
    [
        (((FULL, 10),), 4096, 10),
        (((FULL, 10), (SLIDING, 10)), 2**20, 10),  # the windows are full
        (((FULL, 10), (SLIDING, 10)), 4096, 20),  # what is in flight still grows
        (((FULL, 10), (SLIDING, 20)), 2**20, 10),
        (((STATE, 10),), 4096, 0),
    ],
)
def test_what_a_longer_request_reserves_more(
    mix: tuple[tuple[LayerSpec, int], ...], length: int, tokens_of: int
) -> None:
    pool = pool_of(numbered(*mix), replace(HOW, max_model_len=length))
    assert pool.bytes_per_token == tokens_of * FULL.token_bytes


def test_a_state_has_a_block_more_for_each_drafted_token(table: dict[str, Any]) -> None:
    """v1/kv_cache_interface.py, MambaSpec: 1 + speculative blocks, 2 and more with prefix caching."""
    shape = shape_of("qwen3-next-80b-a3b", table)
    for caching, blocks in ((False, 1), (True, 2)):
        how = VllmSettings(max_model_len=4096, prefix_caching=caching)
        for drafted in (0, 2):
            pool = reserve(shape, replace(how, speculative_tokens=drafted))
            states = {g.blocks_per_request for g in pool.groups if g.kind == "linear"}
            assert states == {blocks + drafted}


@pytest.mark.parametrize("name", ["xlnet", "reformer", "cpmant", "openai-gpt"])
def test_what_v1_cannot_hold_is_refused(name: str, table: dict[str, Any]) -> None:
    with pytest.raises(KvtoolError, match=name):
        reserve(read_model({"model_type": name, "attn_layers": ["lsh"], "num_hidden_layers": 1}, table),
                VllmSettings(max_model_len=64))  # fmt: skip


def test_decode_context_parallelism_shares_out_full_layers_only() -> None:
    assert pool_of(numbered((FULL, 4)), replace(HOW, dcp=4)).blocks_per_request == 512
    assert not pool_of(numbered((SLIDING, 4)), replace(HOW, dcp=4)).fits
    promoted = replace(HOW, dcp=4, hybrid=False)
    assert pool_of(numbered((FULL, 4), (SLIDING, 4)), promoted).fits


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    length=st.integers(1, 10**6),
    memory=st.integers(1, 2**40),
    hybrid=st.booleans(),
)
def test_the_pool_holds_what_it_says(
    counts: list[int], length: int, memory: int, hybrid: bool
) -> None:
    kinds = (FULL, SLIDING, CHUNKED, replace(SLIDING, window=64, token_bytes=512))
    layers = numbered(*zip(kinds, counts, strict=False))
    how = VllmSettings(max_model_len=length, kv_memory=memory, hybrid=hybrid)
    pool = pool_of(layers, how)
    if pool.bytes_per_block is None:
        return
    assert sum(group.layers for group in pool.groups) == len(layers)
    assert sum(g.blocks_per_request for g in pool.groups) == pool.blocks_per_request
    assert pool.one_request_bytes == pool.bytes_per_block * (pool.blocks_per_request or 0)
    room = memory - pool.bytes_per_block
    assert pool.fits == (room > 0 and pool.one_request_bytes <= room)
    if pool.fits:
        assert pool.num_blocks == memory // pool.bytes_per_block
        assert pool.max_concurrency is not None
        assert pool.max_concurrency >= 1


# --- specs from a file ----------------------------------------------------------------------------

SPEC = {
    "cls": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 8, "head_size": 128,
    "dtype": "bfloat16", "n_layers": 2,
}  # fmt: skip


def test_a_list_or_the_object_around_it_is_read() -> None:
    assert parse_specs([SPEC]) == parse_specs({"specs": [SPEC], "case": "mine"})
    assert [spec.layer for spec in parse_specs([SPEC, SPEC])] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "bad",
    [
        None,
        {},
        [],
        [7],
        [SPEC | {"cls": "TPUSpec"}],
        [SPEC | {"num_kv_heads": None}],
        [SPEC | {"num_kv_heads": True}],
        [SPEC | {"num_kv_heads": 0}],
        [SPEC | {"dtype": "float7"}],
        [SPEC | {"n_layers": 10**9}],
        [SPEC | {"page_size_bytes": 7}],
        [SPEC | {"tokens_per_state": 4}],
        [SPEC | {"cls": "SlidingWindowSpec"}],
        [{"cls": "MambaSpec", "block_size": 16, "shapes": [[2]], "dtypes": []}],
        [{"cls": "MambaSpec", "block_size": 16, "shapes": [2], "dtypes": ["float32"]}],
    ],
)
def test_a_spec_that_is_not_understood_is_refused(bad: object) -> None:
    with pytest.raises(KvtoolError, match="--layer-specs"):
        parse_specs(bad)

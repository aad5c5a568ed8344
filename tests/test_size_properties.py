"""What must hold for every model: linear in batch, never less than a shorter context, no zeros."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from typing import Any

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from kvtool import catalog
from kvtool.cache import (
    CacheLayout,
    check_parallel,
    fixed_bytes,
    stages,
    state_bytes,
    token_bytes,
)
from kvtool.dtypes import DTYPES, KvDtype
from kvtool.engines import ideal
from kvtool.errors import KvtoolError
from kvtool.model import ModelShape, read_model
from kvtool.query import Query
from kvtool.size_row import Subject
from kvtool.sizing import size_rows

TABLE = catalog.class_defaults()["types"]
PRESETS = catalog.model_presets()
SHAPES = {preset.name: read_model(preset.config, TABLE) for preset in PRESETS}
NAMES = st.sampled_from(sorted(SHAPES))
CONTEXTS = st.integers(1, 300_000)
KV = st.builds(
    KvDtype, k=st.sampled_from(list(DTYPES.values())), v=st.sampled_from(list(DTYPES.values()))
)


def layout(shape: ModelShape, kv: KvDtype | None = None, **how: Any) -> CacheLayout:
    """A bf16 layout unless told otherwise."""
    bf16 = DTYPES["bf16"]
    return CacheLayout(shape=shape, dtype=bf16, kv=kv or KvDtype(k=bf16, v=bf16), **how)


def size(shape: ModelShape, context: int, kv: KvDtype | None = None, **how: Any) -> int:
    """Bytes of one sequence."""
    return ideal.size(layout(shape, kv, **how), context=context, encoder=100).bytes


@given(name=NAMES, context=CONTEXTS, kv=KV)
def test_never_zero_and_never_less_than_a_shorter_context(
    name: str, context: int, kv: KvDtype
) -> None:
    shape = SHAPES[name]
    here, longer = size(shape, context, kv), size(shape, context + 1, kv)
    assert 0 < here <= longer


@given(name=NAMES, context=CONTEXTS, batch=st.integers(1, 1000))
def test_linear_in_batch(name: str, context: int, batch: int) -> None:
    subject = Subject(name=name, source="preset", shape=SHAPES[name])
    query = Query(contexts=(context,), batches=(1, batch), allow_long=True)
    one, many = size_rows(subject, query)[0]
    for key in ("total_bytes", "per_gpu_bytes", "mha_bytes"):
        assert many[key] == batch * one[key]
    assert many["sequence_bytes"] == one["sequence_bytes"]


@given(name=NAMES, context=CONTEXTS, factor=st.integers(2, 9))
def test_linear_in_tokens_where_every_layer_is_full(name: str, context: int, factor: int) -> None:
    shape = SHAPES[name]
    assume({entry.kind for entry in shape.layers} <= {"full", "latent", "indexer"})
    assert size(shape, factor * context) == factor * size(shape, context)


@given(name=NAMES, prompt=st.integers(1, 9000), output=st.integers(1, 40))
def test_any_split_of_tokens_into_prompt_and_output_is_the_same(
    name: str, prompt: int, output: int
) -> None:
    """Adding the output token by token, each at its marginal price, ends at the whole's size."""
    shape = SHAPES[name]
    # A pool adds an entry every few tokens: its price a token is an average.
    assume(all(entry.stride == 1 for entry in shape.layers))
    grown = size(shape, prompt)
    for done in range(output):
        grown += ideal.size(layout(shape), context=prompt + done, encoder=100).next_token_bytes
    assert grown == size(shape, prompt + output)


@given(name=NAMES, context=CONTEXTS, kv=KV, batch=st.integers(1, 9))
def test_kinds_and_layers_add_up(name: str, context: int, kv: KvDtype, batch: int) -> None:
    subject = Subject(name=name, source="preset", shape=SHAPES[name])
    query = Query(
        contexts=(context,),
        batches=(batch,),
        kv_dtypes=(f"{kv.k.name}/{kv.v.name}",),
        allow_long=True,
        per_layer=True,
    )
    row = size_rows(subject, query)[0][0]
    assert sum(kind["bytes"] for kind in row["kinds"]) == row["total_bytes"]
    assert sum(layer["bytes"] for layer in row["per_layer"]) == row["total_bytes"]
    assert row["state_bytes"] + row["cross_bytes"] <= row["sequence_bytes"]
    for kind in row["kinds"]:
        assert formula_value(kind["formula"]) == kind["bytes"]


def formula_value(text: str) -> int:
    """What the formula multiplies out to, read as arithmetic with its words taken away."""
    words = ("layers", "KV heads", "tokens", "sequences", "bytes of K", "bytes of V", "bytes",
             "channels", "columns", "state elements", "codebooks", "blocks",
             "(sequences * tp)")  # fmt: skip
    text = text.replace(",", "").replace("×", "*")
    for word in words:
        text = text.replace(f" {word}", "")
    assert set(text) <= set("0123456789 *+()/"), text
    return int(eval(text))


@pytest.mark.parametrize("engine", ["ideal", "transformers", "vllm"])
def test_every_formula_multiplies_out(engine: str) -> None:
    """Of every type's class defaults, and every preset, in each engine that takes it."""
    shapes = dict(SHAPES)
    for kind in TABLE:
        with contextlib.suppress(KvtoolError):
            shapes[kind] = read_model({"model_type": kind}, TABLE)
    checked = 0
    for name, shape in shapes.items():
        subject = Subject(name=name, source="preset", shape=shape)
        query = Query(engines=(engine,), contexts=(700,), batches=(3,), allow_long=True)
        with contextlib.suppress(KvtoolError):
            row = size_rows(subject, query)[0][0]
            assert sum(kind["bytes"] for kind in row["kinds"]) == row["total_bytes"], name
            for kind in row["kinds"]:
                assert formula_value(kind["formula"]) == kind["bytes"], (name, kind)
            checked += 1
    assert checked > 400


@given(name=NAMES, context=CONTEXTS, block_size=st.sampled_from([1, 16, 64, 256]))
def test_blocks_round_up_by_less_than_a_block_a_layer(
    name: str, context: int, block_size: int
) -> None:
    shape = SHAPES[name]
    exact, rounded = size(shape, context), size(shape, context, block_size=block_size)
    most = sum((block_size - 1) * token_bytes(layout(shape), entry) for entry in shape.layers)
    assert exact <= rounded <= exact + most
    assert block_size > 1 or rounded == exact


@given(
    name=NAMES,
    context=CONTEXTS,
    tp=st.sampled_from([1, 2, 4, 8, 16, 32]),
    pp=st.integers(1, 6),
    dcp=st.sampled_from([1, 1, 2, 4, 8]),
)
def test_the_worst_rank_is_no_less_than_a_fair_share(
    name: str, context: int, tp: int, pp: int, dcp: int
) -> None:
    shape = SHAPES[name]
    try:
        check_parallel(shape, tp, pp, dcp=dcp)
    except KvtoolError:
        reject()
    result = ideal.size(layout(shape, tp=tp, pp=pp, dcp=dcp), context=context, encoder=100)
    assert math.ceil(result.bytes / (tp * pp)) <= result.rank_bytes <= result.bytes
    if tp == pp == 1:
        assert result.rank_bytes == result.bytes


@given(layers=st.integers(1, 200), pp=st.integers(1, 64))
def test_stages_hold_every_layer_once(layers: int, pp: int) -> None:
    assume(pp <= layers)
    split = stages(layers, pp)
    assert [layer for stage in split for layer in stage] == list(range(layers))
    assert max(map(len, split)) - min(map(len, split)) <= 1


# --- configs that somebody broke --------------------------------------------------------------------

STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.integers(-(10**30), 10**30),
    st.floats(allow_nan=True, allow_infinity=True), st.text(max_size=8),
    st.lists(st.integers(-3, 300), max_size=5), st.lists(st.text(max_size=5), max_size=5),
    st.lists(st.floats(), max_size=3), st.lists(st.none(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)  # fmt: skip
KEYS = sorted({key for row in TABLE.values() for key in row["defaults"]} | {"text_config", "dtype",
    "quantization_config", "per_layer_config", "block_configs", "rope_scaling", "model_type",
    "linear_attn_config", "sparse_attention_config", "hybrid_override_pattern", "architectures",
    "vision_config", "num_global_key_value_heads", "global_head_dim"})  # fmt: skip


@settings(max_examples=600)
@given(data=st.data(), name=st.sampled_from([p.name for p in PRESETS]))
def test_a_mutated_config_is_sized_or_refused(data: st.DataObject, name: str) -> None:
    config = copy.deepcopy(next(p.config for p in PRESETS if p.name == name))
    for _ in range(data.draw(st.integers(1, 3))):
        level = data.draw(st.sampled_from(list(levels_of(config))))
        key = data.draw(st.sampled_from([*level, *KEYS]) if level else st.sampled_from(KEYS))
        if data.draw(st.booleans()):
            level.pop(key, None)
        else:
            level[key] = data.draw(STRANGE)
    sized_or_refused(config)


@settings(max_examples=300)
@given(
    name=st.sampled_from(sorted(TABLE)),
    keys=st.dictionaries(st.sampled_from(KEYS), STRANGE, max_size=4),
)
def test_any_type_with_strange_keys_is_sized_or_refused(name: str, keys: dict[str, Any]) -> None:
    sized_or_refused({"model_type": name} | keys)


def levels_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config and its nested objects."""
    inner = [value for value in config.values() if isinstance(value, dict)]
    return [config, *(level for value in inner for level in levels_of(value))]


def sized_or_refused(config: dict[str, Any]) -> None:
    """Rows with a size, or an error with a message and a hint on one line each."""
    rows, error = attempt(config)
    if error is not None:
        assert error.message
        assert error.hint
        assert "\n" not in error.message
        assert len(error.message) < 400
    assert all(row["total_bytes"] > 0 for row in rows)
    json.dumps(rows, allow_nan=False)


def attempt(config: dict[str, Any]) -> tuple[list[dict[str, Any]], KvtoolError | None]:
    """The rows of a config, or why it has none."""
    try:
        shape = read_model(config, TABLE)
        query = Query(
            contexts=(64,), kv_dtypes=("auto", "q4_0"), allow_long=True, encoder_tokens=64
        )
        return size_rows(Subject(name="x", source="file", shape=shape), query)[0], None
    except KvtoolError as error:
        return [], error


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_every_preset_is_sized(preset: catalog.ModelPreset) -> None:
    assert size(SHAPES[preset.name], 1024) > 0


@given(
    name=NAMES, context=CONTEXTS, kv=KV, tp=st.sampled_from((1, 2, 4, 8)), pp=st.integers(1, 4),
    dcp=st.sampled_from((1, 2)), block=st.sampled_from((None, 16)),
)  # fmt: skip
def test_a_rank_is_the_sum_of_its_layers_one_by_one(
    name: str, context: int, kv: KvDtype, tp: int, pp: int, dcp: int, block: int | None
) -> None:
    shape = SHAPES[name]
    with contextlib.suppress(KvtoolError):
        check_parallel(shape, tp, pp, dcp=dcp)
        cut = layout(shape, kv, tp=tp, pp=pp, dcp=dcp, block_size=block)
        sums = [0] * pp
        for entry in shape.layers:
            shared = dcp if entry.kind in ("full", "latent", "indexer") else 1
            tokens = -(-ideal.held(entry, context, 100, block) // shared)
            own = tokens * token_bytes(cut, entry, tp=tp) + fixed_bytes(entry, tokens)
            own += sum(state_bytes(cut, state, tp=tp) for state in entry.states)
            (stage,) = [
                i for i, one in enumerate(stages(shape.num_modules, pp)) if entry.module in one
            ]
            sums[stage] += own
        assert ideal.rank_bytes(cut, context, 100) == max(sums)

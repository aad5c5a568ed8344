"""A prefill's FLOPs and seconds: by hand, against a loop over tokens, and against the benchmark's."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool import catalog
from kvtool.config import LoadedConfig, load_config
from kvtool.errors import USAGE, KvtoolError
from kvtool.prefill import (
    Attention,
    Prefill,
    break_even_bytes_per_s,
    flops,
    prefill_of,
    seconds,
    token_flops,
)

GIB = 2**30


def of(model: str = "llama-3-8b", **given: Any) -> Prefill:
    return prefill_of(load_config, model, **given)


def of_config(config: dict[str, Any], **given: Any) -> Prefill:
    loaded = LoadedConfig(config=config, name="m", source="file", where="a test")
    return prefill_of(lambda _: loaded, "m", **given)


def refusal(model: str = "llama-3-8b", **given: Any) -> KvtoolError:
    with pytest.raises(KvtoolError) as caught:
        of(model, **given)
    assert caught.value.message
    assert caught.value.hint
    return caught.value


def column(*counts: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(counts, np.int64)


# -- Llama 3 8B by hand

MATRICES = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
"""Q and O, K and V of 8 heads of 128, gate, up and down: 218,103,808 a layer, 6,979,321,856."""
HEAD = 128_256 * 4096
PAIR = 2 * 32 * 32 * (128 + 128)
"""Layers, query heads, a score of 128 and a weighted sum of 128: 524,288 a query and key."""
EIGHT_K = 131_944_593_489_920
"""2 · 6,979,321,856 · 8,192 = 114,349,209,288,704 of matrices; 2 · 525,336,576 of the head;
8,192 · 8,193 / 2 = 33,558,528 pairs of 524,288 = 17,594,333,528,064."""


def test_llama_3_8b_by_hand() -> None:
    got = of()
    assert (got.parameters, got.head_parameters) == (MATRICES, HEAD) == (6_979_321_856, 525_336_576)
    assert got.attention == (
        Attention(num_layers=32, query_heads=32, k_head_dim=128, v_head_dim=128, window=None),
    )
    assert got.attention[0].pair_flops == PAIR
    assert got.bytes_per_token == 131_072
    assert got.weights_bytes == 2 * 8_030_261_248
    assert (got.model, got.dtype, got.kv_dtype, got.tp) == ("llama-3-8b", "bf16", "bf16", 1)
    assert (got.gpu, got.flops_per_s, got.bandwidth_bytes_per_s) == (None,) * 3
    assert got.notes == (
        "llama-3-8b: its weights are 14.96 GiB: 8,030,261,248 parameters in bf16, counted from the "
        "config (--weights sets them)",
    )
    ours = flops(got, column(8192, 8192, 8192, 1, 0), column(0, 4096, 8191, 0, 0))
    half = 4096 * 2 * MATRICES + 2 * HEAD + (8192 * 8193 - 4096 * 4097) // 2 * PAIR
    last = 2 * MATRICES + 2 * HEAD + 8192 * PAIR
    first = 2 * MATRICES + 2 * HEAD + PAIR
    assert ours.tolist() == [EIGHT_K, half, last, first, 0]
    assert ours.dtype == np.float64


def test_seconds_by_hand() -> None:
    """989 TFLOP/s and 3,350 GB/s; 16,060,522,496 bytes of weights take 4.79 ms to read."""
    got = of(gpu="h100")
    assert (got.gpu, got.efficiency) == ("h100-sxm", 0.5)
    assert (got.flops_per_s, got.bandwidth_bytes_per_s) == (989e12, 3350e9)
    assert got.notes[-1] == (
        "h100-sxm: a prefill is taken to reach 0.5 of 989 TFLOP/s: an estimate "
        "(--efficiency sets it)"
    )
    floor = 16_060_522_496 / 3350e9
    taken = seconds(got, column(8192, 8192, 8192, 9), column(0, 8191, 8192, 0))
    assert taken.tolist() == [EIGHT_K / 494.5e12, floor, 0, floor]
    assert taken[0] == pytest.approx(0.26682, rel=1e-4)
    faster = seconds(of(gpu="h100", efficiency=1.0), column(8192), column(0))
    assert faster[0] == pytest.approx(taken[0] / 2)


def test_ranks_add_up() -> None:
    got = of(gpu="h100:8")
    assert got.tp == 8
    assert (got.flops_per_s, got.bandwidth_bytes_per_s) == (8 * 989e12, 8 * 3350e9)
    assert got.bytes_per_token == 131_072  # of the whole model
    assert "8 ranks are taken to be 8 times as fast as one" in got.notes
    replica = of(gpu="h100:8", tp="4")
    assert (replica.tp, replica.flops_per_s) == (4, 4 * 989e12)
    assert replica.notes[-1] == "8 GPUs and --tp 4: the time is that of one replica"


def test_the_break_even_by_hand() -> None:
    got = of(gpu="h100")
    assert of(kv_dtype="fp8").bytes_per_token == 65_536
    assert token_flops(got) == 2 * MATRICES + PAIR
    assert break_even_bytes_per_s(got) == 131_072 * 494.5e12 / (2 * MATRICES + PAIR)
    assert break_even_bytes_per_s(got) == pytest.approx(4.6432e9, rel=1e-4)
    assert break_even_bytes_per_s(got, 8191) == pytest.approx(3.5508e9, rel=1e-4)


def test_the_break_even_is_where_both_take_as_long() -> None:
    """A block of 16 at a context of 32,768, of a prompt that goes on, so that no head is computed."""
    got = of("llama-3.1-8b", gpu="h100")
    start = 32_768
    work = flops(got, column(start + 16), column(start))[0] - 2 * got.head_parameters
    computed = work / (got.flops_per_s or 0) / got.efficiency
    # The middle of the block: 7.5 tokens in.
    between = [break_even_bytes_per_s(got, start + more) for more in (7, 8)]
    loaded = [16 * got.bytes_per_token / rate for rate in between]
    assert loaded[0] < computed < loaded[1]


# -- against a loop over tokens


def plain(prefill: Prefill, tokens: int, cached: int) -> int:
    """Token by token, layer by layer, in whole numbers."""
    work = 0
    for place in range(cached, tokens):
        work += 2 * prefill.parameters
        for layers in prefill.attention:
            keys = [key for key in range(place + 1)
                    if layers.window is None or place - key < layers.window]  # fmt: skip
            multiplied = layers.query_heads * (layers.k_head_dim + layers.v_head_dim)
            work += layers.num_layers * 2 * multiplied * len(keys)
        if place == tokens - 1:
            work += 2 * prefill.head_parameters
    return work


layers = st.builds(
    Attention,
    num_layers=st.integers(1, 100),
    query_heads=st.integers(1, 128),
    k_head_dim=st.integers(1, 576),
    v_head_dim=st.integers(1, 512),
    window=st.none() | st.integers(1, 80),
)
prefills = st.builds(
    Prefill,
    model=st.just("m"), dtype=st.just("bf16"), kv_dtype=st.just("bf16"), tp=st.just(1),
    parameters=st.integers(0, 2**39), head_parameters=st.integers(0, 2**31),
    attention=st.lists(layers, max_size=3).map(tuple),
    bytes_per_token=st.integers(1, 2**20),
    weights_bytes=st.integers(0, 2**40),
    flops_per_s=st.just(1e15), bandwidth_bytes_per_s=st.just(1e12),
)  # fmt: skip
lengths = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)


@given(prefill=prefills, pairs=st.lists(lengths, min_size=1, max_size=5))
def test_a_loop_over_tokens_says_the_same(prefill: Prefill, pairs: list[list[int]]) -> None:
    cached, tokens = (column(*(pair[i] for pair in pairs)) for i in (0, 1))
    expected = [plain(prefill, pair[1], pair[0]) for pair in pairs]
    got = flops(prefill, tokens, cached)
    # A loop's sum below 2^53 is a float64 as it is; these have no rounding to hide in.
    assert [int(one) for one in got] == expected
    rate = 1e15 * prefill.efficiency
    floor = prefill.weights_bytes / 1e12
    assert seconds(prefill, tokens, cached).tolist() == [
        max(work / rate, floor) if pair[1] > pair[0] else 0.0
        for work, pair in zip(expected, pairs, strict=True)
    ]


@given(prefill=prefills, split=lengths)
def test_a_prompt_in_two_parts_is_the_whole(prefill: Prefill, split: list[int]) -> None:
    """And a token after a context is the difference of two prompts, but for the head."""
    start, end = split
    whole, first, rest = flops(prefill, column(end, start, end), column(0, 0, start))
    twice = 2 * prefill.head_parameters if 0 < start < end else 0
    assert whole == first + rest - twice
    alone = flops(prefill, column(end + 1), column(end))[0]
    assert token_flops(prefill, end) == alone - 2 * prefill.head_parameters


def test_long_prompts_are_exact_to_float64() -> None:
    """A sum of positive terms, each rounded a few times: 2^40 tokens do not overflow."""
    got, end, start = of("mistral-7b-v0.1"), 2**40, 2**40 - 3
    (one,) = got.attention
    assert one.window == 4096
    expected = 3 * (2 * got.parameters + 4096 * one.pair_flops) + 2 * got.head_parameters
    assert flops(got, column(end), column(start))[0] == expected
    wide = of()
    pairs = end * (end + 1) // 2 * PAIR
    expected = 2 * MATRICES * end + 2 * HEAD + pairs
    assert flops(wide, column(end), column(0))[0] == pytest.approx(expected, rel=1e-15)


def test_cached_tokens_are_part_of_the_prompt() -> None:
    for tokens, cached in ((1, 2), (1, -1)):
        with pytest.raises(ValueError, match="a part of the prompt"):
            flops(of(), column(tokens), column(cached))


# -- against the benchmark's arithmetic


@pytest.mark.parametrize("model", ["llama-3-8b", "mistral-7b-v0.1", "qwen3-0.6b"])
def test_the_benchmark_counts_the_same(model: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvtool.bench.decode.arithmetic import prefill_flops
    from kvtool.bench.decode.blueprint import blueprint

    plan = blueprint(load_config(model))
    lengths = [1, 100, 4096, 8192]
    expected = [prefill_flops(plan, 1, tokens) for tokens in lengths]
    assert flops(of(model), column(*lengths), column(0, 0, 0, 0)).tolist() == expected


# -- what is known of a model


def test_windows_are_apart_from_full_layers() -> None:
    got = of("gemma-2-9b", weights="18483411968B")
    kinds = [(one.num_layers, one.window) for one in got.attention]
    assert kinds == [(21, 4096), (21, None)]
    assert got.bytes_per_token == 42 * 2 * 8 * 256 * 2


def test_weights_of_a_type_that_is_not_counted_are_an_estimate() -> None:
    """Bytes become parameters, and embeddings multiply nothing."""
    untied = of_config({**UNKNOWN, "tie_word_embeddings": False}, weights="1MB")
    assert (untied.parameters, untied.head_parameters) == (500_000 - 2 * 50 * 32, 50 * 32)
    tied = of_config(UNKNOWN, weights="1MB")
    assert (tied.parameters, tied.head_parameters) == (500_000 - 50 * 32, 50 * 32)
    assert tied.notes[-1].endswith("are 500,000, less 1,600 of embeddings")
    bare = of_config({**UNKNOWN, "vocab_size": None}, weights="1MB")
    assert (bare.parameters, bare.head_parameters) == (500_000, 0)
    assert bare.notes[-1].endswith("are 500,000, embeddings included")


UNKNOWN = {"model_type": "seed_oss", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 50}  # fmt: skip
"""Of a type without a recipe."""


def test_given_weights_do_not_change_what_is_counted() -> None:
    """Nor does how they are stored: a quantised Llama multiplies by as many."""
    got = of(weights="5GiB")
    assert (got.parameters, got.head_parameters, got.weights_bytes) == (MATRICES, HEAD, 5 * GIB)
    assert got.notes == ()
    awq = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    config = load_config("llama-3-8b").config | awq
    assert of_config(config, weights="5GiB").parameters == MATRICES
    assert of_config(config).parameters == MATRICES
    assert 5 * GIB < of_config(config).weights_bytes < 6 * GIB
    with pytest.raises(KvtoolError, match="its config has quantization_config: bytes") as caught:
        of_config({**UNKNOWN, "quantization_config": {"bits": 4}}, weights="5GiB")
    assert caught.value.hint == "leave out --model: hit rates need none"


def test_a_token_meets_the_experts_that_are_chosen() -> None:
    """Mixtral 8x7B: 32 layers of 8 experts of 3 × 4,096 × 14,336, two of which a token meets."""
    got = of("mixtral-8x7b")
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert got.parameters == attention + 32 * (2 * 3 * 4096 * 14_336 + 8 * 4096)
    assert got.weights_bytes == 2 * 46_702_792_704
    assert "a step is taken to read all experts" in got.notes[-1]


def test_latents_are_multiplied_expanded() -> None:
    """MiniCPM3: 40 heads of 64 + 32 for keys and of 64 for values; 256 + 32 numbers are cached."""
    got = of("minicpm3", weights="8GB")
    (one,) = got.attention
    assert (one.query_heads, one.k_head_dim, one.v_head_dim) == (40, 96, 64)
    assert got.bytes_per_token == one.num_layers * 2 * (256 + 32)


def test_a_window_that_leaves_out_the_query_sees_one_more_than_it_keeps() -> None:
    """MiMo-V2's layers, without its experts: 15 tokens are kept, and 16 are seen."""
    config = {"model_type": "mimo_v2_flash", "hidden_size": 32, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "v_head_dim": 4,
              "sliding_window_size": 15, "hybrid_layer_pattern": [0, 1], "vocab_size": 50,
              "num_experts_per_tok": 0}  # fmt: skip
    got = of_config(config, weights="1MB")
    assert [one.window for one in got.attention] == [None, 16]


# -- what is refused


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("llama-4-scout", "its layers are 36 × chunked (8,192 tokens), 12 × full"),
        ("mamba-2.8b", "its layers are 64 × constant state"),
        ("falcon-h1-7b", "its layers are 44 × full, 44 × constant state"),
        ("bart-large", "its layers are 12 × full, 12 × cross-attention"),
        ("gemma-3n-e2b", "its 30 layers keep 20 caches"),
    ],
)
def test_what_no_formula_covers(model: str, why: str) -> None:
    for more in ({}, {"weights": "16GiB"}):
        error = refusal(model, **more)
        assert error.code == "prefill_not_counted"
        assert error.message.startswith(f"{model}: what its prefill computes is not known: {why}")
        assert error.hint == "leave out --model: hit rates need none"


def test_experts_of_a_type_without_a_recipe_are_not_told_by_bytes() -> None:
    config = {**UNKNOWN, "model_type": "dots1", "n_routed_experts": 8, "num_experts_per_tok": 2}
    with pytest.raises(KvtoolError, match="it has experts, and bytes do not tell"):
        of_config(config, weights="1GiB")


@pytest.mark.parametrize("model", ["orion-14b"])
def test_a_type_that_is_not_counted_says_which_option_helps(model: str) -> None:
    error = refusal(model)
    assert error.code == "weights_not_counted"
    assert error.message.startswith(f"{model}: its weights are not counted yet (")
    assert error.hint.startswith("give --weights 16GiB (the whole model's), or leave out --model")


def test_every_preset_is_counted_or_refused() -> None:
    counted = []
    for preset in catalog.model_presets():
        try:
            got = of_config(preset.config)
        except KvtoolError as error:
            if error.code not in ("prefill_not_counted", "weights_not_counted"):
                raise
            continue
        assert sum(one.num_layers for one in got.attention) >= 1, preset.name
        assert min(got.parameters, got.bytes_per_token) > 0, preset.name
        counted.append(preset.name)
    assert len(counted) >= 70
    assert {"llama-3.1-405b", "phi-3-mini", "falcon-180b", "mistral-7b-v0.1"} <= set(counted)


def test_gpus_without_a_rate() -> None:
    error = refusal(gpu="m4-max-128gb")
    assert error.message.startswith("m4-max-128gb: no dense bf16 or fp16 rate is known")
    assert error.hint.startswith("choose a GPU that has one, or leave out --gpu")
    error = refusal(gpu="t4")
    assert error.message.startswith("t4: no dense bf16 rate is known")
    assert error.hint.startswith("give --dtype fp16, whose rate is known, or leave out --gpu")
    assert of(gpu="t4", dtype="fp16").flops_per_s == 65e12
    assert "no dense fp32 rate" in refusal(gpu="h100", dtype="fp32").message
    assert of(dtype="fp32").weights_bytes == 4 * 8_030_261_248


def test_no_seconds_without_a_gpu() -> None:
    for call in (lambda one: seconds(one, column(1), column(0)), break_even_bytes_per_s):
        with pytest.raises(KvtoolError, match="there are FLOPs, and no seconds") as caught:
            call(of())
        assert caught.value.hint.startswith("add --gpu h100")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpu": "h100,b200"}, "one kind of GPU"),
        ({"gpu": "h1oo"}, "no GPU is called 'h1oo'"),
        ({"gpu": "h100:2", "tp": "4"}, "--tp 4 is more than the 2 GPUs"),
        ({"gpu": "m4-max-128gb"}, "no dense bf16 or fp16 rate"),
        ({"weights": "16"}, "--weights: '16' is not an amount of memory"),
        ({"tp": "x"}, "--tp: 'x' is not a whole number"),
        ({"dtype": "int8"}, "--dtype: unknown dtype 'int8'"),
        ({"kv_dtype": "fp7"}, "--kv-dtype: unknown dtype 'fp7'"),
        ({"efficiency": 0.0}, "--efficiency: 0.0 is out of range"),
        ({"efficiency": 1.1}, "--efficiency: 1.1 is out of range"),
        ({"efficiency": float("nan")}, "--efficiency: nan is out of range"),
    ],
)
def test_words_are_refused_before_a_model_is_loaded(given: dict[str, Any], words: str) -> None:
    def never(model: str) -> LoadedConfig:
        raise AssertionError(model)

    with pytest.raises(KvtoolError, match=re.escape(words)) as caught:
        prefill_of(never, "llama-3-8b", **given)
    assert caught.value.exit_code == USAGE


def test_weights_smaller_than_the_embeddings() -> None:
    with pytest.raises(KvtoolError, match="are 1,500 parameters, and the embeddings") as caught:
        of_config(UNKNOWN, weights="3000B")
    assert caught.value.exit_code == USAGE
    assert refusal(tp=3).code == "tp_does_not_divide"

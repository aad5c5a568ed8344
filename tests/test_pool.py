"""The pool: each way to give it, to the token; what is refused; weights against transformers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvtool import catalog
from kvtool.cache import CacheLayout
from kvtool.config import LoadedConfig, load_config
from kvtool.dtypes import DTYPES, KvDtype
from kvtool.engines import ideal
from kvtool.errors import USAGE, KvtoolError
from kvtool.model import read_model
from kvtool.pool import Pool, pool_of

GIB = 2**30

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 112, "vocab_size": 50, "torch_dtype": "bfloat16",
    "max_position_embeddings": 24,
}  # fmt: skip
OPT_13B = {
    "model_type": "opt", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
    "ffn_dim": 20480, "max_position_embeddings": 2048, "vocab_size": 50272,
    "word_embed_proj_dim": 5120, "torch_dtype": "float16",
}  # fmt: skip
"""facebook/opt-13b."""


def pool(**given: Any) -> Pool:
    """A pool as the command line would ask for it; presets and files are read as everywhere."""
    return pool_of(load=load_config, **given)


def pool_for(config: dict[str, Any], *, name: str = "m", **given: Any) -> Pool:
    """The pool of a config that is no preset."""
    loaded = LoadedConfig(config=config, name=name, source="file", where="a test")
    return pool_of(load=lambda _: loaded, model=name, **given)


def refusal(**given: Any) -> KvtoolError:
    """The error that these options end in; two sentences, each with something to say."""
    with pytest.raises(KvtoolError) as caught:
        pool(**given)
    assert caught.value.message
    assert caught.value.hint
    return caught.value


# -- blocks and tokens


def test_blocks_are_blocks_of_any_size() -> None:
    got = pool(num_blocks="1k")
    assert (got.blocks, got.tokens, got.kv_bytes, got.model) == (1024, None, None, None)
    assert (got.num_blocks(16), got.num_tokens(16)) == (1024, 16_384)
    assert (got.num_blocks(32), got.num_tokens(32)) == (1024, 32_768)
    assert got.source == "1,024 blocks (--num-blocks)"
    assert got.notes == ()
    assert pool(num_blocks=7).num_blocks(16) == 7


def test_tokens_fill_whole_blocks_and_are_all_there_without_blocks() -> None:
    got = pool(pool_tokens=15_728)
    assert (got.blocks, got.tokens) == (None, 15_728)
    assert got.num_blocks(16) == 983  # 983 × 16 = 15,728
    assert got.num_blocks(32) == 491  # 491 × 32 = 15,712: 16 tokens are in no block
    assert got.num_tokens(32) == 15_728
    assert got.source == "15,728 tokens (--pool-tokens)"


def test_a_pool_smaller_than_a_block_is_refused() -> None:
    got = pool(pool_tokens=15)
    assert got.num_tokens(16) == 15
    with pytest.raises(KvtoolError, match="15 tokens holds no block of 16") as caught:
        got.num_blocks(16)
    assert caught.value.exit_code == USAGE
    assert "--block-size" in caught.value.hint


@pytest.mark.parametrize("count", ["0", "-3", "ten", 0])
def test_a_count_that_is_none(count: Any) -> None:
    assert refusal(num_blocks=count).message.startswith("--num-blocks: ")
    assert refusal(pool_tokens=count).message.startswith("--pool-tokens: ")


# -- memory of a model


def test_opt_13b_in_12_gib() -> None:
    """40 layers × 2 × 40 heads × 128 × 2 bytes = 819,200; 12 × 2^30 / 819,200 = 15,728.6."""
    got = pool_for(OPT_13B, name="opt-13b", kv_memory="12GiB")
    assert got.bytes_per_token == 40 * 2 * 40 * 128 * 2 == 819_200
    assert (got.tokens, got.kv_bytes) == (15_728, 12_884_901_888)
    assert (got.num_blocks(16), got.num_tokens(16)) == (983, 15_728)
    assert got.source == "12.00 GiB at 819,200 B a token (opt-13b, fp16)"
    assert (got.model, got.blocks, got.notes) == ("opt-13b", None, ())


@pytest.mark.parametrize(
    ("model", "each", "tokens", "blocks"),
    [
        # 32 layers × 2 × 8 KV heads × 128 × 2 bytes; 12 × 2^30 / 2^17 = 12 × 2^13
        ("llama-3.1-8b", 131_072, 98_304, 6_144),
        # 28 layers × 2 × 4 KV heads × 128 × 2 bytes; 12 × 2^30 / 57,344 = 224,694.8
        ("qwen2.5-7b", 57_344, 224_694, 14_043),
        # latent: 61 layers × (512 + 64) × 2 bytes; 12 × 2^30 / 70,272 = 183,357.6
        ("deepseek-v3", 70_272, 183_357, 11_459),
        # one KV head: 32 layers × 2 × 1 × 64 × 2 bytes; 12 × 2^30 / 2^13
        ("falcon-7b", 8_192, 1_572_864, 98_304),
    ],
)
def test_a_models_tokens_by_hand(model: str, each: int, tokens: int, blocks: int) -> None:
    got = pool(model=model, kv_memory="12GiB")
    assert (got.bytes_per_token, got.tokens, got.num_blocks(16)) == (each, tokens, blocks)
    assert got.model == model


@pytest.mark.parametrize(
    ("kv_dtype", "each"),
    [
        ("auto", 32 * 8 * (256 + 256)),
        ("fp8", 32 * 8 * (128 + 128)),
        ("int8", 32 * 8 * (132 + 132)),  # an fp16 scale and an fp16 zero point a head
        ("int4/int2", 32 * 8 * (64 + 4 + 32 + 4)),
        ("fp8/auto", 32 * 8 * (128 + 256)),
    ],
)
def test_the_dtype_of_the_cache(kv_dtype: str, each: int) -> None:
    got = pool(model="llama-3.1-8b", kv_memory="1GiB", kv_dtype=kv_dtype)
    assert (got.bytes_per_token, got.tokens) == (each, GIB // each)


def test_the_dtype_of_the_model() -> None:
    assert pool(model="llama-3.1-8b", kv_memory="1GiB", dtype="fp32").bytes_per_token == 262_144
    stated = {key: value for key, value in OPT_13B.items() if key != "torch_dtype"}
    got = pool_for(stated, kv_memory="1GiB")
    assert got.bytes_per_token == 819_200
    assert got.notes == ("m: the config states no dtype: bf16 is assumed (--dtype sets it)",)
    quantised = OPT_13B | {"quantization_config": {"kv_cache_quant_algo": "FP8"}}
    got = pool_for(quantised, kv_memory="1GiB")
    assert got.bytes_per_token == 409_600
    assert got.notes == ("m: the checkpoint quantises its KV cache: auto is fp8",)
    assert pool_for(quantised, kv_memory="1GiB", kv_dtype="bf16").notes == ()


def test_ranks_share_heads_and_copy_what_cannot_be_shared() -> None:
    """A rank of 4 has 2 of 8 KV heads; one of 16 has a whole one; a latent is on every rank."""
    four = pool(model="llama-3.1-8b", kv_memory="12GiB", tp=4)
    assert (four.bytes_per_token, four.tokens) == (131_072 // 4, 4 * 98_304)
    assert four.source == "12.00 GiB a GPU at 32,768 B a token (llama-3.1-8b, bf16, tp 4)"
    assert four.notes == ()
    many = pool(model="llama-3.1-8b", kv_memory="12GiB", tp="16")
    assert many.bytes_per_token == 131_072 // 8
    assert "do not shrink with --tp 16" in many.notes[0]
    latent = pool(model="deepseek-v3", kv_memory="12GiB", tp=8)
    assert (latent.bytes_per_token, latent.tokens) == (70_272, 183_357)
    assert "do not shrink with --tp 8" in latent.notes[-1]
    error = refusal(model="llama-3.1-8b", kv_memory="12GiB", tp=3)
    assert error.code == "tp_does_not_divide"


def test_memory_for_less_than_a_token() -> None:
    error = refusal(model="llama-3.1-8b", kv_memory="100KiB")
    assert error.code == "does_not_fit"
    assert "hold no token at 131,072 B a token" in error.message
    assert pool(model="llama-3.1-8b", kv_memory="128KiB").tokens == 1


# -- what a GPU has left

H100 = 85_520_809_984
"""The preset's usable bytes; nine tenths of them are 76,968,728,985.6."""


def test_what_a_gpu_has_left_of_given_weights() -> None:
    """76,968,728,985 − 16 × 2^30 = 59,788,859,801; / 131,072 = 456,152.4."""
    got = pool(model="llama-3.1-8b", gpu="h100", weights="16GiB")
    assert (got.kv_bytes, got.tokens) == (59_788_859_801, 456_152)
    assert got.source == (
        "55.68 GiB of h100-sxm (0.9 × 79.65 GiB − 16.00 GiB of weights) "
        "at 131,072 B a token (llama-3.1-8b, bf16)"
    )
    assert got.notes == ("h100-sxm: activations and what else the engine keeps are not subtracted",)


def test_weights_are_estimated_where_they_are_not_given() -> None:
    """8,030,261,248 parameters × 2 bytes; 76,968,728,985 − 16,060,522,496 = 60,908,206,489."""
    got = pool(model="llama-3.1-8b", gpu="h100")
    assert (got.kv_bytes, got.tokens) == (60_908_206_489, 464_692)
    assert got.notes[0] == (
        "llama-3.1-8b: its weights are 14.96 GiB: 8,030,261,248 parameters in bf16, counted from the"
        " config (--weights sets them)"
    )
    wide = pool(model="llama-3.1-8b", gpu="h100", dtype="fp32")
    assert wide.kv_bytes == 76_968_728_985 - 4 * 8_030_261_248


def test_gpus_are_ranks_that_share_the_weights() -> None:
    """A rank of 8: 76,968,728,985 − 141,107,412,992 / 8 of Llama-3.1-70B, whose 161 norms of 8,192 every
    rank has whole; 10,240 × 4 bytes."""
    got = pool(model="llama-3.1-70b", gpu="h100:8")
    norms = 161 * 8192 * 2
    assert got.kv_bytes == 76_968_728_985 - (141_107_412_992 - norms) // 8 - norms
    assert got.bytes_per_token == 80 * 2 * 1 * 128 * 2
    assert got.source.endswith("(llama-3.1-70b, bf16, tp 8)")
    assert pool(model="llama-3.1-70b", gpu="h100", tp=8).kv_bytes == got.kv_bytes
    half = pool(model="llama-3.1-70b", gpu="h100:8", tp="4")
    assert half.kv_bytes == 76_968_728_985 - (141_107_412_992 - norms) // 4 - norms
    assert "8 GPUs and --tp 4: the pool is that of one replica" in half.notes
    uneven = pool(model="llama-3.1-8b", gpu="h100:2", weights="3B")
    assert uneven.kv_bytes == 76_968_728_985 - 2


def test_another_part_of_the_memory() -> None:
    got = pool(model="llama-3.1-8b", gpu="h100", weights="0B", gpu_memory_utilization=1.0)
    assert got.kv_bytes == H100
    for part in (0.0, 1.01, -1.0, float("nan")):
        error = refusal(model="llama-3.1-8b", gpu="h100", gpu_memory_utilization=part)
        assert error.message.startswith("--gpu-memory-utilization: ")


def test_weights_that_leave_nothing() -> None:
    error = refusal(model="llama-3.1-70b", gpu="h100")
    assert error.code == "does_not_fit"
    assert "131.42 GiB of weights leave nothing of the 71.68 GiB" in error.message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpu": "h100,b200"}, "one kind of GPU"),
        ({"gpu": "h1oo"}, "no GPU is called 'h1oo'"),
        ({"gpu": "h100:0"}, "--gpu: 0 is out of range"),
        ({"gpu": "h100:2", "tp": "4"}, "--tp 4 is more than the 2 GPUs"),
        ({"gpu": "h100", "weights": "16"}, "--weights: '16' is not an amount of memory"),
        ({"gpu": "h100", "tp": "x"}, "--tp: 'x' is not a whole number"),
        ({"kv_memory": "12"}, "--kv-memory: '12' is not an amount"),
        ({"kv_memory": "1GiB", "kv_dtype": "fp7"}, "--kv-dtype: unknown dtype 'fp7'"),
        ({"kv_memory": "1GiB", "dtype": "int8"}, "--dtype: unknown dtype 'int8'"),
        ({"kv_memory": "1GiB", "tp": 0}, "--tp: 0 is out of range"),
    ],
)
def test_words_are_refused_before_a_model_is_loaded(given: dict[str, Any], words: str) -> None:
    def never(model: str) -> LoadedConfig:
        raise AssertionError(model)

    with pytest.raises(KvtoolError, match=re.escape(words)) as caught:
        pool_of(load=never, model="llama-3.1-8b", **given)
    assert caught.value.exit_code == USAGE


# -- one way, not two


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "nothing says how large the pool is"),
        ({"tp": 2, "weights": "1GiB"}, "nothing says"),
        ({"model": "llama-3.1-8b"}, "--model alone does not say"),
        ({"num_blocks": 1, "pool_tokens": 1}, "--num-blocks and --pool-tokens each say"),
        ({"model": "x", "kv_memory": "1GiB", "gpu": "h100"}, "--kv-memory and --gpu each say"),
        ({"num_blocks": 1, "kv_memory": "1GiB"}, "--num-blocks and --kv-memory each say"),
        ({"num_blocks": 1, "model": "x"}, "--num-blocks says how large the pool is, and --model"),
        ({"pool_tokens": 1, "model": "x"}, "--pool-tokens says how large the pool is, and --model"),
        ({"kv_memory": "1GiB"}, "--kv-memory is memory, and how many tokens fit"),
        ({"gpu": "h100"}, "--gpu is memory, and how many tokens fit"),
    ],
)
def test_exactly_one_way(given: dict[str, Any], words: str) -> None:
    error = refusal(**given)
    assert words in error.message
    assert error.exit_code == USAGE


def test_options_of_another_way_are_ignored_aloud() -> None:
    got = pool(num_blocks=4, kv_dtype="fp8", tp="2", weights="1GiB", dtype="fp16")
    assert got.notes == tuple(
        f"{flag} is ignored: --num-blocks says how large the pool is"
        for flag in ("--weights", "--kv-dtype", "--dtype", "--tp")
    )
    assert pool(pool_tokens=4, kv_dtype="auto", tp=1).notes == ()
    got = pool(model="llama-3.1-8b", kv_memory="1GiB", gpu_memory_utilization=0.5, weights="1B")
    assert [note.split()[0] for note in got.notes] == ["--weights", "--gpu-memory-utilization"]


# -- models whose tokens are not alike


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("mistral-7b-v0.1", "32 × sliding (4,096 tokens)"),
        ("gemma2-9b", "21 × sliding (4,096 tokens), 21 × full"),
        ("llama-4-scout", "36 × chunked (8,192 tokens), 12 × full"),
        ("mamba-2.8b", "64 × constant state"),
        ("falcon-h1-7b", "44 × full, 44 × constant state"),
        ("bart-large", "12 × full, 12 × cross-attention"),
        ("deepseek-v3.2", "61 × latent, 61 × indexer"),
    ],
)
def test_other_layers_are_refused_by_kind(model: str, kinds: str) -> None:
    for more in ({"kv_memory": "12GiB"}, {"gpu": "h100", "weights": "1GiB"}):
        error = refusal(model=model, **more)
        assert error.code == "tokens_differ"
        assert error.message.endswith(kinds)
        assert error.hint == "give the pool itself: --num-blocks or --pool-tokens"


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"model_type": "xlnet", "n_layer": 2, "mem_len": None}, "2 × hidden state"),
        ({"model_type": "cpmant", "num_hidden_layers": 2, "prompt_length": 32},
         "2 × full (and 32 tokens of its own)"),
        ({"model_type": "musicgen_decoder", "num_hidden_layers": 2, "num_codebooks": 4,
          "add_cross_attention": False, "is_encoder_decoder": False}, "2 × full, for 4 codebooks"),
    ],
)  # fmt: skip
def test_stranger_layers(config: dict[str, Any], kinds: str) -> None:
    with pytest.raises(KvtoolError, match=re.escape(kinds)):
        pool_for(config, kv_memory="1GiB")


def test_a_window_that_no_context_fills_is_none() -> None:
    """Phi-4-mini: 131,072 tokens at most, and a window of 262,144. 32 × 2 × 8 × 128 × 2 bytes."""
    got = pool(model="phi-4-mini", kv_memory="12GiB")
    assert (got.bytes_per_token, got.tokens) == (131_072, 98_304)
    config = {"model_type": "mistral", "num_hidden_layers": 2, "num_key_value_heads": 8,
              "sliding_window": 4096, "max_position_embeddings": 4096}  # fmt: skip
    assert pool_for(config, kv_memory="1GiB").bytes_per_token == 2 * 2 * 8 * 128 * 2
    longer = config | {"max_position_embeddings": 4097}
    unstated = {key: v for key, v in config.items() if key != "max_position_embeddings"}
    for other in (longer, unstated):
        with pytest.raises(KvtoolError, match="2 × sliding"):
            pool_for(other, kv_memory="1GiB")


def test_every_preset_is_a_number_of_tokens_or_refused(table: dict[str, Any]) -> None:
    """Where there is one, n tokens take n times its bytes, at any length the model goes to."""
    good: list[str] = []
    for preset in catalog.model_presets():
        try:
            got = pool_for(preset.config, name=preset.name, kv_memory="12GiB")
        except KvtoolError as error:
            if error.code != "tokens_differ":
                raise
            continue
        shape = read_model(preset.config, table)
        dtype = DTYPES[shape.dtype or "bf16"]
        auto = DTYPES[shape.kv_dtype] if shape.kv_dtype else dtype
        layout = CacheLayout(shape=shape, dtype=dtype, kv=KvDtype(k=auto, v=auto))
        for context in (1, 100, shape.max_context or 1000):
            held = ideal.size(layout, context=context, encoder=0)
            assert held.bytes == context * (got.bytes_per_token or 0), preset.name
        good.append(preset.name)
    assert len(good) > 90
    assert {"command-r", "glm-4.5-air", "mixtral-8x7b", "kimi-k2"} <= set(good)


# -- weights


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"quantization_config": {"quant_method": "hqq2"}}, "hqq2"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"intermediate_size": None}, "no intermediate_size"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 4}}}, "its layers differ"),
        ({"model_type": "codegen"}, "codegen has no recipe"),
    ],
)
def test_weights_that_are_not_counted(more: dict[str, Any], why: str) -> None:
    config = LLAMA | more
    with pytest.raises(KvtoolError, match=re.escape(why)):
        pool_for(config, gpu="h100")
    if "num_key_value_heads" not in str(more):
        assert pool_for(config, gpu="h100", weights="1GiB").kv_bytes == 76_968_728_985 - GIB


def test_experts_and_quantised_weights_are_counted() -> None:
    got = pool(model="mixtral-8x7b", gpu="h200")
    assert "46,702,792,704 parameters in bf16" in " ".join(got.notes)
    awq = LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 16}}
    assert pool_for(awq, gpu="h100").kv_bytes > pool_for(LLAMA, gpu="h100").kv_bytes

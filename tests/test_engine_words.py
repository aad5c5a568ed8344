"""What `kvtool size` says in words: each reason where its condition holds, and only there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtool.run import Row, Run
from kvtool.view.check import view as check_view
from kvtool.view.size import view

Kvtool = Callable[..., Any]

MINUS_ONE = "a window layer keeps window − 1 tokens"
EVERY = "window layers keep every token"
OUTSIDE = "its states live on the modules, outside the cache"
COLUMNS = "convolutions keep"
NARROW = "states are kept in the model's dtype, bf16"
REPEATED = "K and V are repeated to every query head"
KEPT_IN = "K and V are kept in bf16"
PENDING = "a pool's pending tokens are counted as they are"
LONGER = "a request is as long as --max-model-len 8,192"
ROUNDED = "tokens are rounded up to blocks of 16"
FLIGHT = "a window layer may hold its window and the 16,384 tokens in flight besides"
ALL_IN_FLIGHT = "besides, every token here"
ONE_BLOCK = "a window layer has one block more"
CROSS = "cross-attention is reserved for 8,192 encoder tokens"
PADDED = "states are padded to the attention layers' pages"
STATES = "states take 8.75 MiB, not 15.31 MiB"
SHARED = "share blocks as large as the largest group's"
COPIED = "what several ranks keep copies of counts on each"
EXPANDED = "a latent is kept as K and V of every head"
KEYS = "indexer keys are kept in fp8 with their scales"
REASONS = frozenset(
    {
        MINUS_ONE, EVERY, OUTSIDE, COLUMNS, NARROW, REPEATED, KEPT_IN, PENDING, LONGER, ROUNDED,
        FLIGHT, ALL_IN_FLIGHT, ONE_BLOCK, CROSS, PADDED, STATES, SHARED, COPIED, EXPANDED, KEYS,
    }
)  # fmt: skip

NEO = {
    "model_type": "gpt_neo", "num_layers": 24, "hidden_size": 2048, "num_heads": 16,
    "attention_types": [[["global", "local"], 12]], "window_size": 256,
    "max_position_embeddings": 2048, "torch_dtype": "float32",
}  # fmt: skip
XLSTM = {"model_type": "xlstm", "torch_dtype": "bfloat16"}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 2,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip


def sentences(kvtool: Kvtool, *words: str) -> tuple[str, ...]:
    """The sentences of a run that must succeed."""
    return shown(rows(kvtool, *words))


def rows(kvtool: Kvtool, *words: str) -> list[Row]:
    ran = kvtool("size", *words, "--json")
    assert ran.code == 0, ran.err
    found: list[Row] = ran.json["rows"]
    return found


def shown(found: list[Row]) -> tuple[str, ...]:
    return view(Run(command="size", params={}, rows=tuple(found))).sentences


def the_one(said: tuple[str, ...], part: str) -> str:
    found = [text for text in said if part in text]
    assert len(found) == 1, said
    return found[0]


def config(folder: Path, content: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("words", "holds", "reserves"),
    [
        ("gpt-oss-20b -c 8k", {MINUS_ONE}, {FLIGHT, ALL_IN_FLIGHT}),
        ("gpt-oss-20b -c 64k", {MINUS_ONE}, {FLIGHT}),
        ("gpt-oss-20b -c 8k --no-hybrid", {MINUS_ONE}, {EVERY}),
        ("gpt-oss-20b -c 8k --cache static", set(), {FLIGHT, ALL_IN_FLIGHT}),
        ("gpt-oss-20b -c 100", set(), {ROUNDED, ONE_BLOCK}),
        ("llama-4-scout -c 64k", {MINUS_ONE}, {EVERY}),
        ("recurrentgemma-2b -c 8k", {MINUS_ONE, OUTSIDE}, None),
        ("recurrentgemma-2b -c 8k --cache static", {MINUS_ONE, OUTSIDE}, None),
        ("whisper-large-v3 -c 448", set(), {CROSS}),
        ("whisper-large-v3 -c 448 --encoder-tokens 8192", set(), set()),
        ("llama-3-8b -c 8k", set(), set()),
        ("llama-3-8b -c 1000", set(), {ROUNDED}),
        ("llama-3-8b -c 1000 --block-size 16", None, set()),
        ("llama-3-8b -c 1000 --max-model-len 8k", set(), {LONGER}),
        ("llama-3-8b -c 8k --max-model-len 8k", set(), set()),
        ("llama-3-8b -c 8k --pp 2", None, set()),
        ("llama-3-8b -c 8k --pp 3", None, set()),
        ("llama-3-8b -c 8k --tp 8", None, set()),
        ("llama-3-8b -c 8k --tp 16", None, {COPIED}),
        ("llama-3-8b -c 8k --tp 16 --dcp 2", None, set()),
        ("deepseek-v3 -c 8k", set(), set()),
        ("deepseek-v3 -c 8k --tp 8", None, {COPIED}),
        ("deepseek-v3 -c 8k --tp 8 --dcp 8", None, set()),
        ("deepseek-v3.2 -c 8k", set(), {KEYS}),
        ("deepseek-v3.2 -c 8k --mtp 1", set(), {KEYS}),
        ("deepseek-v4-flash -c 8k", {PENDING}, None),
        ("jamba-v0.1 -c 8k", {COLUMNS}, {STATES}),
        ("mamba-2.8b -c 8k", {COLUMNS}, set()),
        ("lfm2-1.2b -c 8k", {COLUMNS}, {PADDED, SHARED}),
        ("gemma-3-4b -c 1k", {MINUS_ONE}, {ONE_BLOCK, SHARED}),
        ("minicpm3 -c 1k", set(), {EXPANDED}),
        ("falcon-40b -c 1k", {REPEATED}, set()),
    ],
)
def test_each_reason_where_it_holds_and_nowhere_else(
    kvtool: Kvtool, words: str, holds: set[str] | None, reserves: set[str] | None
) -> None:
    said = sentences(kvtool, *words.split(), "--engine", "all")
    for engine, reasons in ((": transformers holds", holds), (": vllm reserves", reserves)):
        if reasons is None:
            assert not any(engine in text for text in said)
            continue
        text = the_one(said, engine)
        assert {reason for reason in REASONS if reason in text} == reasons, text


def test_reasons_of_classes_without_a_preset(kvtool: Kvtool, tmp_path: Path) -> None:
    all_of_them = ("-c", "2k", "--engine", "ideal,transformers")
    said = the_one(sentences(kvtool, config(tmp_path, NEO), *all_of_them), "transformers holds")
    assert f": {EVERY}." in said
    assert MINUS_ONE not in said
    short = (config(tmp_path, NEO), "-c", "200", "--engine", "ideal,transformers")
    assert EVERY not in the_one(sentences(kvtool, *short), "transformers holds")
    narrow = the_one(sentences(kvtool, config(tmp_path, XLSTM), *all_of_them), "transformers holds")
    assert f" less (50.0%): {NARROW}." in narrow


def test_a_quantised_checkpoint_is_not_blamed_for_what_it_does_not_say(
    kvtool: Kvtool, tmp_path: Path
) -> None:
    scheme = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"type": "float", "num_bits": 8},
    }
    path = config(tmp_path, LLAMA | {"quantization_config": scheme})
    text = the_one(sentences(kvtool, path, "-c", "1k", "--engine", "all"), "transformers holds")
    assert text.endswith(f"more (100.0%): {KEPT_IN}.")
    plain = config(tmp_path, LLAMA)
    assert not any(KEPT_IN in t for t in sentences(kvtool, plain, "-c", "1k", "--engine", "all"))


def test_the_longer_request_comes_first(kvtool: Kvtool) -> None:
    words = ("llama-3-8b", "-c", "1000", "--max-model-len", "8190", "--engine", "ideal,vllm")
    text = the_one(sentences(kvtool, *words), "vllm reserves")
    assert f": a request is as long as --max-model-len 8,190; {ROUNDED}." in text


def test_a_reason_that_pulls_the_other_way_is_called_so(kvtool: Kvtool) -> None:
    text = the_one(sentences(kvtool, "jamba-v0.1", "-c", "8k", "--engine", "all"), "vllm reserves")
    assert f" less (4.1%): {STATES}; but tokens are rounded up to blocks of 80." in text


def test_only_rows_that_are_alike_are_compared(kvtool: Kvtool) -> None:
    words = ("llama-3-8b", "-c", "1k,8k", "--kv-dtype", "auto,fp8", "--tp", "1,8")
    text = the_one(sentences(kvtool, *words, "--engine", "ideal,vllm"), "vllm reserves")
    assert text == (
        "llama-3-8b, 8,192 tokens, bf16, tp 1: vllm reserves just what the mathematics needs."
    )
    found = rows(kvtool, *words, "--engine", "ideal,vllm")
    split = [r for r in found if (r["tp"] == 1) == (r["engine"] == "ideal")]
    assert not any("reserves" in text for text in shown(split))


def test_requests_that_fit_at_once(kvtool: Kvtool) -> None:
    words = ("llama-3-8b", "-c", "8k", "--engine", "vllm", "--kv-memory")
    fit = "llama-3-8b: 19 requests of 8,192 tokens fit at once in 20.00 GiB on one GPU"
    assert f"{fit}." in sentences(kvtool, *words, "20GiB")
    assert f"{fit}; 64 do not." in sentences(kvtool, *words, "20GiB", "-b", "1,64,128")
    assert not any("at once" in text for text in sentences(kvtool, *words[:-1]))
    (one,) = [t for t in sentences(kvtool, *words, "1.5GiB") if "at once" in t]
    assert one == "llama-3-8b: 1 request of 8,192 tokens fits at once in 1.50 GiB on one GPU."
    eight = the_one(sentences(kvtool, *words, "20GiB", "-b", "192", "--dp", "8"), "at once")
    assert eight.endswith("on each GPU; 192 over 8 replicas, 24 on each, do not.")
    assert "do not" not in the_one(
        sentences(kvtool, *words, "20GiB", "-b", "64", "--dp", "8"), "at once"
    )


def test_the_cache_beside_a_gpu(kvtool: Kvtool) -> None:
    words = ("llama-3-8b", "-c", "8k", "--gpu")
    assert not any("weights" in text for text in sentences(kvtool, *words[:-1]))
    one, four = sentences(kvtool, *words, "h100,h100:4")[-2:]
    assert "1.00 GiB is 1.3% of the 79.65 GiB of one h100-sxm; the weights come on top." in one
    assert "would be 0.3% of the 318.59 GiB of 4 × h100-sxm, if it were spread evenly" in four
    said = sentences(kvtool, *words, "h100,h100:8,h100:4", "--tp", "8")[-3:]
    assert all("on the fullest of 8 GPUs 128.00 MiB is 0.2% of the 79.65 GiB" in t for t in said)
    assert ["not 4" in text for text in said] == [False, False, True]
    assert "(8 ranks need 8 GPUs, not 4)" in said[2]


def test_a_draft_is_named_and_has_no_plain_formula(kvtool: Kvtool) -> None:
    drafted = kvtool("size", "gpt-oss-20b", "-c", "8k", "--draft", "llama-3.2-1b").out
    assert "full (draft)" in drafted
    assert "plain formula" not in drafted
    assert "plain formula" in kvtool("size", "gpt-oss-20b", "-c", "8k").out
    assert "latent (MTP)" in kvtool("size", "deepseek-v3", "-c", "8k", "--mtp", "1").out
    assert "(MTP)" not in kvtool("size", "deepseek-v3", "-c", "8k").out


def test_the_breakdown_says_which_row_it_shows(kvtool: Kvtool) -> None:
    def titles(*words: str) -> list[str]:
        found = rows(kvtool, "llama-3-8b", *words)
        tables = view(Run(command="size", params={}, rows=tuple(found))).tables
        return [table.title for table in tables if "by kind" in table.title]

    assert titles("-c", "1") == ["1 token, by kind of layer"]
    assert titles("-c", "8k", "--kv-dtype", "auto,fp8", "--tp", "1,8") == [
        "8,192 tokens, bf16, tp 1, by kind of layer"
    ]


def test_a_state_has_no_tokens(kvtool: Kvtool) -> None:
    out = kvtool("size", "jamba-v0.1", "-c", "8k", "--engine", "vllm", "--explain").out
    assert "constant" in out
    assert "of 8192 tokens a request" not in out


@pytest.mark.parametrize(
    ("layers", "where"),
    [
        ([None], "in tensors of all layers at once, every"),
        ([0, None], "in 1 layer and tensors of all layers at once, every"),
        ([0], "in 1 layer, every"),
        ([0, 0, 1], "in 2 layers, every"),
    ],
)
def test_check_says_where_the_bytes_are(layers: list[int | None], where: str) -> None:
    def run(real: int) -> str:
        rows = tuple(
            {
                "model": "m", "cache": "dynamic", "context_tokens": 1, "batch": 1, "layer": layer,
                "kind": "ssm", "shape": "", "dtype": "fp32", "predicted_bytes": 4,
                "real_bytes": real, "equal": real == 4, "not_compared": "",
            }
            for layer in layers
        )  # fmt: skip
        (said,) = check_view(Run(command="check", params={}, rows=rows)).sentences
        return said

    assert where in run(4)
    assert "cache of 1 token holds" in run(4)
    differ = (
        "1 of 1 row differs" if len(layers) == 1 else f"{len(layers)} of {len(layers)} rows differ"
    )
    assert differ in run(8)


def test_the_chart_compares_one_gpu_with_one_gpu(kvtool: Kvtool) -> None:
    def drawn(*words: str) -> tuple[str, dict[str, tuple[float, ...]]]:
        found = rows(kvtool, "llama-3-8b", "-c", "4k,8k", *words)
        chart = view(Run(command="size", params={}, rows=tuple(found)), levels={"h100": 5}).chart
        assert chart is not None
        assert chart.levels == (("h100", 5),)
        return chart.y_label, {line.name: line.y for line in chart.lines}

    mib = 2**20
    assert drawn() == ("KV cache (bytes)", {"llama-3-8b": (512 * mib, 1024 * mib)})
    label, lines = drawn("--tp", "1,8", "--block-size", "16")
    assert label == "KV cache on a GPU (bytes)"
    assert lines == {
        "llama-3-8b (tp 1)": (512 * mib, 1024 * mib), "llama-3-8b (tp 8)": (64 * mib, 128 * mib),
    }  # fmt: skip
    _, engines = drawn("--engine", "ideal,vllm")
    assert list(engines) == ["llama-3-8b (ideal)", "llama-3-8b (vllm)"]

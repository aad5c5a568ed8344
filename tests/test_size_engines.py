"""`kvtool size --engine …`: what is held, what is reserved, and why they differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Kvtool = Callable[..., Any]
GIB = 2**30


def rows(kvtool: Kvtool, *words: str) -> list[dict[str, Any]]:
    """The rows of a run that must succeed."""
    ran = kvtool("size", *words, "--json")
    assert ran.code == 0, ran.err
    found: list[dict[str, Any]] = ran.json["rows"]
    return found


def test_all_engines_in_one_table_and_in_words(kvtool: Kvtool) -> None:
    ran = kvtool("size", "gpt-oss-20b", "-c", "8k", "--engine", "all")
    assert ran.code == 0
    for words in (
        "needed", "held", "reserved", "vLLM's blocks",
        "transformers holds", "window − 1 tokens", "vllm reserves", "tokens in flight",
    ):  # fmt: skip
        assert words in ran.out, words
    three = rows(kvtool, "gpt-oss-20b", "-c", "8k", "--engine", "all")
    assert [row["engine"] for row in three] == ["ideal", "transformers", "vllm"]


def test_what_one_engine_cannot_do_is_a_note_beside_others(kvtool: Kvtool) -> None:
    ran = kvtool("size", "llama-3-8b", "-c", "8k", "--engine", "all", "--kv-dtype", "fp8", "--json")
    assert [row["engine"] for row in ran.json["rows"]] == ["ideal", "vllm"]
    assert any("no row for transformers" in note for note in ran.json["notes"])
    alone = kvtool(
        "size", "llama-3-8b", "-c", "8k", "--engine", "transformers", "--kv-dtype", "fp8"
    )
    assert alone.code == 1


def test_the_fields_of_transformers_add_up(kvtool: Kvtool) -> None:
    names = ["self_k", "self_v", "cross_k", "cross_v", "conv", "ssm", "indexer", "other"]
    for model in ("llama-3-8b", "jamba-v0.1", "deepseek-v3.2", "whisper-large-v3", "rwkv-4-169m"):
        words = (model, "-c", "400", "-b", "3", "--engine", "transformers")
        row = rows(kvtool, *words)[0]
        assert sum(row[f"{name}_bytes"] for name in names) == row["total_bytes"]
        assert sum(kind["bytes"] for kind in row["kinds"]) == row["total_bytes"]


def test_static_and_dynamic_windows(kvtool: Kvtool) -> None:
    def size(*words: str) -> int:
        found: int = rows(kvtool, "mistral-7b-v0.1", "-c", "8k", *words)[0]["total_bytes"]
        return found

    token = 2 * 32 * 8 * 128 * 2
    assert size() == 4096 * token
    assert size("--engine", "transformers") == 4095 * token
    assert size("--engine", "transformers", "--cache", "static") == 4096 * token


def test_the_vllm_row_has_the_fields_of_the_contract(kvtool: Kvtool) -> None:
    words = ("llama-3-8b", "-c", "8k", "--engine", "vllm", "--kv-memory", "20GiB")
    row = rows(kvtool, *words)[0]
    assert row["block_size"] == 16
    assert row["bytes_per_block"] == 2 * 32 * 8 * 128 * 2 * 16
    assert row["one_request_bytes"] == GIB
    assert row["num_blocks"] == 20 * GIB // row["bytes_per_block"]
    assert row["kv_cache_size_tokens"] == 20 * 8192
    assert row["max_concurrency"] == 20.0
    assert row["fits"] is True
    group = {
        "kind": "full",
        "layers": 32,
        "block_size": 16,
        "blocks_per_request": 512,
        "window": None,
    }
    assert row["groups"] == [group | {"page_bytes": 2 * 8 * 128 * 2 * 16}]


def test_vllm_without_enough_memory_is_an_answer_and_a_failure(kvtool: Kvtool) -> None:
    words = ("llama-3-8b", "-c", "8k", "--engine", "vllm", "--kv-memory", "1GiB", "--json")
    ran = kvtool("size", *words)
    assert ran.code == 1
    row = ran.json["rows"][0]
    assert row["fits"] is False
    assert row["num_blocks"] is row["kv_cache_size_tokens"] is row["max_concurrency"] is None
    assert ran.json["error"]["code"] == "does_not_fit"
    assert "estimated maximum model length is 8176" in ran.json["error"]["message"]


def test_vllm_per_rank_replicas_and_ds_mla(kvtool: Kvtool) -> None:
    eight = rows(kvtool, "llama-3-8b", "-c", "8k", "--engine", "vllm", "--tp", "8")[0]
    sixteen = rows(kvtool, "llama-3-8b", "-c", "8k", "--engine", "vllm", "--tp", "16")[0]
    assert eight["per_gpu_bytes"] == sixteen["per_gpu_bytes"] == GIB // 8
    words = ("deepseek-v3", "-c", "8k", "--engine", "vllm", "--kv-dtype")
    assert rows(kvtool, *words, "fp8_ds_mla")[0]["bytes_per_block"] == 61 * 656 * 16
    assert kvtool("size", "deepseek-v3", "--kv-dtype", "fp8_ds_mla").code == 2


def test_layer_specs(kvtool: Kvtool, tmp_path: Path) -> None:
    spec = {
        "cls": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 8, "head_size": 128,
        "head_size_v": 128, "dtype": "bfloat16", "n_layers": 4,
    }  # fmt: skip
    path = tmp_path / "specs.json"
    path.write_text(json.dumps([spec]))
    words = ("--layer-specs", str(path), "--engine", "vllm", "--max-model-len", "1k")
    row = rows(kvtool, *words)[0]
    assert row["bytes_per_block"] == 4 * 2 * 8 * 128 * 2 * 16
    assert kvtool("size", "--layer-specs", path).code == 2
    assert kvtool("size", "llama-3-8b", "--layer-specs", path, "--engine", "vllm").code == 2
    path.write_text("[{}]")
    assert kvtool("size", *words).code == 1


def test_draft_and_mtp_layers_are_counted(kvtool: Kvtool) -> None:
    def total(*words: str) -> int:
        found: int = rows(kvtool, *words, "-c", "1k")[0]["total_bytes"]
        return found

    big, small = total("llama-3.1-70b"), total("llama-3.2-1b")
    assert total("llama-3.1-70b", "--draft", "llama-3.2-1b") == big + small
    assert total("deepseek-v3", "--mtp", "1") - total("deepseek-v3") == 1152 * 1024
    with_indexer = total("deepseek-v3.2", "--mtp", "2") - total("deepseek-v3.2")
    assert with_indexer == 2 * (576 + 128) * 2 * 1024
    assert kvtool("size", "mamba-2.8b", "--mtp", "1").code == 1


def test_context_parallel_data_parallel_and_given_stages(kvtool: Kvtool) -> None:
    def per_gpu(*words: str) -> int:
        found: int = rows(kvtool, *words, "-c", "8k")[0]["per_gpu_bytes"]
        return found

    whole = per_gpu("deepseek-v3", "--tp", "8")
    assert per_gpu("deepseek-v3", "--tp", "8", "--dcp", "8") * 8 == whole
    assert per_gpu("deepseek-v3", "-b", "16", "--dp", "8") == 2 * whole
    assert per_gpu("deepseek-v3", "-b", "17", "--dp", "8") == 3 * whole
    # Ranks share tokens only where they hold the same head: 2 ranks of each of 8 heads here.
    assert per_gpu("llama-3-8b", "--tp", "16", "--dcp", "2") * 16 == per_gpu("llama-3-8b")
    assert kvtool("size", "llama-3-8b", "--tp", "8", "--dcp", "2").code == 1
    layer = 2 * 8 * 128 * 2 * 8192
    assert per_gpu("llama-3-8b", "--pp-layers", "8/24") == 24 * layer
    stages = ("llama-3-8b", "--pp-layers", "8/24", "--engine", "vllm")
    assert per_gpu(*stages) == 24 * layer


def test_llama_4_in_vllm_keeps_every_token(kvtool: Kvtool) -> None:
    """vllm-project/vllm#19407: 240.0 GiB for one request of 10,485,760 tokens on each of 8 GPUs."""
    words = ("llama-4-scout", "-c", "10485760", "--tp", "8", "--engine", "vllm")
    row = rows(kvtool, *words, "--allow-long")[0]
    assert row["one_request_bytes"] == 240 * 2**30
    ran = kvtool("size", *words, "--allow-long", "--kv-memory", "88.38GiB", "--json")
    assert ran.json["error"]["code"] == "does_not_fit"
    assert any("--hybrid turns it on" in note for note in ran.json["notes"])
    less = rows(kvtool, *words, "--allow-long", "--hybrid")[0]["one_request_bytes"]
    assert less < row["one_request_bytes"] / 3


def test_a_draft_runs_on_the_last_stage_by_its_own_rules(kvtool: Kvtool, tmp_path: Path) -> None:
    neo = tmp_path / "neo.json"
    neo.write_text('{"model_type": "gpt_neo", "torch_dtype": "bfloat16"}')
    words = ("llama-3-70b", "-c", "8k", "--draft", "llama-3.2-1b", "--pp", "4")
    row = rows(kvtool, *words)[0]
    layer, drafted = 2 * 8 * 128 * 2 * 8192, 2 * 8 * 64 * 2 * 8192
    assert row["per_gpu_bytes"] == 20 * layer + 16 * drafted
    assert row["draft"] == "llama-3.2-1b"
    assert row["plain_bytes"] == 80 * layer
    own, draft = row["kinds"]
    assert (own["layers"], own["decided_by"]["layers"]) == (80, "num_hidden_layers = 80")
    assert (draft["layers"], draft["decided_by"]["layers"]) == (16, "num_hidden_layers = 16")
    uncut = rows(
        kvtool, str(neo), "-c", "2k", "--draft", "gpt-oss-20b", "--engine", "transformers"
    )[0]
    windows = [k["tokens"] for k in uncut["kinds"] if k["decided_by"].get("draft")]
    assert sorted(windows) == [127, 2048]


def test_options_of_a_gpu(kvtool: Kvtool) -> None:
    one, eight = rows(kvtool, "deepseek-v3", "-c", "128k", "-b", "16", "--tp", "8", "--gpu",
                      "h200:8,h200")[0]["gpus"]  # fmt: skip
    assert one["share"] == eight["share"] > 0.9
    spread = rows(kvtool, "llama-3-8b", "-c", "8k", "--gpu", "h100:8")[0]["gpus"][0]
    assert spread["share"] == 2**30 / (8 * spread["usable_bytes"])
    assert any(
        "mi325x" in n for n in kvtool("size", "gpt2", "--gpu", "mi325x", "--json").json["notes"]
    )


def test_errors_of_one_case_keep_the_others(kvtool: Kvtool) -> None:
    for words in (
        ("-c", "4k,8k", "--max-model-len", "5k"),
        ("-c", "4k", "--kv-dtype", "auto,int4"),
    ):
        ran = kvtool("size", "llama-3-8b", "--engine", "vllm", *words, "--json")
        assert ran.code == 1
        assert len(ran.json["rows"]) == 1
    several = kvtool("size", "gpt2", "no-such-model", "nor-this", "--json")
    assert "no-such-model" in several.json["error"]["message"]
    assert any("nor-this" in note for note in several.json["notes"])
    alone = kvtool("size", "no-such-model", "--json")
    assert alone.json["params"]["models"] == ["no-such-model"]


def test_fp8_ds_mla_is_what_the_row_says(kvtool: Kvtool) -> None:
    row = rows(kvtool, "deepseek-v3", "-c", "8k", "--engine", "vllm", "--kv-dtype", "fp8_ds_mla")[0]
    assert row["kv_dtype"] == "fp8_ds_mla"
    assert row["bytes_per_token"] == 61 * 656


def test_what_is_not_used_is_said(kvtool: Kvtool) -> None:
    words = ("--cache", "static", "--kv-memory", "1GiB", "--prompt-tokens", "5")
    notes = kvtool("size", "llama-3-8b", "-c", "8", *words, "--json").json["notes"]
    assert [note.split(" is ignored")[0] for note in notes] == [
        "--kv-memory", "--prompt-tokens", "--cache",
    ]  # fmt: skip
    rounded = kvtool("size", "llama-3-8b", "-c", "8", "--engine", "vllm", "--block-size", "3")
    assert "blocks of 16 tokens of --block-size 3" in rounded.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--engine", "llama.cpp"], 2), (["--engine", "ideal,nope"], 2), (["--cache", "paged"], 2),
        (["--prompt-tokens", "-1"], 2), (["--max-model-len", "0"], 2), (["--kv-memory", "20"], 2),
        (["--kv-memory", "lots"], 2), (["--max-batched-tokens", "0"], 2), (["--mtp", "999"], 2),
        (["--batches-in-flight", "0"], 2), (["--draft", "no-such-model"], 1), (["--dcp", "0"], 2),
        (["--pp-layers", "16/x"], 2), (["--pp-layers", "16/99"], 1),
        (["--pp-layers", "16/16", "--pp", "3"], 2), (["--dcp", "3"], 1), (["--gpu", "h100:"], 2),
        (["--engine", "transformers", "-c", "1k", "--prompt-tokens", "2k"], 2),
        (["--engine", "vllm", "-c", "8", "--max-model-len", "1"], 1),
        (["--engine", "vllm", "--kv-dtype", "q8_0"], 1),
    ],
)  # fmt: skip
def test_bad_words(kvtool: Kvtool, words: list[str], code: int) -> None:
    ran = kvtool("size", "llama-3-8b", *words)
    assert ran.code == code, ran.err
    assert [line.split(":")[0] for line in ran.err.splitlines()] == ["Error", "Hint"]

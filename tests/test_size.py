"""`kvtool size` from the outside: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GIB = 2**30
LLAMA = {
    "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "torch_dtype": "float16",
}  # fmt: skip
Kvtool = Callable[..., Any]

FIELDS = [
    "model",
    "model_type",
    "source",
    "engine",
    "context_tokens",
    "encoder_tokens",
    "batch",
    "dtype",
    "kv_dtype",
    "tp",
    "pp",
    "bytes_per_token",
    "sequence_bytes",
    "state_bytes",
    "cross_bytes",
    "total_bytes",
    "per_gpu_bytes",
    "mha_bytes",
    "gqa_ratio",
    "kinds",
]
KIND_FIELDS = [
    "kind",
    "layers",
    "kv_heads",
    "k_head_dim",
    "v_head_dim",
    "window",
    "bytes",
    "formula",
    "decided_by",
]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Write a config.json and return its path."""

    def write(**keys: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({k: v for k, v in (LLAMA | keys).items() if v != "absent"}))
        return str(path)

    return write


def test_the_question_of_the_readme(kvtool: Kvtool) -> None:
    ran = kvtool("size", "llama-3-70b", "-c", "8k", "-b", "1,64")
    assert ran.code == 0
    for answer in ("2.50 GiB", "160.00 GiB", "own KV head: 20.00 GiB (8x)"):
        assert answer in ran.out
    assert ran.err == ""


def test_a_row_has_the_fields_of_the_contract(kvtool: Kvtool) -> None:
    run = kvtool("size", "gemma-3-27b", "-c", "32k", "--json").json
    assert list(run) == [
        "schema",
        "command",
        "version",
        "created",
        "env",
        "params",
        "rows",
        "notes",
    ]
    assert (run["schema"], run["command"]) == (1, "size")
    row = run["rows"][0]
    assert set(FIELDS) <= set(row)
    assert all(set(KIND_FIELDS) <= set(kind) for kind in row["kinds"])
    assert [kind["kind"] for kind in row["kinds"]] == ["sliding", "full"]
    assert row["bytes_per_token"] == 10 * 2 * 16 * 128 * 2
    assert row["gqa_ratio"] == 2.0


def test_the_same_words_give_the_same_rows(kvtool: Kvtool) -> None:
    first, second = (kvtool("size", "jamba-v0.1", "--json").json["rows"] for _ in range(2))
    assert json.dumps(first) == json.dumps(second)


def test_without_a_context_one_token_8k_and_the_maximum(
    kvtool: Kvtool, config: Callable[..., str]
) -> None:
    def contexts(**keys: Any) -> list[int]:
        rows = kvtool("size", config(**keys), "--json").json["rows"]
        return [row["context_tokens"] for row in rows]

    assert contexts(max_position_embeddings=131072) == [1, 8192, 131072]
    assert contexts(max_position_embeddings=4096) == [1, 4096]
    assert contexts(model_type="mamba2", num_heads=16, head_dim=64,
                    max_position_embeddings="absent") == [1, 8192]  # fmt: skip


def test_lists_are_a_product_in_the_order_given(kvtool: Kvtool) -> None:
    rows = kvtool("size", "llama-3-8b", "-c", "2k,1k", "-b", "1..4*2", "--kv-dtype", "fp8,auto",
                  "--json").json["rows"]  # fmt: skip
    seen = [(row["context_tokens"], row["batch"], row["kv_dtype"]) for row in rows]
    assert seen == [
        (context, batch, dtype)
        for context in (2048, 1024)
        for batch in (1, 2, 4)
        for dtype in ("fp8", "bf16")
    ]


@pytest.mark.parametrize(
    ("dtype", "bytes_per_head"),
    [
        ("fp32", 512), ("fp16", 256), ("bf16", 256), ("fp8", 128), ("fp8_e5m2", 128),
        ("int8", 128 + 4), ("int4", 64 + 4), ("int2", 32 + 4), ("nvfp4", 64 + 8),
        ("q8_0", 4 * 34), ("q5_1", 4 * 24), ("q5_0", 4 * 22), ("q4_1", 4 * 20), ("q4_0", 4 * 18),
        ("iq4_nl", 4 * 18),
    ],
)  # fmt: skip
def test_kv_dtypes_count_their_scales(kvtool: Kvtool, dtype: str, bytes_per_head: int) -> None:
    row = kvtool("size", "llama-3-8b", "-c", "1", "--kv-dtype", dtype, "--json").json["rows"][0]
    assert row["total_bytes"] == 32 * 8 * 2 * bytes_per_head
    assert row["kv_dtype"] == dtype


def test_k_and_v_apart_and_scales_shown(kvtool: Kvtool) -> None:
    ran = kvtool("size", "llama-3-8b", "-c", "1", "--kv-dtype", "int4/int2", "--json")
    row = ran.json["rows"][0]
    assert row["total_bytes"] == 32 * 8 * ((64 + 4) + (32 + 4))
    assert row["scale_bytes"] == 32 * 8 * 8
    table = kvtool("size", "llama-3-8b", "-c", "1", "--kv-dtype", "int4/int2")
    assert "Scales and zero points of int4/int2: 2.00 KiB (7.7%)." in table.out


def test_a_quantised_cache_of_the_checkpoint_is_auto(
    kvtool: Kvtool, config: Callable[..., str]
) -> None:
    path = config(quantization_config={"kv_cache_scheme": {"type": "float", "num_bits": 8}})
    ran = kvtool("size", path, "-c", "1", "--json")
    assert ran.json["rows"][0]["kv_dtype"] == "fp8"
    assert any("auto is fp8" in note for note in ran.json["notes"])


def test_no_dtype_in_the_config_is_bf16_and_said(
    kvtool: Kvtool, config: Callable[..., str]
) -> None:
    ran = kvtool("size", config(torch_dtype="absent"), "-c", "1")
    assert "bf16 is assumed" in ran.err
    assert "bf16 is assumed" not in kvtool("size", config(), "-c", "1").err
    assert kvtool("size", config(torch_dtype="absent"), "-c", "1", "-q").err == ""


@pytest.mark.parametrize(
    ("model", "tp", "share"),
    [
        ("llama-3-70b", 4, 1 / 4),
        ("llama-3-70b", 8, 1 / 8),
        ("llama-3-70b", 16, 1 / 8),  # replicated: one KV head a rank
        ("deepseek-v3", 8, 1),  # a latent cache is whole on each rank
    ],
)
def test_tensor_parallel(kvtool: Kvtool, model: str, tp: int, share: float) -> None:
    row = kvtool("size", model, "-c", "8k", "--tp", tp, "--json").json["rows"][0]
    assert row["per_gpu_bytes"] == row["total_bytes"] * share


def test_pipeline_stages_report_the_worst(kvtool: Kvtool) -> None:
    row = kvtool("size", "llama-3-8b", "-c", "1", "--pp", "3", "--json").json["rows"][0]
    assert row["per_gpu_bytes"] == row["total_bytes"] * 11 // 32  # 11 + 11 + 10 layers
    both = kvtool("size", "llama-3-8b", "-c", "1", "--pp", "2", "--tp", "2", "--json").json
    assert both["rows"][0]["per_gpu_bytes"] * 4 == both["rows"][0]["total_bytes"]


def test_blocks_round_up(kvtool: Kvtool) -> None:
    row = kvtool("size", "llama-3-8b", "-c", "17", "--block-size", "16", "--json").json["rows"][0]
    assert row["total_bytes"] == 2 * 32 * 8 * 128 * 32 * 2


def test_per_layer_and_explain(kvtool: Kvtool, config: Callable[..., str]) -> None:
    ran = kvtool("size", "gemma-3n-e4b", "-c", "1k", "--per-layer", "--explain")
    assert "by layer" in ran.out
    assert "where each number comes from" in ran.out
    assert "class default of gemma3n_text, sliding_window = 512" in ran.out
    path = config(head_dim=None, num_key_value_heads="absent")
    out = kvtool("size", path, "-c", "1", "--explain").out
    assert "hidden_size = 512 / num_attention_heads = 8" in out
    assert "no num_key_value_heads, so num_attention_heads = 8" in out


def test_the_sentence_about_the_plain_formula(kvtool: Kvtool) -> None:
    out = kvtool("size", "gemma-3-27b", "-c", "32k").out
    assert "would say 15.50 GiB, 5.3x too much" in out
    assert "52 of 62 layers hold at most 1,024 tokens" in out
    assert "plain formula" not in kvtool("size", "llama-3-8b").out
    assert "constant state" in kvtool("size", "mamba-2.8b").out


def test_standard_input(kvtool: Kvtool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(LLAMA)))
    row = kvtool("size", "-", "-c", "1", "--json").json["rows"][0]
    assert row["source"] == "stdin"
    assert row["total_bytes"] == 2 * 4 * 2 * 64 * 2


def test_several_models_and_one_that_fails(kvtool: Kvtool, config: Callable[..., str]) -> None:
    good = kvtool("size", "llama-3-8b", config(), "-c", "1", "--json")
    assert [row["source"] for row in good.json["rows"]] == ["preset", "file"]
    mixed = kvtool("size", "llama-3-8b", config(num_hidden_layers=0), "-c", "1", "--json")
    assert mixed.code == 1
    assert len(mixed.json["rows"]) == 1
    assert "num_hidden_layers" in mixed.json["error"]["message"]
    assert mixed.err.count("\n") == 2


def test_what_fails_of_a_list_does_not_lose_the_rest(kvtool: Kvtool) -> None:
    long = kvtool("size", "llama-3-8b", "-c", "1k,1m", "--json")
    assert long.code == 1
    assert [row["context_tokens"] for row in long.json["rows"]] == [1024]
    assert long.json["error"]["code"] == "context_too_long"
    split = kvtool("size", "llama-3-8b", "-c", "1", "--tp", "2,3,8", "--json")
    assert [row["tp"] for row in split.json["rows"]] == [2, 8]
    assert split.json["error"]["code"] == "tp_does_not_divide"
    assert kvtool("size", "llama-3-8b", "-c", "1m", "--json").json["rows"] == []


def test_a_product_that_takes_minutes_is_refused(
    kvtool: Kvtool, config: Callable[..., str]
) -> None:
    ran = kvtool("size", "llama-3-8b", "-c", "1..1000", "-b", "1..1000")
    assert (ran.code, ran.out) == (2, "")
    assert "1,000,000 rows of 32 layers" in ran.err
    deep = config(num_hidden_layers=2000)
    assert kvtool("size", deep, "-c", "1..501").code == 2
    assert kvtool("size", deep, "-c", "1..3").code == 0


def test_a_result_that_cannot_be_saved_is_printed(
    kvtool: Kvtool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    ran = kvtool("size", "gpt2", "-o", tmp_path / "x.csv")
    assert ran.code == 1
    assert "36.00 KiB" in ran.out
    assert "no space left" in ran.err
    asked = kvtool("size", "gpt2", "-o", tmp_path / "x.csv", "--json")
    assert len(asked.json["rows"]) == 2
    assert not list(tmp_path.iterdir())


def test_an_output_is_no_input_and_no_device(
    kvtool: Kvtool, tmp_path: Path, config: Callable[..., str]
) -> None:
    path = config()
    before = Path(path).read_text()
    for model in (path, str(tmp_path)):
        ran = kvtool("size", model, "-o", tmp_path / "config.json")
        assert ran.code == 2
        assert "a file that is read" in ran.err
    assert Path(path).read_text() == before
    os.mkfifo(tmp_path / "pipe.json")
    ran = kvtool("size", path, "-o", tmp_path / "pipe.json")
    assert ran.code == 1
    assert "not a file" in ran.err


def test_names_from_strangers_are_harmless_in_every_format(kvtool: Kvtool, tmp_path: Path) -> None:
    path = tmp_path / "=1+1.json"
    path.write_text(json.dumps(LLAMA | {"torch_dtype": "\x1b[31m\u009b31m\u202eabc"}))
    for format in ("csv", "json", "md", "table"):
        ran = kvtool("size", path, "-f", format)
        assert ran.code == 0
        assert not set("\x1b\x07\u009b\u202e") & set(ran.out + ran.err)
    assert kvtool("size", path, "-f", "csv").out.splitlines()[1].startswith("'=1+1,")
    notes = json.loads(kvtool("size", path, "--json").out)["notes"]
    assert any("\u202e" in note for note in notes)


def test_csv_and_md_and_files(kvtool: Kvtool, tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(kvtool("size", "gpt2", "-f", "csv").out)))
    assert [row["context_tokens"] for row in rows] == ["1", "1024"]
    assert kvtool("size", "gpt2", "-f", "md").out.startswith("| model")
    for suffix in (".json", ".jsonl", ".csv", ".md", ".svg", ".png"):
        target = tmp_path / f"out{suffix}"
        ran = kvtool("size", "gpt2", "gemma-3-4b", "-o", target)
        assert (ran.code, ran.out) == (0, ""), ran.err
        assert target.stat().st_size > 300


def test_the_gate(kvtool: Kvtool) -> None:
    held = kvtool(
        "size", "llama-3-70b", "-c", "8k", "-b", "64", "--assert-max-gib", "160", "--json"
    )
    assert held.code == 0
    ran = kvtool("size", "llama-3-70b", "-c", "8k", "-b", "64", "--assert-max-gib", "80", "--json")
    assert ran.code == 1
    assert ran.json["rows"][0]["total_bytes"] == 160 * GIB
    assert ran.json["error"]["code"] == "above_limit"
    assert kvtool("size", "llama-3-70b", "-c", "8k", "-b", "64", "--assert-max-gib", "80", "--tp", "2",
                  "-q").code == 0  # fmt: skip


def test_a_context_above_the_maximum(kvtool: Kvtool) -> None:
    ran = kvtool("size", "llama-3-70b", "-c", "32k")
    assert ran.code == 1
    assert "32,768 tokens is above the model's maximum of 8,192" in ran.err
    assert "--allow-long" in ran.err
    assert kvtool("size", "llama-3-70b", "-c", "32k", "--allow-long").code == 0
    assert kvtool("size", "falcon-7b", "-c", "32k").code == 0  # no maximum in its config


def test_assume_full_is_said_in_every_output(kvtool: Kvtool, config: Callable[..., str]) -> None:
    path = config(model_type="somebodys-own")
    refused = kvtool("size", path)
    assert refused.code == 1
    assert "somebodys-own" in refused.err
    assert "--assume full" in refused.err
    ran = kvtool("size", path, "--assume", "full", "--json")
    assert all(row["assume"] == "full" for row in ran.json["rows"])
    assert any("--assume full" in note for note in ran.json["notes"])
    assert "--assume full" in kvtool("size", path, "--assume", "full").out


def test_encoder_tokens(kvtool: Kvtool) -> None:
    fixed = kvtool("size", "whisper-large-v3", "-c", "100", "--json").json["rows"][0]
    assert fixed["encoder_tokens"] == 1500
    none = kvtool("size", "whisper-large-v3", "-c", "100", "--encoder-tokens", "0", "--json").json
    assert none["rows"][0]["cross_bytes"] == 0
    ignored = kvtool("size", "llama-3-8b", "-c", "1", "--encoder-tokens", "5")
    assert "ignored" in ignored.err


BAD_CONFIGS: dict[str, bytes] = {
    "not_json": b"{not json",
    "not_object": b"[1, 2]",
    "empty": b"",
    "too_large": b'{"a": "' + b"x" * (10 * 2**20) + b'"}',
    "negative": json.dumps(LLAMA | {"num_hidden_layers": -4}).encode(),
    "zero": json.dumps(LLAMA | {"num_hidden_layers": 0}).encode(),
    "huge": json.dumps(LLAMA | {"num_hidden_layers": 10**9}).encode(),
    "enormous": json.dumps(LLAMA).replace('"num_hidden_layers": 4', f'"num_hidden_layers": {"9" * 6000}').encode(),
    "text": json.dumps(LLAMA | {"num_key_value_heads": "8"}).encode(),
    "fraction": json.dumps(LLAMA | {"hidden_size": 511.5}).encode(),
    "nan": json.dumps(LLAMA | {"hidden_size": float("nan")}).encode(),
    "true": json.dumps(LLAMA | {"num_hidden_layers": True}).encode(),
    "deep": b'{"a":' * 100_000,
    "binary": bytes(range(256)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs_are_two_lines(kvtool: Kvtool, tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(BAD_CONFIGS[name])
    two_lines(kvtool("size", path, "--json"), code=1)


def test_a_folder_without_a_config(kvtool: Kvtool, tmp_path: Path) -> None:
    two_lines(kvtool("size", tmp_path, "--json"), code=1)
    two_lines(kvtool("size", tmp_path / "config.json", "--json"), code=1)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--context", "0"], 2), (["--context", "-1"], 2), (["--context", "8q"], 2),
        (["--context", ""], 2), (["--context", "1e99"], 2), (["--context", "4k..1k"], 2),
        (["--batch", "1e9"], 2), (["--batch", "0"], 2), (["--batch", "1000000000"], 2),
        (["--batch", "1..1000000"], 2), (["--tp", "3"], 1), (["--tp", "0"], 2),
        (["--pp", "1000"], 1), (["--kv-dtype", "fp9"], 2), (["--kv-dtype", "a/b/c"], 2),
        (["--kv-dtype", ""], 2), (["--dtype", "int4"], 2), (["--engine", "sglang"], 2),
        (["--engine", "idael"], 2), (["--assume", "gqa"], 2), (["--block-size", "0"], 2),
        (["--assert-max-gib", "-1"], 2), (["--assert-max-gib", "nan"], 2), (["--gpu", "h1000"], 2),
        (["--encoder-tokens", "-1"], 2), (["--no-such-flag"], 2), (["-o", "x.docx"], 2),
        (["-o", "/no/such/folder/x.json"], 1), (["-f", "xml"], 2),
    ],
)  # fmt: skip
def test_bad_words_are_two_lines(kvtool: Kvtool, words: list[str], code: int) -> None:
    two_lines(kvtool("size", "llama-3-8b", "--json", *words) if words[:1] != ["-f"] else
              kvtool("size", "llama-3-8b", *words), code=code, json_too=words[:1] != ["-f"])  # fmt: skip


def two_lines(ran: Any, *, code: int, json_too: bool = True) -> None:
    """`Error: …` and `Hint: …` on stderr, the same in JSON, and no number anywhere."""
    assert ran.code == code, ran.err
    lines = ran.err.splitlines()
    assert len(lines) == 2, ran.err
    assert lines[0].startswith("Error: ")
    assert lines[1].startswith("Hint: ")
    assert len(ran.err) < 1000
    if json_too:
        assert ran.json["rows"] == []
        assert {"code", "message", "hint"} == set(ran.json["error"])

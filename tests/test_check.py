"""kvtool check: models at full size on the meta device, and what is said when there is none."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtool import check as checking
from kvtool.engines.result import Part
from kvtool.errors import KvtoolError
from kvtool.guard import deadline, offline, plain_config, refuse_huge

Kvtool = Callable[..., Any]

pytest.importorskip("torch")
pytest.importorskip("transformers")

TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """A config.json with these keys; its path."""

    def write(**keys: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(TINY | keys))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("model", "layers", "kinds"),
    [
        ("llama-3-70b", 80, {"self_k", "self_v"}),
        ("gemma-3-27b", 62, {"self_k", "self_v"}),
        ("deepseek-v3", 61, {"self_k", "self_v"}),
        ("qwen3-next-80b-a3b", 48, {"self_k", "self_v", "conv", "ssm"}),
        ("jamba-v0.1", 32, {"self_k", "self_v", "conv", "ssm"}),
        ("gpt-oss-120b", 36, {"self_k", "self_v"}),
        ("deepseek-v3.2", 61, {"self_k", "self_v", "indexer"}),
        ("whisper-large-v3", 32, {"self_k", "self_v", "cross_k", "cross_v"}),
        ("t5-small", 6, {"self_k", "self_v", "cross_k", "cross_v"}),
        ("llama-4-scout", 48, {"self_k", "self_v"}),
        ("llama-3.2-11b-vision", 32, {"self_k", "self_v"}),
        ("rwkv-4-169m", 1, {"ssm"}),
    ],
)
def test_a_preset_at_full_size(model: str, layers: int, kinds: set[str], kvtool: Any) -> None:
    ran = kvtool("check", model, "--json")
    assert ran.code == 0, ran.err
    rows = ran.json["rows"]
    assert len({row["layer"] for row in rows}) == layers
    assert {row["kind"] for row in rows} == kinds
    assert all(row["equal"] and row["real_bytes"] == row["predicted_bytes"] for row in rows)


def test_a_row_says_what_was_held(kvtool: Any) -> None:
    row = kvtool("check", "gemma-3-27b", "--json").json["rows"][0]
    assert row == {
        "model": "gemma-3-27b",
        "model_type": "gemma3_text",
        "source": "preset",
        "context_tokens": 1056,
        "encoder_tokens": 0,
        "batch": 1,
        "cache": "dynamic",
        "layer": 0,
        "kind": "self_k",
        "predicted_bytes": 16 * 1023 * 128 * 2,
        "real_bytes": 16 * 1023 * 128 * 2,
        "shape": "1×16×1023×128",
        "dtype": "bfloat16",
        "equal": True,
        "not_compared": "",
    }


@pytest.mark.parametrize(
    "model", ["llama-3-70b", "gemma-3-27b", "qwen3-next-80b-a3b", "gpt-oss-20b"]
)
def test_a_static_cache_for_two_in_fp32(model: str, kvtool: Any) -> None:
    words = ("--cache", "static", "-b", "2", "--dtype", "fp32", "-c", "300")
    ran = kvtool("check", model, *words, "--json")
    assert ran.code == 0, ran.err
    rows = ran.json["rows"]
    assert {row["shape"].split("×")[0] for row in rows} == {"2"}
    assert {row["dtype"] for row in rows} == {"float32"}
    assert {row["cache"] for row in rows} == {"static"}


def test_no_weights_are_made(kvtool: Any) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert kvtool("check", "llama-3.1-405b").code == 0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20  # 1 GiB in KiB; the weights are 811 GB


def test_the_table_joins_what_is_alike(kvtool: Any) -> None:
    ran = kvtool("check", "llama-3-70b")
    assert "0–79     self_k   1×8×32×128   bfloat16" in ran.out
    assert "10,485,760 bytes (10.00 MiB) in 80 layers, every tensor as predicted." in ran.out


def test_a_difference_is_an_error(
    config: Callable[..., str], kvtool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        checking, "parts", lambda *_, **__: (Part(layer=0, kind="self_k", bytes=5),)
    )
    ran = kvtool("check", config(), "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "differs"
    rows = ran.json["rows"]
    assert [row["equal"] for row in rows] == [False] * 6
    assert [row["predicted_bytes"] for row in rows] == [5, 0, 0, 0, 0, 0]
    ran = kvtool("check", config())
    assert ran.err.count("Error:") == ran.err.count("Hint:") == 1
    assert "6 of 6 rows differ" in ran.err
    assert "no, +4,091 bytes" in ran.out


def test_a_config_that_its_own_class_cannot_run(kvtool: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "falcon", "hidden_size": 512, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 8, "num_kv_heads": 2, "multi_query": False,
        "new_decoder_architecture": False,
    }))  # fmt: skip
    ran = kvtool("check", path, "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "not_buildable"
    assert ran.err.count("\n") == 2
    assert "cannot run falcon without weights: RuntimeError: shape" in ran.err


def test_a_million_layers_of_a_tower_are_not_built(config: Callable[..., str], kvtool: Any) -> None:
    ran = kvtool("check", config(vision_config={"num_hidden_layers": 10**6}))
    assert ran.code == 1
    assert "num_hidden_layers = 1,000,000: at most 4,096 are built" in ran.err


def test_a_model_of_its_own_code_is_not_run(config: Callable[..., str], kvtool: Any) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling.Model"}
    latent = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8}
    ran = kvtool("check", config(model_type="kimi_k2", auto_map=auto_map, **latent))
    assert ran.code == 1
    assert "has no model type 'kimi_k2'" in ran.err
    assert "never run" in ran.err
    assert ran.out == ""


def test_what_fails_does_not_lose_the_others(config: Callable[..., str], kvtool: Any) -> None:
    ran = kvtool("check", "kimi-k2", config(), "--json")
    assert ran.code == 1
    assert len(ran.json["rows"]) == 6
    assert ran.json["error"]["code"] == "not_buildable"
    assert ran.json["error"]["message"].startswith("kimi-k2: ")


def test_only_the_text_part_is_said(kvtool: Any) -> None:
    ran = kvtool("check", "llama-4-scout")
    assert ran.code == 0
    assert "only its text part was run: the whole fails with" in ran.err


def test_without_torch(
    config: Callable[..., str], kvtool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    ran = kvtool("check", config())
    assert ran.code == 1
    assert "torch is not installed" in ran.err
    assert "Hint: pip install 'kvtool[bench]'" in ran.err


def test_the_hub_is_not_asked_while_a_model_is_built() -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE")
    with offline():
        assert constants.HF_HUB_OFFLINE is True
        assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert (constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE")) == before


@pytest.mark.parametrize(
    "words",
    [
        ("--cache", "statik"), ("-c", "0"), ("-c", "many"), ("-b", "0"), ("--dtype", "fp8"),
        ("-f", "xml"),
    ],
)  # fmt: skip
def test_a_usage_error(words: tuple[str, ...], config: Callable[..., str], kvtool: Any) -> None:
    ran = kvtool("check", config(), *words)
    assert ran.code == 2
    assert ran.out == ""


def test_a_context_above_the_maximum_is_refused(config: Callable[..., str], kvtool: Any) -> None:
    ran = kvtool("check", config(max_position_embeddings=64), "-c", "65")
    assert ran.code == 1
    assert "above the model's maximum of 64" in ran.err


HOSTILE = {
    "attn_implementation": "evil/kernel", "_attn_implementation": "flash_attention_2",
    "_experts_implementation": "x", "num_labels": 10**9, "id2label": {"0": "a"},
    "quantization_config": "junk", "auto_map": {"AutoConfig": "evil--code"}, "return_dict": False,
    "pad_token_id": 10**6,
}  # fmt: skip


def test_what_names_code_or_labels_is_not_built(kvtool: Kvtool, tmp_path: Path) -> None:
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(TINY | HOSTILE | {"num_hidden_layers": 3.0}))
    ran = kvtool("check", path, "--json")
    assert ran.code == 0, ran.err
    assert all(row["equal"] for row in ran.json["rows"])
    kept = plain_config({"text_config": TINY | HOSTILE})["text_config"]
    assert kept == TINY | {"pad_token_id": None}


@pytest.mark.parametrize(
    "keys",
    [
        {"vision_config": {"model_type": "swin", "depths": [10**7]}},
        {"depths": [3000, 3000]},
        {"num_hidden_layers": 2000, "num_experts": 4096},
        {"num_codebooks": 10**6},
    ],
)
def test_what_is_too_much_to_build_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(KvtoolError, match="are built"):
        refuse_huge(TINY | keys)


def test_a_deadline_ends_what_goes_on() -> None:
    with pytest.raises(KvtoolError, match="more than 1 s"), deadline(1):
        time.sleep(5)


def test_its_own_input_is_never_overwritten(kvtool: Kvtool, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    (tmp_path / "hf_quant_config.json").write_text("{}")
    for command in ("check", "size"):
        for target in (path, tmp_path / "hf_quant_config.json"):
            ran = kvtool(command, tmp_path, "-o", target)
            assert ran.code == 2
            assert "a file that is read" in ran.err
    assert json.loads(path.read_text()) == TINY


def test_a_check_has_no_picture(kvtool: Kvtool, tmp_path: Path) -> None:
    ran = kvtool("check", "llama-3-8b", "-o", tmp_path / "x.png")
    assert ran.code == 2
    assert "no chart" in ran.err


def test_every_failure_is_told(kvtool: Kvtool) -> None:
    ran = kvtool("check", "gpt2", "no-such", "nor-this", "--json")
    assert "no-such" in ran.json["error"]["message"]
    assert any("nor-this" in note for note in ran.json["notes"])
    assert ran.json["rows"]


def test_a_broken_library_is_two_lines(kvtool: Kvtool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("libcudart.so: no such file")

    monkeypatch.setitem(sys.modules, "torch", None)
    assert "not installed" in kvtool("check", "gpt2").err
    monkeypatch.setattr("builtins.__import__", _failing_import("torch", broken))
    ran = kvtool("check", "gpt2")
    assert "cannot be loaded: libcudart.so" in ran.err


def _failing_import(name: str, fail: Any) -> Any:
    real = __import__

    def imported(module: str, *args: Any, **keys: Any) -> Any:
        if module == name:
            fail()
        return real(module, *args, **keys)

    return imported


def test_a_window_of_one_keeps_everything(kvtool: Kvtool, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(TINY | {"model_type": "mistral", "sliding_window": 1}))
    assert kvtool("check", path).code == 0


def test_what_was_not_run_is_said_in_the_answer(kvtool: Kvtool, tmp_path: Path) -> None:
    path = tmp_path / "crossed.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "add_cross_attention": True}))
    ran = kvtool("check", path, "-q")
    assert "(cross-attention not compared)" in ran.out

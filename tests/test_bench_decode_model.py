"""Which models `kvtool bench decode` runs, with which weights, and what it refuses in two lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_cases import LLAMA, MISTRAL, decoder_of, tiny

from kvtool.bench.decode.blueprint import blueprint
from kvtool.bench.decode.model import build_model, forward, prompts
from kvtool.bench.decode.settings import DecodeRun, ModelChoice, Roofs, decode_cases
from kvtool.bench.decode.uniform import uniform_rows
from kvtool.config import load_config
from kvtool.errors import KvtoolError

OTHERS: dict[str, dict[str, Any]] = {
    "qwen2": LLAMA
    | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "qwen3": LLAMA | {"model_type": "qwen3"},
    "qwen3_moe": LLAMA
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "gemma3": LLAMA
    | {
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 64,
    },
    "phi3": LLAMA | {"model_type": "phi3", "sliding_window": 24, "pad_token_id": 0},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 256,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 128,
        "n_positions": 512,
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_run_on_blocks(name: str) -> None:
    plan = tiny(OTHERS[name])
    cases = decode_cases(("dynamic", "contiguous", "paged"), (2,), (30,), (10,), (8,))
    rows = list(
        uniform_rows(plan, ModelChoice(), DecodeRun(cases=cases, exponent_contexts=()), Roofs())
    )
    assert [row["same_tokens"] for row in rows] == [True, True, True]
    if name == "qwen3_moe":  # what experts read depends on the tokens
        assert {row["mbu"] for row in rows} == {row["predicted_gain"] for row in rows} == {None}
    if name == "gpt2":  # its matrices are no Linear
        assert plan.linear_parameters == 2 * 12 * 256 * 256


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek-v3", "kind latent"),
        ("jamba-v0.1", "attention function"),
        ("lfm2-1.2b", "kind linear"),
        ("llama-4-scout", "kind chunked"),
        ("t5-small", "row of text"),
        ("gemma-2-2b", "attn_logit_softcapping"),
        ("gpt-oss-20b", "sinks"),
        ("gemma-3n-e2b", "share"),
        ("chatglm3-6b", "does not build"),
    ],
)
def test_what_has_no_kernel_is_refused(name: str, words: str) -> None:
    with pytest.raises(KvtoolError, match=words) as caught:
        blueprint(load_config(name))
    error = caught.value
    assert error.message.startswith(f"{name} cannot be run by bench decode: ")
    assert (error.code, error.exit_code) == ("not_runnable", 1)
    assert "\n" not in error.message + error.hint


def test_a_head_size_without_a_kernel_is_refused() -> None:
    with pytest.raises(KvtoolError, match="64, 80, 96, 128, 192, 256, it has K 32 and V 32"):
        tiny(LLAMA, head_dim=32)


def test_the_first_layers_alone() -> None:
    plan = blueprint(load_config("gemma-3-4b"), layers=7)
    assert plan.heads.windows == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert plan.config.num_hidden_layers == len(plan.config.layer_types) == 7
    assert plan.notes == ("7 layers are run, of the config's 34",)
    whole = blueprint(load_config("smollm2-135m"))
    assert whole.num_parameters == 134_515_008
    for layers in (0, 31):
        with pytest.raises(KvtoolError, match="has 30 layers") as caught:
            blueprint(load_config("smollm2-135m"), layers=layers)
        assert caught.value.exit_code == 2


def test_random_weights_are_those_of_the_seed() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (decoder_of(LLAMA, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    for (name, a), b in zip(one.module.named_parameters(), same.module.parameters(), strict=True):
        assert torch.equal(a, b), name
    ids = prompts(one, 4, 30)
    assert torch.equal(ids, prompts(other, 4, 30))
    assert not torch.equal(forward(one, ids), forward(other, ids))


def saved(folder: Path, config: dict[str, Any]) -> torch.nn.Module:
    """A model of other weights than ours, saved as a Hub folder is."""
    module = decoder_of(config, seed=7).module
    module.save_pretrained(folder)
    text = config | {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(text))
    (folder / "evil.py").write_text("raise SystemExit('code of a model repository was run')")
    return module


@pytest.mark.parametrize("tied", [False, True])
def test_real_weights_of_a_folder(tied: bool, tmp_path: Path) -> None:
    module = saved(tmp_path, MISTRAL | {"tie_word_embeddings": tied})
    plan = blueprint(load_config(str(tmp_path)))
    real = build_model(plan, ModelChoice())
    made = build_model(plan, ModelChoice(random_weights=True))
    assert (real.weights, made.weights) == ("folder", "random")
    for (name, a), b in zip(module.named_parameters(), real.module.parameters(), strict=True):
        assert torch.equal(a, b), name
    fewer = build_model(blueprint(load_config(str(tmp_path)), layers=1), ModelChoice())
    assert len(fewer.module.model.layers) == 1


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 3}))
    with pytest.raises(KvtoolError, match="tensors are missing") as caught:
        build_model(blueprint(load_config(str(tmp_path))), ModelChoice())
    assert "--random-weights" in caught.value.hint
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(KvtoolError, match="cannot be used"):
        build_model(blueprint(load_config(str(tmp_path))), ModelChoice())
    quantised = LLAMA | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(KvtoolError, match="quantised"):
        build_model(blueprint(load_config(str(tmp_path))), ModelChoice())

"""presets/models: well-formed, unambiguous, sourced, and with the sizes that are known of them."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvtool import catalog

FILES = sorted((Path(catalog.__file__).parent / "presets" / "models").glob("*.toml"))
ROWS: list[tuple[str, str, dict[str, Any]]] = [
    (file.stem, name, row)
    for file in FILES
    for name, row in tomllib.loads(file.read_text("utf-8")).items()
]
each_model = pytest.mark.parametrize(
    ("name", "row"), [row[1:] for row in ROWS], ids=[name for _, name, _ in ROWS]
)
MODELS = {name: row["config"] for _, name, row in ROWS}

KEYS = {"hub_id", "aliases", "source", "note", "null_keys", "weights_known", "config"}
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
# An exact place: a file of a repository, a page, or the class defaults of a release.
SOURCE = re.compile(r"https://\S+|transformers \d+\.\d+\.\d+ ")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[0-9a-f]{7,40})? [\w(]")

WANTED = """
llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3.1-8b llama-3.1-70b llama-3.1-405b
llama-3.2-1b llama-3.2-3b llama-3.2-11b-vision llama-3.3-70b llama-4-scout llama-4-maverick
gemma-2-2b gemma-2-9b gemma-2-27b gemma-3-1b gemma-3-4b gemma-3-12b gemma-3-27b gemma-3n-e2b
gemma-3n-e4b gemma-4-31b recurrentgemma-2b
deepseek-v2-lite deepseek-v3 deepseek-r1 deepseek-v3.2 deepseek-v4-flash kimi-k2 kimi-k2.5 kimi-linear
gpt-oss-20b gpt-oss-120b gpt2 gpt2-medium gpt2-large gpt2-xl gpt-j-6b gpt-neox-20b pythia-6.9b
mistral-7b-v0.1 mistral-7b-v0.3 mistral-nemo mistral-small-3 mixtral-8x7b mixtral-8x22b
qwen2-7b qwen2.5-7b qwen2.5-32b qwen2.5-72b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b
qwen3-32b qwen3-30b-a3b qwen3-235b-a22b qwen3-next-80b-a3b qwen3-vl-32b qwen3.5-9b qwen3.5-397b-a17b
glm-4.5 glm-5.1 glm-5.2 glm-4-9b-chat chatglm3-6b minimax-m2.5 minimax-m3 mimo-v2-flash
step-3.7-flash falcon-7b falcon-40b jamba-v0.1 mamba-2.8b codestral-mamba nemotron-3-nano
nemotron-super-49b phi-2 phi-3-mini phi-3.5-moe phi-mini-moe phi-4 bloom opt-6.7b opt-30b starcoder
starcoder2-15b mpt-7b mpt-30b dbrx command-r-plus command-r7b olmo-3 smollm3 lfm2 granite-4 zamba2
minicpm3 t5-small t5-large flan-t5-xxl bart-large whisper-large-v3 baichuan2-7b openelm-1.1b
""".split()  # noqa: SIM905


def test_there_are_enough_of_them():
    assert len(ROWS) >= 75
    assert len({config["model_type"] for config in MODELS.values()}) >= 60


def test_every_file_has_a_family_name_and_holds_models():
    assert all(re.fullmatch(r"[a-z0-9]+", file.stem) for file in FILES)
    assert {family for family, _, _ in ROWS} == {file.stem for file in FILES}


def test_no_two_models_share_a_name_alias_or_hub_id():
    names = Counter(
        each.lower() for _, name, row in ROWS for each in (name, row["hub_id"], *_aliases(row))
    )
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize("name", WANTED)
def test_the_names_people_type_are_there(name: str):
    assert catalog.model_preset(name) is not None


@each_model
def test_a_row_is_well_formed(name: str, row: dict[str, Any]):
    assert re.fullmatch(r"[a-z0-9.-]+", name)
    assert set(row) <= KEYS
    assert HUB_ID.fullmatch(row["hub_id"])
    assert all(HUB_ID.fullmatch(alias) for alias in _aliases(row))
    assert row.get("note", "x").strip()


@each_model
def test_a_row_says_where_its_numbers_come_from(name: str, row: dict[str, Any]):
    assert SOURCE.search(row["source"])
    assert "memory" not in row["source"]
    for place in row["source"].split("https://github.com/")[1:]:
        assert REPOSITORY.match(place)


@each_model
def test_a_config_is_one_that_a_hub_could_hold(name: str, row: dict[str, Any]):
    config = row["config"]
    assert re.fullmatch(r"[a-z0-9_-]+", config["model_type"])
    for at, value in _leaves(config):
        assert "." not in at[-1]
        assert value != "null"
        assert not isinstance(value, int) or value >= -1
    for dotted in row.get("null_keys", ()):
        assert tuple(dotted.split(".")) not in dict(_leaves(config))


@each_model
def test_lists_by_layer_have_one_entry_a_layer(name: str, row: dict[str, Any]):
    config = row["config"]
    for part in (config, config.get("text_config", {})):
        layers = part.get("num_hidden_layers")
        for key in ("layer_types", "layers_block_type", "block_configs", "hybrid_override_pattern"):
            if layers is not None and key in part:
                assert len(part[key]) == layers, key


@each_model
def test_heads_divide(name: str, row: dict[str, Any]):
    config = row["config"]
    for part in (config, config.get("text_config", {})):
        heads, kv_heads = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(kv_heads, int):
            assert heads % kv_heads == 0


# What two bytes an element come to a token over all layers, windows not yet full: published
# figures, and the products of the model cards' numbers.
@pytest.mark.parametrize(
    ("name", "layers", "kv_heads", "head_dim", "a_token"),
    [
        ("llama-2-7b", 32, 32, 128, 524_288),
        ("llama-3-8b", 32, 8, 128, 131_072),
        ("llama-3-70b", 80, 8, 128, 327_680),
        ("llama-3.1-405b", 126, 8, 128, 516_096),
        ("llama-3.2-1b", 16, 8, 64, 32_768),
        ("mistral-7b-v0.1", 32, 8, 128, 131_072),
        ("mixtral-8x7b", 32, 8, 128, 131_072),
        ("mistral-nemo", 40, 8, 128, 163_840),
        ("qwen2.5-7b", 28, 4, 128, 57_344),
        ("qwen2.5-72b", 80, 8, 128, 327_680),
        ("qwen3-8b", 36, 8, 128, 147_456),
        ("qwen3-235b-a22b", 94, 4, 128, 192_512),
        ("gpt-oss-20b", 24, 8, 64, 49_152),
        ("gpt-oss-120b", 36, 8, 64, 73_728),
        ("phi-4", 40, 10, 128, 204_800),
        ("opt-30b", 48, 56, 128, 1_376_256),
    ],
)
def test_known_sizes_a_token(name: str, layers: int, kv_heads: int, head_dim: int, a_token: int):
    config = MODELS[name]
    heads = config["num_attention_heads"]
    found = (
        config["num_hidden_layers"],
        config.get("num_key_value_heads", heads),
        config.get("head_dim", config["hidden_size"] // heads),
    )
    assert found == (layers, kv_heads, head_dim)
    assert layers * kv_heads * head_dim * 2 * 2 == a_token


@pytest.mark.parametrize(
    ("name", "layers", "a_token"),
    [("deepseek-v2-lite", 27, 31_104), ("deepseek-v3", 61, 70_272), ("deepseek-r1", 61, 70_272)],
)
def test_known_sizes_of_latents(name: str, layers: int, a_token: int):
    config = MODELS[name]
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert config["num_hidden_layers"] == layers
    assert layers * latent * 2 == a_token


@pytest.mark.parametrize(
    ("name", "key", "counts"),
    [
        ("qwen3.8-27b", "layer_types", {"linear_attention": 48, "full_attention": 16}),
        ("olmo-3-7b", "layer_types", {"sliding_attention": 24, "full_attention": 8}),
        ("lfm2-1.2b", "layer_types", {"conv": 10, "full_attention": 6}),
        ("nemotron-3-nano", "hybrid_override_pattern", {"M": 23, "E": 23, "*": 6}),
        ("mimo-v2-flash", "hybrid_layer_pattern", {0: 9, 1: 39}),
    ],
)
def test_known_mixtures_of_layers(name: str, key: str, counts: dict[Any, int]):
    assert Counter(MODELS[name][key]) == counts


def test_falcon_7b_has_one_kv_head_though_its_file_names_none():
    config = MODELS["falcon-7b"]
    assert config.get("multi_query", True)
    assert not config.get("new_decoder_architecture", False)
    assert "num_kv_heads" not in config or config["num_kv_heads"] == 71


def _aliases(row: dict[str, Any]) -> list[str]:
    aliases: list[str] = row.get("aliases", [])
    return aliases


def _leaves(table: dict[str, Any], at: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += _leaves(value, (*at, key))
        else:
            found.append(((*at, key), value))
    return found

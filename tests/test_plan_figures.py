"""Figures of plans that were wrong once: each against what a log, a config or arithmetic says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_cases import case_of, model_of
from ran import Ran

from kvtool import catalog
from kvtool.cli.plan_words import interrupted
from kvtool.config import _instead
from kvtool.engine_memory.usable import torch_total
from kvtool.errors import KvtoolError, usage_error
from kvtool.levers.presets import cheapest
from kvtool.plan import plan_row, planned
from kvtool.plan_query import PlanQuery, gpus_named
from kvtool.units import GIB
from kvtool.weights.stored import stored
from kvtool.weights.usual import SCHEMES, by_name

Kvtool = Callable[..., Ran]


def row(name: str, gpu: str = "h100", engine: str = "vllm", **words: Any) -> dict[str, Any]:
    return plan_row(planned(case_of(name, gpu, engine, **words)[2]))


# -- how long a context


@pytest.mark.parametrize(
    ("name", "maximum"), [("gemma-3-27b", 131_072), ("gemma-7b", 8_192), ("phi-3.5-moe", 131_072)]
)
def test_the_longest_context_is_at_most_the_models(name: str, maximum: int) -> None:
    """Of these the maximum is their class's default."""
    assert row(name, "h200:8", contexts=(4096,))["max_context"] == maximum
    longer = row(name, "h200:8", contexts=(2 * maximum,), allow_long=True)
    assert longer["max_context"] > maximum


@pytest.mark.parametrize("name", ["t5-large", "rwkv-4-14b"])
def test_where_positions_have_no_end_memory_alone_ends_a_context(name: str) -> None:
    """Relative positions, and a state: the figure in the config is what they were made for."""
    asked = [
        row(name, "h100", "ideal", contexts=(tokens,), weights=30 * GIB)["max_context"]
        for tokens in (100, 3000)
    ]
    assert asked[0] == asked[1]
    assert asked[0] is None or asked[0] > 100_000


def test_an_encoder_follows_the_longest_context() -> None:
    """1,024 tokens are above what its class is made for, so that memory alone ends the search."""

    def asked(tokens: int, encoder: int | None = None) -> dict[str, Any]:
        return row(
            "flan-t5-large", "h200", "ideal", contexts=(tokens,), users=(8,), encoder_tokens=encoder
        )

    found = asked(1024)["max_context"]
    assert asked(found)["fits"]
    assert not asked(found + 1)["fits"]
    assert asked(1024, 512)["max_context"] > found


# -- how fast


@pytest.mark.parametrize("pp", [1, 2, 3, 6, 7])
def test_stages_that_are_not_even_read_a_mean_stages_cache(pp: int) -> None:
    found = row("llama-3-70b", f"h200:{8 * pp}", tps=(8,), pps=(pp,), users=(8 * pp,))
    assert found["attention_intensity"] == pytest.approx(8)
    assert found["read_cache_bytes"] == pytest.approx(8 * 8192 * 80 * 2 * 128 * 2 / pp, rel=1e-6)


@pytest.mark.parametrize("engine", ["ideal", "vllm"])
def test_states_are_no_part_of_the_cache_that_attention_reads(engine: str) -> None:
    """16 query heads on 2 KV heads, whatever dtype the engine has for states."""
    found = row("qwen3-next-80b-a3b", "h200:2", engine, users=(8,))
    assert found["attention_intensity"] == pytest.approx(8)


def test_what_is_whole_on_each_rank_is_computed_on_each() -> None:
    """Kimi-K2's projections into latents, its routers: 16 % more than an eighth of all."""
    _, _, alone = case_of("kimi-k2", "h200:8", "ideal", tps=(1,), dps=(8,))
    _, _, cut = case_of("kimi-k2", "h200:8", "ideal", tps=(8,))
    assert alone.loads is not None
    assert cut.loads is not None
    assert 1.05 < 8 * cut.loads.token_flops / alone.loads.token_flops < 1.3
    for tp in (1, 2, 4, 8):
        _, _, dense = case_of("llama-3-70b", f"h200:{tp}", "ideal", tps=(tp,))
        assert dense.loads is not None
        whole = dense.loads.token_flops * tp
        assert whole == pytest.approx(2 * (70_553_706_496 - 128_256 * 8192), rel=1e-3)


def test_the_speed_of_a_mix_is_not_that_of_its_longest(kvtool: Kvtool) -> None:
    ran = kvtool("plan", "llama-3.1-8b", "--gpu", "h100", "--workload", "chat", "--json")
    (found,) = ran.json["rows"]
    lengths = found["lengths"]
    assert lengths["running_output_tokens_per_s"] > 1.5 * found["output_tokens_per_s"]
    each = lengths["max_concurrency_running"] / lengths["running_output_tokens_per_s"]
    assert lengths["running_tpot_s"] == pytest.approx(each)
    shown = kvtool("plan", "llama-3.1-8b", "--gpu", "h100", "--workload", "chat")
    assert "So mixed a token takes" in shown.out


def test_the_speed_of_a_mix_is_of_all_replicas(kvtool: Kvtool) -> None:
    words = ("plan", "llama-3.1-8b", "--workload", "chat", "--json", "--gpu")
    one = kvtool(*words, "h100").json["rows"][0]["lengths"]
    four = kvtool(*words, "h100:4", "--dp", "4").json["rows"][0]["lengths"]
    rate, cost = "running_output_tokens_per_s", "running_usd_per_million_tokens"
    assert four[rate] == pytest.approx(4 * one[rate])
    assert four[cost] == pytest.approx(one[cost])
    assert four["running_tpot_s"] == pytest.approx(one["running_tpot_s"])


# -- latents


def test_fp8_latents_of_sparse_attention_are_plain_on_blackwell() -> None:
    """43,190 bytes a token printed for DeepSeek-V3.2-NVFP4 on a B200, vLLM 0.18."""
    asked: dict[str, Any] = {"kv_dtypes": ("fp8",), "contexts": (32_768,)}
    for gpus in ("b200:8", "b300:8"):
        assert row("deepseek-v3.2", gpus, **asked)["request_bytes"] == 32_768 * 61 * (576 + 132)
    assert row("deepseek-v3.2", "h200:8", **asked)["request_bytes"] == 32_768 * 61 * (656 + 132)


def test_a_latent_has_no_keys_and_values_apart(kvtool: Kvtool) -> None:
    ran = kvtool("plan", "deepseek-v3", "--gpu", "h200:8", "-b", "8", "--levers", "--json")
    changes = [one["flags"] for one in ran.json["rows"][0]["levers"]]
    assert "--kv-dtype int4" in changes
    assert not any("int4/int2" in one for one in changes)


# -- weights


def test_weights_of_which_a_source_leaves_out_sizes_are_refused(kvtool: Kvtool) -> None:
    ran = kvtool("plan", "falcon-h1-34b", "--gpu", "h100")
    assert (ran.code, "does not say all its sizes" in ran.err) == (1, True)
    assert kvtool("plan", "falcon-h1-34b", "--gpu", "h100", "--weights", "63GiB").code == 0


@pytest.mark.parametrize(
    ("typed", "words", "share"),
    [
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "NVFP4", 0.30),
        ("Qwen/Qwen3-235B-A22B-FP8", "fp8", 0.51),
        ("zai-org/GLM-4.5-FP8", "fp8", 0.51),
    ],
)
def test_a_preset_in_place_of_a_quantised_checkpoint_is_quantised(
    typed: str, words: str, share: float
) -> None:
    preset = catalog.model_preset(typed)
    assert preset is not None
    found = _instead(preset, typed, None, usage_error("no network", ""))
    assert found.name == typed
    assert any(words in note and "an estimate" in note for note in found.notes)
    assert found.config == {
        **preset.config, "quantization_config": found.config["quantization_config"],
    }  # fmt: skip
    whole = model_of(preset.name, PlanQuery(gpus=gpus_named("h100"))).stored
    from kvtool.model import read_model
    from kvtool.plan_model import model_for

    shape = read_model(found.config, catalog.class_defaults()["types"])
    smaller = model_for(found, shape, PlanQuery(gpus=gpus_named("h100")))
    assert smaller.repository == typed
    assert smaller.stored is not None
    assert whole is not None
    assert smaller.stored.bytes / whole.bytes == pytest.approx(share, abs=0.04)


def test_a_preset_by_its_own_id_is_as_it_is() -> None:
    preset = catalog.model_preset("meta-llama/Llama-3.1-8B")
    assert preset is not None
    found = _instead(preset, preset.hub_id, None, usage_error("no network", ""))
    assert "quantization_config" not in found.config


def test_nvfp4_weights(kvtool: Kvtool) -> None:
    words = ("plan", "llama-3-70b", "--gpu", "b200", "--json", "--weights-dtype")
    fp8, nvfp4 = (kvtool(*words, one).json["rows"][0]["weights_bytes"] for one in ("fp8", "nvfp4"))
    assert nvfp4 / fp8 == pytest.approx(4.5 / 8, abs=0.03)


@pytest.mark.parametrize("name", ["qwen3-vl-4b", "gemma-3-4b", "llama-3.2-11b-vision"])
def test_usual_schemes_leave_towers_alone(name: str) -> None:
    model = model_of(name, PlanQuery(gpus=gpus_named("h100")))
    assert model.stored is not None
    for scheme in SCHEMES.values():
        config = {**model.config, "quantization_config": scheme}
        parts = tuple(one.part for one in model.stored.parts)
        found = stored(parts, config, model.dtype, name=name)
        assert found.by_role["vision"] == model.stored.by_role["vision"]
        assert found.bytes < 0.8 * model.stored.bytes


def test_a_name_tells_a_scheme_where_the_config_does_not() -> None:
    assert by_name("acme/Some-7B-AWQ", {}) == "int4"
    assert by_name("acme/Some-7B", {}) == ""
    assert by_name("acme/Some-7B-FP8", {"quantization_config": {"quant_method": "fp8"}}) == ""


# -- GPUs


def test_one_package_of_two_devices_is_no_gpu_of_both(kvtool: Kvtool) -> None:
    ran = kvtool("plan", "llama-3-70b", "--gpu", "mi250x:2")
    assert ran.code == 2
    assert "mi250x-gcd" in ran.err
    assert kvtool("simulate", "--model", "llama-3-8b", "--gpu", "mi250x").code == 2
    assert "mi250x" not in [one.preset.id for one in gpus_named("all")]


def test_a_gpu_whose_total_nobody_printed_is_an_estimate() -> None:
    for preset in catalog.gpu_presets():
        whole, basis = torch_total(preset)
        assert 0 < whole.low <= whole.best <= whole.high <= 1.03 * preset.nominal_gb * GIB
        if preset.usable_bytes is None and "logs" not in basis:
            assert "an estimate" in basis
    shared, _ = torch_total(catalog.gpu_preset("jetson-orin-64gb"))
    assert shared.best > 0.9 * 64 * GIB
    known = catalog.gpu_preset("mi300x")
    guessed, _ = torch_total(replace(known, id="other", usable_bytes=None))
    assert guessed.low <= torch_total(known)[0].best <= guessed.high


def test_ranking_says_how_and_what_it_leaves_out(kvtool: Kvtool) -> None:
    ran = kvtool("plan", "llama-3.1-8b", "--gpu", "all", "-b", "16", "--json")
    rows, notes = ran.json["rows"], " ".join(ran.json["notes"])
    known = [one for one in rows if one["ridge"] is not None]
    priced = [one["usd_per_million_tokens"] for one in known if one["usd_per_million_tokens"]]
    assert priced == sorted(priced)
    assert rows[: len(known)] == known
    assert "rtx-3090" in notes.split("nobody published")[1]
    assert f"{len(catalog.gpu_presets()) - len(rows)} of {len(catalog.gpu_presets())}" in notes


def test_several_nodes_are_not_cheaper_by_leaving_out_what_they_exchange() -> None:
    query = PlanQuery(gpus=gpus_named("all"), engines=("ideal",), ranked=True)
    found = cheapest(model_of("qwen3-32b", query), query, 8192, None, by="tokens")
    assert {one.gpus for one in found if one.plan.case.gpu.id in ("h100-sxm", "h200")} <= {
        1,
        2,
        4,
        8,
    }

    asked = cheapest(model_of("qwen3-32b", query), query, 8192, 512, by="tokens")
    assert 16 in {one.gpus for one in asked}


def test_rankings_without_speeds_say_nothing_of_them(kvtool: Kvtool) -> None:
    notes = " ".join(
        kvtool("plan", "gpt2", "--gpu", "all", "--dtype", "fp32", "--json").json["notes"]
    )
    assert "nobody published" not in notes
    assert "are not listed" in notes


# -- vLLM's versions and defaults


def test_defaults_before_0_8_are_of_vllm_alone() -> None:
    asked: dict[str, Any] = {"version": "0.7", "contexts": (65_536,)}
    old, new = row("llama-3.1-8b", "h100", **asked), row("llama-3.1-8b", "h100")
    assert (old["max_batched_tokens"], old["max_num_seqs"]) == (2048, 256)
    assert (new["max_batched_tokens"], new["max_num_seqs"]) == (8192, 1024)
    ideal = [
        row("llama-3.1-8b", "h100", "ideal", **(asked | {"version": one}))
        for one in ("0.7", "0.32")
    ]
    assert ideal[0] == ideal[1]


def test_notes_on_what_vllm_does_otherwise(kvtool: Kvtool) -> None:
    def notes(*words: str) -> str:
        return " ".join(kvtool("plan", *words, "--engine", "vllm", "--json").json["notes"])

    least, states = "the rank with the least", "caches prefixes of models with states"
    given = ("--kv-memory", "20GiB")
    assert least in notes("llama-3-8b", "--gpu", "h100:2", *given)
    assert least not in notes("llama-3-8b", "--gpu", "h100", *given)
    assert least not in notes("llama-3-8b", "--gpu", "h100:2")
    hybrid = ("qwen3.5-9b", "--gpu", "h100")
    assert states in notes(*hybrid)
    assert states not in notes(*hybrid, "--no-prefix-caching")
    assert states not in notes(*hybrid, "--engine-version", "0.11")
    assert states not in notes("llama-3-8b", "--gpu", "h100")


def test_what_vllm_keeps_besides_can_be_made_less(kvtool: Kvtool) -> None:
    """gpt-oss-120b on one H100: 1,024 requests at a time take a sampler of gigabytes."""
    words = ("plan", "gpt-oss-120b", "--gpu", "h100", "-c", "32k", "--engine", "vllm")
    ran = kvtool(*words, "--json")
    ways = {one["flags"]: one for one in ran.json["rows"][0]["alternatives"]}
    fewer = ways["--max-num-seqs 64"]
    assert fewer["fits"]
    assert fewer["whole_requests"]["low"] >= 1
    assert kvtool(*words, "--max-num-seqs", "64").code == 0
    assert ways["--max-num-seqs 64 --enforce-eager"]["max_concurrency"] > fewer["max_concurrency"]
    assert "*: by the best estimate" in kvtool(*words).out
    full = kvtool("plan", "llama-3-70b", "--gpu", "h100", "--engine", "vllm", "--json")
    assert "--max-num-seqs" not in str(full.json["rows"][0]["alternatives"])


def test_what_is_assumed_of_the_engine_is_said(kvtool: Kvtool) -> None:
    def notes(*words: str) -> str:
        return " ".join(
            kvtool("plan", "llama-3-8b", "--gpu", "h100", "--json", *words).json["notes"]
        )

    assert "--engine vllm" in notes()
    assert "follows its 0.32" in notes("--engine", "vllm")
    assert "follows its" not in notes("--engine", "vllm", "--engine-version", "0.25")


def test_gpus_written_the_other_way_round(kvtool: Kvtool) -> None:
    ran = kvtool("plan", "llama-3-8b", "--gpu", "2xL40S")
    assert ran.err.splitlines()[-1] == "Hint: write --gpu L40S:2"


def test_a_title_names_the_gpu_of_all_rows(kvtool: Kvtool) -> None:
    shown = kvtool("plan", "llama-3-8b", "--gpu", "h100,h100:2", "-q").out
    assert shown.splitlines()[0].startswith("llama-3-8b on h100-sxm")


def test_a_grid_that_ends_early_keeps_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    assert isinstance(interrupted(path, {}), KeyboardInterrupt)
    assert isinstance(interrupted(None, {}), KeyboardInterrupt)


def test_a_grid_ended_after_its_rows_says_where_they_are(kvtool: Kvtool, tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    assert kvtool("plan", "llama-3-8b", "--gpu", "h100", "-c", "4k,8k", "-o", str(path)).code == 0
    error = interrupted(path, {})
    assert isinstance(error, KvtoolError)
    assert (error.exit_code, str(path) in error.message) == (130, True)


# -- lists


def test_a_list_of_which_a_part_fails_ends_with_1(kvtool: Kvtool) -> None:
    ran = kvtool("plan", "llama-3-70b", "--gpu", "h100:4,h200:2", "--tp", "4", "--json")
    assert (ran.code, len(ran.json["rows"])) == (1, 1)
    assert kvtool("plan", "llama-3-70b", "--gpu", "h200:2", "--tp", "4").code == 2


def test_large_numbers_are_whole(kvtool: Kvtool) -> None:
    shown = kvtool("plan", "mamba2-2.7b", "--gpu", "h200:8").out
    assert "e+0" not in shown
    gained = kvtool("plan", "falcon-7b", "--gpu", "rtx-pro-6000:16", "--levers")
    assert "e+0" not in gained.out


def test_a_package_in_a_list_is_refused_too() -> None:
    with pytest.raises(KvtoolError, match="two devices to software"):
        gpus_named("h100,mi250x")

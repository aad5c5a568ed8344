"""`kvtool bench` as it is typed: the contract of its rows, its files, and everything that goes wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_bench_npz import arrays

from kvtool.cli import bench_attention_run, bench_decode_run, bench_run
from kvtool.cli.bench_emit import Measured, wrong
from kvtool.errors import KvtoolError

pytest.importorskip("torch")
Kvtool = Callable[..., Any]

SMALL = ("bench", "attention", "-b", "2", "-c", "40", "--query-heads", "4", "--kv-heads", "2",
         "--head-dim", "64", "--budget", "0.1s", "--device", "cpu")  # fmt: skip
CONTRACT = {
    "provider", "device", "batch", "context_tokens", "query_heads", "kv_heads", "head_dim",
    "block_size", "pattern", "kv_dtype", "layout", "num_splits", "threads", "time_s_min",
    "time_s_p10", "time_s_p50", "time_s_p90", "cpu_time_s_p50", "samples", "bytes_useful",
    "bytes_moved", "gb_per_s", "read_roof_gb_per_s", "copy_roof_gb_per_s", "read_fraction",
    "copy_fraction", "overhead", "overhead_ci", "max_abs_error", "tolerance", "correct", "registers",
    "spills", "shared_bytes",
}  # fmt: skip
DECODE_CONTRACT = {
    "model", "cache", "device", "batch", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s_p50",
    "tpot_s_p99", "output_tokens_per_s", "kv_reserved_bytes", "kv_used_bytes", "peak_bytes", "mbu",
    "same_tokens", "predicted_gain", "measured_gain",
}  # fmt: skip
CONFIG = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_a_run_on_a_cpu_has_the_rows_of_the_contract(kvtool: Kvtool) -> None:
    ran = kvtool(*SMALL, "--block-size", "1,16", "--json")
    assert ran.code == 0, ran.err
    rows = ran.json["rows"]
    names = ["paged", "contiguous", "sdpa", "gather-sdpa"]
    assert [row["provider"] for row in rows] == names * 2
    for row in rows:
        assert set(row) >= CONTRACT
        assert row["device"] == "cpu"
        assert row["correct"] is True
        assert row["cpu_time_s_p50"] > 0
    assert {row["block_size"] for row in rows} == {1, 16}
    assert ran.json["command"] == "bench attention"
    env = ran.json["env"]
    assert env["torch"]
    assert env["device_name"]
    assert env["threads"] == 1
    notes = " ".join(ran.json["notes"])
    for name in ("flashinfer", "flash-attn", "vllm"):
        assert f"{name} has no row" in notes


def test_without_a_gpu_it_says_that_it_measures_the_cpu(kvtool: Kvtool) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    asked = tuple(word for word in SMALL if word not in ("--device", "cpu"))
    ran = kvtool(*asked, "--provider", "sdpa")
    assert ran.code == 0
    assert "no GPU here: this measures the CPU backend" in ran.err
    ran = kvtool(*asked, "--device", "cuda")
    assert ran.code == 1
    assert "torch sees no GPU" in ran.err
    assert ran.out == ""


TIMED = ("time_s", "gb_per_s", "fraction", "overhead", "samples", "peak_flop", "roof")


def test_the_same_seed_gives_the_same_rows_but_for_timings(kvtool: Kvtool) -> None:
    def untimed(*more: str) -> list[dict[str, Any]]:
        rows = kvtool(*SMALL, "--pattern", "fragmented", "--json", *more).json["rows"]
        return [{k: v for k, v in row.items() if not any(w in k for w in TIMED)} for row in rows]

    assert untimed() == untimed("--seed", "0")
    assert untimed() != untimed("--seed", "1")


def test_the_table_says_what_paging_costs_and_where_the_roof_is(kvtool: Kvtool) -> None:
    ran = kvtool(*SMALL)
    assert ran.code == 0
    assert "of read roof" in ran.out
    assert "he place of the blocks" in ran.out
    assert "Arithmetic intensity 1.0 FLOP a byte" in ran.out  # 2 query heads a KV head, fp32
    assert "bound by memory" in ran.out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--block-size", "0"), "powers of two from 1 to 256"),
        (("--block-size", "24"), "powers of two from 1 to 256"),
        (("--block-size", "512"), "powers of two from 1 to 256"),
        (("--head-dim", "72"), "--head-dim 72"),
        (("--query-heads", "5"), "no multiple"),
        (("--batch", "0"), "--batch"),
        (("--context", "x"), "--context"),
        (("--kv-dtype", "fp8"), "--kv-dtype"),
        (("--pattern", "random"), "--pattern"),
        (("--provider", "pagd"), "Did you mean paged"),
        (("--device", "tpu"), "--device"),
        (("--budget", "soon"), "--budget"),
        (("--budget", "0s"), "--budget"),
        (("--skew", "3"), "--skew 3"),
        (("--threads", "0"), "--threads"),
        (("--dump-output", "x.npy"), ".npz"),
        (("--dump-output", "x.npz", "--batch", "1,2"), "one case"),
        (("--model", "llama-3-8b"), "contradict"),
    ],
)
def test_wrong_words_are_usage_errors_before_anything_is_run(
    kvtool: Kvtool, more: tuple[str, ...], said: str
) -> None:
    ran = kvtool(*SMALL, *more)
    assert ran.code == 2, ran.err
    assert said in ran.err
    assert len(ran.err.strip().splitlines()) == 2
    assert ran.out == ""


def test_a_model_gives_the_heads(kvtool: Kvtool) -> None:
    asked = ("bench", "attention", "--dry-run", "--device", "cpu", "--json", "--model")
    row = kvtool(*asked, "llama-3-8b").json["rows"][0]
    assert (row["query_heads"], row["kv_heads"], row["head_dim"]) == (32, 8, 128)
    ran = kvtool(*asked, "deepseek-v3")
    assert ran.code == 1
    assert "latent caches have no kernel here yet" in ran.err


def test_a_dry_run_lists_cases_memory_and_time(kvtool: Kvtool) -> None:
    ran = kvtool("bench", "attention", "--dry-run", "-c", "1k,4k", "--device", "cpu", "--json")
    assert ran.code == 0
    rows = ran.json["rows"]
    assert [(row["batch"], row["context_tokens"]) for row in rows] == [
        (1, 1024), (1, 4096), (8, 1024), (8, 4096),
    ]  # fmt: skip
    assert all(row["memory_bytes"] > row["bytes_useful"] for row in rows)
    assert all(row["expected_s"] > 0 for row in rows)
    assert "by estimate" in kvtool("bench", "attention", "--dry-run", "--device", "cpu").out


def test_a_picture_has_bandwidth_and_the_roofline(kvtool: Kvtool, tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    ran = kvtool(*SMALL, "--block-size", "1,16", "-o", str(path))
    assert ran.code == 0, ran.err
    text = path.read_text("utf-8")
    for words in ("Roofline", "read roof", "block size (tokens)", "FLOP a byte", "gather-sdpa"):
        assert words in text


def test_somebody_else_can_recompute_the_answer(kvtool: Kvtool, tmp_path: Path) -> None:
    dump, again = tmp_path / "dump.npz", tmp_path / "again.npz"
    ran = kvtool(*SMALL, "--pattern", "shuffled", "--dump-output", str(dump))
    assert ran.code == 0, ran.err
    with np.load(dump) as file:
        found = dict(file)
    q, size = found["q"].astype(np.float64), found["k_cache"].shape[1]
    for row, tokens in enumerate(found["lengths"]):
        at = np.arange(tokens)
        blocks = found["block_table"][row, at // size]
        k, v = (
            found[name][blocks, at % size].astype(np.float64) for name in ("k_cache", "v_cache")
        )
        for head in range(q.shape[1]):
            scores = k[:, head // 2] @ q[row, head] * float(found["scale"])
            weights = np.exp(scores - scores.max())
            out = weights / weights.sum() @ v[:, head // 2]
            for name in ("paged", "contiguous", "sdpa", "gather_sdpa"):
                assert np.abs(found[f"out_{name}"][row, head] - out).max() < 1e-5
            lse = np.log(weights.sum()) + scores.max()
            assert abs(found["lse_paged"][row, head] - lse) < 1e-5
    ran = kvtool(
        "bench", "attention", "--inputs", str(dump), "--dump-output", str(again), "--device", "cpu",
        "--budget", "0.1s", "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json["rows"][0]["pattern"] == "inputs"
    with np.load(again) as file:
        assert np.array_equal(file["out_paged"], found["out_paged"])


@pytest.mark.parametrize("more", [("-b", "7"), ("--kv-dtype", "fp16"), ("--skew", "2")])
def test_what_a_file_says_is_not_asked_twice(
    kvtool: Kvtool, tmp_path: Path, more: tuple[str, str]
) -> None:
    np.savez(tmp_path / "in.npz", **arrays())
    ran = kvtool("bench", "attention", "--inputs", str(tmp_path / "in.npz"), *more)
    assert ran.code == 2
    assert "and --inputs contradict each other" in ran.err


def test_inputs_are_never_written_over(kvtool: Kvtool, tmp_path: Path) -> None:
    path, link = tmp_path / "in.npz", tmp_path / "link.json"
    np.savez(path, **arrays())
    link.symlink_to(path)
    before = path.read_bytes()
    for more in (("--dump-output", path), ("-o", link)):
        ran = kvtool("bench", "attention", "--inputs", path, "--device", "cpu", *more)
        assert ran.code == 2, more
        assert "a file that is read" in ran.err
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_inputs_without_an_answer_are_not_blamed_on_kernels(
    kvtool: Kvtool, tmp_path: Path, name: str, value: float
) -> None:
    given = arrays()
    given[name].flat[::3] = value
    np.savez(tmp_path / "in.npz", **given)
    ran = kvtool(
        "bench", "attention", "--inputs", str(tmp_path / "in.npz"), "--device", "cpu", "--json"
    )
    assert ran.code == 1
    assert ran.json["error"]["code"] == "bad_inputs", ran.err


@pytest.mark.parametrize("factor", [0.0, 1e-4, 1e-30, 1e4])
def test_the_size_of_v_decides_no_verdict(kvtool: Kvtool, tmp_path: Path, factor: float) -> None:
    given = arrays()
    given["v_cache"] = given["v_cache"] * np.float32(factor)
    np.savez(tmp_path / "in.npz", **given)
    ran = kvtool(
        "bench", "attention", "--inputs", str(tmp_path / "in.npz"), "--device", "cpu", "--budget",
        "0.1s",
    )  # fmt: skip
    assert ran.code == 0, ran.err


def test_blocks_that_no_sequence_uses_take_no_memory_and_ids_beyond_a_length_do_nothing(
    kvtool: Kvtool, tmp_path: Path
) -> None:
    many = np.zeros((20_000, 16, 2, 64), np.float32)
    given = arrays(k_cache=many, v_cache=many, lengths=np.array([1, 1]))
    given["block_table"][:, 1:] = 2**40
    np.savez_compressed(tmp_path / "in.npz", **given)
    ran = kvtool(
        "bench", "attention", "--inputs", str(tmp_path / "in.npz"), "--device", "cpu", "--json",
        "--budget", "0.1s",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert [row["provider"] for row in ran.json["rows"]] == [
        "paged", "contiguous", "sdpa", "gather-sdpa",
    ]  # fmt: skip


def test_what_has_no_end_is_not_read(kvtool: Kvtool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    for path in ("/dev/zero", str(tmp_path / "pipe.npz"), str(tmp_path)):
        ran = kvtool("bench", "attention", "--inputs", path, "--device", "cpu")
        assert ran.code == 1
        assert "not a file" in ran.err


def test_inputs_that_are_none_are_an_error(kvtool: Kvtool, tmp_path: Path) -> None:
    ran = kvtool("bench", "attention", "--inputs", str(tmp_path / "absent.npz"), "--device", "cpu")
    assert ran.code == 1
    assert "--inputs" in ran.err


def _second_case_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    real, calls = bench_attention_run.measure_case, []

    def measure(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(bench_attention_run, "measure_case", measure)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted after 1 of 2 cases"),
        (MemoryError(), 1, "are needed"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            1,
            "are needed",
        ),
        (RuntimeError("an illegal\nmemory access"), 1, "RuntimeError: an illegal memory access"),
    ],
)
def test_what_ends_a_run_keeps_the_cases_before_it(
    kvtool: Kvtool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    _second_case_raises(monkeypatch, error)
    path = tmp_path / "run.json"
    ran = kvtool(*SMALL, "--block-size", "1,16", "--json", "-o", str(path))
    assert ran.code == code
    assert said in ran.json["error"]["message"]
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert [row["block_size"] for row in ran.json["rows"]] == [1] * 4
    assert len(json.loads(path.read_text("utf-8"))["rows"]) == 4


def test_a_case_too_large_for_the_memory_is_refused_and_the_others_are_kept(kvtool: Kvtool) -> None:
    ran = kvtool(*SMALL, "--context", "40,1m", "--batch", "4096", "--json", "--provider", "sdpa")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "out_of_memory"
    assert len(ran.json["rows"]) == 1


def test_a_missing_extra_says_how_to_get_it(
    kvtool: Kvtool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for command in ("attention", "decode"):
        ran = kvtool("bench", command)
        assert ran.code == 1
        assert "pip install 'kvtool[bench]'" in ran.err


def test_a_wrong_result_fails_the_run_and_keeps_its_row() -> None:
    right = {"correct": True}
    row = {
        "correct": False, "provider": "paged", "error_share": 7.04, "max_lse_error": 0.0, "batch": 1,
        "context_tokens": 10, "block_size": 16,
    }  # fmt: skip
    assert wrong([right]) is None
    error = wrong([right, row])
    assert error is not None
    assert "paged is wrong: it is off by 7.0 times what rounding allows" in error.message
    assert error.exit_code == 1
    error = wrong([{"same_tokens": False, "cache": "paged"}])
    assert error is not None
    assert "other tokens" in error.message


def test_decode_has_the_rows_of_the_contract(kvtool: Kvtool, tiny: Path) -> None:
    ran = kvtool(
        "bench", "decode", "--model", str(tiny), "--prompt-tokens", "20", "--output-tokens", "8",
        "--batch", "1,2", "--num-requests", "4", "--n", "2", "--device", "cpu", "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    rows = ran.json["rows"]
    assert all(set(row) >= DECODE_CONTRACT for row in rows)
    assert all(row["same_tokens"] is True for row in rows)
    uniform = [(row["cache"], row["batch"]) for row in rows if row["run"] == "uniform"]
    caches = ("dynamic", "none", "static", "contiguous", "paged", "continuous")
    assert uniform == [
        *((cache, 1) for cache in caches),
        *((cache, 2) for cache in caches if cache != "none"),
    ]
    ragged = [row for row in rows if row["run"] == "ragged"]
    assert [row["cache"] for row in ragged] == ["contiguous-max", "paged"]
    assert ragged[1]["shared_blocks"] > 0
    ran = kvtool(
        "bench", "decode", "--model", str(tiny), "--prompt-tokens", "20", "--output-tokens", "4",
        "--batch", "1", "--cache", "none,paged", "--device", "cpu", "--num-requests", "4",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    for words in ("TTFT", "same tokens", "bytes allow", "paging runs", "bytes that a step reads"):
        assert words in ran.out


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--cache", "pagd"), 2, "Did you mean paged"),
        (("--block-size", "24"), 2, "powers of two"),
        (("--output-tokens", "1"), 2, "output of 2"),
        (("--max-model-len", "10"), 2, "--max-model-len"),
        (("--layers", "3"), 2, "2 layers"),
        (("--kv-memory", "10KiB"), 1, "--kv-memory"),
        (("--kv-memory", "10"), 2, "--kv-memory"),
        (("--model", "deepseek-v3"), 1, "cannot be run"),
        (("--model", "no-such-model"), 1, "no-such-model"),
    ],
)
def test_what_decode_cannot_run_is_refused(
    kvtool: Kvtool, tiny: Path, more: tuple[str, ...], code: int, said: str
) -> None:
    ran = kvtool(
        "bench", "decode", "--model", str(tiny), "--prompt-tokens", "20", "--output-tokens", "8",
        "--device", "cpu", "--cache", "paged", "--batch", "1", *more,
    )  # fmt: skip
    assert ran.code == code, ran.err
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_decode_refuses_beforehand_what_only_its_last_part_would_meet(
    kvtool: Kvtool, tiny: Path
) -> None:
    asked = ("bench", "decode", "--model", str(tiny), "--device", "cpu", "--json")
    ran = kvtool(*asked, "--kv-memory", "10KiB")
    assert (ran.code, ran.json["rows"]) == (1, [])
    many = ("--batch", "1..100", "--prompt-tokens", "1..100", "--output-tokens", "2..100")
    ran = kvtool(*asked, *many)
    assert ran.code == 2
    assert "rows are too many" in ran.err


def test_a_model_whose_logits_are_no_numbers_is_refused(kvtool: Kvtool, tmp_path: Path) -> None:
    path = tmp_path / "nan.json"
    path.write_text(json.dumps(CONFIG | {"rms_norm_eps": float("nan")}))
    ran = kvtool("bench", "decode", "--model", str(path), "--device", "cpu", "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "not_runnable"
    assert "its logits are no numbers" in ran.err


def test_providers_that_are_not_here_measure_nothing(kvtool: Kvtool) -> None:
    ran = kvtool(*SMALL, "--provider", "flashinfer,vllm", "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "no_provider"
    assert len(ran.json["notes"]) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), KvtoolError("full", "less")])
def test_what_ends_decode_keeps_the_rows_before_it(error: BaseException) -> None:
    def rows() -> Any:
        yield {"cache": "dynamic"}
        raise error

    found = bench_decode_run._collected(rows)
    assert found.rows == [{"bench": "decode", "cache": "dynamic"}]
    assert found.failed is not None
    assert found.failed.exit_code == (130 if isinstance(error, KeyboardInterrupt) else 1)


def test_bench_alone_runs_both_with_their_defaults(
    kvtool: Kvtool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def cases(listed: Any, device: Any, given: Any, *more: Any) -> Measured:
        asked["attention"] = (listed, given)
        return Measured()

    def models(given: Any, device: Any, out: Any) -> tuple[Measured, list[str]]:
        asked["decode"] = given
        return Measured(), []

    monkeypatch.setattr(bench_run, "measure_cases", cases)
    monkeypatch.setattr(bench_run, "measure_decode", models)
    for words in (("--block-size", "64"), ("all", "--block-size", "64")):
        asked.clear()
        ran = kvtool("bench", *words, "--device", "cpu", "--json")
        assert ran.code == 0, ran.err
        listed, _ = asked["attention"]
        assert [(case.batch, case.block_size) for case in listed] == [(1, 64), (8, 64)]
        assert asked["decode"]["block_size"] == "64"
        assert asked["decode"]["cache"] == "none,dynamic,static,contiguous,paged,continuous"
        assert ran.json["command"] == "bench"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), KvtoolError("no transformers", "get it")])
def test_what_ends_decode_keeps_the_rows_of_attention(
    kvtool: Kvtool, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def models(*arguments: Any) -> Any:
        raise error

    small = [Measured(rows=kvtool(*SMALL, "--json").json["rows"])]
    monkeypatch.setattr(bench_run, "measure_cases", lambda *arguments: small[0])
    monkeypatch.setattr(bench_run, "measure_decode", models)
    ran = kvtool("bench", "--device", "cpu", "--json")
    assert ran.code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert len(ran.json["rows"]) == 4
    assert ran.json["error"]


def test_all_takes_one_value_of_what_both_benchmarks_have(kvtool: Kvtool) -> None:
    for option, typed in (("--kv-dtype", "fp32,bf16"), ("--threads", "1,1")):
        ran = kvtool("bench", "--device", "cpu", option, typed)
        assert ran.code == 2
        assert f"{option} takes one value here" in ran.err


def test_an_error_names_the_command_of_the_group(kvtool: Kvtool) -> None:
    assert kvtool("bench", "attention", "--block-size", "0", "--json").json["command"] == (
        "bench attention"
    )
    assert kvtool("bench", "--block-size", "0", "--json").json["command"] == "bench"


def test_help_names_the_commands_and_the_options_of_all(kvtool: Kvtool) -> None:
    ran = kvtool("bench", "--help")
    assert ran.code == 0
    for words in ("attention", "decode", "all", "Without a command"):
        assert words in ran.out
    assert "--block-size" in kvtool("bench", "all", "--help").out
    ran = kvtool("bench", "atention")
    assert ran.code == 2
    assert "attention" in ran.err

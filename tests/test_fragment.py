"""`kvtool fragment` from the command line: its rows add up, its words are understood, nothing is lost."""

from __future__ import annotations

import contextlib
import gzip
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtool.run import Run
from kvtool.view.fragment import BAR_WIDTH, bar, view

SHARES = ("token", "reserved", "internal", "padding", "external", "idle")
ALLOCATORS = ["paged", "max", "pow2", "oracle", "grow", "static-batch"]
PAPER = {"max": 20.4, "pow2": 26.8, "oracle": 38.2, "paged": 96.3}
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""


@pytest.fixture
def rows(kvtool: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    """The rows of `kvtool fragment …`."""

    def run(*argv: str, code: int = 0) -> list[dict[str, Any]]:
        ran = kvtool("fragment", *argv, "--json")
        assert ran.code == code, ran.err
        found: list[dict[str, Any]] = ran.json["rows"]
        return found

    return run


def test_every_allocator_has_a_row_and_its_shares_add_up(rows: Callable[..., Any]) -> None:
    found = rows("--dist", "zipf", "--num-requests", "2000")
    assert [row["allocator"] for row in found] == ALLOCATORS
    for row in found:
        assert sum(row[f"{share}_share"] for share in SHARES) == pytest.approx(1, abs=1e-12)
        assert row["completed"] + row["rejected"] == row["requests"] == 2000
        assert 0 < row["mean_batch"] <= row["peak_batch"] <= row["max_num_seqs"]
        assert row["measured_steps"] < row["steps"]
    paged, most, *_ = found
    assert paged["num_blocks"] * paged["block_size"] == paged["pool_tokens"] == 15_728
    assert paged["token_share"] > 3 * most["token_share"]
    assert most["mean_batch"] == 7  # 15,728 // 2,048
    assert {row["placement"] for row in found} == {None, "buddy"}


def test_the_paper_s_figure_2(rows: Callable[..., Any]) -> None:
    names = ",".join(PAPER)
    found = rows("--workload", "vllm-paper", "--allocator", names, "--num-requests", "20000")
    for row in found:
        assert abs(100 * row["token_share"] - PAPER[row["allocator"]]) < 3


def test_the_same_seed_gives_the_same_rows_and_another_does_not(rows: Callable[..., Any]) -> None:
    argv = ("--workload", "chat", "--num-requests", "500", "--allocator", "paged,grow")
    first = rows(*argv)
    assert first == rows(*argv)
    assert first != rows(*argv, "--seed", "1")


def test_lists_sweep_in_the_order_given(rows: Callable[..., Any]) -> None:
    found = rows(
        "--allocator", "paged,max", "--placement", "buddy,best-fit", "--block-size", "1..16*4",
        "--rate", "saturated,4", "--num-requests", "200",
    )  # fmt: skip
    paged = [(r["rate"], r["block_size"]) for r in found if r["allocator"] == "paged"]
    assert sorted(paged) == [(rate, size) for rate in ("4", "saturated") for size in (1, 4, 16)]
    others = [(r["rate"], r["placement"]) for r in found if r["allocator"] == "max"]
    # Blocks mean nothing to a contiguous allocator: it runs once for each pool.
    assert sorted(others) == [(r, p) for r in ("4", "saturated") for p in ("best-fit", "buddy")]


def test_larger_blocks_waste_more_in_their_tails(rows: Callable[..., Any]) -> None:
    found = rows("--allocator", "paged", "--block-size", "1..256*4", "--num-requests", "2000")
    waste = [row["reserved_share"] + row["internal_share"] for row in found]
    assert waste[0] == 0
    assert waste == sorted(waste)


@pytest.mark.parametrize(
    ("argv", "tokens"),
    [
        (("--num-blocks", "100"), 1600),
        (("--num-blocks", "100", "--block-size", "32"), 3200),
        (("--pool-tokens", "8k"), 8192),
        (("--model", "llama-3-8b", "--kv-memory", "1GiB"), 8192),  # 131,072 bytes a token
        (("--model", "opt-13b", "--kv-memory", "12GiB", "--dtype", "fp16"), 15728),
        (("--model", "llama-3-8b", "--kv-memory", "1GiB", "--tp", "8"), 65536),
        (("--max-model-len", "8k"), 65536),  # no pool given: room for eight of the longest
    ],
)
def test_the_pool(rows: Callable[..., Any], argv: tuple[str, ...], tokens: int) -> None:
    (row,) = rows(*argv, "--allocator", "paged", "--num-requests", "50")
    assert row["pool_tokens"] == tokens


def test_forks_save_blocks_and_more_samples_save_more(rows: Callable[..., Any]) -> None:
    found = rows("--allocator", "paged,oracle", "--n", "1,2,4", "--num-requests", "150")
    saved = [row["saved_share"] for row in found if row["allocator"] == "paged"]
    assert saved[0] == 0 < saved[1] < saved[2]
    for row in found:
        assert sum(row[f"{share}_share"] for share in SHARES) == pytest.approx(1, abs=1e-12)
        if row["allocator"] == "oracle":
            assert row["requests"] == 150 * row["n"]
            assert row["saved_share"] == row["copied_blocks"] == row["shared_blocks"] == 0
        elif row["n"] > 1:
            assert row["copied_blocks"] > 0 < row["shared_blocks"]


def test_a_shared_system_prompt_is_cached_once(rows: Callable[..., Any]) -> None:
    found = rows("--allocator", "paged", "--shared-prefix", "0,512", "--num-requests", "150")
    assert [row["saved_share"] > 0.3 for row in found] == [False, True]


def test_swapping_recomputes_less(rows: Callable[..., Any]) -> None:
    argv = ("--allocator", "paged", "--num-requests", "1000")
    (recompute,) = rows(*argv)
    (swap,) = rows(*argv, "--preemption", "swap", "--cpu-blocks", "100k")
    assert recompute["preemptions"] > 0 < recompute["recomputed_tokens"]
    assert recompute["swapped_blocks"] == swap["recomputed_tokens"] == 0
    assert swap["swapped_blocks"] > 0


def test_a_trace_from_a_file_gzipped_and_from_standard_input(
    rows: Callable[..., Any], tmp_path: Path
) -> None:
    plain, packed = tmp_path / "trace.csv", tmp_path / "trace.csv.gz"
    plain.write_text(AZURE)
    packed.write_bytes(gzip.compress(AZURE.encode()))
    (row,) = rows("--trace", str(plain), "--allocator", "paged", "--rate", "trace")
    assert (row["workload"], row["requests"], row["completed"]) == ("trace.csv", 3, 3)
    assert row["max_model_len"] == 2048
    assert row["end_s"] > 4.5  # the last request arrives then
    (zipped,) = rows("--trace", str(packed), "--allocator", "paged", "--rate", "trace")
    assert {**zipped, "workload": ""} == {**row, "workload": ""}
    done = subprocess.run(
        [sys.executable, "-m", "kvtool", "fragment", "--trace", "-", "--json", "--rate", "trace",
         "--allocator", "paged"],
        input=AZURE.encode(), capture_output=True, check=True,
    )  # fmt: skip
    (piped,) = json.loads(done.stdout)["rows"]
    assert {**piped, "workload": ""} == {**row, "workload": ""}


def test_what_is_rejected_is_counted_and_said(kvtool: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n10,5\n5000,5\n10,4000\n1000000000,1\n")
    argv = ("--trace", str(path), "--max-model-len", "4096", "--pool-tokens", "1024")
    ran = kvtool("fragment", *argv, "--allocator", "paged,oracle,max", "--json")
    paged, oracle, most = ran.json["rows"]
    assert (paged["prompt_too_long"], paged["larger_than_pool"], paged["completed"]) == (2, 1, 1)
    assert (oracle["prompt_too_long"], oracle["larger_than_pool"]) == (2, 1)
    assert (most["completed"], most["larger_than_pool"]) == (0, 2)  # 4,096 slots never fit
    text = kvtool("fragment", *argv, "--allocator", "paged").out
    assert "2 requests rejected, because the prompt leaves no room below max_model_len" in text
    assert "1 request rejected, because the whole pool (1,024 tokens) does not hold" in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--dist", "zipff"), "zipf"),
        (("--allocator", "padded"), "paged"),
        (("--placement", "bestfit"), "best-fit"),
        (("--workload", "chatt"), "chat"),
        (("--rate", "fast"), "--rate"),
        (("--rate", "0"), "--rate"),
        (("--rate", "trace"), "--trace"),
        (("--num-requests", "0"), "--num-requests"),
        (("--num-blocks", "10", "--pool-tokens", "10"), "leave out"),
        (("--kv-memory", "1GiB"), "--model"),
        (("--pool-tokens", "8", "--block-size", "16"), "block"),
        (("--preemption", "swap"), "--cpu-blocks"),
        (("--preemption", "drop"), "recompute"),
        (("--preemption", "swap", "--cpu-blocks", "10", "--n", "2"), "--n"),
        (("--num-blocks", "1024m", "--block-size", "65536"), "2^40"),
        (("--n", "300"), "--max-num-seqs"),
        (("--shared-prefix", "100k"), "--shared-prefix"),
        (("--trace", "x.csv", "--workload", "chat"), "leave out"),
        (("--prompt-mean", "5000"), "mean"),
        (("--n", "0"), "--n"),
        (("--block-size", "1..1000", "--rate", "1,2"), "rows"),
        (("--step-time", "base=1"), "base_ns"),
    ],
)
def test_usage_errors_are_two_lines(
    kvtool: Callable[..., Any], argv: tuple[str, ...], says: str
) -> None:
    ran = kvtool("fragment", *argv)
    assert ran.code == 2, ran.err
    assert ran.out == ""
    errors = [line for line in ran.err.splitlines() if not line.startswith("Note:")]
    assert [line.split(":")[0] for line in errors] == ["Error", "Hint"]
    assert says in ran.err


def test_a_file_that_is_read_is_not_written_over(
    kvtool: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "lens.csv"
    path.write_text("100,200\n300,400\n")
    ran = kvtool("fragment", "--output-dist", f"empirical:{path}", "-o", str(path))
    assert ran.code == 2
    assert path.read_text() == "100,200\n300,400\n"


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_numbers_that_are_none_are_refused_in_json_too(
    kvtool: Callable[..., Any], number: str
) -> None:
    ran = kvtool("fragment", "--prompt-mean", number, "--json")
    assert ran.code == 2
    assert ran.json["params"]["prompt_mean"] == number


def test_a_row_for_each_pool_though_blocks_make_them_alike(rows: Callable[..., Any]) -> None:
    found = rows("--num-requests", "50", "--pool-tokens", "16000,16001", "--allocator", "paged")
    assert [row["num_blocks"] for row in found] == [1000, 1000]


def test_a_model_whose_tokens_differ_is_refused(kvtool: Callable[..., Any]) -> None:
    ran = kvtool("fragment", "--model", "gemma-3-27b", "--kv-memory", "10GiB")
    assert ran.code == 1
    assert "sliding" in ran.err
    assert "--pool-tokens" in ran.err


def test_pictures(kvtool: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "waste.svg"
    ran = kvtool("fragment", "--num-requests", "300", "-o", str(path))
    assert ran.code == 0, ran.err
    drawn = path.read_text()
    for name in ("paged", "max, buddy", "static-batch", "over time", "a colour a request"):
        assert name in drawn
    first = path.read_bytes()
    kvtool("fragment", "--num-requests", "300", "-o", str(path))
    assert path.read_bytes() == first


def test_a_picture_of_many_rows_has_bars_alone(kvtool: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "waste.svg"
    argv = ("--num-requests", "20", "--allocator", "paged", "-o", str(path))
    assert kvtool("fragment", *argv, "--block-size", "1..20").code == 0
    assert "over time" not in path.read_text()
    ran = kvtool("fragment", *argv, "--block-size", "1..200")
    assert ran.code == 2
    assert "200 rows" in ran.err


def _interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it printed. One that comes while a library loads may be lost there, as a person's would be: again."""
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=20)
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=20)


def test_an_interrupted_run_prints_what_is_done(rows: Callable[..., Any]) -> None:
    rows("--num-requests", "10")  # so that nothing is left to compile
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtool", "fragment", "--num-requests", "100000000", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(6)  # of a run that takes a minute
    out, err = _interrupted(process)
    assert process.returncode == 130, err
    run = json.loads(out)
    assert run["error"]["code"] == "interrupted"
    assert run["rows"][-1]["interrupted"] is True
    assert 0 < run["rows"][-1]["completed"] < 100_000_000
    assert "Error: interrupted in row 1 of 6" in err


def test_the_bar_has_one_length_and_shows_each_share(rows: Callable[..., Any]) -> None:
    for row in rows("--num-requests", "500"):
        assert len(bar(row)) == BAR_WIDTH
        assert bar(row).count("█") == pytest.approx(row["token_share"] * BAR_WIDTH, abs=1)


def test_the_verdict_compares_rows_of_one_pool(rows: Callable[..., Any]) -> None:
    found = rows(
        "--num-requests", "1000", "--pool-tokens", "8k,64k", "--allocator", "paged,max",
    )  # fmt: skip
    said = view(Run(command="fragment", params={}, rows=tuple(found))).sentences
    for paged, most in (found[:2], found[2:]):
        assert paged["pool_tokens"] == most["pool_tokens"]
        ratio = paged["mean_batch"] / most["mean_batch"]
        (line,) = [one for one in said if f"pool tokens {paged['pool_tokens']:,}:" in one]
        assert f"{ratio:.1f}x the batch" in line


def test_rows_can_be_told_apart(rows: Callable[..., Any]) -> None:
    found = rows(
        "--num-requests", "100", "--pool-tokens", "8k,64k", "--allocator", "paged", "--n", "1,2",
    )  # fmt: skip
    table, *_ = view(Run(command="fragment", params={}, rows=tuple(found))).tables
    assert "pool tokens" in table.columns
    keys = [(row[0], row[1], row[2]) for row in table.rows]
    assert len(set(keys)) == len(keys) == 4


def test_what_is_no_memory_is_said_to_bind(kvtool: Callable[..., Any]) -> None:
    ran = kvtool("fragment", "--max-num-seqs", "4", "--num-requests", "300", "--allocator", "paged")
    assert "--max-num-seqs 4 kept the next request out" in ran.out


def test_lists_of_preemption_and_swap_space(rows: Callable[..., Any]) -> None:
    found = rows(
        "--num-requests", "300", "--allocator", "paged,grow", "--preemption", "recompute,swap",
        "--cpu-blocks", "100,10k",
    )  # fmt: skip
    ways = [(r["preemption"], r["cpu_blocks"]) for r in found if r["allocator"] == "paged"]
    assert ways == [("recompute", 0), ("swap", 100), ("swap", 10240)]
    assert [r["preemption"] for r in found if r["allocator"] == "grow"] == ["recompute"]


def test_the_verdict_compares_paged_with_the_worst(rows: Callable[..., Any]) -> None:
    found = rows("--num-requests", "1000")
    said = view(Run(command="fragment", params={}, rows=tuple(found))).sentences
    ratio = found[0]["mean_batch"] / found[1]["mean_batch"]
    assert any(f"{ratio:.1f}x the batch" in one and "reserving the maximum" in one for one in said)

"""What `kvtool plan` says besides: real lengths, ways to split GPUs, prefill apart, tiers, pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ran import Ran

from kvtool.run import Run
from kvtool.units import GIB
from kvtool.view import Bars, Chart, Panels
from kvtool.view.plan import view

Kvtool = Callable[..., Ran]
LLAMA = ("plan", "llama-3-8b", "--gpu", "h100", "--engine", "vllm")


def row_of(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    (row,) = ran.json["rows"]
    return dict(row)


def test_real_lengths_in_place_of_one_context(kvtool: Kvtool) -> None:
    row = row_of(kvtool(*LLAMA, "--workload", "chat", "--num-requests", "2000", "--json"))
    lengths = row["lengths"]
    assert row["context_tokens"] == lengths["length_tokens_p99"]
    assert lengths["max_concurrency_p99"] == pytest.approx(row["max_concurrency"])
    assert (
        lengths["max_concurrency_p50"]
        > lengths["max_concurrency_p95"]
        > lengths["max_concurrency_p99"]
    )
    assert lengths["max_concurrency_running"] > lengths["max_concurrency_at_end"]
    assert row["sharing"] is None
    said = kvtool(*LLAMA, "--workload", "chat", "--num-requests", "2000", "-q").out
    assert "all at the p99 of" in said
    assert "run at a time" in said


def test_shared_prefixes_are_held_once(kvtool: Kvtool) -> None:
    words = ("--workload", "agent", "--num-requests", "400", "-c", "8k", "--json")
    sharing = row_of(kvtool("plan", "llama-3.1-8b", *LLAMA[2:], *words))["sharing"]
    assert sharing["max_concurrency_shared"] > 2 * sharing["max_concurrency_unshared"] > 0


def test_a_trace_has_lengths_too(kvtool: Kvtool, tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    lines = [f"{k},{100 + k % 50},{20 + k % 7}" for k in range(300)]
    file.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    ran = kvtool(*LLAMA, "--trace", str(file), "--json")
    if ran.code == 0:
        assert row_of(ran)["lengths"]["requests"] == 300
    else:  # the header is none that kvtool reads: it says which are
        assert len(ran.err.strip().splitlines()) == 2


def test_ways_to_split_gpus_best_first(kvtool: Kvtool) -> None:
    words = ("plan", "qwen3-30b-a3b", "--gpu", "h100:4", "--engine", "vllm", "--ways")
    row = row_of(kvtool(*words, "--json"))
    rates = [one["output_tokens_per_s"] or 0 for one in row["ways"] if one["fits"]]
    assert rates == sorted(rates, reverse=True)
    assert {(one["tp"], one["dp"]) for one in row["ways"]} >= {(4, 1), (2, 2), (1, 4)}
    assert all(one["gpus"] == 4 for one in row["ways"])
    assert "ways to split the GPUs" in kvtool(*words, "-q").out


def test_prefill_and_decode_apart(kvtool: Kvtool) -> None:
    words = ("--disaggregate", "prefill=h100:2,decode=h100:1", "--link", "400Gb", "--tp", "1")
    row = row_of(kvtool(*LLAMA, *words, "--prompt-tokens", "8k", "--output-tokens", "128", "--json",
                        "--allow-long"))  # fmt: skip
    apart = row["disaggregation"]
    assert apart["kv_bytes"] == 8192 * 131_072
    assert apart["transfer_s"] == pytest.approx(GIB * 8 / 400e9)
    assert (apart["prefill_gpus"], apart["decode_gpus"]) == (2, 1)


def test_tiers_below_the_gpu(kvtool: Kvtool) -> None:
    row = row_of(kvtool(*LLAMA, "--tiers", "cpu=64GiB@25GB/s,disk=1TiB@6GB/s", "--json"))
    cpu, disk = row["tiers"]
    assert (cpu["num_blocks"], cpu["requests"]) == (64 * GIB // (16 * 131_072), 64)
    assert cpu["load_s"] == pytest.approx(GIB / 25e9)
    assert disk["load_s"] == pytest.approx(GIB / 6e9)
    assert cpu["prefill_s"] > cpu["load_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workload", "chat", "--trace", "x.csv"), "two sets of requests"),
        (("--workload", "chatter"), "chatter"),
        (("--disaggregate", "prefill=h100"), "sends caches over a link"),
        (("--disaggregate", "prefill=h100", "--link", "400Gb"), "names prefill and decode"),
        (("--disaggregate", "h100:2", "--link", "400Gb"), "is no kind of its own"),
        (("--link", "400Gb"), "--link is of --disaggregate"),
        (("--tiers", "cpu=64GiB"), "is no tier"),
        (("--tiers", "cpu=64GiB@0GB/s"), "slower than 1 kB/s"),
        (("--trace", "none.jsonl"), "none.jsonl"),
    ],
)
def test_words_that_cannot_be_meant(kvtool: Kvtool, words: tuple[str, ...], message: str) -> None:
    ran = kvtool(*LLAMA, *words)
    assert ran.code in (1, 2)
    assert message in ran.err
    assert len(ran.err.strip().splitlines()) == 2


def test_pictures(kvtool: Kvtool, tmp_path: Path) -> None:
    words = ("plan", "gemma-3-27b", "--gpu", "h100,h200", "--engine", "vllm", "-q")
    curve = tuple(kvtool(*words, "-c", "1k..32k*2", "--json").json["rows"])
    drawn = view(Run(command="plan", params={}, rows=curve)).chart
    assert isinstance(drawn, Chart)
    assert [line.name for line in drawn.lines] == ["h100-sxm", "h200"]
    assert drawn.lines[1].y == tuple(sorted(drawn.lines[1].y, reverse=True))
    bars = tuple(kvtool(*words, "-c", "8k", "--json").json["rows"])
    stacked = view(Run(command="plan", params={}, rows=bars)).chart
    assert isinstance(stacked, Panels)
    (panel,) = stacked.panels
    assert isinstance(panel, Bars)
    assert {"weights", "activations", "KV cache: full attention", "KV cache: sliding"} <= set(
        panel.parts
    )
    for _, shares in panel.rows:
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0
    for suffix in ("png", "svg"):
        assert kvtool(*words, "-c", "8k", "-o", str(tmp_path / f"plan.{suffix}")).code == 0
        assert (tmp_path / f"plan.{suffix}").stat().st_size > 1000

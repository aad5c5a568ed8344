"""`kvtool bench decode`: every cache generates the same tokens, and what a row says is so."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_cases import (
    CONFIGS,
    LLAMA,
    TOKEN_BYTES,
    broken_kernels,
    case_of,
    decoder_of,
    tiny,
)

from kvtool.bench.decode import memory as decode_memory
from kvtool.bench.decode.growth import log_slope
from kvtool.bench.decode.kernels import Kernels, kernels_for
from kvtool.bench.decode.kv_store import KvStore
from kvtool.bench.decode.model import Decoder, prompts
from kvtool.bench.decode.sessions import Setting
from kvtool.bench.decode.settings import (
    CACHES,
    ROW,
    DecodeCase,
    DecodeRun,
    ModelChoice,
    Roofs,
    decode_cases,
)
from kvtool.bench.decode.trial import greedy_tokens
from kvtool.bench.decode.uniform import uniform_rows, uniform_steps
from kvtool.errors import KvtoolError

FP32 = ModelChoice()


@pytest.fixture(scope="module")
def decoders() -> dict[str, Decoder]:
    """Both tiny models."""
    return {name: decoder_of(config) for name, config in CONFIGS.items()}


def rows_of(config: dict[str, Any], *cases: DecodeCase, **given: Any) -> list[dict[str, Any]]:
    """The rows of some cases, without the law of growth."""
    choice = given.pop("choice", FP32)
    repeats, contexts = given.pop("repeats", 1), given.pop("contexts", ())
    run = DecodeRun(cases=cases, repeats=repeats, exponent_contexts=contexts)
    return list(uniform_rows(tiny(config), choice, run, given.pop("roofs", Roofs()), **given))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_every_cache_generates_the_same_tokens(name: str, block_size: int) -> None:
    caches = CACHES if block_size == 16 else ("dynamic", "paged")
    rows = rows_of(CONFIGS[name], *(case_of(one, block_size=block_size) for one in caches))
    assert {row["cache"]: row["same_tokens"] for row in rows} == dict.fromkeys(caches, True)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tokens_depend_on_the_cache(name: str, decoders: dict[str, Decoder]) -> None:
    """A model that repeats one word would pass with any attention."""
    decoder = decoders[name]
    setting = Setting(decoder=decoder, kernels=kernels_for("cpu"))
    found = greedy_tokens(setting, case_of("dynamic"), prompts(decoder, 3, 21))
    assert len(set(found.flatten().tolist())) > 10


@pytest.mark.parametrize("choice", [FP32, ModelChoice(dtype="bf16")])
def test_a_wrong_kernel_is_found(choice: ModelChoice) -> None:
    cases = case_of("dynamic"), case_of("paged"), case_of("contiguous")
    rows = rows_of(LLAMA, *cases, choice=choice, make_kernels=broken_kernels)
    assert [row["same_tokens"] for row in rows] == [True, False, True]


def test_other_dtypes_are_checked_in_fp32() -> None:
    rows = rows_of(LLAMA, case_of("dynamic"), case_of("paged"), choice=ModelChoice(dtype="bf16"))
    assert [row["same_tokens"] for row in rows] == [True, True]
    assert {row["dtype"] for row in rows} == {"bf16"}


def test_rows_have_every_key_and_echo_the_case() -> None:
    roofs = Roofs(read=lambda size: 1e9, matmul=lambda: 1e9)
    cases = decode_cases(("none", "dynamic", "paged"), (1, 2), (20,), (6,), (16, 64))
    rows = rows_of(LLAMA, *cases, roofs=roofs)
    assert [(row["cache"], row["batch"], row["block_size"]) for row in rows] == [
        ("dynamic", 1, None),
        ("none", 1, None),
        ("paged", 1, 16),
        ("paged", 1, 64),
        ("dynamic", 2, None),
        ("paged", 2, 16),
        ("paged", 2, 64),
    ]
    for row in rows:
        assert list(row) == list(ROW)
        assert row["ttft_s"] > 0
        assert row["itl_s_p50"] <= row["itl_s_p99"]
        assert row["mbu"] > 0
        assert row["peak_bytes"] is None
        assert row["output_tokens_per_s"] == pytest.approx(row["batch"] * 6 / row["wall_s"])
    assert rows[0]["measured_gain"] == rows[0]["predicted_gain"] == 1


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_are_those_of_the_formulas(name: str) -> None:
    """21 + 12 tokens, the last never stored: 32 of each of 3 sequences."""
    given = {"block_size": 64, "max_tokens": 40}
    rows = rows_of(CONFIGS[name], *(case_of(one, **given) for one in CACHES))
    found = {row["cache"]: (row["kv_reserved_bytes"], row["kv_used_bytes"]) for row in rows}
    window = name == "mistral"
    used = 3 * (24 if window else 32) * TOKEN_BYTES
    assert found["none"] == (0, 0)
    # transformers' sliding layer keeps one token less than its window.
    assert found["dynamic"] == (3 * (23 if window else 32) * TOKEN_BYTES,) * 2
    assert found["static"] == (3 * (24 if window else 40) * TOKEN_BYTES, used)
    assert found["contiguous"] == (3 * 40 * TOKEN_BYTES, used)
    assert found["paged"] == (3 * 64 * TOKEN_BYTES, used)
    assert found["continuous"][1] == used


def test_slots_are_the_allocators(decoders: dict[str, Decoder]) -> None:
    decoder = decoders["llama"]
    store = KvStore(
        decoder.heads,
        kernels_for("cpu"),
        num_blocks=20,
        block_size=4,
        dtype=torch.float32,
        device="cpu",
    )
    for sequence, tokens in (("a", 5), ("b", 9), ("c", 1)):
        store.pool.allocate(sequence, tokens)
    store.pool.free("a")
    store.pool.allocate("d", 13)
    for sequence in ("b", "c", "d"):
        tokens = store.pool.num_tokens(sequence)
        expected = [store.pool.slot(sequence, position) for position in range(tokens)]
        assert store.slots(sequence).tolist() == expected


def test_copies_on_write_are_carried_out_in_every_layer(decoders: dict[str, Decoder]) -> None:
    decoder = decoders["llama"]
    kernels = kernels_for("cpu")
    store = KvStore(
        decoder.heads, kernels, num_blocks=4, block_size=4, dtype=torch.float32, device="cpu"
    )
    store.data.fill_(float("nan"))
    store.pool.allocate("parent", 6)
    slots = torch.from_numpy(store.slots("parent"))
    for layer in range(2):
        values = torch.randn(6, 2, 64)
        kernels.store(values, -values, *store.data[layer], slots)
    store.fork("parent", "child")
    store.append("child")
    tail, copied = store.pool.block_table("parent")[1], store.pool.block_table("child")[1]
    assert tail != copied
    assert store.copies == 1
    assert torch.equal(store.data[:, :, copied, :, :2], store.data[:, :, tail, :, :2])
    assert store.data[:, :, copied, :, 2:].isnan().all()
    store.append("parent")  # its tail is no longer shared
    assert store.copies == 1


IN_THE_INTERPRETER = """
from decode_cases import CONFIGS, tiny
from ragged_cases import requests_of
from kvtool.bench.decode.uniform import uniform_rows
from kvtool.bench.decode.kernels import gpu_kernels
from kvtool.bench.decode.ragged import ragged_rows
from kvtool.bench.decode.settings import (
    DecodeRun, ModelChoice, RaggedRun, Roofs, decode_cases,
)
for config in CONFIGS.values():
    cases = decode_cases(("dynamic", "contiguous", "paged"), (2,), (26,), (4,))
    run = DecodeRun(cases=cases, repeats=1, exponent_contexts=())
    make = lambda device, threads: gpu_kernels()
    rows = uniform_rows(tiny(config), ModelChoice(), run, Roofs(), make_kernels=make)
    print([row["same_tokens"] for row in rows])
    # A lane for each: those that have ended fall idle.
    lengths = requests_of(((20, 5), (5, 7), (12, 3), (9, 6)))
    run = RaggedRun(requests=lengths, kv_budget_bytes=2**22, max_model_len=48, repeats=1)
    rows = list(ragged_rows(tiny(config), ModelChoice(), run, make_kernels=make))
    print([row["same_tokens"] for row in rows], rows[0]["peak_batch"])
"""


def test_the_gpu_kernels_generate_the_same_tokens() -> None:
    """Triton's interpreter runs them on a CPU; it has to be chosen before they are imported."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{here}:{here.parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = ["[True, True, True]", "[True, True] 4"]
    assert done.stdout.splitlines() == expected * 2, done.stderr[-2000:]


def test_the_law_of_growth() -> None:
    assert log_slope([10, 20, 40], [3.0, 6.0, 12.0]) == pytest.approx(1)
    assert log_slope([10, 20, 40], [3.0, 3.0, 3.0]) == pytest.approx(0)
    assert log_slope([10, 20, 40], [1.0, 4.0, 16.0]) == pytest.approx(2)
    assert log_slope([10], [1.0]) is None
    contexts = (16, 32, 64, 1024)  # the model has positions for 512
    rows = rows_of(LLAMA, case_of("none"), case_of("paged"), contexts=contexts)
    for row in rows:
        assert row["exponent_contexts"] == [16, 32, 64]
        assert isinstance(row["time_exponent"], float)
        assert isinstance(row["time_exponent_end"], float)


def test_progress_is_told_as_often_as_announced() -> None:
    for choice in (FP32, ModelChoice(dtype="bf16")):
        told: list[str] = []
        cases = (case_of("paged"), case_of("dynamic"), case_of("continuous"))
        run = DecodeRun(cases=cases, exponent_contexts=(16, 32, 64))
        list(uniform_rows(tiny(LLAMA), choice, run, Roofs(), advance=told.append))
        assert len(told) == uniform_steps(tiny(LLAMA), choice, run)


def failing(kind: type[BaseException], words: str) -> Any:
    def make(device: str, threads: int) -> Kernels:
        def paged(*given: Any) -> torch.Tensor:
            raise kind(words)

        return replace(kernels_for(device, threads), paged=paged)

    return make


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (torch.cuda.OutOfMemoryError, "CUDA out of memory"),
        (MemoryError, ""),
        (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_names_the_case_and_keeps_what_is_finished(
    kind: type[Exception], words: str
) -> None:
    run = DecodeRun(cases=(case_of("paged"), case_of("dynamic")), exponent_contexts=())
    make = failing(kind, words)
    rows = uniform_rows(tiny(LLAMA), FP32, run, Roofs(), make_kernels=make)
    assert next(rows)["cache"] == "dynamic"
    with pytest.raises(KvtoolError) as caught:
        next(rows)
    assert caught.value.code == "out_of_memory"
    assert caught.value.message == "out of memory in paged, batch 3, 21 + 12 tokens"
    assert "--batch" in caught.value.hint


def test_an_interrupt_keeps_what_is_finished() -> None:
    run = DecodeRun(cases=(case_of("dynamic"), case_of("paged")), exponent_contexts=())
    make = failing(KeyboardInterrupt, "")
    rows = uniform_rows(tiny(LLAMA), FP32, run, Roofs(), make_kernels=make)
    assert next(rows)["same_tokens"] is True
    with pytest.raises(KeyboardInterrupt):
        next(rows)


def test_a_context_above_the_maximum_is_refused() -> None:
    with pytest.raises(KvtoolError, match=r"600 tokens are .* \(512\)") as caught:
        rows_of(LLAMA, case_of("paged", prompt_tokens=588))
    assert caught.value.code == "context_too_long"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("illegal instruction", "kernel_failed"),
        ("Failed to find C compiler. Please specify via CC", "no_compiler"),
    ],
)
def test_other_failures_name_the_case_or_what_is_missing(words: str, code: str) -> None:
    make = failing(RuntimeError, words)
    with pytest.raises(KvtoolError, match=words) as caught:
        rows_of(LLAMA, case_of("paged"), make_kernels=make)
    assert caught.value.code == code


def test_too_much_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvtoolError, match="TiB"):
        rows_of(LLAMA, case_of("paged", batch=10**9))
    monkeypatch.setattr(decode_memory, "available_bytes", lambda device: 2**20)
    with pytest.raises(KvtoolError, match=r"MiB weights .* and 1\.00 MiB are free") as caught:
        rows_of(LLAMA, case_of("paged"))
    assert caught.value.code == "out_of_memory"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"block_size": 0}, "block size 0"),
        ({"block_size": 24}, "block size 24"),
        ({"block_size": 512}, "block size 512"),
        ({"cache": "quantised"}, "quantised"),
        ({"batch": 0}, "batch"),
        ({"output_tokens": 1}, "output"),
        ({"max_tokens": 30}, "33 tokens"),
    ],
)
def test_cases_that_cannot_be_run(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(KvtoolError, match=words) as caught:
        case_of(**({"cache": "paged"} | wrong))
    assert caught.value.exit_code == 2
    with pytest.raises(KvtoolError, match="fp8"):
        ModelChoice(dtype="fp8")


def test_nothing_is_said_by_others(capfd: pytest.CaptureFixture[str]) -> None:
    rows_of(LLAMA, *(case_of(one) for one in CACHES), choice=ModelChoice(dtype="bf16"))
    assert capfd.readouterr() == ("", "")

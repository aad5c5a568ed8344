"""The same tokens: in fp32 that is fp32, where two words as likely as each other decide nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_cases import LLAMA, case_of, decoder_of, tiny

from kvtool.bench.decode import uniform
from kvtool.bench.decode.hushed import exact_fp32
from kvtool.bench.decode.kernels import Kernels, kernels_for
from kvtool.bench.decode.model import Decoder, prompts
from kvtool.bench.decode.ragged import ragged_rows
from kvtool.bench.decode.same import Verdict, compare, near_ties
from kvtool.bench.decode.sessions import Setting
from kvtool.bench.decode.settings import DecodeRun, ModelChoice, RaggedRun, Roofs, made_requests
from kvtool.bench.decode.trial import greedy_tokens
from kvtool.bench.decode.uniform import uniform_rows
from kvtool.view.bench_decode import tables

HALF = 64
"""Words from here on are twins of those before."""


def twins(margin: float) -> Decoder:
    """A model whose word w + HALF is read as w is, and has its logit times 1 + margin."""
    decoder = decoder_of(LLAMA)
    head = decoder.module.get_output_embeddings().weight
    table = decoder.module.get_input_embeddings().weight
    head[HALF:] = head[:HALF] * (1 + margin)
    table[HALF:] = table[:HALF]
    return decoder


def generated(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    setting = Setting(decoder=decoder, kernels=kernels_for("cpu"))
    return greedy_tokens(setting, case_of("dynamic"), ids)


@pytest.mark.parametrize(("margin", "same"), [(0.0, True), (1e-5, True), (1e-2, False)])
def test_a_near_tie_decides_nothing_and_a_margin_does(margin: float, same: bool) -> None:
    decoder = twins(margin)
    ids = prompts(decoder, 3, 21)
    known = generated(decoder, ids)
    found = known.clone()
    found[1, 4:7] = known[1, 4:7] ^ HALF
    assert compare(decoder, ids, known, known) == Verdict(True, 0)
    expected = Verdict(True, 3) if same else Verdict(False, 0)
    assert compare(decoder, ids, found, known) == expected


def test_what_follows_a_tie_is_checked_too() -> None:
    decoder = twins(0.0)
    ids = prompts(decoder, 1, 21)
    known = generated(decoder, ids)
    found = known.clone()
    found[0, 3] ^= HALF
    assert compare(decoder, ids, found, known) == Verdict(True, 1)
    found[0, 9] = (found[0, 9] + 1) % HALF
    assert not compare(decoder, ids, found, known).same


def test_the_first_word_of_a_sample_has_its_rank() -> None:
    decoder = decoder_of(LLAMA)
    ids = prompts(decoder, 1, 21)[0]
    with torch.no_grad():
        first = decoder.module(input_ids=ids[None], logits_to_keep=1).logits[0, -1].topk(2).indices
    assert near_ties(decoder, ids, [int(first[1])], rank=1) is not None
    assert near_ties(decoder, ids, [int(first[1])]) is None
    assert near_ties(decoder, ids, [int(first[0])], rank=1) is None


def test_numbers_that_are_none_are_no_ties() -> None:
    decoder = decoder_of(LLAMA)
    decoder.module.get_output_embeddings().weight.fill_(float("nan"))
    assert near_ties(decoder, prompts(decoder, 1, 5)[0], [1, 2]) is None


def test_ties_stand_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = uniform.timed

    def timed(setting: Any, case: Any, ids: Any) -> Any:
        run = right(setting, case, ids)
        return replace(run, tokens=run.tokens ^ HALF) if case.cache == "paged" else run

    monkeypatch.setattr(uniform, "build_model", lambda plan, choice: twins(1e-6))
    monkeypatch.setattr(uniform, "timed", timed)
    run = DecodeRun(cases=(case_of("dynamic"), case_of("paged")), repeats=1, exponent_contexts=())
    rows = list(uniform_rows(tiny(LLAMA), ModelChoice(), run, Roofs()))
    assert [(row["same_tokens"], row["ties"]) for row in rows] == [(True, 0), (True, 36)]
    assert tables(rows)[0].rows[1][-1] == "yes, 36 near-ties"


@pytest.fixture
def coarse() -> Any:
    """TF32 as an environment may ask for it."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32
    torch.set_float32_matmul_precision("medium")
    cudnn.allow_tf32 = True
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before[1:]
    torch.set_float32_matmul_precision(before[0])


def precision() -> tuple[str, bool, bool]:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
    )


def test_fp32_is_exact_while_rows_are_made(coarse: None) -> None:
    seen = set()

    def make(device: str, threads: int) -> Kernels:
        right = kernels_for(device, threads)

        def paged(*given: Any) -> torch.Tensor:
            seen.add(precision())
            return right.paged(*given)

        return replace(right, paged=paged)

    before = precision()
    assert before == ("medium", True, True)
    for choice in (ModelChoice(), ModelChoice(dtype="bf16")):
        seen.clear()
        run = DecodeRun(cases=(case_of("paged"),), repeats=1, exponent_contexts=())
        list(uniform_rows(tiny(LLAMA), choice, run, Roofs(), make_kernels=make))
        assert seen == {("highest", False, False)}
        assert precision() == before
    seen.clear()
    requests = made_requests(2, 64, prompt_mean=20, output_mean=4)
    ragged = RaggedRun(requests=requests, kv_budget_bytes=2**20, max_model_len=64, repeats=1)
    list(ragged_rows(tiny(LLAMA), ModelChoice(), ragged, make_kernels=make))
    assert seen == {("highest", False, False)}
    assert precision() == before


def test_precision_is_put_back_after_an_error(coarse: None) -> None:
    before = precision()

    def interrupted() -> None:
        with exact_fp32():
            assert precision() == ("highest", False, False)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert precision() == before

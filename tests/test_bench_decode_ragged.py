"""Ragged requests on real blocks: what is batched, preempted, forked and copied generates the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from decode_cases import CONFIGS, LLAMA, TOKEN_BYTES, broken_kernels, decoder_of, tiny

from kvtool.bench.decode.batching import Batcher, Prompt, Tally
from kvtool.bench.decode.kernels import kernels_for
from kvtool.bench.decode.kv_store import KvStore
from kvtool.bench.decode.model import Decoder
from kvtool.bench.decode.ragged import alone, ragged_rows, ragged_steps
from kvtool.bench.decode.ragged_row import largest_batch, pools_for
from kvtool.bench.decode.settings import ROW, ModelChoice, RaggedRun, made_requests, silent
from kvtool.bench.decode.stepping import Stepping, attend
from kvtool.errors import KvtoolError
from kvtool.requests import Requests

LENGTHS = ((33, 9), (5, 17), (16, 16), (1, 3), (47, 1), (20, 12), (8, 30))
"""Prompt and output tokens."""


@pytest.fixture(scope="module")
def decoders() -> dict[str, Decoder]:
    """Both tiny models."""
    return {name: decoder_of(config) for name, config in CONFIGS.items()}


def requests_of(lengths: tuple[tuple[int, int], ...] = LENGTHS) -> Requests:
    prompt, output = (np.array(column, dtype=np.int64) for column in zip(*lengths, strict=True))
    return Requests(arrival_ns=np.zeros_like(prompt), prompt_tokens=prompt, output_tokens=output)


def prompts_of(decoder: Decoder) -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    return [
        Prompt(
            index=index,
            ids=torch.randint(0, decoder.plan.vocab, (prompt,), generator=generator),
            output_tokens=output,
        )
        for index, (prompt, output) in enumerate(LENGTHS)
    ]


def batched(
    decoder: Decoder,
    num_blocks: int,
    block_size: int,
    *,
    samples: int = 1,
    contiguous: bool = False,
) -> tuple[Tally, KvStore]:
    """All requests on a pool whose memory is poisoned at the start."""
    store = KvStore(
        decoder.heads,
        kernels_for("cpu"),
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=torch.float32,
        device="cpu",
        contiguous=contiguous,
    )
    store.data.fill_(float("nan"))
    batcher = Batcher(Stepping(decoder, store, 64), samples=samples, max_batch=64)
    return batcher.run(prompts_of(decoder), silent), store


def check_each_alone(decoder: Decoder, tally: Tally) -> None:
    attend(decoder, "sdpa")
    for one in tally.sequences:
        assert one.generated == alone(decoder, one.prompt, one.sample), one.prompt.index
        assert 0 < one.first_s <= one.last_s


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_a_ragged_batch_is_what_each_request_is_alone(
    name: str, block_size: int, decoders: dict[str, Decoder]
) -> None:
    blocks = sum(-(-(prompt + output) // block_size) for prompt, output in LENGTHS)
    tally, store = batched(decoders[name], blocks, block_size)
    check_each_alone(decoders[name], tally)
    assert tally.preemptions == 0
    # One request has its one token from its prompt and is never decoded.
    assert max(tally.batches) == len(LENGTHS) - 1
    assert store.pool.num_free == blocks


@pytest.mark.parametrize("name", CONFIGS)
def test_preemption_happens_and_changes_nothing(name: str, decoders: dict[str, Decoder]) -> None:
    tally, store = batched(decoders[name], 22, 4)
    check_each_alone(decoders[name], tally)
    assert tally.preemptions > 0
    assert tally.recomputed_tokens > 0
    assert store.pool.num_free == 22


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_blocks", [300, 40])
def test_forks_share_their_prompt_and_change_nothing(
    name: str, num_blocks: int, decoders: dict[str, Decoder]
) -> None:
    tally, store = batched(decoders[name], num_blocks, 4, samples=3)
    check_each_alone(decoders[name], tally)
    assert (tally.preemptions > 0) == (num_blocks == 40)
    assert tally.shared_blocks >= 8  # the first prompt's full blocks
    assert store.copies > 0
    firsts = {one.generated[0] for one in tally.sequences if one.prompt.index == 0}
    assert len(firsts) == 3
    assert store.pool.num_free == num_blocks


def test_copies_on_write_are_as_many_as_tails_are_shared(decoders: dict[str, Decoder]) -> None:
    """Of three samples whose prompt ends inside a block two copy it; none if it ends with one."""
    _, store = batched(decoders["llama"], 300, 4, samples=3)
    inside = sum(prompt % 4 != 0 and output > 1 for prompt, output in LENGTHS)
    assert store.copies == 2 * inside


@pytest.mark.parametrize("samples", [1, 2])
def test_reservations_run_the_same_requests(samples: int, decoders: dict[str, Decoder]) -> None:
    tally, store = batched(decoders["llama"], 3, 64, samples=samples, contiguous=True)
    check_each_alone(decoders["llama"], tally)
    assert tally.preemptions == 0
    assert max(tally.batches) == (3 if samples == 1 else 2)
    assert store.copies == (samples - 1) * len(LENGTHS)


def run_of(**other: Any) -> RaggedRun:
    given: dict[str, Any] = {
        "requests": requests_of(),
        "kv_budget_bytes": 2 * 64 * TOKEN_BYTES + 5,
        "max_model_len": 64,
        "repeats": 1,
    }
    return RaggedRun(**(given | other))


@pytest.mark.parametrize("samples", [1, 2])
def test_paging_makes_batches_larger(samples: int) -> None:
    told: list[str] = []
    run = run_of(samples=samples)
    rows = list(ragged_rows(tiny(LLAMA), ModelChoice(), run, advance=told.append))
    assert len(told) == ragged_steps(ModelChoice(), run)
    contiguous, paged = rows
    for row in rows:
        assert list(row) == list(ROW)
        assert row["same_tokens"] is True
        assert row["checked_sequences"] == 7 * samples
        assert row["kv_used_bytes"] <= row["kv_reserved_bytes"] <= row["kv_budget_bytes"]
        assert row["baseline"] == "contiguous-max"
    assert (contiguous["num_blocks"], paged["num_blocks"]) == (2, 8)
    assert (contiguous["cache"], paged["cache"]) == ("contiguous-max", "paged")
    assert contiguous["peak_batch"] == 2
    assert paged["mean_batch"] > contiguous["mean_batch"]
    assert paged["steps"] < contiguous["steps"]
    assert paged["predicted_gain"] > contiguous["predicted_gain"] == 1


def test_memory_by_hand() -> None:
    """A budget of two reservations of 64 tokens and five bytes: 8 blocks of 16."""
    plan, run = tiny(LLAMA), run_of()
    contiguous, paged = pools_for(plan, run, 4)
    assert contiguous.num_blocks == 2
    assert paged.num_blocks == 8
    # 128 tokens of room; prompt + half the output + half a block, weighted by the output.
    held = sum((p + o / 2 + 8) * o for p, o in LENGTHS) / sum(o for _, o in LENGTHS)
    assert largest_batch(paged, run) == pytest.approx(128 / held)
    assert largest_batch(contiguous, run) == 2
    rich = run_of(kv_budget_bytes=10**9)
    assert pools_for(plan, rich, 4)[0].num_blocks == len(LENGTHS)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_wrong_kernel_is_found(dtype: str) -> None:
    run = run_of(check_requests=3)
    choice = ModelChoice(dtype=dtype)
    told: list[str] = []
    rows = list(
        ragged_rows(tiny(LLAMA), choice, run, advance=told.append, make_kernels=broken_kernels)
    )
    assert [row["same_tokens"] for row in rows] == [True, False]
    assert len(told) == ragged_steps(choice, run)


def test_made_requests_fit_and_come_from_their_seed() -> None:
    made = made_requests(500, 512)
    total = made.prompt_tokens + made.output_tokens
    assert total.max() <= 512
    assert made.prompt_tokens.mean() == pytest.approx(512 / 5, rel=0.15)
    assert made.output_tokens.mean() == pytest.approx(512 / 16, rel=0.15)
    assert (made_requests(500, 512).prompt_tokens == made.prompt_tokens).all()
    assert (made_requests(500, 512, seed=1).prompt_tokens != made.prompt_tokens).any()


def test_what_can_never_fit_is_refused() -> None:
    for budget, words in ((10 * 16 * TOKEN_BYTES, "holds 0 blocks"), (0, "holds 0 blocks")):
        with pytest.raises(KvtoolError, match=words):
            list(
                ragged_rows(
                    tiny(LLAMA), ModelChoice(), run_of(kv_budget_bytes=budget, max_model_len=512)
                )
            )
    run = run_of(kv_budget_bytes=64 * TOKEN_BYTES, max_model_len=64, samples=2)
    with pytest.raises(KvtoolError, match="needs 2"):
        list(ragged_rows(tiny(LLAMA), ModelChoice(), run))
    with pytest.raises(KvtoolError, match="48 tokens does not fit 40") as caught:
        run_of(max_model_len=40)
    assert caught.value.exit_code == 2
    with pytest.raises(KvtoolError, match="block size 24"):
        run_of(block_sizes=(16, 24))

"""Ragged requests on real blocks: what is batched, preempted, forked and copied generates the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from decode_cases import CONFIGS, LLAMA, TOKEN_BYTES, broken_kernels, decoder_of, tiny
from ragged_cases import LENGTHS, batched, check_each_alone, run_of

from kvtool.bench.decode import ragged
from kvtool.bench.decode.model import Decoder
from kvtool.bench.decode.ragged import ragged_rows, ragged_steps
from kvtool.bench.decode.ragged_row import Ran, largest_batch, pools_for, ragged_row
from kvtool.bench.decode.settings import ROW, ModelChoice, made_requests
from kvtool.errors import KvtoolError


@pytest.fixture(scope="module")
def decoders() -> dict[str, Decoder]:
    """Both tiny models."""
    return {name: decoder_of(config) for name, config in CONFIGS.items()}


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


def test_every_block_size_is_run_and_the_runs_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    right, order = ragged._run, []

    def run(machine: Any, pool: Any, requests: Any) -> Any:
        if len(requests) == len(LENGTHS):  # else it is a warm-up
            order.append((pool.cache, pool.block_size))
        return right(machine, pool, requests)

    monkeypatch.setattr(ragged, "_run", run)
    asked = run_of(block_sizes=(16, 64), repeats=3)  # a block may be as large as a reservation
    told: list[str] = []
    rows = list(ragged_rows(tiny(LLAMA), ModelChoice(), asked, advance=told.append))
    assert order == [("contiguous-max", 64), ("paged", 16), ("paged", 64)] * 3
    assert [(row["cache"], row["block_size"]) for row in rows] == [
        ("contiguous-max", None),
        ("paged", 16),
        ("paged", 64),
    ]
    assert len(told) == ragged_steps(ModelChoice(), asked)
    for row in rows:
        assert row["same_tokens"] is True
        assert (row["repeats"], row["ties"]) == (3, 0)
        assert row["measured_gain_ci"][0] <= row["measured_gain"] <= row["measured_gain_ci"][1]


def test_a_row_is_that_of_the_median_run(decoders: dict[str, Decoder]) -> None:
    run = run_of()
    contiguous, paged = pools_for(tiny(LLAMA), run, 4)
    walls = {contiguous: (4.0, 6.0, 5.0), paged: (2.0, 2.0, 4.0)}
    tally, _ = batched(decoders["llama"], 300, 16)
    ran = {
        pool: [
            Ran(tally=replace(tally, wall_s=wall), copied_blocks=int(wall), peak_bytes=None)
            for wall in times
        ]
        for pool, times in walls.items()
    }
    row = ragged_row(decoders["llama"], run, paged, ran)
    assert (row["wall_s"], row["copied_blocks"]) == (2.0, 2)
    assert row["measured_gain"] == pytest.approx(2)  # of 2, 3 and 1.25
    assert ragged_row(decoders["llama"], run, contiguous, ran)["wall_s"] == 5.0


def test_on_a_gpu_everything_is_run_once_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ragged, "warms_up_whole", lambda device: True)
    right, order = ragged._run, []

    def run(machine: Any, pool: Any, requests: Any) -> Any:
        order.append((pool.cache, len(requests)))
        return right(machine, pool, requests)

    monkeypatch.setattr(ragged, "_run", run)
    asked, told = run_of(repeats=2), []
    list(ragged_rows(tiny(LLAMA), ModelChoice(), asked, advance=told.append))
    first = [("contiguous-max", 7)] * 2 + [("paged", 7)] * 2
    assert order == [*first, ("contiguous-max", 7), ("paged", 7)]
    assert len(told) == ragged_steps(ModelChoice(), asked)


def test_a_gpu_warms_up_whole_and_a_cpu_does_not() -> None:
    assert [ragged.warms_up_whole(one) for one in ("cuda", "cuda:1", "cpu")] == [True, True, False]


def test_an_end_keeps_the_runs_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = ragged._run, []

    def run(machine: Any, pool: Any, requests: Any) -> Any:
        calls.append(pool.cache)
        if len(calls) == 6:  # the second of paged: a warm-up each, two of contiguous-max
            raise KeyboardInterrupt
        return right(machine, pool, requests)

    monkeypatch.setattr(ragged, "_run", run)
    rows: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        rows.extend(ragged_rows(tiny(LLAMA), ModelChoice(), run_of(repeats=3)))
    assert [(row["cache"], row["repeats"]) for row in rows] == [("contiguous-max", 2), ("paged", 1)]
    assert rows[1]["measured_gain_ci"] is None

"""What a decode step gives a kernel: the same plan at every step, lanes in order, idle ones skipped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_cases import CONFIGS, LLAMA, decoder_of, tiny
from ragged_cases import batched, check_each_alone, run_of

from kvtool.bench.decode import kv_step
from kvtool.bench.decode.kernels import Kernels, kernels_for
from kvtool.bench.decode.kv_store import KvStore
from kvtool.bench.decode.model import Decoder
from kvtool.bench.decode.ragged import ragged_rows
from kvtool.bench.decode.settings import ModelChoice


@pytest.fixture(scope="module")
def decoders() -> dict[str, Decoder]:
    """Both tiny models."""
    return {name: decoder_of(config) for name, config in CONFIGS.items()}


def test_every_step_is_cut_for_the_same_context() -> None:
    """A plan that followed the longest sequence would be compiled again while it is timed."""
    seen = set()

    def make(device: str, threads: int) -> Kernels:
        right = kernels_for(device, threads)

        def recorded(kernel: Any) -> Any:
            def called(*given: Any) -> torch.Tensor:
                seen.add(given[-1].max_context)
                return kernel(*given)

            return called

        return replace(right, paged=recorded(right.paged), contiguous=recorded(right.contiguous))

    list(ragged_rows(tiny(LLAMA), ModelChoice(), run_of(), make_kernels=make))
    assert seen == {64}


def in_order(device: str, threads: int) -> Kernels:
    """The CPU's kernels with the rules of a GPU's: lanes in order, slots below 0 skipped."""
    right = kernels_for(device, threads)

    def store(keys: Any, values: Any, k: Any, v: Any, slots: torch.Tensor) -> None:
        kept = slots >= 0
        right.store(keys[kept], values[kept], k, v, slots[kept])

    def contiguous(q: torch.Tensor, k: Any, v: Any, table: Any, seen: Any) -> torch.Tensor:
        used = seen.lengths > 0
        out = torch.zeros_like(q)
        lanes = torch.arange(len(q), dtype=torch.int32)[:, None]
        out[used] = right.contiguous(
            q[used], k, v, lanes[used], replace(seen, lengths=seen.lengths[used])
        )
        return out

    return replace(right, store=store, contiguous=contiguous, in_order=True)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("samples", "lanes"), [(1, 4), (1, 7), (2, 4)])
def test_idle_lanes_change_nothing(
    name: str,
    samples: int,
    lanes: int,
    decoders: dict[str, Decoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four lanes are taken again, out of order; of seven nobody takes those that fall idle."""
    idle = []
    right = kv_step._spread

    def spread(values: Any, lanes: Any, none: int) -> Any:
        rows = right(values, lanes, none)
        idle.append(len(rows) - len(values))
        return rows

    monkeypatch.setattr(kv_step, "_spread", spread)
    decoder = decoders[name]
    kernels = in_order("cpu", 1)
    tally, _ = batched(decoder, lanes, 64, samples=samples, contiguous=True, kernels=kernels)
    check_each_alone(decoder, tally)
    assert max(idle) > 0 or lanes == 4
    assert 0 < len(idle) <= 3 * len(tally.batches)  # three arrays a step, not a layer


def test_a_kernel_that_takes_any_lane_gets_no_idle_rows(decoders: dict[str, Decoder]) -> None:
    rows = []
    right = kernels_for("cpu")

    def contiguous(q: torch.Tensor, k: Any, v: Any, table: Any, seen: Any) -> torch.Tensor:
        rows.append((len(q), tuple(table.shape), bool((seen.lengths > 0).all())))
        return right.contiguous(q, k, v, table, seen)

    tally, _ = batched(
        decoders["llama"], 4, 64, contiguous=True, kernels=replace(right, contiguous=contiguous)
    )
    assert [one for one, _, _ in rows[::2]] == tally.batches
    assert all(shape == (count, 1) and filled for count, shape, filled in rows)


def test_rows_are_lanes_and_idle_ones_write_nowhere(decoders: dict[str, Decoder]) -> None:
    store = KvStore(
        decoders["llama"].heads, in_order("cpu", 1), num_blocks=4, block_size=8,
        dtype=torch.float32, device="cpu", contiguous=True,
    )  # fmt: skip
    for sequence, tokens in (("a", 3), ("b", 5), ("c", 8)):
        store.pool.allocate(sequence, tokens)
    full = kv_step.decode_step(store, ["a", "b", "c"], max_context=8)
    assert full.lanes is None
    assert full.slots.tolist() == [2, 8 + 4, 16 + 7]
    store.pool.free("b")
    step = kv_step.decode_step(store, ["c", "a"], max_context=8)
    assert step.lanes is not None
    assert step.lengths is not None
    assert step.lanes.tolist() == [2, 0]
    assert step.slots.tolist() == [2, -1, 16 + 7]
    assert step.lengths.tolist() == [3, 0, 8]


def test_an_idle_row_has_a_position_that_is_there() -> None:
    """A table of positions has no entry −1."""
    decoder = decoder_of(
        {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 128,
         "n_positions": 512}
    )  # fmt: skip
    tally, _ = batched(decoder, 7, 64, contiguous=True, kernels=in_order("cpu", 1))
    check_each_alone(decoder, tally)

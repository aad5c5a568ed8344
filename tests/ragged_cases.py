"""Requests of different lengths for the tests of `kvtool bench decode`, and a batch of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from decode_cases import TOKEN_BYTES

from kvtool.bench.decode.batching import Batcher, Prompt, Tally
from kvtool.bench.decode.kernels import Kernels, kernels_for
from kvtool.bench.decode.kv_store import KvStore
from kvtool.bench.decode.model import Decoder
from kvtool.bench.decode.ragged import alone
from kvtool.bench.decode.settings import RaggedRun, silent
from kvtool.bench.decode.stepping import Stepping, attend
from kvtool.requests import Requests

LENGTHS = ((33, 9), (5, 17), (16, 16), (1, 3), (47, 1), (20, 12), (8, 30))
"""Prompt and output tokens."""


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
    kernels: Kernels | None = None,
) -> tuple[Tally, KvStore]:
    """All requests on a pool whose memory is poisoned at the start."""
    store = KvStore(
        decoder.heads,
        kernels or kernels_for("cpu"),
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


def run_of(**other: Any) -> RaggedRun:
    given: dict[str, Any] = {
        "requests": requests_of(),
        "kv_budget_bytes": 2 * 64 * TOKEN_BYTES + 5,
        "max_model_len": 64,
        "repeats": 1,
    }
    return RaggedRun(**(given | other))

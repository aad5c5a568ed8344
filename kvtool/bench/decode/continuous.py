"""transformers' own continuous batching, run and timed on the same prompts.

Its pool is sized for the case: pages of the block size, as many as the tokens need. Its attention
is SDPA; it is kept from switching to flash attention, which would compare two attentions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from kvtool.bench.decode.model import Decoder
from kvtool.bench.decode.sessions import used_bytes
from kvtool.bench.decode.settings import DecodeCase
from kvtool.bench.decode.stepping import attend
from kvtool.bench.decode.trial import Timed
from kvtool.errors import KvtoolError

Tensor = torch.Tensor

LOGGERS = ("ContinuousBatchingLogger", "transformers")
SMALLEST_PAGE = 4
"""transformers takes no smaller page."""
MOST_BATCH_TOKENS = 8192
SPARE_BLOCKS = 2
"""Its scheduler keeps a share of the pool free before it lets a prompt in."""
WARM_UP_TOKENS = 3


def page_size(case: DecodeCase) -> int:
    """Tokens of one of its pages."""
    return max(case.block_size, SMALLEST_PAGE)


def num_blocks(case: DecodeCase) -> int:
    """Its pool: what the sequences need at the end, and a few spare blocks."""
    return case.batch * (-(-case.total_tokens // page_size(case)) + SPARE_BLOCKS)


def time_continuous(decoder: Decoder, case: DecodeCase, ids: Tensor, repeats: int) -> Timed:
    """The case, after a short warm-up; times come from its own time stamps."""
    _generate(decoder, case, ids, WARM_UP_TOKENS)
    runs = [_generate(decoder, case, ids, case.output_tokens) for _ in range(repeats)]
    done = [one for run in runs for one in run]
    stamps = [one.timestamps for one in done]
    walls = sorted(
        max(one.timestamps[-1] for one in run) - min(one.created_time for one in run)
        for run in runs
    )
    return Timed(
        ttft_s=tuple(one.timestamps[0] - one.created_time for one in done),
        tpot_s=tuple((times[-1] - times[0]) / (len(times) - 1) for times in stamps),
        itl_s=tuple(b - a for times in stamps for a, b in pairwise(times)),
        wall_s=walls[len(walls) // 2],
        tokens=_tokens(runs[-1]),
        reserved_bytes=_reserved_bytes(decoder, case),
        used_bytes=used_bytes(decoder, case.batch, case.cached_tokens),
        cuda_graph=decoder.device.startswith("cuda"),
    )


def _reserved_bytes(decoder: Decoder, case: DecodeCase) -> int | None:
    """Its pool. Where 5.17 puts layers with and without a window into groups, it is not known."""
    from transformers import ContinuousBatchingConfig

    mixed = len(set(decoder.heads.windows)) > 1
    if mixed and "page_size" not in ContinuousBatchingConfig.__dataclass_fields__:
        return None
    return num_blocks(case) * page_size(case) * decoder.token_bytes


def continuous_tokens(decoder: Decoder, case: DecodeCase, ids: Tensor) -> Tensor:
    """What it generates [batch, output_tokens], on the CPU."""
    return _tokens(_generate(decoder, case, ids, case.output_tokens))


def _tokens(run: list[Any]) -> Tensor:
    return torch.tensor([one.generated_tokens for one in run])


def _generate(decoder: Decoder, case: DecodeCase, ids: Tensor, output: int) -> list[Any]:
    """Its outputs in the order of the prompts. Raises KvtoolError if one failed."""
    from transformers import GenerationConfig

    config = _config(decoder, case)
    greedy = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=output, do_sample=False, eos_token_id=-1
    )
    with _silent_loggers():
        found = decoder.module.generate_batch(
            ids.tolist(),
            generation_config=greedy,
            continuous_batching_config=config,
            record_timestamps=True,
            progress_bar=False,
        )
    # By request: it may finish them in any order.
    done = list(found.values())
    wrong = [one for one in done if one.error or len(one.generated_tokens) != output]
    if len(done) != case.batch or wrong:
        why = str(wrong[0].error)[:160] if wrong and wrong[0].error else "a request is not finished"
        raise KvtoolError(
            f"transformers' continuous batching failed: {why}",
            "leave `continuous` out of --cache",
            code="continuous_failed",
        )
    return done


def _config(decoder: Decoder, case: DecodeCase) -> Any:
    """Its configuration, and SDPA as the model's attention.

    5.24 calls a page what 5.17 calls a block, and has a switch where 5.17 goes by the name.
    """
    from transformers import ContinuousBatchingConfig

    gpu = decoder.device.startswith("cuda")
    fields = ContinuousBatchingConfig.__dataclass_fields__
    size = "page_size" if "page_size" in fields else "block_size"
    given: dict[str, Any] = {size: page_size(case)}
    if "auto_switch_to_flash" in fields:
        given["auto_switch_to_flash"] = False
        attend(decoder, "sdpa")
    else:
        attend(decoder, "paged|sdpa")
    return ContinuousBatchingConfig(
        num_blocks=num_blocks(case),
        max_batch_tokens=min(case.batch * case.total_tokens, MOST_BATCH_TOKENS),
        allow_block_sharing=False,
        use_async_batching=None if gpu else False,
        use_cuda_graph=None if gpu else False,
        **given,
    )


@contextmanager
def _silent_loggers() -> Iterator[None]:
    """Its words go to loggers of its own, errors of missing optional packages among them."""
    before = [(name, logging.getLogger(name).level) for name in LOGGERS]
    for name, _ in before:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in before:
            logging.getLogger(name).setLevel(level)

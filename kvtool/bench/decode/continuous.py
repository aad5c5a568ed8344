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

from kvtool.bench.decode.cuda_graph import Execution
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
WAIT_S, STOP_S = 1.0, 5.0
"""For a result before looking whether its thread still runs; for that thread's end."""


def page_size(case: DecodeCase) -> int:
    """Tokens of one of its pages."""
    return max(case.block_size, SMALLEST_PAGE)


def num_blocks(case: DecodeCase) -> int:
    """Its pool: what the sequences need at the end, and a few spare blocks."""
    return case.batch * (-(-case.total_tokens // page_size(case)) + SPARE_BLOCKS)


def warm_up_continuous(decoder: Decoder, case: DecodeCase, ids: Tensor) -> None:
    """A few tokens, thrown away."""
    _generate(decoder, case, ids, min(WARM_UP_TOKENS, case.output_tokens))


def timed_continuous(decoder: Decoder, case: DecodeCase, ids: Tensor) -> Timed:
    """The case run once; times come from its own time stamps."""
    done, execution = _generate(decoder, case, ids, case.output_tokens)
    stamps = [one.timestamps for one in done]
    start = min(one.created_time for one in done)
    return Timed(
        ttft_s=tuple(one.timestamps[0] - one.created_time for one in done),
        tpot_s=tuple((times[-1] - times[0]) / (len(times) - 1) for times in stamps),
        gaps_s=tuple(b - a for times in stamps for a, b in pairwise(times)),
        wall_s=max(times[-1] for times in stamps) - start,
        tokens=_tokens(done),
        reserved_bytes=_reserved_bytes(decoder, case),
        used_bytes=used_bytes(decoder, case.batch, case.cached_tokens),
        execution=execution,
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
    return _tokens(_generate(decoder, case, ids, case.output_tokens)[0])


def _tokens(run: list[Any]) -> Tensor:
    return torch.tensor([one.generated_tokens for one in run])


def _generate(
    decoder: Decoder, case: DecodeCase, ids: Tensor, output: int
) -> tuple[list[Any], Execution]:
    """Its outputs in the order of the prompts. Raises KvtoolError if one failed."""
    from transformers import GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    greedy = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=output, do_sample=False, eos_token_id=-1
    )
    hints = WorkloadHints(
        max_prompt_length=case.prompt_tokens, max_generated_length=output, num_requests=case.batch
    )
    running = decoder.module.continuous_batching_context_manager(
        generation_config=greedy,
        continuous_batching_config=_config(decoder, case),
        timeout=STOP_S,
        workload_hints=hints,
    )
    with _silent_loggers(), torch.no_grad(), running as manager:
        try:
            done = _results(manager, ids.tolist(), output)
        except BaseException:
            # Else it would first generate what is left.
            manager.stop(hard_stop=True, timeout=STOP_S)
            raise
        execution = _execution(manager)
    wrong = [one for one in done if one.error or len(one.generated_tokens) != output]
    if len(done) != case.batch or wrong:
        why = str(wrong[0].error)[:160] if wrong and wrong[0].error else "a request is not finished"
        raise KvtoolError(
            f"transformers' continuous batching failed: {why}",
            "leave `continuous` out of --cache",
            code="continuous_failed",
        )
    return done, execution


def _results(manager: Any, prompts: list[list[int]], output: int) -> list[Any]:
    """What its thread made of the prompts, in their order; fewer if the thread has ended."""
    names = manager.add_requests(inputs=prompts, max_new_tokens=output, record_timestamps=True)
    done: dict[str, Any] = {}
    while len(done) < len(prompts):
        result = manager.get_result(timeout=WAIT_S)
        if result is None and not manager.is_running():
            break
        if result is not None and result.is_finished():
            done[result.request_id] = result
    return [done[name] for name in names if name in done]


def _execution(manager: Any) -> Execution:
    """Whether it replays its steps, as it has decided itself for both of its paths."""
    decided = getattr(manager.continuous_batching_config, "use_cuda_graph", None)
    flags = set(decided) if isinstance(decided, tuple) else {decided}
    flag = flags.pop() if len(flags) == 1 else None
    return Execution(flag if isinstance(flag, bool) else None)


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

"""One batch of equal prompts, decoded with one kind of cache: prefill it, then step.

transformers' own caches run with its SDPA attention, ours with `paged_cache.attention`; the model's
code is the same. A session is used once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvtool import live
from kvtool.bench.decode.cuda_graph import EAGER, Execution, Replay
from kvtool.bench.decode.kernels import Kernels
from kvtool.bench.decode.kv_store import KvStore
from kvtool.bench.decode.model import Decoder, forward
from kvtool.bench.decode.settings import DecodeCase
from kvtool.bench.decode.stepping import Stepping, attend

Tensor = torch.Tensor

COUNTED = Execution(False, "transformers counts the tokens of a sliding layer in Python")
"""Why a static cache with such layers is no graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """`prefill` takes ids [batch, tokens] and `step` the last tokens [batch]; both give the next
    ones, greedily. `record`, between the two, records the steps as a CUDA graph where there is one.
    `held` tells the bytes of the cache: reserved, and used."""

    prefill: Callable[[Tensor], Tensor]
    step: Callable[[Tensor], Tensor]
    held: Callable[[], tuple[int, int]]
    record: Callable[[Tensor], None] = lambda tokens: None
    execution: Callable[[], Execution] = lambda: EAGER


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a session is made of besides its case."""

    decoder: Decoder
    kernels: Kernels
    cuda_graph: bool = False


def open_session(setting: Setting, case: DecodeCase) -> Session:
    """The session of a case's cache."""
    return SESSIONS[case.cache](setting, case)


def used_bytes(decoder: Decoder, batch: int, tokens: int) -> int:
    """K and V that later tokens can see: a window's worth in a layer with a window."""
    heads = decoder.heads
    token = 2 * heads.kv_heads * heads.head_dim * decoder.dtype.itemsize
    return batch * heads.seen_tokens(tokens) * token


def _none(setting: Setting, case: DecodeCase) -> Session:
    """No cache: every step computes the whole sequence again."""
    decoder, seen = setting.decoder, []
    attend(decoder, "sdpa")

    def prefill(ids: Tensor) -> Tensor:
        seen.append(ids)
        return forward(decoder, ids, use_cache=False)

    def step(tokens: Tensor) -> Tensor:
        seen.append(tokens[:, None])
        return forward(decoder, torch.cat(seen, 1), use_cache=False)

    return Session(prefill=prefill, step=step, held=lambda: (0, 0))


def _dynamic(setting: Setting, case: DecodeCase) -> Session:
    from transformers import DynamicCache

    decoder = setting.decoder
    attend(decoder, "sdpa")
    cache = DynamicCache(config=decoder.module.config)

    def run(ids: Tensor) -> Tensor:
        return forward(decoder, ids, use_cache=True, **{decoder.cache_name: cache})

    return Session(
        prefill=run,
        step=lambda tokens: run(tokens[:, None]),
        held=lambda: (_held_bytes(cache), _held_bytes(cache)),
    )


def _static(setting: Setting, case: DecodeCase) -> Session:
    from transformers import StaticCache

    decoder, position = setting.decoder, case.prompt_tokens
    attend(decoder, "sdpa")
    cache: Any = StaticCache(config=decoder.module.config, max_cache_len=case.reserved_tokens)
    given = {decoder.cache_name: cache, "use_cache": True}
    place = torch.zeros((1, 1), dtype=torch.long, device=decoder.device)
    ids = torch.zeros((case.batch, 1), dtype=torch.long, device=decoder.device)
    countable = not setting.cuda_graph or _counts_on_device(cache)
    replay = Replay(
        lambda: forward(decoder, ids, position_ids=place, **given),
        lambda: _rewind(cache, position),
        wanted=setting.cuda_graph and countable,
    )

    def place_input(tokens: Tensor) -> None:
        ids.copy_(tokens[:, None])
        place.fill_(position)

    def record(tokens: Tensor) -> None:
        place_input(tokens)
        replay.record()

    def step(tokens: Tensor) -> Tensor:
        nonlocal position
        place_input(tokens)
        out: Tensor = replay()
        position += 1
        return out

    return Session(
        prefill=lambda prompt: forward(decoder, prompt, **given),
        step=step,
        held=lambda: (_held_bytes(cache), used_bytes(decoder, case.batch, position)),
        record=record,
        execution=lambda: replay.execution if countable else COUNTED,
    )


def _counts_on_device(cache: Any) -> bool:
    """Whether a graph can replay it: a sliding layer counts in Python."""
    from transformers.cache_utils import StaticLayer

    return all(type(layer) is StaticLayer for layer in cache.layers)


def _rewind(cache: Any, position: int) -> None:
    """A static cache as it was when it held so many tokens."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(position)


def _held_bytes(cache: Any) -> int:
    return sum(one.bytes for one in live.held(cache))


def _ours(setting: Setting, case: DecodeCase) -> Session:
    """Blocks from the allocator; contiguous: one block of the whole reservation a sequence."""
    decoder = setting.decoder
    contiguous = case.cache == "contiguous"
    size = case.reserved_tokens if contiguous else case.block_size
    store = KvStore(
        decoder.heads,
        setting.kernels,
        num_blocks=case.batch * -(-case.total_tokens // size),
        block_size=size,
        dtype=decoder.dtype,
        device=decoder.device,
        contiguous=contiguous,
    )
    return _on_blocks(setting, case, store)


def _on_blocks(setting: Setting, case: DecodeCase, store: KvStore) -> Session:
    decoder, sequences = setting.decoder, range(case.batch)
    stepping = Stepping(decoder, store, case.total_tokens, setting.cuda_graph)
    has_room = False

    def make_room() -> None:
        nonlocal has_room
        for sequence in () if has_room else sequences:
            store.append(sequence)
        has_room = True

    def prefill(ids: Tensor) -> Tensor:
        for sequence in sequences:
            store.pool.allocate(sequence, ids.shape[1])
        return stepping.prefill(sequences, ids)

    def record(tokens: Tensor) -> None:
        make_room()
        stepping.record(sequences, tokens)

    def step(tokens: Tensor) -> Tensor:
        nonlocal has_room
        make_room()
        has_room = False
        return stepping.step(sequences, tokens)

    def held() -> tuple[int, int]:
        used = used_bytes(decoder, case.batch, store.pool.num_tokens(0))
        return store.held_bytes, used

    return Session(
        prefill=prefill,
        step=step,
        held=held,
        record=record,
        execution=lambda: stepping.execution,
    )


SESSIONS: dict[str, Callable[[Setting, DecodeCase], Session]] = {
    "none": _none,
    "dynamic": _dynamic,
    "static": _static,
    "contiguous": _ours,
    "paged": _ours,
}

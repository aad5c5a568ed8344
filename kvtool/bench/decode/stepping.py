"""Forward passes of a model over a store: whole prompts, then a token of each sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvtool.bench.decode.cuda_graph import Replay
from kvtool.bench.decode.kv_step import Step, decode_step, prefill_step
from kvtool.bench.decode.kv_store import KvStore
from kvtool.bench.decode.model import Decoder, forward
from kvtool.bench.decode.paged_cache import KEY, PagedCache

Tensor = torch.Tensor


def attend(decoder: Decoder, key: str) -> None:
    """Choose the attention function of all layers: sdpa, or ours."""
    decoder.module.set_attn_implementation(key)


class Stepping:
    """Forward passes of a model over a store. Slots must be there: allocate and append come first.

    With `cuda_graph` the decode step of one batch is recorded once and replayed; the tensors that it
    reads are written to in place, so the block table has room for `max_tokens`.
    """

    def __init__(
        self, decoder: Decoder, store: KvStore, max_tokens: int, cuda_graph: bool = False
    ) -> None:
        attend(decoder, KEY)
        self.decoder = decoder
        self.store = store
        self.cache = PagedCache(store)
        self._width = store.pool.blocks_for(max_tokens)
        self._max_tokens = max_tokens
        self._graph = cuda_graph
        self._fixed: tuple[Step, Tensor] | None = None
        self._replay: Replay | None = None

    @property
    def is_graph(self) -> bool:
        """Whether decode steps are replayed."""
        return self._replay is not None and self._replay.is_graph

    def prefill(self, sequences: Sequence[Any], ids: Tensor) -> Tensor:
        """Greedy tokens [batch] after whole prompts of equal length [batch, tokens]."""
        return self._run(prefill_step(self.store, sequences), ids, None)

    def logits(self, sequence: Any, ids: Tensor) -> Tensor:
        """Logits [vocabulary] after one prompt [1, tokens]."""
        step = prefill_step(self.store, [sequence])
        with self.cache.running(step), torch.no_grad():
            given: dict[str, Any] = {self.decoder.cache_name: self.cache, "logits_to_keep": 1}
            out: Tensor = self.decoder.module(input_ids=ids, use_cache=True, **given).logits
        return out[0, -1]

    def step(self, sequences: Sequence[Any], tokens: Tensor) -> Tensor:
        """The next tokens [batch] after one of each sequence [batch]."""
        if not self._graph:
            step = decode_step(self.store, sequences)
            return self._run(step, tokens[:, None], step.lengths)
        found: Tensor = self._placed(sequences, tokens)()
        return found

    def record(self, sequences: Sequence[Any], tokens: Tensor) -> None:
        """Record the decode step that comes next; its slots must be there."""
        if self._graph:
            self._placed(sequences, tokens).record()

    def _placed(self, sequences: Sequence[Any], tokens: Tensor) -> Replay:
        """What replays a step, its input in place."""
        new = decode_step(self.store, sequences, width=self._width)
        new = replace(new, max_context=self._max_tokens)
        if self._fixed is None or self._replay is None:
            fixed = new, tokens[:, None].clone()
            self._fixed = fixed
            self._replay = Replay(
                lambda: self._run(fixed[0], fixed[1], fixed[0].lengths), lambda: None, wanted=True
            )
        old, ids = self._fixed
        for target, source in (
            (old.slots, new.slots),
            (old.block_table, new.block_table),
            (old.lengths, new.lengths),
            (ids, tokens[:, None]),
        ):
            assert target is not None
            assert source is not None
            target.copy_(source)
        return self._replay

    def _run(self, step: Step, ids: Tensor, lengths: Tensor | None) -> Tensor:
        given: dict[str, Any] = {self.decoder.cache_name: self.cache}
        if lengths is not None:
            given["position_ids"] = (lengths.long() - 1)[:, None]
        with self.cache.running(step):
            return forward(self.decoder, ids, use_cache=True, **given)

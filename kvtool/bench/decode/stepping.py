"""Forward passes of a model over a store: whole prompts, then a token of each sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kvtool.bench.decode.cuda_graph import EAGER, Execution, Replay
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

    Every decode step is cut for `max_tokens`, whatever its own longest sequence: a kernel then is
    the same at every step. With `cuda_graph` the decode step of one batch is recorded once and
    replayed; the tensors that it reads are written to in place.
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
    def execution(self) -> Execution:
        """Whether decode steps are replayed."""
        return EAGER if self._replay is None else self._replay.execution

    def prefill(self, sequences: Sequence[Any], ids: Tensor) -> Tensor:
        """Greedy tokens [batch] after whole prompts of equal length [batch, tokens]."""
        return _run(self.decoder, self.cache, prefill_step(self.store, sequences), ids)

    def logits(self, sequence: Any, ids: Tensor) -> Tensor:
        """Logits [vocabulary] after one prompt [1, tokens]."""
        step = prefill_step(self.store, [sequence])
        with self.cache.running(step), torch.no_grad():
            given: dict[str, Any] = {self.decoder.cache_name: self.cache, "logits_to_keep": 1}
            out: Tensor = self.decoder.module(input_ids=ids, use_cache=True, **given).logits
        return out[0, -1]

    def step(self, sequences: Sequence[Any], tokens: Tensor) -> Tensor:
        """The next tokens [batch] after one of each sequence [batch]."""
        if self._graph:
            found: Tensor = self._placed(sequences, tokens)()
            return found
        step = decode_step(self.store, sequences, max_context=self._max_tokens)
        if step.lanes is None:
            return _run(self.decoder, self.cache, step, tokens[:, None])
        ids = tokens.new_zeros((len(step.slots), 1))
        ids[step.lanes, 0] = tokens
        return _run(self.decoder, self.cache, step, ids)[step.lanes]

    def record(self, sequences: Sequence[Any], tokens: Tensor) -> None:
        """Record the decode step that comes next; its slots must be there."""
        if self._graph:
            self._placed(sequences, tokens).record()

    def _placed(self, sequences: Sequence[Any], tokens: Tensor) -> Replay:
        """What replays a step, its input in place."""
        new = decode_step(self.store, sequences, max_context=self._max_tokens, width=self._width)
        assert new.lanes is None, "a batch that is replayed takes the lanes in order"
        if self._fixed is None or self._replay is None:
            fixed = self._fixed = new, tokens[:, None].clone()
            run = partial(_run, self.decoder, self.cache, *fixed)
            self._replay = Replay(run, lambda: None, wanted=True)
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


def _run(decoder: Decoder, cache: PagedCache, step: Step, ids: Tensor) -> Tensor:
    """Greedy tokens [batch] of one step; no method, so that a Replay of it holds no Stepping."""
    given: dict[str, Any] = {decoder.cache_name: cache}
    if step.lengths is not None:
        positions = step.lengths.long() - 1
        given["position_ids"] = (positions if step.lanes is None else positions.clamp(min=0))[
            :, None
        ]
    with cache.running(step):
        return forward(decoder, ids, use_cache=True, **given)

"""Made traces with shared prefixes, small enough for the plain twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvtool.sim.prefix.replay import Cache
from kvtool.sim.prefix.result import POLICIES
from kvtool.trace_blocks import HashedRequests


def hashed(
    requests: Sequence[tuple[Sequence[int], int]], size: int, outputs: Sequence[int] | None = None
) -> HashedRequests:
    """Requests from (blocks, prompt tokens)."""
    for blocks, tokens in requests:
        assert len(blocks) == -(-tokens // size)
    starts = np.zeros(len(requests) + 1, np.int64)
    starts[1:] = np.cumsum([len(blocks) for blocks, _ in requests])
    return HashedRequests(
        arrival_ns=np.arange(len(requests), dtype=np.int64),
        prompt_tokens=np.array([tokens for _, tokens in requests], np.int64),
        output_tokens=np.array(outputs or [1] * len(requests), np.int64),
        hash_ids=np.array([one for blocks, _ in requests for one in blocks], np.int64),
        starts=starts,
        block_size=size,
    )


@st.composite
def traces(draw: st.DrawFn, most: int = 40, *, spelled: bool = False) -> HashedRequests:
    """Prompts over few block names, so that they share, diverge and come again; not all are long.

    Equal names at different places are different blocks: names say nothing of what comes before.
    `spelled`: the blocks go on over what was generated.
    """
    size = draw(st.integers(1, 8))
    names = draw(st.integers(1, 4))
    kinds = draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, names), min_size=1, max_size=8),
                st.integers(0, size - 1),
                st.integers(0, 3 * size),
            ),
            min_size=1, max_size=8,
        )
    )  # fmt: skip
    order = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most))
    requests, outputs, lengths = [], [], []
    for blocks, missing, output in order:
        blocks = blocks[: draw(st.integers(1, len(blocks)))]
        tokens = len(blocks) * size - missing
        lengths.append(draw(st.integers(1, tokens)))
        requests.append((blocks, tokens))
        outputs.append(output)
    made = hashed(requests, size, outputs)
    tenants = np.array(draw(st.lists(st.integers(0, 2), min_size=len(made), max_size=len(made))))
    made = replace(made, tenant=tenants.astype(np.int64))
    if not spelled:
        return made
    prompts = np.array(lengths, np.int64)  # the blocks are of the prompt and of what it generated
    return replace(
        made,
        prompt_tokens=prompts,
        output_tokens=made.prompt_tokens - prompts,
        spells_outputs=True,
    )


@st.composite
def caches(draw: st.DrawFn, index: str, **given: Any) -> Cache:
    """Caches from too small for any request to large enough for all."""
    settings: dict[str, Any] = {
        "capacity_blocks": draw(st.integers(1, 60)),
        "block_size": draw(st.integers(1, 12)),
        "policy": draw(st.sampled_from(POLICIES)),
        "cache_outputs": draw(st.sampled_from(("none", "unique"))),
    }
    return Cache(index=index, **{**settings, **given})


def cut_up(requests: HashedRequests, size: int) -> list[HashedRequests]:
    """The same in chunks of so many requests."""
    return [
        requests.part(first, min(first + size, len(requests)))
        for first in range(0, len(requests), size)
    ]

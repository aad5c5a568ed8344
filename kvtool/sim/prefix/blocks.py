"""A trace's blocks cut finer or merged coarser: what full blocks of another size a prompt has."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtool.errors import KvtoolError
from kvtool.jit import compiled
from kvtool.sim.prefix.keys import Ints
from kvtool.sim.prefix.result import KNOWN, NONE
from kvtool.trace_blocks import HashedRequests

MOST_IDS = 2**31 - 1


class InBlocks(NamedTuple):
    """Requests as their full blocks of one size.

    Request i has `ids[starts[i] : starts[i + 1]]`; equal ids mean equal prefixes. `tokens` is the
    length of the prompt, `outputs` the generated tokens that are cached too, `tenants` whose it is.
    """

    ids: Ints
    starts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    outputs: NDArray[np.int64]
    tenants: NDArray[np.int64]


def ids_per_key(trace_block_size: int, block_size: int) -> int:
    """Blocks whose last token can lie in one block of the trace."""
    return -(-trace_block_size // block_size)


def in_blocks_of(
    block_size: int, requests: HashedRequests, keys: Ints, *, cache_outputs: str
) -> InBlocks:
    """The full blocks of each prompt; if outputs are cached as known, of both together.

    Finer blocks lie within one block of the trace, coarser ones over several; where two blocks of the
    trace differ, all that they are cut into differs. An id is the block of the trace that holds the
    last token, and which of the blocks that end there it is.
    """
    prompt = requests.prompt_tokens
    each = ids_per_key(requests.block_size, block_size)
    if len(keys) and (int(keys.max()) + 1) * each > MOST_IDS:
        raise KvtoolError(
            f"blocks of {block_size} tokens are more than {MOST_IDS:,} different ones in this trace",
            "take larger blocks, or --index radix, whose edges hold runs of them",
            code="too_large",
        )
    outputs = outputs_of(requests, cache_outputs)
    counts = (prompt + outputs if cache_outputs == KNOWN else prompt) // block_size
    starts = np.zeros(len(prompt) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    if starts[-1] > MOST_IDS:
        raise KvtoolError(
            f"{len(prompt):,} requests at a time have {int(starts[-1]):,} blocks of {block_size} tokens",
            "take larger blocks, or --index radix, whose edges hold runs of them",
            code="too_large",
        )
    ids = np.empty(int(starts[-1]), np.int32)
    cut(keys, requests.starts, requests.block_size, block_size, starts, ids)
    return InBlocks(ids, starts, prompt, outputs, tenants_of(requests))


def outputs_of(requests: HashedRequests, cache_outputs: str) -> NDArray[np.int64]:
    """Generated tokens of each request whose K and V are cached.

    Of known outputs all but the last: it is sampled, and nothing is computed from it. SGLang caches
    (prompt + output)[:-1], vLLM tokens that were computed. Of unique ones all, and none where the one
    token comes from the prefill: the measured rows were made so, their outputs appended in bulk.
    """
    assert cache_outputs != KNOWN or requests.spells_outputs, (
        "a trace does not say what was generated"
    )
    outputs = requests.output_tokens
    if cache_outputs == NONE:
        return np.zeros_like(outputs)
    return np.where(outputs > 1, outputs - 1 if cache_outputs == KNOWN else outputs, 0)


def tenants_of(requests: HashedRequests) -> NDArray[np.int64]:
    """Whose each request is: one tenant's unless it is said."""
    return np.zeros(len(requests), np.int64) if requests.tenant is None else requests.tenant


@compiled
def cut(keys: Any, key_starts: Any, trace_size: int, size: int, starts: Any, ids: Any) -> None:
    """Fill in the ids of all requests."""
    each = (trace_size + size - 1) // size
    for request in range(len(starts) - 1):
        first = key_starts[request]
        to = starts[request]
        count = starts[request + 1] - to
        if size == trace_size:
            for block in range(count):
                ids[to + block] = keys[first + block]
            continue
        for block in range(count):
            of = ((block + 1) * size - 1) // trace_size
            ids[to + block] = keys[first + of] * each + block - of * trace_size // size

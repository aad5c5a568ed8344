"""Decode attention on the CPU: one query token a sequence against its cached keys and values.

For each sequence, query head h and KV head h // G, over the tokens t that are seen (all, or the last
`window`): s_t = scale q·k_t, out = sum of softmax(s)_t v_t, lse = ln of the sum of exp(s_t). It is
computed a tile of tokens at a time with the running maximum of an online softmax (arXiv 1805.02867;
block tables as in vLLM's paper, arXiv 2309.06180), in powers of two: the queries carry scale / ln 2.

A contiguous cache is a paged one with a block a sequence: the same machine code, so that their times
differ by where the rows lie alone.
"""

from __future__ import annotations

import math

import numpy as np

from kvtool.bench.cpu.kernel import TILE, Array, Partial, Pool, Shape, attend
from kvtool.bench.cpu.read import workers
from kvtool.bench.cpu.vectors import STEP
from kvtool.errors import KvtoolError
from kvtool.jit import must_compile

_LEAST_CHUNK = 8 * TILE
_LINE_BYTES = 64


def paged_decode(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, lengths: Array, out: Array,
    lse: Array, *, scale: float, window: int = 0, threads: int = 1,
) -> None:  # fmt: skip
    """Write attention to `out` [batch, query_heads, head_dim] and its natural log-sum-exp to `lse`.

    q [batch, query_heads, head_dim], in any float; caches [num_blocks, kv_heads, block_size,
    head_dim] with any strides but the last: float32, float16, or uint16 for the bits of bf16;
    head_dim a multiple of 16. Entries of the table behind a sequence's end may be anything; one
    that is read and names no block is an error. A sequence of length 0: out 0, lse -inf.
    Raises KvtoolError for what does not fit together.
    """
    _check(q, k_cache, v_cache, block_table, lengths, out, lse, window, threads)
    shape = _shape(q, k_cache, v_cache)
    work = _chunks(lengths, window, threads)
    out[...], lse[...] = 0, -np.inf
    if not len(work):
        return
    if int(work[:, 2].max()) > block_table.shape[1] * shape.block_size:
        raise _refused("a sequence is longer than its row of the block table")
    # Beyond int32 no block exists, and a cast would make some other number of it.
    table = _read_only(np.ascontiguousarray(np.clip(block_table, -1, 2**31 - 1), np.int32))
    query = _queries(q, scale, shape)
    partial = _new_partial(len(work), shape)
    pools = _pool(k_cache), _pool(v_cache)

    def run(piece: Array) -> bool:
        scratch = np.empty((2, 2, TILE), np.int64), _aligned((shape.heads, TILE))
        return bool(attend(piece, query, *pools, table, shape, partial, *scratch))

    if threads == 1:
        fine = run(work)
    else:
        fine = all(workers(threads).map(run, np.array_split(work, len(work))))
    if not fine:
        raise _refused(f"a block table names a block that is not one of {shape.num_blocks:,}")
    _merge(work, partial, shape, q.shape, out, lse)


def contiguous_decode(
    q: Array, k: Array, v: Array, lengths: Array, out: Array, lse: Array,
    *, scale: float, window: int = 0, threads: int = 1,
) -> None:  # fmt: skip
    """The same on caches [batch, kv_heads, max_tokens, head_dim]."""
    table = np.arange(len(k), dtype=np.int32)[:, None]
    paged_decode(q, k, v, table, lengths, out, lse, scale=scale, window=window, threads=threads)


def paged_twin(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, lengths: Array,
    *, scale: float, window: int = 0,
) -> tuple[Array, Array]:  # fmt: skip
    """The same, plainly and in float64: (out, lse). Caches of numbers, not of bits."""
    group, block_size = q.shape[1] // k_cache.shape[1], k_cache.shape[2]
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for sequence, length in enumerate(lengths):
        tokens = np.arange(max(0, length - window) if window else 0, length)
        if not tokens.size:
            continue
        blocks = block_table[sequence, tokens // block_size]
        for head in range(q.shape[1]):
            place = blocks, head // group, tokens % block_size
            scores = (
                k_cache[place].astype(np.float64) @ q[sequence, head].astype(np.float64) * scale
            )
            weights = np.exp(scores - scores.max())
            out[sequence, head] = weights @ v_cache[place].astype(np.float64) / weights.sum()
            lse[sequence, head] = scores.max() + np.log(weights.sum())
    return out, lse


def compiles() -> bool:
    """Whether the first run on this machine is still to come."""
    return must_compile(attend)


def _check(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, lengths: Array, out: Array,
    lse: Array, window: int, threads: int,
) -> None:  # fmt: skip
    """What the machine code believes: it reads and writes where these say, and looks no further."""
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table,
             "lengths": lengths, "out": out, "lse": lse}  # fmt: skip
    for (name, array), ndim in zip(given.items(), (3, 4, 4, 2, 1, 3, 2), strict=True):
        if not isinstance(array, np.ndarray) or array.ndim != ndim:
            raise _refused(f"{name} is no numpy array of {ndim} dimensions")
    batch = len(q)
    if len(lengths) != batch or len(block_table) != batch:
        raise _refused(f"{batch} queries, {len(lengths)} lengths, {len(block_table)} tables")
    if block_table.dtype.kind not in "iu" or lengths.dtype.kind not in "iu":
        raise _refused("block_table and lengths hold integers")
    if batch and int(lengths.min()) < 0:
        raise _refused("a length is negative")
    if q.dtype.kind != "f" or not k_cache.shape[1]:
        raise _refused(f"queries of {q.dtype}, {k_cache.shape[1]} KV heads")
    for name, array, shape in (("out", out, q.shape), ("lse", lse, q.shape[:2])):
        if array.shape != shape or array.dtype != np.float32 or not array.flags.writeable:
            raise _refused(f"{name} is no float32 of shape {shape} that can be written")
    if not isinstance(window, int) or window < 0 or not isinstance(threads, int) or threads < 1:
        raise _refused(f"window {window} or threads {threads} is no count")


def _shape(q: Array, k_cache: Array, v_cache: Array) -> Shape:
    """The sizes, once they are what the kernel can take."""
    num_blocks, kv_heads, block_size, head_dim = k_cache.shape
    group, rest = divmod(q.shape[1], kv_heads)
    if rest or q.shape[2] != head_dim or v_cache.shape != k_cache.shape:
        raise _refused(f"queries {q.shape} do not fit keys {k_cache.shape}, values {v_cache.shape}")
    if head_dim % 16 or not head_dim:
        raise _refused(f"a head size of {head_dim} is not a multiple of 16")
    for cache in (k_cache, v_cache):
        known = cache.dtype == k_cache.dtype and cache.dtype in (np.float32, np.float16, np.uint16)
        whole = not any(stride % cache.itemsize for stride in cache.strides)
        if not known or not whole or cache.strides[3] != cache.itemsize or min(cache.strides) < 0:
            raise _refused(f"a cache of {cache.dtype} with strides {cache.strides} cannot be read")
    heads = -(-group // STEP) * STEP
    line = _LINE_BYTES // k_cache.itemsize
    return Shape(kv_heads, heads, head_dim, num_blocks, block_size, line)


def _pool(cache: Array) -> Pool:
    block, head, token, _ = (stride // cache.itemsize for stride in cache.strides)
    last = sum((n - 1) * stride for n, stride in zip(cache.shape, cache.strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(
        cache, (last // cache.itemsize + 1,), (cache.itemsize,), writeable=False
    )
    return Pool(flat.view(np.int16) if flat.dtype == np.float16 else flat, block, head, token)


def _queries(q: Array, scale: float, shape: Shape) -> Array:
    """Queries by their KV head, with zeros as further heads, times what makes powers of two of e."""
    batch, query_heads, head_dim = q.shape
    group = query_heads // shape.kv_heads
    query = _aligned((batch, shape.kv_heads, shape.heads, head_dim))
    by_head = q.reshape(batch, shape.kv_heads, group, head_dim)
    np.multiply(
        by_head, np.float32(scale / math.log(2)), out=query[:, :, :group], casting="same_kind"
    )
    return query.reshape(-1)


def _chunks(lengths: Array, window: int, threads: int) -> Array:
    """(sequence, start, stop, number) of each piece of work: with one thread a sequence, else a part
    of one, so that there are some for each thread."""
    spans = [(max(0, n - window) if window else 0, n) for n in lengths.tolist()]
    tokens = sum(stop - start for start, stop in spans)
    most = max(_LEAST_CHUNK, tokens // (4 * threads)) if threads > 1 else max(1, tokens)
    cuts = [
        (sequence, at, min(stop, at + most))
        for sequence, (start, stop) in enumerate(spans)
        for at in range(start, stop, most)
    ]
    work = np.empty((len(cuts), 4), np.int64)
    work[:, :3] = np.array(cuts, np.int64).reshape(-1, 3)
    work[:, 3] = range(len(cuts))
    return work


def _new_partial(chunks: int, shape: Shape) -> Partial:
    rows = chunks * shape.kv_heads * shape.heads
    tops = np.full(rows, -np.inf, np.float32)
    return Partial(_aligned(rows * shape.head_dim), tops, np.zeros(rows, np.float32))


def _merge(
    work: Array, partial: Partial, shape: Shape, q_shape: tuple[int, ...], out: Array, lse: Array
) -> None:
    """The chunks of a sequence as one: each is shrunk to the largest of their maxima."""
    _, query_heads, head_dim = q_shape
    group = query_heads // shape.kv_heads
    by_head = (len(work), shape.kv_heads, shape.heads)
    tops = partial.tops.reshape(by_head)[:, :, :group]
    totals = partial.totals.reshape(by_head)[:, :, :group]
    sums = partial.sums.reshape(*by_head, head_dim)[:, :, :group]
    sequences, starts, chunks = np.unique(work[:, 0], return_index=True, return_counts=True)
    if len(starts) < len(work):
        most = np.maximum.reduceat(tops, starts)
        shares = np.exp2(tops - np.repeat(most, chunks, axis=0))
        tops, totals = most, np.add.reduceat(totals * shares, starts)
        sums = np.add.reduceat(sums * shares[..., None], starts)
    out[sequences] = (sums / totals[..., None]).reshape(-1, query_heads, head_dim)
    lse[sequences] = ((tops + np.log2(totals)) * math.log(2)).reshape(-1, query_heads)


def _aligned(shape: int | tuple[int, ...]) -> Array:
    """Zeros in fp32 that begin with a cache line: vectors across two lines cost twice."""
    size = math.prod(shape) if isinstance(shape, tuple) else shape
    raw = np.zeros(4 * size + _LINE_BYTES, np.uint8)
    first = -raw.ctypes.data % _LINE_BYTES
    return raw[first : first + 4 * size].view(np.float32).reshape(shape)


def _read_only(array: Array) -> Array:
    """For numba a read-only array is another type: always the same one, whoever calls."""
    view = array.view()
    view.flags.writeable = False
    return view


def _refused(what: str) -> KvtoolError:
    return KvtoolError(what, "the shapes and dtypes are those of kvtool.bench.cpu.attention")

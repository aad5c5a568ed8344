"""The tensors of a case: the same K and V contiguous and in blocks, in pools larger than the cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtool.bench.attention.case import KV_DTYPES, Case
from kvtool.bench.attention.tables import block_tables
from kvtool.bench.device import Device, load_torch, torch_dtype
from kvtool.errors import KvtoolError

COLD = 3
"""All pools together are so many times the last-level cache: none is read from there again."""
MOST_POOLS = 64
"""Copies of a small case: more would take longer to make than to measure."""
MOST_SHARE = 0.7
"""Of the memory that is free: beyond it other programs, or the kernels' own buffers, run out."""
PLANTED, TILE = 4, 64
"""Tokens at random places, and on both sides of so many edges of tiles, that get a large share of the
attention, beside the first, the last and those at a block's edge: a kernel that loses one of them is
visibly wrong."""


@dataclass(slots=True, kw_only=True)
class Data:
    """K and V in `pools` copies; V of copy i is scaled by `factor(i)`, a power of two, so that the
    output tells which copy was read.

    `k[i]`, `v[i]`: [batch, longest, kv_heads, head_dim]; `k_cache[i]`, `v_cache[i]`:
    [blocks, block_size, kv_heads, head_dim]; both as views of the case's layout.
    """

    case: Case
    device: Device
    q: Any
    """[batch, query_heads, head_dim] in the KV dtype."""
    kv: list[Any]
    """K and V of a copy as one piece of memory: what the roofs read and copy."""
    k: list[Any]
    v: list[Any]
    k_cache: list[Any]
    v_cache: list[Any]
    table: Any
    """int32 [batch, most blocks], −1 where there is no block."""
    lengths: Any
    """int32 [batch]."""
    given_scale: float | None = None
    """Of the scores, where a file says it."""

    @property
    def pools(self) -> int:
        """Copies of K and V."""
        return len(self.k)

    @property
    def roof_bytes(self) -> int:
        """What a roof reads of a copy: K and V, with the padding of uneven sequences."""
        return int(self.kv[0].numel() * self.kv[0].element_size())

    @property
    def is_cold(self) -> bool:
        """Whether the copies are together so large that none is read from the last-level cache."""
        return self.pools * self.case.kv_bytes >= COLD * self.device.cache_bytes

    @property
    def scale(self) -> float:
        """Of the scores: 1/√head_dim unless a file says otherwise."""
        return float(self.case.head_dim**-0.5) if self.given_scale is None else self.given_scale

    def fill_padding(self, value: float) -> None:
        """Write a value where no token is: beyond each length, in block tails and unused blocks."""
        torch = load_torch()
        positions = torch.arange(self.k[0].shape[1], device=self.q.device)
        outside = positions[None, :] >= self.lengths[:, None]
        unused = _unused_slots(self)
        for one in (*self.k, *self.v):
            one.masked_fill_(outside[:, :, None, None], value)
        for one in (*self.k_cache, *self.v_cache):
            one.masked_fill_(unused[:, :, None, None], value)


def factor(pool: int) -> float:
    """What V of a copy is scaled by: neighbours differ, and the scaling is exact."""
    return float(2.0 ** -(pool % 4))


def pools_of(case: Case, device: Device) -> int:
    """How many copies are needed so that none is read from the last-level cache."""
    wanted = -(-COLD * device.cache_bytes // case.kv_bytes)
    room = int(MOST_SHARE * device.free_bytes) // memory_of(case, pools=1)
    return max(1, min(wanted, room, MOST_POOLS))


def memory_of(case: Case, *, pools: int) -> int:
    """Bytes that a case takes: contiguous copies, where the copy roof writes, paged copies, and the
    buffer that is gathered into."""
    width = 2 * case.kv_heads * case.head_dim * KV_DTYPES[case.kv_dtype]
    contiguous = case.batch * case.max_context * width
    spare = 1.25 if case.pattern == "fragmented" else 1.0
    paged = int(sum(case.blocks) * case.block_size * width * spare)
    gathered = case.batch * max(case.blocks) * case.block_size * width
    return pools * (2 * contiguous + paged) + gathered


def make(case: Case, device: Device, *, seed: int) -> Data:
    """The data of a case from a seed. Raises KvtoolError where memory does not suffice."""
    torch = load_torch()
    _check_memory(case, device)
    generator = torch.Generator(device=device.kind).manual_seed(seed % 2**63)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device.kind, dtype=torch.float32)

    base = random(case.batch, case.kv_heads, 1, case.head_dim)
    noise = random(case.batch, case.kv_heads, case.query_heads // case.kv_heads, case.head_dim)
    q = (base + 0.5 * noise).reshape(case.batch, case.query_heads, case.head_dim)
    kv = _empty(case, device, 2, case.batch, case.max_context)
    kv.normal_(generator=generator)
    _plant(case, _view(case, kv[0]), base[:, :, 0], seed)
    table, num_blocks = block_tables(case, seed)
    return _copied(case, device, q, kv, torch.from_numpy(table), num_blocks)


def make_from(case: Case, device: Device, inputs: Any) -> Data:
    """The data of a file (npz.Inputs): its blocks, and the same tokens contiguous."""
    torch = load_torch()
    _check_memory(case, device)
    kv = _empty(case, device, 2, case.batch, case.max_context).zero_()
    k, v = (_view(case, one) for one in kv)
    for row, tokens in enumerate(case.lengths):
        positions = torch.arange(tokens)
        blocks = inputs.table[row, positions // case.block_size].long()
        for target, source in ((k, inputs.k_cache), (v, inputs.v_cache)):
            target[row, :tokens] = source[blocks, positions % case.block_size].to(device.kind)
    made = _copied(case, device, inputs.q, kv, inputs.table, inputs.k_cache.shape[0])
    made.given_scale = inputs.scale
    return made


def _copied(case: Case, device: Device, q: Any, kv: Any, table: Any, num_blocks: int) -> Data:
    """K and V of all sequences as so many contiguous and paged copies as are needed."""
    torch = load_torch()
    data = Data(
        case=case, device=device, kv=[], k=[], v=[], k_cache=[], v_cache=[],
        q=q.to(device.kind, torch_dtype(case.kv_dtype)).contiguous(),
        table=table.to(device.kind),
        lengths=torch.tensor(case.lengths, dtype=torch.int32, device=device.kind),
    )  # fmt: skip
    for pool in range(pools_of(case, device)):
        one = kv if pool == 0 else kv.clone()
        if pool:
            one[1].mul_(factor(pool))
        data.kv.append(one)
        data.k.append(_view(case, one[0]))
        data.v.append(_view(case, one[1]))
        for caches in (data.k_cache, data.v_cache):
            caches.append(_view(case, _empty(case, device, num_blocks, case.block_size).zero_()))
        _scatter(data, pool)
    return data


def _check_memory(case: Case, device: Device) -> None:
    needed = memory_of(case, pools=1)
    if needed > MOST_SHARE * device.free_bytes:
        raise out_of_memory(case, needed, device)


def flat(tensor: Any) -> Any:
    """The memory of a tensor as one line, whichever way its axes are ordered; nothing is copied."""
    while not tensor.is_contiguous():
        tensor = tensor.permute(0, 2, 1, 3)
    return tensor.view(-1)


def out_of_memory(case: Case, needed: int, device: Device) -> KvtoolError:
    """The error of a case that this device has no room for."""
    from kvtool.units import format_bytes

    return KvtoolError(
        f"batch {case.batch}, context {case.context_tokens:,}: about {format_bytes(needed)} are "
        f"needed and {format_bytes(device.free_bytes)} of the {device.kind}'s memory are free",
        "lower --batch or --context; --dry-run lists what each case takes",
        code="out_of_memory",
    )


def _empty(case: Case, device: Device, *outer: int) -> Any:
    """Memory of […, tokens] × heads in the case's order: the last of `outer` are tokens."""
    torch = load_torch()
    *before, tokens = outer
    inner = (tokens, case.kv_heads) if case.layout == "nhd" else (case.kv_heads, tokens)
    shape = (*before, *inner, case.head_dim)
    return torch.empty(shape, dtype=torch_dtype(case.kv_dtype), device=device.kind)


def _view(case: Case, memory: Any) -> Any:
    """[outer, tokens, kv_heads, head_dim], whatever the order in memory."""
    return memory if case.layout == "nhd" else memory.permute(0, 2, 1, 3)


def _plant(case: Case, k: Any, base: Any, seed: int) -> None:
    """Keys along their queries' common direction at a few places, so that these weigh heavily."""
    rng = np.random.default_rng(seed)
    size = case.block_size
    for row, tokens in enumerate(case.lengths):
        if not tokens:
            continue
        edges = {0, tokens - 1, (tokens - 1) // size * size, size - 1, size}
        tiles = rng.integers(tokens // TILE + 1, size=PLANTED) * TILE
        edges |= {*tiles, *(tiles - 1), *rng.integers(tokens, size=PLANTED)}
        places = sorted(int(at) for at in edges if 0 <= at < tokens)
        score = math.log(max(tokens / 16, math.e))
        key = base[row] * (score / case.head_dim**0.5)
        k[row, places] = key.to(k.dtype)


def _scatter(data: Data, pool: int) -> None:
    """The contiguous copy into its blocks."""
    rows, positions, blocks, offsets = _slots(data)
    data.k_cache[pool][blocks, offsets] = data.k[pool][rows, positions]
    data.v_cache[pool][blocks, offsets] = data.v[pool][rows, positions]


def _slots(data: Data) -> tuple[Any, Any, Any, Any]:
    """Of every token its sequence and position, and its block and offset."""
    torch = load_torch()
    lengths = data.lengths.long()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    positions = torch.arange(len(rows), device=lengths.device) - starts[rows]
    blocks = data.table[rows, positions // data.case.block_size].long()
    return rows, positions, blocks, positions % data.case.block_size


def _unused_slots(data: Data) -> Any:
    """Which slots of the pool hold no token: [blocks, block_size]."""
    torch = load_torch()
    unused = torch.ones(data.k_cache[0].shape[:2], dtype=torch.bool, device=data.table.device)
    _, _, blocks, offsets = _slots(data)
    unused[blocks, offsets] = False
    return unused

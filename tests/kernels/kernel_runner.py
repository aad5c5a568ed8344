"""Run one group of cases in triton's interpreter and print a line of JSON for each.

    python kernel_runner.py GROUP [PART PARTS]

A process of its own: TRITON_INTERPRET has to be set before the kernels are imported, and an address
out of bounds is a SIGSEGV there. The line before a crash names the case.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import kernel_cases
import torch

from kvtool.kernels import decode, merge, read, store
from kvtool.kernels.decode_plan import Plan
from kvtool.kernels.launch import is_interpreted

NAN = float("nan")
BAD_ID = 2**30
# Computing is fp32 in the interpreter whatever the dtype; rounding the result is half a unit of the
# last place, and the interpreter truncates where a GPU rounds: a whole one.
EXACT = 1e-12
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def error_of(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference as a share of max(1, |wanted|); inf where only one is finite."""
    wanted = wanted.double()
    same = result.double() == wanted
    difference = torch.where(same, 0.0, (result.double() - wanted).abs() / wanted.abs().clamp(1.0))
    return float(torch.nan_to_num(difference, nan=torch.inf).max()) if result.numel() else 0.0


def empty_cache(case: kernel_cases.DecodeCase, first: int, second: int) -> torch.Tensor:
    """A view [first, second, kv_heads, head_dim] full of NaN, in the case's layout."""
    sizes = [first, second, case.kv_heads, case.head_dim]
    if case.layout == "HND":
        sizes[1], sizes[2] = sizes[2], sizes[1]
    cache = torch.full(sizes, NAN, dtype=getattr(torch, case.dtype))
    return cache.permute(0, 2, 1, 3) if case.layout == "HND" else cache


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that ends where memory does: one element further is a SIGSEGV."""
    num_bytes = tensor.numel() * tensor.element_size()
    room = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + room), mmap.PAGESIZE, 0)
    offset = room - num_bytes
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return copy.view(tensor.shape).copy_(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One case's tensors: the same tokens dense, in blocks and in rows; the last two in poison."""

    q: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    dense: torch.Tensor
    paged: list[torch.Tensor]
    contiguous: list[torch.Tensor]


def inputs_of(case: kernel_cases.DecodeCase) -> Inputs:
    """Random q, K and V, scattered over blocks in random order."""
    batch, longest = len(case.lengths), max(case.lengths, default=0)
    dtype = getattr(torch, case.dtype)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    q = torch.randn(batch, case.group * case.kv_heads, case.head_dim).to(dtype)
    dense = torch.randn(2, batch, max(longest, 1), case.kv_heads, case.head_dim).to(dtype)
    blocks = -(-longest // case.block_size) + 1
    table = torch.full((batch, blocks), BAD_ID, dtype=torch.int32)
    table[:, 1::2] = -1
    order = torch.randperm(batch * blocks + 2).to(torch.int32)
    paged = [empty_cache(case, batch * blocks + 2, case.block_size) for _ in "kv"]
    contiguous = [empty_cache(case, batch, longest + 3) for _ in "kv"]
    for seq, length in enumerate(case.lengths):
        start = max(0, length - case.window) if case.window else 0
        for token in range(start, length):
            block, offset = divmod(token, case.block_size)
            table[seq, block] = order[seq * blocks + block]
            for cache, twin, source in zip(paged, contiguous, dense, strict=True):
                cache[table[seq, block], offset] = source[seq, token]
                twin[seq, token] = source[seq, token]
    if batch:
        table, lengths = guarded(table), guarded(lengths)
    return Inputs(
        q=q, lengths=lengths, table=table, dense=dense, paged=paged, contiguous=contiguous
    )


def run_decode(case: kernel_cases.DecodeCase) -> dict[str, float]:
    """Errors of out and lse, and of the reference beside the kernel, against dense attention."""
    given = inputs_of(case)
    q, lengths = given.q, given.lengths
    plan = Plan(
        tile=case.tile, chunk_tiles=case.chunk_tiles, num_stages=1, num_warps=1,
        num_splits=case.splits, walk="chunked" if case.walk == "contiguous" else case.walk,
    )  # fmt: skip
    out = torch.full_like(q, NAN, dtype=getattr(torch, case.out_dtype or case.dtype))
    lse = torch.full(q.shape[:2], NAN)
    workspace = decode.workspace_for(q, plan)
    for part in workspace or ():
        part.fill_(NAN)
    asked = {"scale": case.scale, "window": case.window}
    options = asked | {"plan": plan, "out": out, "lse": lse, "workspace": workspace}
    if case.walk == "contiguous":
        got = decode.contiguous_decode(q, *given.contiguous, lengths, **options)
        reference = decode.contiguous_reference(q, *given.contiguous, lengths, **asked)
    else:
        got = decode.paged_decode(q, *given.paged, given.table, lengths, **options)
        reference = decode.paged_reference(q, *given.paged, given.table, lengths, **asked)
    assert got[0] is out
    assert got[1] is lse
    wanted = decode.contiguous_reference(q, *given.dense, lengths, **asked)
    return {
        "out": error_of(out, wanted[0]) / TOLERANCE[out.dtype],
        "lse": error_of(lse, wanted[1]) / TOLERANCE[torch.float32],
        "reference": max(map(error_of, reference, wanted)) / 1e-9,
    }


def run_store(block_size: int, layout: str, dtype: str, slot_dtype: torch.dtype) -> dict:
    """Scatter with skipped slots; the rest of the cache must stay as it was."""
    case = kernel_cases.DecodeCase(
        kv_heads=11, head_dim=80, block_size=block_size, layout=layout, dtype=dtype
    )
    num_blocks = max(2, 32 // block_size)
    caches = [empty_cache(case, num_blocks, block_size).fill_(7.0) for _ in range(4)]
    slots = torch.randperm(num_blocks * block_size)[:9].to(slot_dtype)
    slots[[0, 4]] = -1
    fused = torch.randn(9, 3, 11, 80).to(getattr(torch, dtype))  # K and V as slices of a projection
    store.store(fused[:, 1], fused[:, 2], *caches[:2], slots)
    store.reference(fused[:, 1], fused[:, 2], *caches[2:], slots)
    return {"store": sum(map(error_of, caches[:2], caches[2:])) / EXACT}


def run_merge(parts: int, dtype: str) -> dict[str, float]:
    """Parts without tokens hold NaN; one row has no tokens at all."""
    outs, logs = torch.randn(parts, 3, 4, 80), torch.randn(parts, 3, 4) * 30
    logs[torch.rand(logs.shape) < 0.3] = -torch.inf
    logs[:, 1, 2] = -torch.inf
    outs[logs == -torch.inf] = NAN
    outs = outs.to(getattr(torch, dtype))
    got = merge.merge(outs, logs)
    wanted = merge.reference(outs, logs)
    return {
        "out": error_of(got[0], wanted[0]) / TOLERANCE[got[0].dtype],
        "lse": error_of(got[1], wanted[1]) / TOLERANCE[torch.float32],
    }


def run_read(num_bytes: int) -> dict[str, float]:
    """Sums of words that wrap."""
    x = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8)
    return {"sums": error_of(read.read_sum(x), read.reference(x)) / EXACT}


def far_buffer(num_elements: int) -> torch.Tensor:
    """fp16 memory that is only address space until it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 2 * num_elements, flags=flags), dtype=torch.float16)


def run_far(strides: tuple[int, int, int], kernel: str) -> dict[str, float]:
    """Blocks, tokens or heads that lie more than 2^31 elements apart."""
    sizes = (4, 4, 4, 64)
    extent = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=False))
    buffer = far_buffer(extent + 128)
    k = torch.as_strided(buffer, sizes, (*strides, 1))
    v = torch.as_strided(buffer, sizes, (*strides, 1), 64)
    new = torch.randn(2, 16, 4, 64).half()
    slots = torch.randperm(16)
    writing = store.store if kernel == "store" else store.reference
    writing(new[0], new[1], k, v, slots)
    near = torch.zeros(2, *sizes, dtype=torch.float16)
    store.reference(new[0], new[1], near[0], near[1], slots)
    if kernel == "store":
        return {"store": (error_of(k, near[0]) + error_of(v, near[1])) / EXACT}
    q = torch.randn(4, 8, 64).half()
    plan = Plan(tile=16, chunk_tiles=1, num_stages=1, num_warps=1, num_splits=1)
    if kernel == "contiguous":
        lengths = torch.tensor([4, 3, 0, 4], dtype=torch.int32)
        got = decode.contiguous_decode(q, k, v, lengths, plan=plan)
        wanted = decode.contiguous_reference(q, *near, lengths)
    else:
        table = torch.stack([torch.randperm(4) for _ in range(4)]).int()
        lengths = torch.tensor([16, 13, 0, 5], dtype=torch.int32)
        got = decode.paged_decode(q, k, v, table, lengths, plan=plan)
        wanted = decode.paged_reference(q, *near, table, lengths)
    return {"out": error_of(got[0], wanted[0]) / 1e-3, "lse": error_of(got[1], wanted[1]) / 1e-5}


def other() -> Iterable[tuple[str, Callable[[], dict[str, float]]]]:
    """store, merge and read."""
    for number, block_size in enumerate((1, 4, 16, 256)):
        for dtype in kernel_cases.DTYPES:
            layout, kind = kernel_cases.LAYOUTS[number % 2], (torch.int32, torch.int64)[number // 2]
            yield (
                f"store {block_size} {layout} {dtype} {kind}",
                lambda b=block_size, la=layout, d=dtype, k=kind: run_store(b, la, d, k),
            )
    for parts in (1, 2, 5, 40):
        for dtype in kernel_cases.DTYPES[:2]:
            yield f"merge {parts} {dtype}", lambda p=parts, d=dtype: run_merge(p, d)
    for num_bytes in (64, 4 * read.WORDS, 4 * read.WORDS * 3 + 64):
        yield f"read {num_bytes}", lambda n=num_bytes: run_read(n)


def far() -> Iterable[tuple[str, Callable[[], dict[str, float]]]]:
    """Offsets beyond 32 bits, in turn in each stride of the cache."""
    for kernel in ("chunked", "contiguous", "store"):
        for strides in ((2**30, 1024, 128), (1024, 2**30, 128), (1024, 256, 2**30)):
            fixed = strides if strides[2] < 2**30 else (512, 128, 2**30)
            yield f"far {kernel} {fixed}", lambda s=fixed, k=kernel: run_far(s, k)


def decodes(
    cases: Iterable[kernel_cases.DecodeCase],
) -> Iterable[tuple[str, Callable[[], dict[str, float]]]]:
    """Decode cases as named calls."""
    return [(str(case), lambda case=case: run_decode(case)) for case in cases]


GROUPS = {
    "shapes": lambda: decodes(kernel_cases.shapes()),
    "edges": lambda: decodes(kernel_cases.edges()),
    "matrix": lambda: decodes(kernel_cases.matrix()),
    "other": other,
    "far": far,
}


def main(group: str, part: int = 0, parts: int = 1) -> None:
    """Print {"case": …} before each case and {"errors": …} (shares of the tolerance) after it."""
    assert is_interpreted(decode._decode)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, call in list(GROUPS[group]())[part::parts]:
        print(json.dumps({"case": name}), flush=True)
        print(json.dumps({"errors": call()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

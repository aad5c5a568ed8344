"""What the kernels ask of their arguments, refused with a ValueError that names the argument.

Strides (in elements) and addresses (in bytes) have to be multiples of 16: triton keeps 128-bit loads
only where it knows that, and without them a decode kernel silently loses most of its bandwidth.
"""

from __future__ import annotations

import torch

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_BLOCK_SIZE = 256


def refuse_unless(met: bool, text: str) -> None:
    """Raise a ValueError with this text unless the condition is met."""
    if not met:
        raise ValueError(text)


def is_count(text: str, number: object, *, low: int = 1, high: int = 2**31 - 1) -> None:
    """Refuse what is no whole number from low to high, with this text."""
    refuse_unless(
        isinstance(number, int) and not isinstance(number, bool) and low <= number <= high, text
    )


def shape_is(name: str, tensor: torch.Tensor, **sizes: int) -> None:
    """Refuse a tensor whose shape is not these named sizes, in order."""
    wanted = tuple(sizes.values())
    refuse_unless(
        tuple(tensor.shape) == wanted,
        f"{name} must have the shape [{', '.join(sizes)}] = {list(wanted)}, "
        f"not {list(tensor.shape)}",
    )


def effective_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides, 0 where a dimension has one element: its stride is never used and may be odd."""
    return tuple(
        stride if size > 1 else 0
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def rows_are_aligned(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """Refuse what would lose 128-bit loads; returns the strides of all but the last dimension."""
    refuse_unless(
        tensor.shape[-1] == 1 or tensor.stride(-1) == 1,
        f"{name}: the last dimension must have stride 1, not {tensor.stride(-1)}",
    )
    strides = effective_strides(tensor)[:-1]
    refuse_unless(
        all(stride % 16 == 0 for stride in strides),
        f"{name}: strides must be multiples of 16 elements, not {list(tensor.stride())} "
        "(others lose 128-bit loads)",
    )
    refuse_unless(
        tensor.data_ptr() % 16 == 0,
        f"{name}: the address must be a multiple of 16 bytes (others lose 128-bit loads)",
    )
    return strides


def is_dense(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse a tensor with gaps, or of another dtype than these."""
    refuse_unless(tensor.is_contiguous(), f"{name} must be contiguous")
    refuse_unless(
        tensor.dtype in dtypes,
        f"{name} must be {' or '.join(map(str, dtypes))}, not {tensor.dtype}",
    )


def same_device(**tensors: torch.Tensor | None) -> torch.device:
    """Refuse tensors on different devices; returns the one."""
    strangers = [
        name
        for name, one in tensors.items()
        if one is not None and not isinstance(one, torch.Tensor)
    ]
    refuse_unless(not strangers, f"{', '.join(strangers)} must be torch tensors")
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    refuse_unless(len(set(devices.values())) == 1, f"tensors lie on different devices: {devices}")
    return next(iter(devices.values()))


def block_size_is_supported(block_size: int) -> None:
    """Refuse block sizes that are no power of two from 1 to 256."""
    refuse_unless(
        1 <= block_size <= MAX_BLOCK_SIZE and block_size & (block_size - 1) == 0,
        f"block_size must be a power of two from 1 to {MAX_BLOCK_SIZE}, not {block_size}",
    )


def head_dim_is_supported(head_dim: int) -> None:
    """Refuse head sizes without a row in `decode_plan`'s table of tiles."""
    refuse_unless(
        head_dim in HEAD_DIMS,
        f"head_dim must be one of {', '.join(map(str, HEAD_DIMS))}, not {head_dim}",
    )


def caches_match(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, str]
) -> tuple[int, ...]:
    """Refuse K and V that do not fit q or each other; returns their common strides but the last.

    One set of strides for both halves the address arithmetic of the kernel.
    """
    refuse_unless(q.dim() == 3, "q must be [batch, query_heads, head_dim]")
    for name, cache in zip(names, (k, v), strict=True):
        refuse_unless(cache.dim() == 4, f"{name} must have 4 dimensions, not {cache.dim()}")
    refuse_unless(
        k.shape == v.shape,
        f"{names[0]} and {names[1]} must have one shape, not {list(k.shape)} and {list(v.shape)}",
    )
    kv_heads, head_dim = k.shape[2:]
    head_dim_is_supported(head_dim)
    refuse_unless(
        q.shape[2] == head_dim, f"q has head_dim {q.shape[2]} and {names[0]} has {head_dim}"
    )
    refuse_unless(
        kv_heads > 0 and q.shape[1] > 0 and q.shape[1] % kv_heads == 0,
        f"query heads ({q.shape[1]}) must be a multiple of KV heads ({kv_heads})",
    )
    refuse_unless(q.dtype in DTYPES, f"q must be fp16, bf16 or fp32, not {q.dtype}")
    refuse_unless(
        k.dtype == q.dtype and v.dtype == q.dtype,
        f"q, {names[0]} and {names[1]} must have one dtype, not {q.dtype}, {k.dtype}, {v.dtype}",
    )
    strides = rows_are_aligned(names[0], k)
    refuse_unless(
        strides == rows_are_aligned(names[1], v),
        f"{names[0]} and {names[1]} must have the same strides, "
        f"not {list(k.stride())} and {list(v.stride())}",
    )
    return strides


def results_fit(
    q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse as given, or new ones; out may be fp32 whatever q is."""
    batch, heads, head_dim = q.shape
    out = q.new_empty(q.shape) if out is None else out
    lse = q.new_empty((batch, heads), dtype=torch.float32) if lse is None else lse
    shape_is("out", out, batch=batch, query_heads=heads, head_dim=head_dim)
    shape_is("lse", lse, batch=batch, query_heads=heads)
    is_dense("out", out, (q.dtype, torch.float32))
    is_dense("lse", lse, (torch.float32,))
    rows_are_aligned("out", out)
    return out, lse


def table_fits(q: torch.Tensor, table: torch.Tensor) -> None:
    """Refuse a block table that is not int32 [batch, max_blocks]."""
    refuse_unless(table.dim() == 2, "block_table must be [batch, max_blocks]")
    shape_is("block_table", table, batch=q.shape[0], max_blocks=table.shape[1])
    refuse_unless(
        table.dtype == torch.int32 and (table.shape[1] <= 1 or table.stride(1) == 1),
        "block_table must be int32, with stride 1 in its last dimension",
    )


def workspace_fits(
    q: torch.Tensor, parts: tuple[torch.Tensor, torch.Tensor], num_splits: int
) -> None:
    """Refuse a workspace without room for these splits of q."""
    room = parts[0].shape[0]
    refuse_unless(room >= num_splits, f"workspace has room for {room} splits, not {num_splits}")
    batch, heads, head_dim = q.shape
    shape_is("workspace[0]", parts[0], splits=room, batch=batch, heads=heads, head_dim=head_dim)
    shape_is("workspace[1]", parts[1], splits=room, batch=batch, heads=heads)
    for number, part in enumerate(parts):
        is_dense(f"workspace[{number}]", part, (torch.float32,))

"""Inputs and outputs of a case as one .npz file, so that somebody else can recompute the answer.

    q            [batch, query_heads, head_dim]
    k_cache      [blocks, block_size, kv_heads, head_dim], v_cache alike
    block_table  [batch, most blocks], integers; what lies beyond a length is not looked at
    lengths      [batch], integers
    scale        of the scores; 1/√head_dim where it is left out
    kv_dtype     fp32, fp16, or bf16: then q, k_cache and v_cache are uint16, the bits of a bf16
    out_NAME     [batch, query_heads, head_dim], lse_NAME [batch, query_heads]: written, not read

What is written can be read again as inputs.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvtool.bench.attention.case import BLOCK_SIZES, HEAD_DIMS, Case
from kvtool.bench.attention.data import Data
from kvtool.bench.attention.prepared import Prepared
from kvtool.bench.device import free_memory, load_torch, numpy_of
from kvtool.errors import KvtoolError

ARRAYS = ("q", "k_cache", "v_cache", "block_table", "lengths")
DTYPES = {"float32": "fp32", "float16": "fp16", "uint16": "bf16"}
LARGEST = 1e30
"""Of a number that fp32 arithmetic still has room for when it is multiplied and summed."""
MOST_SHARE = 0.2
"""Of the free memory: the file is held once more contiguous, and again for the device."""


class Inputs(NamedTuple):
    """A file's arrays as torch tensors on the CPU, checked."""

    q: Any
    k_cache: Any
    v_cache: Any
    table: Any
    lengths: tuple[int, ...]
    scale: float | None
    kv_dtype: str

    def case(
        self, *, layout: str, threads: int | None, num_splits: int | None, num_stages: int | None
    ) -> Case:
        """What the arrays are a case of."""
        _, size, kv_heads, head_dim = self.k_cache.shape
        return Case(
            batch=len(self.lengths), context_tokens=max(1, sum(self.lengths) // len(self.lengths)),
            query_heads=self.q.shape[1], kv_heads=kv_heads, head_dim=head_dim, block_size=size,
            pattern="inputs", kv_dtype=self.kv_dtype, layout=layout, num_splits=num_splits,
            num_stages=num_stages, skew=1, threads=threads, given_lengths=self.lengths,
        )  # fmt: skip


def read_inputs(path: Path) -> Inputs:
    """The arrays of a file that a stranger wrote. Raises KvtoolError; nothing in it is executed."""
    try:
        _check_size(path)
        with np.load(path, allow_pickle=False) as file:
            arrays = {
                name: file[name] for name in file.files if not name.startswith(("out_", "lse_"))
            }
    except KvtoolError:
        raise
    except OSError as error:
        raise _bad(path, f"it cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever a damaged zip or header makes numpy raise
        raise _bad(path, f"it is no .npz of plain arrays: {error}") from error
    arrays = {name: one for name, one in arrays.items() if isinstance(one, np.ndarray)}
    missing = [name for name in ARRAYS if name not in arrays]
    if missing:
        raise _bad(path, f"it has no array {', '.join(missing)}")
    return _checked(path, arrays)


def _check_size(path: Path) -> None:
    """Refuse what is no file, or would unpack to more than there is room for, before it does."""
    if not path.is_file():  # a device or a pipe has no end
        raise _bad(path, "there is no such file" if not path.exists() else "it is not a file")
    with zipfile.ZipFile(path) as archive:
        size = sum(one.file_size for one in archive.infolist())
    if size > MOST_SHARE * free_memory():
        raise _bad(path, f"it unpacks to {size:,} bytes, more than there is room for")


def _checked(path: Path, arrays: Mapping[str, Any]) -> Inputs:
    q, k, v, table, lengths = (arrays[name] for name in ARRAYS)
    dims = {"q": 3, "k_cache": 4, "v_cache": 4, "block_table": 2, "lengths": 1}
    for name, count in dims.items():
        if arrays[name].ndim != count:
            raise _bad(path, f"{name} has {arrays[name].ndim} dimensions, not {count}")
    kv_dtype = _dtype(path, arrays)
    if k.shape != v.shape or q.shape[2] != k.shape[3]:
        raise _bad(
            path, f"q {q.shape}, k_cache {k.shape} and v_cache {v.shape} do not fit together"
        )
    if k.shape[1] not in BLOCK_SIZES or k.shape[3] not in HEAD_DIMS:
        raise _bad(path, f"no kernel has blocks of {k.shape[1]} tokens with heads of {k.shape[3]}")
    if not k.shape[2] or not q.shape[1] or q.shape[1] % k.shape[2]:
        raise _bad(path, f"{q.shape[1]} query heads are no multiple of {k.shape[2]} KV heads")
    if not len(lengths) or len(lengths) != len(q) or len(table) != len(q):
        raise _bad(path, "q, block_table and lengths are not of one batch, or it is empty")
    for name in ("block_table", "lengths"):
        if arrays[name].dtype.kind not in "iu":
            raise _bad(path, f"{name} holds {arrays[name].dtype}, not integers")
    _check_blocks(path, table, lengths, num_blocks=k.shape[0], size=k.shape[1])
    scale = _scale(path, arrays["scale"]) if "scale" in arrays else None
    q, k, v = (_tensor(one, kv_dtype) for one in (q, k, v))
    held, table = _only_used(table, lengths, k.shape[1])
    torch = load_torch()
    lengths = tuple(map(int, lengths))
    return Inputs(q, k[held], v[held], torch.from_numpy(table), lengths, scale, kv_dtype)


def _scale(path: Path, array: Any) -> float:
    if array.ndim or array.dtype.kind not in "fiu":
        raise _bad(path, f"scale is no number but {array.dtype} of shape {list(array.shape)}")
    scale = float(array)
    if not abs(scale) < LARGEST:
        raise _bad(path, f"scale is {scale}")
    return scale


def _only_used(table: Any, lengths: Any, size: int) -> tuple[Any, Any]:
    """The blocks that tokens are in, and the table with their numbers among these; −1 elsewhere."""
    used = np.arange(table.shape[1])[None, :] < -(-lengths // size)[:, None]
    held = np.unique(table[used])
    out = np.full(table.shape, -1, dtype=np.int32)
    out[used] = np.searchsorted(held, table[used])
    return held, out


def _dtype(path: Path, arrays: Mapping[str, Any]) -> str:
    names = {str(arrays[name].dtype) for name in ("q", "k_cache", "v_cache")}
    found = DTYPES.get(names.pop()) if len(names) == 1 else None
    said = str(arrays.get("kv_dtype", found))
    if found is None or said != found:
        raise _bad(path, "q, k_cache and v_cache must all be float32, float16 or, for bf16, uint16")
    return found


def _check_blocks(path: Path, table: Any, lengths: Any, *, num_blocks: int, size: int) -> None:
    """Every block that a token is in exists: a kernel would read whatever lies elsewhere."""
    if int(lengths.min()) < 0 or int(lengths.max()) > table.shape[1] * size:
        raise _bad(
            path, f"lengths are not within 0 to {table.shape[1] * size:,}, what the table holds"
        )
    if not int(lengths.max()):
        raise _bad(path, "every sequence is empty")
    for row, tokens in enumerate(lengths):
        used = table[row, : -(-int(tokens) // size)]
        if used.size and not (int(used.min()) >= 0 and int(used.max()) < num_blocks):
            raise _bad(path, f"block_table row {row} names a block outside 0 to {num_blocks - 1:,}")


def _tensor(array: Any, kv_dtype: str) -> Any:
    torch = load_torch()
    plain = np.ascontiguousarray(array)
    if kv_dtype == "bf16":
        return torch.from_numpy(plain.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(plain)


def outputs(data: Data, ready: Mapping[str, Prepared]) -> dict[str, Any]:
    """The arrays of a dump: the inputs, and what each provider made of them."""
    found = {
        "q": numpy_of(data.q.cpu()),
        "k_cache": numpy_of(data.k_cache[0].contiguous().cpu()),
        "v_cache": numpy_of(data.v_cache[0].contiguous().cpu()),
        "block_table": data.table.cpu().numpy(),
        "lengths": data.lengths.cpu().numpy(),
        "scale": np.float64(data.scale),
        "kv_dtype": np.str_(data.case.kv_dtype),
    }
    for name, one in ready.items():
        one.run(0)
        out = one.output(0).reshape(data.q.shape)
        found[f"out_{name.replace('-', '_')}"] = out.float().cpu().numpy()
        if one.lse is not None:
            found[f"lse_{name.replace('-', '_')}"] = one.lse(0).float().cpu().numpy()
    return found


def _bad(path: Path, what: str) -> KvtoolError:
    return KvtoolError(
        f"--inputs {path}: {' '.join(what.split())[:300]}",
        "docs/bench.md lists the arrays; --dump-output writes such a file",
        code="bad_inputs",
    )

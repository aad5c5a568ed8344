"""What goes wrong on a device, in two lines: no memory left, no compiler, a kernel that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtool.bench.case import Case
from kvtool.bench.data import memory_of, out_of_memory
from kvtool.bench.device import Device, load_torch
from kvtool.errors import KvtoolError

_NO_ROOM = ("not enough memory", "can't allocate memory", "cannot allocate memory")
_NO_COMPILER = ("c compiler", "gcc", "cc1", "python.h")


@contextmanager
def named_failure(case: Case, device: Device) -> Iterator[None]:
    """Turn what torch, triton and numba raise into the error of this case."""
    torch = load_torch()
    try:
        yield
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        raise out_of_memory(case, memory_of(case, pools=1), device) from error
    except KvtoolError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise _reworded(error, case, device) from error


def _reworded(error: Exception, case: Case, device: Device) -> KvtoolError:
    text = " ".join(str(error).split())
    low = text.lower()
    if any(words in low for words in _NO_ROOM):
        return out_of_memory(case, memory_of(case, pools=1), device)
    if device.is_gpu and any(words in low for words in _NO_COMPILER):
        return KvtoolError(
            f"triton cannot build its launcher: {text[:160]}",
            "install a C compiler and Python's headers (apt-get install gcc python3-dev), or set CC",
            code="no_compiler",
        )
    return KvtoolError(
        f"batch {case.batch}, context {case.context_tokens:,}, block size {case.block_size}: "
        f"{type(error).__name__}: {text[:200]}",
        "run again with KVTOOL_DEBUG=1 for the traceback; --provider leaves providers out",
        code="kernel_failed",
    )

"""What goes wrong on a device, in two lines: no memory left, no compiler, a kernel that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtool.bench.device import Device, load_torch
from kvtool.errors import KvtoolError

_NO_ROOM = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")
_NO_COMPILER = ("c compiler", "gcc", "cc1", "python.h")


@contextmanager
def named_failure(what: str, device: Device, full: Callable[[], KvtoolError]) -> Iterator[None]:
    """Turn what torch, triton and numba raise into an error about `what`; `full` is that of memory."""
    torch = load_torch()
    try:
        yield
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        raise full() from error
    except KvtoolError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if any(words in text.lower() for words in _NO_ROOM):
            raise full() from error
        raise _reworded(what, text, error, device) from error


def _reworded(what: str, text: str, error: Exception, device: Device) -> KvtoolError:
    if device.is_gpu and any(words in text.lower() for words in _NO_COMPILER):
        return KvtoolError(
            f"triton cannot build its launcher: {text[:160]}",
            "install a C compiler and Python's headers (apt-get install gcc python3-dev), or set CC",
            code="no_compiler",
        )
    return KvtoolError(
        f"{what}: {type(error).__name__}: {text[:200]}",
        "run again with KVTOOL_DEBUG=1 for the traceback and report it",
        code="kernel_failed",
    )

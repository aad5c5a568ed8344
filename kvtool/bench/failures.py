"""What goes wrong on a device, in two lines: no memory left, no compiler, a kernel that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtool.errors import KvtoolError

_FULL = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")
"""How torch words it: on a CPU it is a RuntimeError like any other."""
_NO_COMPILER = ("c compiler", "gcc", "cc1", "python.h")
"""How triton words it where its launcher cannot be built."""


@contextmanager
def named_failure(
    what: str, full: Callable[[], KvtoolError], *, leave_out: str = ""
) -> Iterator[None]:
    """Turn what torch, triton, numba and transformers raise into an error about `what`.

    `full` is the error of memory that does not suffice; `leave_out` a hint at what goes on without.
    """
    try:
        yield
    except KvtoolError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        low = text.lower()
        if isinstance(error, MemoryError) or any(words in low for words in _FULL):
            raise full() from error
        if any(words in low for words in _NO_COMPILER):
            raise KvtoolError(
                f"triton cannot build its launcher: {text[:160]}",
                "install a C compiler and Python's headers (apt-get install gcc python3-dev), or "
                "set CC",
                code="no_compiler",
            ) from error
        raise KvtoolError(
            f"{what} failed: {type(error).__name__}: {text[:200]}",
            f"run again with KVTOOL_DEBUG=1 for the traceback{leave_out}",
            code="kernel_failed",
        ) from error

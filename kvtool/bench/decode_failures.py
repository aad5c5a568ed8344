"""What goes wrong while a model decodes, in two lines that name the case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtool.errors import KvtoolError

FULL = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")
"""How torch words it: on a CPU it is a RuntimeError like any other."""
NO_COMPILER = ("c compiler", "gcc", "cc1", "python.h")
"""How triton words it where its launcher cannot be built."""


@contextmanager
def named_failure(what: str, lower: str) -> Iterator[None]:
    """What torch, triton and transformers raise, as a KvtoolError; `lower` helps if memory is full."""
    try:
        yield
    except KvtoolError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        low = text.lower()
        if isinstance(error, MemoryError) or any(words in low for words in FULL):
            raise KvtoolError(
                f"out of memory in {what}", f"lower {lower}, or --layers", code="out_of_memory"
            ) from error
        if any(words in low for words in NO_COMPILER):
            raise KvtoolError(
                f"triton cannot build its launcher: {text[:160]}",
                "install a C compiler and Python's headers (apt-get install gcc python3-dev), or"
                " set CC",
                code="no_compiler",
            ) from error
        raise KvtoolError(
            f"{what} failed: {type(error).__name__}: {text[:200]}",
            "run again with KVTOOL_DEBUG=1 for the traceback; --cache leaves caches out",
            code="decode_failed",
        ) from error

"""What goes wrong while a model decodes, in two lines that name the case."""

from __future__ import annotations

from contextlib import AbstractContextManager

from kvtool.bench import failures
from kvtool.errors import KvtoolError


def named_failure(what: str, lower: str) -> AbstractContextManager[None]:
    """What a case raises as its error; `lower` names the options that help if memory is full."""

    def full() -> KvtoolError:
        return KvtoolError(
            f"out of memory in {what}", f"lower {lower}, or --layers", code="out_of_memory"
        )

    return failures.named_failure(what, full, leave_out="; --cache leaves caches out")

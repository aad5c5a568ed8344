"""The one error of kvtool: what happened, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

FAILED = 1
USAGE = 2
INTERRUPTED = 130


class KvtoolError(Exception):
    """Raised anywhere, caught once at the edge, printed as `Error: …` and `Hint: …`."""

    def __init__(
        self, message: str, hint: str, *, code: str = "failed", exit_code: int = FAILED
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
        self.exit_code = exit_code
        self.params: dict[str, object] = {}  # the options of the command that failed
        self.in_output = False  # true once an emitted run carries it: one JSON object on stdout

    def to_dict(self) -> dict[str, str]:
        """The `error` of the JSON contract."""
        return {"code": self.code, "message": self.message, "hint": self.hint}


def usage_error(message: str, hint: str) -> KvtoolError:
    """An error of the command line itself: exit code 2."""
    return KvtoolError(message, hint, code="usage", exit_code=USAGE)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean …?' with the nearest known names, or an empty string."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), list(by_lower), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(by_lower[match] for match in near)}?" if near else ""


def missing_matplotlib() -> KvtoolError:
    """The error of a picture without the extra that draws it."""
    return KvtoolError(
        "pictures need matplotlib, which is not installed",
        "pip install 'kvtool[plot]'",
        code="missing_extra",
    )

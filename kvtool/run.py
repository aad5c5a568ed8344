"""A run: what one command was asked and what it found. The one JSON object of every command."""

from __future__ import annotations

import json
import platform
import re
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kvtool import __version__

SCHEMA = 1

Row = dict[str, Any]
"""One result. Bytes are ints, seconds floats, shares fractions of 1; every resolved input is echoed."""


def environment() -> dict[str, str]:
    """Where the run was made: enough for a bug report, nothing that imports torch."""
    return {
        "kvtool": __version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Rows and the notes that go with them; `error` is set when the command failed."""

    command: str
    params: dict[str, Any]
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    error: dict[str, str] | None = None
    version: str = __version__
    created: str = field(default_factory=_now)
    env: dict[str, str] = field(default_factory=environment)

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract (docs/json.md): schema first, error only if there is one."""
        out: dict[str, Any] = {
            "schema": SCHEMA,
            "command": self.command,
            "version": self.version,
            "created": self.created,
            "env": self.env,
            "params": self.params,
            "rows": list(self.rows),
            "notes": list(self.notes),
        }
        if self.error is not None:
            out["error"] = self.error
        return out

    def to_json(self) -> str:
        """Strict JSON: a NaN or an infinity in a row is a bug, not a value."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        return spell_controls(text)


_CONTROLS = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def spell_controls(text: str) -> str:
    r"""JSON text with what a terminal obeys and JSON need not escape as \uXXXX."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)

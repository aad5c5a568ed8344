"""One run of the command line, as the fixture `kvtool` gives it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ran:
    """One run of the command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """stdout as the JSON object it must be."""
        value: dict[str, Any] = json.loads(self.out)
        return value

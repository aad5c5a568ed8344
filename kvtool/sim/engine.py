"""A run of the fast engine: requests in by the chunk, steps and outcomes out, and a place to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtool.requests import Requests
from kvtool.sim.kernel import FULL, MORE_REQUESTS, PAUSED, advance
from kvtool.sim.settings import REJECTED, STATUSES, UNFINISHED, Settings
from kvtool.sim.state import REQUEST, STEP, SUMS, Records, State, new_state

STEPS_AT_ONCE = 1 << 20
"""Steps between two looks at the keyboard and at the progress bar."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """A run that can be driven in pieces. `per_request` and `per_step` are empty unless recorded."""

    settings: Settings
    state: State
    num_requests: int = 0
    num_rejected: int = 0
    interrupted: bool = False

    @property
    def run(self) -> Any:
        """The scalars of the run."""
        return self.state.run[0]

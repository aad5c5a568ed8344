"""What both decode functions take by name, refused with a ValueError before anything is built."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .arguments import is_count, refuse_unless
from .decode_plan import Plan

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What both decode functions take by name.

    scale: of the scores (head_dim ** -0.5); window: tokens that are seen, 0 for all; max_context:
    the longest that a sequence can be, for the number of splits alone (what the table or K holds);
    plan: instead of the table's; out, lse, workspace: preallocated, out in q's dtype or fp32.
    """

    scale: float | None = None
    window: int = 0
    max_context: int | None = None
    plan: Plan | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    workspace: Pair | None = None

    def __post_init__(self) -> None:
        is_count(f"window must be 0 (none) or more, not {self.window}", self.window, low=0)
        if self.max_context is not None:
            is_count(f"max_context must be at least 1, not {self.max_context}", self.max_context)
        if self.scale is not None:
            refuse_unless(
                isinstance(self.scale, int | float) and math.isfinite(self.scale),
                f"scale must be a finite number, not {self.scale}",
            )
        refuse_unless(
            self.plan is None or isinstance(self.plan, Plan),
            f"plan must be a Plan, not {self.plan}",
        )

"""What the plain scheduler of kvtool.sim.blocks works on: requests, steps under way, steps made."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtool.sim.settings import UNFINISHED


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request and where it stands. `key(k)` names block k of its tokens, prompt and generated.

    `token(k)` is token k of them; None where nobody knows what requests consist of.
    """

    index: int
    arrival_ns: int
    priority: int
    prompt_tokens: int
    output_tokens: int
    most_output: int
    key: Callable[[int], Hashable]
    token: Callable[[int], Hashable] | None = None
    parent: int = -1
    think_ns: int = 0
    generated: int = 0
    computed: int = 0
    placeholders: int = 0
    """Tokens that are being generated and not known yet: at most one (asynchronous scheduling)."""
    table: list[int] = field(default_factory=list)
    registered: int = 0
    """Full blocks of the table that can be found."""
    node: Any = None
    """Of a radix tree: where these end."""
    prefill_tokens: int = 0
    """All that it had to compute or to find when it was last admitted."""
    is_running: bool = False
    admit_step: int = -1
    first_token_step: int = -1
    finish_step: int = -1
    first_token_ns: int = -1
    finish_ns: int = -1
    num_preemptions: int = 0
    lost_tokens: int = 0
    """That were computed when it was preempted last."""
    cached_tokens_first: int = -1
    cached_tokens_after_preemption: int = 0
    status: int = UNFINISHED

    @property
    def told(self) -> int:
        """Generated tokens of a request that has ended."""
        return 0 if self.status == UNFINISHED else self.generated

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens that are known."""
        return self.prompt_tokens + self.generated

    @property
    def order(self) -> tuple[int, int]:
        """By which priorities choose whom to preempt."""
        return self.priority, self.arrival_ns


class Hits(NamedTuple):
    """Blocks that were found for a request, as its pool finds them."""

    num_blocks: int
    where: Any


@dataclass(slots=True, kw_only=True)
class Batch:
    """A step under way: who is in it, and who gets a token from it."""

    step: int
    end_ns: int
    scheduled: list[tuple[Request, int, bool]]


@dataclass(slots=True, kw_only=True)
class Step:
    """A call of `schedule`, seen after it and before its output is processed."""

    scheduled_tokens: int
    batch: int
    running: int
    waiting: int
    used_blocks: int
    context_tokens: int
    evictions: int
    held_up: int
    begin_ns: int
    end_ns: int

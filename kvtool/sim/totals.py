"""What a run comes to, whichever allocator held the tokens: counts, and sums of slots over steps."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

SHARES = ("token", "reserved", "internal", "padding", "external", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Slots of the pool summed over steps, each seen after scheduling: what each slot was.

    token: holds a cached token of a live request. reserved: held, and will hold one. internal: held
    and never used. padding: held by a batch for a shorter or finished request. external: free while
    the head of the queue cannot be placed. idle: free otherwise. The six add to pool × steps.
    """

    steps: int = 0
    token: int = 0
    reserved: int = 0
    internal: int = 0
    padding: int = 0
    external: int = 0
    idle: int = 0
    running: int = 0
    """Requests that ran, summed like the slots."""
    no_seat: int = 0
    no_tokens: int = 0
    no_memory: int = 0
    """Steps in which max_num_seqs, the step's tokens or memory kept the head of the queue out."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Sums)}
        )

    def share(self, name: str) -> float:
        """A fraction of the pool, averaged over the steps."""
        slots = sum(getattr(self, one) for one in SHARES)
        return getattr(self, name) / slots if slots else 0.0

    @property
    def held(self) -> int:
        """Slots that belonged to a request."""
        return self.token + self.reserved + self.internal + self.padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """A run. `window` leaves warm-up and drain out: see `measured`."""

    requests: int
    completed: int
    cut: int = 0
    """Of the completed, those that max_model_len ended."""
    prompt_too_long: int = 0
    """Rejected by the front end: no prompt, or one that leaves no room below max_model_len."""
    larger_than_pool: int = 0
    """Aborted, because no pool of this size could ever hold them."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_blocks: int = 0
    copied_tokens: int = 0
    peak_running: int = 0
    steps: int = 0
    end_ns: int = 0
    scheduled_tokens: int = 0
    whole: Sums = field(default_factory=Sums)
    window: Sums = field(default_factory=Sums)
    series: tuple[Sums, ...] = ()
    """Over time: equal numbers of steps, but for the last; of static batching, whole batches."""
    interrupted: bool = False

    @property
    def rejected(self) -> int:
        """Requests that got no answer."""
        return self.prompt_too_long + self.larger_than_pool

    @property
    def measured(self) -> Sums:
        """The steps at whose start a tenth of the requests had ended, until none waits or will come.

        A run that is too short to have such steps is measured as a whole.
        """
        return self.window if self.window.steps else self.whole


def warm_up_of(num_requests: int) -> int:
    """Requests that must have ended before a step is measured."""
    return num_requests // 10

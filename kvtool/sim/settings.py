"""What a run of the scheduler is given: its limits, its pool and its law of time."""

from __future__ import annotations

from dataclasses import dataclass, field

FS_OF_NS = 10**6
RECOMPUTE, SWAP = "recompute", "swap"
ABORT_HEAD, STOP = "abort-head", "stop"
FCFS, PRIORITY, LPM = "fcfs", "priority", "lpm"
HASH, RADIX = "hash", "radix"
MAX_TOKENS, EOS = "max-tokens", "eos"
STATUSES = ("done", "cut", "rejected", "aborted", "unfinished")
NOBODY_WAITS, NO_SEAT, NO_TOKENS, NO_MEMORY, BATCH_CLOSED = range(5)
"""What kept the head of the queue out of a step: max_num_seqs, the step's tokens, memory, or a static batch
that had begun before it came."""
DONE, CUT, REJECTED, ABORTED, UNFINISHED = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What a step takes in ns: base + token × scheduled tokens + context × their context tokens + attention
    × pairs of a scheduled token and one that it attends to, itself included + request × scheduled requests,
    each of which has one row of logits.

    With `read_ns`, what reading the weights takes, reading and computing overlap: base + the longer of
    read + context × context tokens and token × tokens + attention × pairs + request × requests. A step
    without tokens takes base.
    Blocks that a step swaps out or in are moved before it computes: nothing overlaps with that. A term that
    is counted may have a fraction, of which fs are kept; it is rounded down to whole ns in each step.
    """

    base_ns: int = 10_000_000
    token_ns: float = 20_000
    context_ns: float = 1
    attention_ns: float = 0
    request_ns: float = 0
    read_ns: int = 0
    swap_ns: int = 0
    """Of a block that is moved, either way."""

    def ns(
        self, tokens: int, context: int, pairs: int = 0, *, requests: int = 0, moved: int = 0
    ) -> int:
        """Of a step of so many tokens, whose requests have so many tokens of context; blocks it moves."""
        base = self.base_ns + self.swap_ns * moved
        computing = _term(self.token_ns, tokens) + _term(self.attention_ns, pairs)
        computing += _term(self.request_ns, requests)
        reading = _term(self.context_ns, context)
        if self.read_ns and tokens:
            return base + max(self.read_ns + reading, computing)
        return base + reading + computing


def pairs_of(tokens: int, context: int) -> int:
    """Pairs of a token and one that it attends to: so many tokens, the last of which is the context-th."""
    return tokens * context - tokens * (tokens - 1) // 2


def femtoseconds(ns: float) -> int:
    """In whole ones, as the engines count a fraction of a ns."""
    return ns * FS_OF_NS if isinstance(ns, int) else round(ns * FS_OF_NS)


def _term(ns: float, count: int) -> int:
    return femtoseconds(ns) * count // FS_OF_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Names as in vLLM where vLLM has the setting.

    `num_blocks` are usable blocks: vLLM's null block, which it counts in its own number, comes on top.
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_active_seqs: int | None = None
    max_batched_tokens: int = 8192
    max_scheduled_tokens: int | None = None
    chunked_prefill: bool = True
    watermark: float = 0.0
    reserve_full_prompt: bool = True
    long_prefill_threshold: int = 0
    long_prefill_adaptive: bool = False
    preemption: str = RECOMPUTE
    cpu_blocks: int = 0
    on_stall: str = ABORT_HEAD
    prefix_caching: bool = False
    index: str = HASH
    """Of prefix caching: vLLM's hashed blocks, or SGLang's radix tree."""
    policy: str = FCFS
    async_scheduling: bool = False
    finish_by: str = MAX_TOKENS
    """eos: max_model_len alone bounds the output, and the last token wanted ends it, as it turns out."""
    step_time: StepTime = field(default_factory=StepTime)

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def max_running(self) -> int:
        """Requests that run at once (vLLM: max_num_active_seqs, else max_num_seqs)."""
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission must leave free: vLLM rounds down, its null block included."""
        return int(self.watermark * (self.num_blocks + 1))

    @property
    def token_budget(self) -> int:
        """Tokens of a step: the smaller of the two budgets, which shrink together."""
        return min(self.max_batched_tokens, self.max_scheduled_tokens or self.max_batched_tokens)

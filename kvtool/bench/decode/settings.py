"""What `kvtool bench decode` is asked: settings, frozen. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.bench.attention.case import BLOCK_SIZES
from kvtool.errors import usage_error

if TYPE_CHECKING:
    from kvtool.requests import Requests

CACHES = ("none", "dynamic", "static", "contiguous", "paged", "continuous")
"""none: everything is computed again at each step. dynamic, static: transformers' own classes.
contiguous: ours, a reservation a sequence. paged: ours, blocks. continuous: transformers' own
continuous batching."""

DTYPES = ("fp32", "bf16", "fp16")
"""Of weights and cache."""

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_LAYERS = 4
"""Of the default model, on a CPU: a whole run in less than a minute on one core."""


def check_block_size(block_size: int) -> int:
    """A block size that the kernels have: a power of two from 1 to 256."""
    if block_size not in BLOCK_SIZES:
        raise usage_error(
            f"block size {block_size} has no kernel",
            f"choose a power of two from 1 to {BLOCK_SIZES[-1]}: 16 is usual",
        )
    return block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """How a config becomes a model that runs."""

    device: str = "cpu"
    """cpu, cuda or cuda:N, as torch names it."""
    dtype: str = "fp32"
    """Of weights and cache."""
    seed: int = 0
    random_weights: bool = False
    """True: random, also where the folder has weights."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise usage_error(
                f"a model cannot be run in {self.dtype}", f"choose from {', '.join(DTYPES)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """One uniform run: `batch` prompts of one length, greedy, no end-of-sequence stop.

    `max_tokens` is what static and contiguous reserve a sequence.
    """

    cache: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    block_size: int = 16
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        if self.cache not in CACHES:
            raise usage_error(
                f"there is no cache '{self.cache}'", f"choose from {', '.join(CACHES)}"
            )
        if min(self.batch, self.prompt_tokens) < 1 or self.output_tokens < 2:
            raise usage_error(
                "a run decodes: it needs a batch and a prompt of 1 and an output of 2 tokens or more",
                "raise --batch, --prompt-tokens or --output-tokens",
            )
        if self.max_tokens is not None and self.max_tokens < self.total_tokens:
            raise usage_error(
                f"{self.total_tokens:,} tokens do not fit a reservation of {self.max_tokens:,}",
                "raise --max-model-len, or shorten the prompt or the output",
            )

    @property
    def total_tokens(self) -> int:
        """Prompt and output of one sequence."""
        return self.prompt_tokens + self.output_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of one sequence in the cache at the end: the last output is never stored."""
        return self.total_tokens - 1

    @property
    def reserved_tokens(self) -> int:
        """Tokens a sequence for which static and contiguous set memory aside."""
        return self.max_tokens or self.total_tokens


def decode_cases(
    caches: tuple[str, ...],
    batches: tuple[int, ...],
    prompts: tuple[int, ...],
    outputs: tuple[int, ...],
    block_sizes: tuple[int, ...] = (16,),
    *,
    max_tokens: int | None = None,
) -> tuple[DecodeCase, ...]:
    """The product, in the order in which it is run: caches innermost, so that rivals run together.

    `none` costs the square of the length for each sequence: it is run at the smallest batch only.
    Only `paged` and `continuous` have a block size to vary.
    """
    return tuple(
        DecodeCase(
            cache=cache,
            batch=batch,
            prompt_tokens=prompt,
            output_tokens=output,
            block_size=block_size,
            max_tokens=max_tokens,
        )
        for prompt in prompts
        for output in outputs
        for batch in batches
        for cache in caches
        if cache != "none" or batch == min(batches)
        for block_size in (block_sizes if cache in ("paged", "continuous") else block_sizes[:1])
    )


CPU_CONTEXTS = (128, 256, 512, 1024)
GPU_CONTEXTS = (1024, 2048, 4096, 8192, 16384)
"""Where the growth of a token's time is fitted. On a GPU shorter ones take the time of the launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """How uniform cases are run."""

    cases: tuple[DecodeCase, ...]
    threads: int = 1
    """CPU threads, of torch and of our kernels."""
    repeats: int = 3
    """Rounds over the caches of a shape, each with a run of every one."""
    check_layers: int = 4
    """If the dtype is not fp32, greedy tokens are compared in an fp32 model of so many layers."""
    cuda_graph: bool = True
    """Our caches' decode step as one CUDA graph, where there is CUDA."""
    exponent_contexts: tuple[int, ...] = CPU_CONTEXTS
    """Contexts at which one token of one sequence is timed, for the law of growth; (): not fitted."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedRun:
    """Requests of different lengths, batched continuously in one budget of memory for the cache."""

    requests: Requests
    kv_budget_bytes: int
    max_model_len: int
    """What contiguous-max reserves for each sequence."""
    block_sizes: tuple[int, ...] = (16,)
    samples: int = 1
    """Sequences a request; they share their prompt's blocks and differ from their first token on."""
    max_batch: int = 256
    threads: int = 1
    repeats: int = 3
    """Rounds, each with a run of every cache."""
    check_requests: int = 8
    """Requests whose tokens are compared with a run of their own; 0: none."""
    check_layers: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for size in self.block_sizes:
            check_block_size(size)
        if not len(self.requests) or self.samples < 1 or self.max_batch < self.samples:
            raise usage_error(
                "there is nothing to batch",
                "ask for a request, a sample, and a batch that holds it",
            )
        longest = int((self.requests.prompt_tokens + self.requests.output_tokens).max())
        if longest > self.max_model_len:
            raise usage_error(
                f"a request of {longest:,} tokens does not fit {self.max_model_len:,}",
                "raise --max-model-len, or make the requests shorter",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofs:
    """What this device can do, measured in this process when it is asked for; None: not measured.

    Both are called with torch's threads set to the run's.
    """

    read: Callable[[int], float] | None = None
    """Bytes of a buffer → bytes a second that are read of it."""
    matmul: Callable[[], float] | None = None
    """FLOP a second of a square matrix product in the model's dtype."""


def made_requests(
    count: int,
    max_model_len: int,
    *,
    prompt_mean: float | None = None,
    output_mean: float | None = None,
    seed: int = 0,
) -> Requests:
    """Requests of lognormal lengths that fit `max_model_len`, all there at the start.

    Prompts have at most three quarters of it, a fifth on average; outputs at most a quarter, a
    sixteenth on average: what is reserved for a maximum that few requests come near.
    """
    from kvtool.lengths import parse_lengths
    from kvtool.workload import Workload, chunks

    longest = max_model_len // 4
    prompt = parse_lengths(
        "lognormal",
        name="--prompt-tokens",
        mean=prompt_mean or max_model_len / 5,
        cap=max_model_len - longest,
    )
    output = parse_lengths(
        "lognormal", name="--output-tokens", mean=output_mean or max_model_len / 16, cap=longest
    )
    work = Workload(name="made", prompt=prompt, output=output, num_requests=count, seed=seed)
    return next(chunks(work))


ROW: dict[str, Any] = dict.fromkeys(
    (
        "run", "model", "cache", "device", "batch", "prompt_tokens", "output_tokens", "block_size",
        "max_model_len", "requests", "samples", "dtype", "layers", "weights", "num_parameters",
        "weights_bytes", "bytes_per_token", "kv_budget_bytes", "num_blocks", "repeats", "ttft_s",
        "tpot_s_p50", "tpot_s_p99", "itl_s_p50", "itl_s_p99", "output_tokens_per_s",
        "decode_tokens_per_s", "wall_s", "kv_reserved_bytes", "kv_used_bytes", "peak_bytes",
        "step_bytes", "step_cache_bytes", "step_flops", "mfu_prefill", "mfu_decode", "mbu_prefill", "mbu",
        "matmul_peak_flops", "read_roof_bytes_per_s", "mean_batch", "peak_batch", "steps",
        "preemptions", "recomputed_tokens", "shared_blocks", "copied_blocks", "same_tokens",
        "ties", "checked_sequences", "baseline", "predicted_gain", "measured_gain",
        "measured_gain_ci", "time_exponent", "time_exponent_end", "exponent_contexts", "cuda_graph",
        "graph_error",
    )
)  # fmt: skip
"""Every key of a row, in order; null is what a run of that kind does not have or does not know."""


def silent(step: str) -> None:
    """Progress that nobody watches: `advance` is told of each thing that is done."""


Advance = Callable[[str], None]

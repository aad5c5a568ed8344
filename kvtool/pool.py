"""How large the pool of KV blocks is: as blocks, as tokens, or as a model's bytes on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from kvtool.errors import usage_error
from kvtool.units import parse_count

if TYPE_CHECKING:
    from kvtool.config import LoadedConfig

PAPER_SLOTS, PAPER_LONGEST = 15_728, 2048
"""Of OPT-13B in 12 GiB, and its longest request (vLLM paper, table 1 and section 6.1)."""
LONGEST_IN_POOL, LARGEST = 8, 2**40
USUAL = {"--kv-dtype": "auto", "--tp": "1"}
"""What asks for nothing."""
WAYS = (
    "give --num-blocks, --pool-tokens, --model with --kv-memory 12GiB, or --model with --gpu h100"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What the KV cache has room for. Either `blocks` or `tokens` is set; bytes are one GPU's."""

    tokens: int | None = None
    blocks: int | None = None
    kv_bytes: int | None = None
    """Memory for the cache on each GPU; None where the pool was given in blocks or tokens."""
    bytes_per_token: int | None = None
    """Of one token, all layers, on the fullest tensor-parallel rank."""
    model: str | None = None
    gpu: str | None = None
    tp: int | None = None
    source: str
    """Where the number comes from, in a line."""
    notes: tuple[str, ...] = ()

    def num_blocks(self, block_size: int) -> int:
        """Whole blocks of that many tokens; a pool that holds none is refused."""
        if self.blocks is not None:
            return self.blocks
        count = (self.tokens or 0) // block_size
        if not count:
            raise usage_error(
                f"a pool of {self.tokens:,} tokens holds no block of {block_size:,}",
                "choose a smaller --block-size, or a larger pool",
            )
        return count

    def usable_blocks(self, block_size: int) -> int:
        """Of vLLM: one block of a pool that was given as memory is its null block, which nobody is given."""
        count = self.num_blocks(block_size)
        return count if self.kv_bytes is None else max(1, count - 1)

    def num_tokens(self, block_size: int) -> int:
        """Tokens there is room for: blocks × block_size, or the tokens themselves, of which what
        does not cut memory into blocks can use every one."""
        return self.blocks * block_size if self.blocks is not None else self.tokens or 0


def pool_of(
    *,
    load: Callable[[str], LoadedConfig],
    num_blocks: int | str | None = None,
    pool_tokens: int | str | None = None,
    model: str | None = None,
    kv_memory: str | None = None,
    gpu: str | None = None,
    weights: str | None = None,
    gpu_memory_utilization: float | None = None,
    kv_dtype: str | None = None,
    dtype: str | None = None,
    tp: int | str | None = None,
) -> Pool:
    """The pool that the options ask for, as typed; None where one was not given.

    `load` reads a model's config (kvtool.config.load_config); it is called last, once every word
    has been understood. Raises KvtoolError unless exactly one way is given.
    """
    counts = {"--num-blocks": num_blocks, "--pool-tokens": pool_tokens}
    way = _way({**counts, "--kv-memory": kv_memory, "--gpu": gpu}, model)
    on_gpu = {"--weights": weights, "--gpu-memory-utilization": gpu_memory_utilization}
    of_model = {"--kv-dtype": kv_dtype, "--dtype": dtype, "--tp": tp}
    if model is None:
        return _counted(way, counts[way], _ignored(way, {**on_gpu, **of_model}))
    from kvtool.model_pool import tokens_of  # reads models: not for a pool that is given in blocks

    fit = tokens_of(
        load=load,
        model=model,
        kv_memory=kv_memory,
        gpu=gpu,
        weights=weights,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_dtype=kv_dtype,
        dtype=dtype,
        tp=tp,
    )
    notes = () if gpu is not None else _ignored(way, on_gpu)
    return Pool(**asdict(replace(fit, notes=(*notes, *fit.notes))))


def _way(ways: dict[str, object], model: str | None) -> str:
    """The one option that says how large the pool is."""
    given = [flag for flag, value in ways.items() if value is not None]
    if not given and model is None:
        raise usage_error("nothing says how large the pool is", WAYS)
    if not given:
        raise usage_error("--model alone does not say how large the pool is", WAYS)
    if len(given) > 1:
        raise usage_error(
            f"{' and '.join(given)} each say how large the pool is", "leave out all but one"
        )
    way = given[0]
    by_memory = way in ("--kv-memory", "--gpu")
    if by_memory and model is None:
        raise usage_error(
            f"{way} is memory, and how many tokens fit into it depends on the model",
            "add --model, such as --model llama-3.1-8b",
        )
    if model is not None and not by_memory:
        raise usage_error(
            f"{way} says how large the pool is, and --model asks to derive it",
            f"leave out --model, or give --kv-memory or --gpu in place of {way}",
        )
    return way


def _ignored(way: str, options: Mapping[str, object]) -> tuple[str, ...]:
    """Notes on options that change nothing with this way."""
    return tuple(
        f"{flag} is ignored: {way} says how large the pool is"
        for flag, value in options.items()
        if value is not None and str(value) != USUAL.get(flag)
    )


def _counted(way: str, typed: int | str | None, notes: tuple[str, ...]) -> Pool:
    count = parse_count(str(typed), name=way)
    if way == "--num-blocks":
        return Pool(blocks=count, source=f"{count:,} blocks ({way})", notes=notes)
    return Pool(tokens=count, source=f"{count:,} tokens ({way})", notes=notes)


def default_tokens(longest: int) -> int:
    """The pool if nobody says: the vLLM paper's, or room for eight requests longer than its own."""
    if longest <= PAPER_LONGEST:
        return PAPER_SLOTS
    return min(LARGEST, LONGEST_IN_POOL * longest)

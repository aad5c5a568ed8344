"""Memory before it is allocated: what a case takes, what is there, and a refusal with numbers."""

from __future__ import annotations

import gc

from kvtool.bench.attention.case import KV_DTYPES
from kvtool.bench.decode.blueprint import Blueprint
from kvtool.bench.decode.settings import DecodeCase, ModelChoice
from kvtool.bench.device import free_memory
from kvtool.errors import KvtoolError
from kvtool.units import format_bytes

SHARE_OF_WEIGHTS = 0.7
"""Of free memory: above it there is no room beside the weights."""


def available_bytes(device: str) -> int:
    """What can be had on the device now."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()  # what torch keeps for later is free too
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def forget_peak(device: str) -> None:
    """Count the GPU's peak from here on, with nothing left of what ran before."""
    if device.startswith("cuda"):
        import torch

        gc.collect()  # what stands in a cycle
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: str) -> int | None:
    """The most that torch has held on the GPU since then; a CPU does not tell."""
    if not device.startswith("cuda"):
        return None
    import torch

    return int(torch.cuda.max_memory_allocated(device))


def case_bytes(plan: Blueprint, case: DecodeCase, item_bytes: int) -> dict[str, int]:
    """What a case takes besides the weights: the cache, and the widest tensors of a prefill."""
    token = plan.heads.token_bytes(item_bytes)
    tokens = case.reserved_tokens if case.cache in ("static", "contiguous") else case.total_tokens
    cache = 0 if case.cache == "none" else case.batch * tokens * token
    if case.cache == "dynamic":
        cache += cache // plan.heads.num_layers  # torch.cat holds a layer twice
    width = max(getattr(plan.config, "intermediate_size", 0) or 0, 4 * plan.config.hidden_size)
    longest = case.total_tokens if case.cache == "none" else case.prompt_tokens
    return {"cache": cache, "activations": 2 * case.batch * longest * width * item_bytes}


def check_memory(
    plan: Blueprint, choice: ModelChoice, needed: dict[str, int], *, what: str, lower: str
) -> None:
    """Refuse what cannot fit, before anything is allocated; `needed` besides the weights."""
    weights = plan.num_parameters * KV_DTYPES[choice.dtype]
    parts = {"weights": weights, **needed}
    total, there = sum(parts.values()), available_bytes(choice.device)
    if total > there:
        terms = " + ".join(f"{format_bytes(size)} {name}" for name, size in parts.items() if size)
        raise KvtoolError(
            f"{what} needs {format_bytes(total)} ({terms}), and {format_bytes(there)} are free",
            _what_helps(plan, choice, there, lower, weights),
            code="out_of_memory",
        )


def _what_helps(plan: Blueprint, choice: ModelChoice, there: int, lower: str, weights: int) -> str:
    """What to lower: of a model whose weights alone do not fit, the layers or the dtype."""
    if weights < SHARE_OF_WEIGHTS * there:
        return f"lower {lower}, or --layers"
    item = KV_DTYPES[choice.dtype]
    layer = plan.linear_parameters // plan.heads.num_layers
    rest = plan.num_parameters - plan.linear_parameters
    fit = int((SHARE_OF_WEIGHTS * there / item - rest) // max(layer, 1))
    narrower = "" if item == 2 else "--dtype bf16 halves it; "
    return f"{narrower}--layers {max(1, fit)} is about what fits"


def case_words(case: DecodeCase) -> str:
    """A case in an error: `paged, batch 8, 128 + 32 tokens`."""
    return f"{case.cache}, batch {case.batch}, {case.prompt_tokens} + {case.output_tokens} tokens"

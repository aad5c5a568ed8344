"""What to paste into a shell so that an engine starts as planned."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from kvtool.plan import PlanCase, Planned, plan_row, planned
from kvtool.run import Row

KV_FLAGS = {"fp8": "fp8", "fp8_e5m2": "fp8_e5m2"}
"""vLLM's --kv-cache-dtype for the dtypes that it has; others are the model's."""


def row_of(case: PlanCase) -> Row:
    """A case to its row: a function that can be sent to another process."""
    return with_command(planned(case))


def with_command(plan: Planned) -> Row:
    """The plan's row, and how an engine starts as planned."""
    return {**plan_row(plan), "command": command_of(plan.case)}


def command_of(case: PlanCase) -> str | None:
    """None for an engine that is no server."""
    made = COMMANDS.get(case.holder.engine)
    return None if made is None else " ".join(made(case))


def _vllm(case: PlanCase) -> list[str]:
    """vllm serve, as its engine arguments of 0.32 are called (vllm/engine/arg_utils.py)."""
    layout, echo = case.holder.layout, case.echo
    words = ["vllm serve", shlex.quote(case.repository), f"--max-model-len {case.context}"]
    words.append(f"--gpu-memory-utilization {echo['gpu_memory_utilization']:g}")
    for flag, ranks in (
        ("--tensor-parallel-size", layout.tp),
        ("--pipeline-parallel-size", layout.pp),
        ("--data-parallel-size", case.replicas),
        ("--decode-context-parallel-size", layout.dcp),
    ):
        words += [f"{flag} {ranks}"] if ranks > 1 else []
    words += ["--enable-expert-parallel"] if echo["expert_parallel"] else []
    if layout.kv.name != layout.dtype.name and layout.kv.name in KV_FLAGS:
        words.append(f"--kv-cache-dtype {KV_FLAGS[layout.kv.name]}")
    if case.max_num_seqs is not None:
        words.append(f"--max-num-seqs {case.max_num_seqs}")
    words.append(f"--max-num-batched-tokens {echo['max_batched_tokens']}")
    if layout.block_size is not None:
        words.append(f"--block-size {layout.block_size}")
    words.append(
        "--enable-prefix-caching"
        if case.holder.options.prefix_caching
        else "--no-enable-prefix-caching"
    )
    return words


COMMANDS: dict[str, Callable[[PlanCase], list[str]]] = {"vllm": _vllm}

"""What to paste into a shell so that an engine starts as planned."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable

from kvtool.plan import PlanCase, Planned, plan_row, planned
from kvtool.run import Row

DTYPE_FLAGS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""vLLM's --dtype."""
KV_FLAGS = {
    "fp8": "fp8", "fp8_e5m2": "fp8_e5m2", "bf16": "bfloat16", "fp8_ds_mla": "fp8_ds_mla",
}  # fmt: skip
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
    layout, echo, options = case.holder.layout, case.echo, case.holder.options
    top = layout.shape.max_context
    long = [LONG] if top is not None and case.max_model_len > top else []
    words = [
        *long,
        "vllm serve",
        shlex.quote(case.repository),
        f"--max-model-len {case.max_model_len}",
    ]
    words.append(_share(case))
    for flag, ranks in (
        ("--tensor-parallel-size", layout.tp),
        ("--pipeline-parallel-size", layout.pp),
        ("--data-parallel-size", case.replicas),
        ("--decode-context-parallel-size", layout.dcp),
    ):
        words += [f"{flag} {ranks}"] if ranks > 1 else []
    words += ["--enable-expert-parallel"] if echo["expert_parallel"] else []
    words += _formats(case)
    if case.max_num_seqs is not None:
        words.append(f"--max-num-seqs {case.max_num_seqs}")
    words.append(f"--max-num-batched-tokens {echo['max_batched_tokens']}")
    if layout.block_size is not None:
        words.append(f"--block-size {layout.block_size}")
    if any(entry.kind == "linear" for entry in layout.shape.layers):  # where it changes the layout
        words.append(f"--{'' if options.prefix_caching else 'no-'}enable-prefix-caching")
    words += ["--enforce-eager"] if echo["enforce_eager"] else []
    words += ["--disable-hybrid-kv-cache-manager"] if options.hybrid is False else []
    return words


def _share(case: PlanCase) -> str:
    """The memory it may use. What is reserved comes off the share, rounded down: vLLM has no flag for it."""
    usable = case.memory.has.range.best
    if case.memory.is_given:
        return f"--kv-cache-memory-bytes {usable}"
    share, whole = case.echo["gpu_memory_utilization"], case.echo["gpu_bytes"]
    reserved = case.memory.of("reserve")
    if reserved and whole:
        share = math.floor(1000 * (share - reserved / whole)) / 1000
    return f"--gpu-memory-utilization {share:g}"


def _formats(case: PlanCase) -> list[str]:
    """Dtypes that are not those of the checkpoint."""
    layout = case.holder.layout
    words = [f"--quantization {case.quantization}"] if case.quantization else []
    if layout.dtype.name != layout.shape.dtype and layout.dtype.name in DTYPE_FLAGS:
        words.append(f"--dtype {DTYPE_FLAGS[layout.dtype.name]}")
    auto = layout.shape.kv_dtype or layout.dtype.name
    kv = case.holder.kv_dtype
    if kv != auto and kv in KV_FLAGS:
        words.append(f"--kv-cache-dtype {KV_FLAGS[kv]}")
    return words


LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
"""Without it vLLM refuses more than the config's maximum (vllm/envs.py)."""
COMMANDS: dict[str, Callable[[PlanCase], list[str]]] = {"vllm": _vllm}

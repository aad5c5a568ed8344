"""What each engine makes of a layout: one small file each, looked up by name."""

from __future__ import annotations

from kvtool.engines import ideal
from kvtool.errors import did_you_mean, usage_error

ENGINES = {"ideal": ideal.size}
PLANNED = ("transformers", "vllm", "sglang", "llama.cpp")


def check_engine(name: str) -> None:
    """Refuse an engine that is not here yet, or not at all, by name."""
    if name in ENGINES:
        return
    if name in PLANNED:
        raise usage_error(f"--engine {name} is not in this version of kvtool", "use --engine ideal")
    raise usage_error(
        f"--engine: unknown engine '{name[:40]}'",
        f"the engines are {', '.join(ENGINES)}.{did_you_mean(name, [*ENGINES, *PLANNED])}",
    )

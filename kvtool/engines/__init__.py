"""What each engine makes of a layout: one small file each, looked up by name."""

from __future__ import annotations

from kvtool.engines import ideal, transformers
from kvtool.errors import did_you_mean, usage_error

ENGINES = {"ideal": ideal.size, "transformers": transformers.size}
"""Engines that hold tensors; `vllm` reserves blocks and has rows of its own."""

NAMES = (*ENGINES, "vllm")
PLANNED = ("sglang", "llama.cpp")


def engines_named(text: str) -> tuple[str, ...]:
    """The engines of --engine: a name, a list, or all. One that is not here yet is refused by name."""
    if text == "all":
        return NAMES
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name in PLANNED:
            raise usage_error(
                f"--engine {name} is not in this version of kvtool",
                f"the engines are {', '.join(NAMES)} and all",
            )
        if name not in NAMES:
            raise usage_error(
                f"--engine: unknown engine '{name[:40]}'",
                f"the engines are {', '.join(NAMES)} and all."
                + did_you_mean(name, [*NAMES, *PLANNED]),
            )
    return tuple(dict.fromkeys(names))

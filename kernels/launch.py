"""A kernel ready to run: its arguments checked, its grid known, nothing left to decide.

The launchers build these, so that what is run, what is captured in a CUDA graph and what
`compiled` compiles ahead of time for a chip that is not here are the same arguments.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from .decode_plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel, the programs to start, its arguments by name, and num_warps, num_stages."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]
    device: torch.device

    def on_device(self) -> AbstractContextManager[Any]:
        """Make the launch's device the current one, as triton asks."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def run(self) -> Any:
        """Start it on the current stream; returns triton's handle (None in the interpreter)."""
        with self.on_device():
            return self.kernel[self.grid](**self.arguments, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A result and the launches that fill it: prepare once, run often. plan: how it is cut up."""

    launches: tuple[Launch, ...]
    out: torch.Tensor
    lse: torch.Tensor
    plan: Plan | None = None

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Start each launch in turn; returns (out, lse), filled when the stream gets there."""
        for launch in self.launches:
            launch.run()
        return self.out, self.lse


def is_interpreted(kernel: Any) -> bool:
    """Whether TRITON_INTERPRET was set when this kernel was decorated."""
    return not isinstance(kernel, triton.JITFunction)


@lru_cache(maxsize=64)
def chip_of(device: torch.device) -> tuple[str, int]:
    """A device's architecture as `decode_plan` names it, and its number of multiprocessors."""
    if device.type != "cuda":
        return "interpreter", 1
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    return arch, properties.multi_processor_count
